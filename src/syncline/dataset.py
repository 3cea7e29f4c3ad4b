"""A data set of measured runs: calibration, step times and traces (docs/dataset.md).

found = syncline.dataset.load("predictions.tar.gz")
for case in found.cases:
    print(case.strategy, case.ranks, found.steps_s(case), len(found.trace(case).tasks))
"""

from __future__ import annotations

import json
import statistics
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from syncline import workload as workloads
from syncline.cluster_facts import ClusterFacts
from syncline.cluster_file import parse_cluster
from syncline.config import printable
from syncline.errors import ConfigError
from syncline.perf.trace import Trace
from syncline.workload import Workload

NAMES = ("runs.jsonl", "links.toml", "latency.json", "*.json", "*.toml", "traces/*.trace.gz")
"""What such a data set is made of."""
_MOST_BYTES = 1 << 30
"""No member of an archive is larger than that."""


class Case(NamedTuple):
    """What was run: on links of this rate (empty: in shared memory), what, on how many ranks."""

    rate: str
    network: str
    ranks: int
    strategy: str

    @property
    def key(self) -> str:
        return "/".join((self.rate or "machine", self.network, str(self.ranks), self.strategy))


class Run(NamedTuple):
    """One run of a case: medians over its steps, and bytes that a rank sent in one."""

    case: Case
    step_s: float
    samples_per_s: float
    sent_bytes: float
    exposed: float


@dataclass(frozen=True)
class Dataset:
    """The members of an archive by name; they are read when they are asked for."""

    members: Mapping[str, bytes]
    source: str

    @cached_property
    def runs(self) -> list[Run]:
        lines = self._text("runs.jsonl").splitlines()
        return [Run(Case(*row[0]), *row[1:]) for row in map(json.loads, lines)]

    @property
    def cases(self) -> list[Case]:
        """Every case once, in the order of the runs."""
        return list(dict.fromkeys(run.case for run in self.runs))

    def steps_s(self, case: Case) -> list[float]:
        return [run.step_s for run in self.runs if run.case == case]

    def step_s(self, case: Case) -> float:
        """Return the median of a case's runs."""
        return statistics.median(self.steps_s(case))

    def trace(self, case: Case) -> Trace:
        name = f"traces/{case.key.replace('/', '-')}.trace.gz"
        return Trace.from_compressed(self._bytes(name), f"{self.source}: {name}")

    def links(self) -> ClusterFacts:
        """Return what two ranks of one machine measured."""
        return parse_cluster(self._text("links.toml"), f"{self.source}: links.toml")

    def latency_s(self) -> float:
        """Return half a round trip between two machines of the lab."""
        return float(json.loads(self._text("latency.json"))["latency_s"])

    def workload(self, case: Case) -> Workload:
        name = f"{case.network}.json"
        name = name if name in self.members else f"{case.network}-{case.rate}.json"
        return workloads.parse(self._bytes(name), f"{self.source}: {name}")

    def job(self, case: Case) -> str:
        """Return the job's text; ranks, batch and strategy are set for each case."""
        return self._text(f"{case.network}-{case.rate or 'machine'}.toml")

    def unpack(self, folder: str | Path) -> None:
        """Write all members below a folder."""
        for name, data in self.members.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def _text(self, name: str) -> str:
        return self._bytes(name).decode()

    def _bytes(self, name: str) -> bytes:
        if name not in self.members:
            fix = "Take the whole file, as benchmarks.dataset wrote it."
            raise ConfigError(self.source, f"it holds no {name}", "a data set has it", fix)
        return self.members[name]


def load(path: str | Path) -> Dataset:
    """Read a data set; raise ConfigError if the file is none."""
    source, members = printable(path), dict[str, bytes]()
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or name.is_absolute() or ".." in name.parts:
                    raise ValueError(f"it holds {printable(member.name)}")
                if member.size > _MOST_BYTES:
                    raise ValueError(f"{printable(member.name)} is too large")
                file = archive.extractfile(member)
                assert file is not None
                members[member.name] = file.read()
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        what = f"cannot be read ({printable(str(error) or type(error).__name__)})"
        rule = "a data set is a compressed archive"
        fix = "Make it anew: python -m benchmarks.dataset."
        raise ConfigError(source, what, rule, fix) from None
    return Dataset(members, source)
