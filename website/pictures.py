"""`python -m website.pictures [NAME...]`: draw the pictures of the pages again.

Each picture comes from the code, not from a drawing program: the lanes are those of a simulated
run, and so are the speed-ups. Both are equal on every machine. The scatter of predictions comes
from measured runs, and takes minutes: name it to draw it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from syncline.files import write_atomically
from website.lanes import draw_lanes
from website.pages import ROOT
from website.speed_ups import draw_speed_ups

DRAWN: dict[str, Callable[[], str]] = {
    "lanes.svg": draw_lanes,
    "choose.svg": draw_speed_ups,
}
"""Pictures that come out the same, byte for byte; the tests compare them."""

LATEST_RUNS = "predictions-*.tar.gz"


def draw_predictions(path: Path) -> None:
    """Predict the measured runs of the data set again, and plot both. Takes minutes."""
    from syncline import dataset

    folder = ROOT / "build" / "predictions"
    (*_, runs) = sorted((ROOT / "datasets").glob(LATEST_RUNS))
    dataset.load(runs).unpack(folder)
    command = (sys.executable, "-m", "benchmarks.prediction", "--predict", "--out", str(folder))
    subprocess.run([*command, "--plot", str(path)], check=True, stdout=sys.stderr)


def main(names: list[str]) -> None:
    for name in names or DRAWN:
        path = ROOT / "docs" / name
        if name == "prediction.svg":
            draw_predictions(path)
        elif name in DRAWN:
            write_atomically(path, DRAWN[name]().encode())
        else:
            known = ", ".join((*DRAWN, "prediction.svg"))
            sys.exit(f"website.pictures: got {name!r}, but the pictures are {known}.")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
