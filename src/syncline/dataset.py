"""A data set of measured runs: calibration, step times and traces (docs/dataset.md).

found = syncline.dataset.load("predictions.tar.gz")
for case in found.cases:
    print(case.strategy, case.ranks, found.steps_s(case), len(found.trace(case).tasks))
"""

from __future__ import annotations

import math
import statistics
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from syncline import workload as workloads
from syncline.cluster_facts import ClusterFacts
from syncline.cluster_file import parse_cluster
from syncline.config.words import brief, printable
from syncline.errors import ConfigError
from syncline.perf.trace import Trace
from syncline.workload import Workload

RUNS, LINKS, LATENCY, BUSY = "runs.jsonl", "links.toml", "latency.json", "busy.json"
_MOST_BYTES = 1 << 30
"""An archive's members are no larger together."""


class Case(NamedTuple):
    """What was run: on links of this rate (empty: in shared memory), what, on how many ranks."""

    rate: str
    network: str
    ranks: int
    strategy: str

    @property
    def key(self) -> str:
        return "/".join((self.rate or "machine", self.network, str(self.ranks), self.strategy))

    @property
    def trace_name(self) -> str:
        return f"traces/{self.key.replace('/', '-')}.trace.gz"

    @property
    def job_name(self) -> str:
        return f"{self.network}-{self.rate or 'machine'}.toml"

    @property
    def layers_names(self) -> tuple[str, str]:
        """Where its layers' times may be: one file for all rates, or one for its own."""
        return f"{self.network}.json", f"{self.network}-{self.rate}.json"


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
        return list(read_runs(self._bytes(RUNS), f"{self.source}: {RUNS}"))

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
        name = case.trace_name
        return Trace.from_compressed(self._bytes(name), f"{self.source}: {name}")

    def links(self) -> ClusterFacts:
        """Return what two ranks of one machine measured."""
        return parse_cluster(self._text(LINKS), f"{self.source}: {LINKS}")

    def latency_s(self) -> float:
        """Return half a round trip between two machines of the lab."""
        return read_latency(self._bytes(LATENCY), f"{self.source}: {LATENCY}")

    def workload(self, case: Case) -> Workload:
        first, second = case.layers_names
        name = first if first in self.members else second
        return workloads.parse(self._bytes(name), f"{self.source}: {name}")

    def job(self, case: Case) -> str:
        """Return the job's text; ranks, batch and strategy are set for each case."""
        return self._text(case.job_name)

    def unpack(self, folder: str | Path) -> None:
        """Write all members below a folder."""
        for name, data in self.members.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def _text(self, name: str) -> str:
        return self._bytes(name).decode(errors="replace")

    def _bytes(self, name: str) -> bytes:
        if name not in self.members:
            fix = "Take the whole file, as benchmarks.dataset wrote it."
            raise ConfigError(self.source, f"it holds no {name}", "a data set has it", fix)
        return self.members[name]


class _Latency(msgspec.Struct):
    latency_s: float


_ROW = tuple[tuple[str, str, int, str], float, float, float, float]


def read_runs(data: bytes, source: str) -> Iterator[Run]:
    """Yield the runs of a file's lines; errors name it `source`."""
    for number, line in enumerate(data.splitlines(), 1):
        where = f"{source}, line {number}"
        row: Any = _decode(line, _ROW, where)
        if not all(0 <= one < math.inf for one in row[1:]) or row[0][2] < 1:
            rule = "figures of a run are 0 or more, and it has ranks"
            raise ConfigError(where, brief(line.decode()), rule, "Take the whole data set again.")
        yield Run(Case(*row[0]), *row[1:])


def read_latency(data: bytes, source: str) -> float:
    found: _Latency = _decode(data, _Latency, source)
    if not 0 <= found.latency_s < math.inf:
        rule = "a latency is 0 or more, in seconds"
        raise ConfigError(source, f"got {found.latency_s}", rule, "Take the whole data set again.")
    return found.latency_s


def read_busy(data: bytes, source: str) -> dict[str, float]:
    """Return the seconds that all cores together were busy in a step, by the keys of cases."""
    found: dict[str, float] = _decode(data, dict[str, float], source)
    for key, seconds in found.items():
        if not 0 <= seconds < math.inf:
            rule = "cores are busy for 0 seconds or more"
            what = f"{printable(key)} is {seconds}"
            raise ConfigError(source, what, rule, "Take the whole data set again.")
    return found


def _decode(data: bytes, kind: Any, source: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        rule = "docs/dataset.md says what it holds"
        raise ConfigError(source, brief(error), rule, "Take the whole data set again.") from None


def load(path: str | Path) -> Dataset:
    """Read a data set; raise ConfigError if the file is none."""
    source, members, total = printable(path), dict[str, bytes](), 0
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or name.is_absolute() or ".." in name.parts:
                    raise ValueError(f"it holds {printable(member.name)}")
                total += member.size
                if total > _MOST_BYTES:
                    raise ValueError("it holds more than a gigabyte")
                file = archive.extractfile(member)
                assert file is not None
                members[member.name] = file.read()
    except (OSError, EOFError, tarfile.TarError, ValueError, zlib.error) as error:
        what = f"cannot be read ({brief(error) or type(error).__name__})"
        rule = "a data set is a compressed archive"
        fix = "Make it anew: python -m benchmarks.dataset."
        raise ConfigError(source, what, rule, fix) from None
    return Dataset(members, source)
