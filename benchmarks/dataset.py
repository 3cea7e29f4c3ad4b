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

from syncline.dataset import BUSY, LATENCY, LINKS, RUNS, Dataset, load, read_runs
from syncline.files import write_atomically

MOST_BYTES = 20_000_000


def members(folder: Path) -> list[str]:
    """Return the names of what belongs to the data set: that of cases which were run."""
    runs = read_runs((folder / RUNS).read_bytes(), str(folder / RUNS))
    found = {RUNS, LINKS, LATENCY, BUSY}
    for case in {run.case for run in runs}:
        found |= {case.trace_name, case.job_name, *case.layers_names}
    return sorted(name for name in found if (folder / name).is_file())


def pack(folder: Path) -> bytes:
    """Return the folder as a compressed archive without times and owners."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name in members(folder):
            about, data = tarfile.TarInfo(name), (folder / name).read_bytes()
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
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
