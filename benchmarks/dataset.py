"""Packs what `benchmarks.prediction` measured: `python -m benchmarks.dataset FOLDER OUT.tar.gz`.

The data set holds the calibration, every run and one trace of each case, so that others can study
how exchanges are scheduled without a cluster; `syncline.dataset.load` reads it, and
`python -m benchmarks.prediction --predict --out FOLDER` makes the table of predictions again from
what `unpack` leaves. Equal folders give equal bytes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
import tarfile
from pathlib import Path

from syncline.dataset import NAMES, Dataset, load
from syncline.files import write_atomically

MOST_BYTES = 20_000_000


def pack(folder: Path) -> bytes:
    """Return the folder as a compressed archive without times and owners."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if any(Path(name).match(pattern) for pattern in NAMES):
                about = tarfile.TarInfo(name)
                about.size = path.stat().st_size
                archive.addfile(about, io.BytesIO(path.read_bytes()))
    return gzip.compress(found.getvalue(), 9, mtime=0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dataset", description=__doc__)
    parser.add_argument("folder", type=Path, help="what benchmarks.prediction --out wrote")
    parser.add_argument("out", type=Path)
    job = parser.parse_args()
    data = pack(job.folder)
    if len(data) > MOST_BYTES:
        print(f"benchmarks.dataset: {len(data)} bytes, at most {MOST_BYTES}", file=sys.stderr)
        return 1
    write_atomically(job.out, data)
    found: Dataset = load(job.out)
    print(f"{job.out}: {len(found.runs)} runs of {len(found.cases)} cases, {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
