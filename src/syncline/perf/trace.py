"""A trace: what each rank did when, and what it had waited for. Real and virtual runs write it.

A task belongs to a rank, a lane, a kind, a bucket and a step. On the compute lane tasks follow one
another; on the comm lane several may be under way at once. `after` names the tasks whose end a
task waited for before it began, so a trace is a task graph with measured times (Shi et al. 2018,
arXiv 1805.03812). A task of the comm lane waits for other ranks in its middle as well: it is
divided into parts, and parts of one exchange have the same id on all ranks that take part in it.

The file is JSON lines (docs/traces.md): a header, then one list per task, sorted by rank and
number. Equal traces give equal bytes. A file whose name ends in .gz is compressed.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from syncline.config.words import brief, printable
from syncline.errors import ConfigError
from syncline.files import write_atomically

FORMAT, VERSION = "syncline-trace", 2

TaskId = tuple[int, int]
"""A task of any rank: the rank, and the task's number there."""


# gc=False: the cyclic collector skips them. A long trace has millions, and none is in a cycle.
class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part of a task; it begins where the part before it ends, or with the task."""

    kind: str
    end_s: float
    num_bytes: int = 0
    """What the rank handed to its peers for it, as `Traffic` counts."""
    exchange: str = ""
    """The id of its collective, or of its call to another rank; empty if it belongs to none."""
    peers: tuple[int, ...] = ()
    """The ranks that it received from, if not from all members of the collective."""


class Task(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One piece of work on one lane. Times are seconds of one clock.

    `number` counts a rank's tasks from 0. `bucket` is -1 if the task belongs to no bucket.
    """

    rank: int
    number: int
    lane: str
    kind: str
    bucket: int
    step: int
    start_s: float
    end_s: float
    after: tuple[TaskId, ...] = ()
    parts: tuple[Part, ...] = ()

    def spans(self) -> Iterable[tuple[Part, float]]:
        """Yield each part and when it began."""
        start_s = self.start_s
        for part in self.parts:
            yield part, start_s
            start_s = part.end_s


class Clocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the ranks' clocks were made one: what was added to each, and how wrong that may be.

    Offsets are in seconds, by rank, when the trace begins and when it ends. The difference of two
    ranks' times is wrong by at most `error_s`.
    """

    offsets_s: tuple[tuple[float, float], ...] = ()
    error_s: float = 0.0
    latency_s: float = 0.0
    """Half the shortest round trip that was seen between two machines."""


class BucketFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bucket: its bytes, and the parameters in it."""

    num_bytes: int
    parameters: tuple[str, ...]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was run, on what, and how its times are to be read."""

    format: str = FORMAT
    version: int = VERSION
    syncline: str = ""
    torch: str = ""
    clock: str = "measured"
    """"measured" or "virtual"."""
    strategy: str = ""
    machines: tuple[tuple[int, ...], ...] = ()
    """The ranks of each machine."""
    shards: int = 0
    samples: int = 0
    """Samples of a shard."""
    first_step: int = 0
    steps: int = 0
    """The number of the first step, and how many there are."""
    sent_bytes: tuple[int, ...] = ()
    """What each rank handed to its peers in steps, as counted; by rank."""
    buckets: tuple[BucketFacts, ...] = ()
    clocks: Clocks = Clocks()
    job: str = ""
    """The job, as TOML."""
    cluster: dict[str, Any] | None = None
    interval_s: tuple[float, ...] = ()
    """Of a simulation: the least and the most that a step takes, nine times in ten; empty if that
    was not found."""


class Trace(msgspec.Struct, frozen=True):
    """The tasks of all ranks."""

    tasks: tuple[Task, ...]
    header: Header = Header()

    def to_bytes(self) -> bytes:
        """Return the file's bytes, sorted by rank and number; floats as `repr`, without loss."""
        rows = [
            msgspec.to_builtins(self.header),
            *(msgspec.to_builtins(task) for task in self._sorted()),
        ]
        lines = (json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
        return "".join(f"{line}\n" for line in lines).encode()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the trace") -> Trace:
        """Read what `to_bytes` returned. Errors name it `source`."""
        lines = data.split(b"\n")
        header = _header_of(lines[0], source)
        if lines.pop() != b"":
            raise _damaged(source, len(lines) + 1, "it is cut short")
        decoder = msgspec.json.Decoder(Task)
        tasks = []
        for number, line in enumerate(lines[1:], 2):
            try:
                tasks.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise _damaged(source, number, brief(error)) from None
        _check(tasks, source)
        return cls(tuple(tasks), header)

    def write(self, path: str | Path) -> None:
        """Write a file, whole or not at all; compressed if its name ends in .gz."""
        data = self.to_bytes()
        if str(path).endswith(".gz"):
            data = gzip.compress(data, 6, mtime=0)  # no time: equal traces give equal bytes
        write_atomically(Path(path), data)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a file; raise ConfigError if it is damaged or not a trace."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise ConfigError(
                str(path), f"cannot be read ({reason})", "a trace is a file", _WAY_OUT
            ) from None
        if data.startswith(b"\x1f\x8b"):
            return cls.from_compressed(data, str(path))
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_compressed(cls, data: bytes, source: str = "the trace") -> Trace:
        """Read the bytes of a .gz file."""
        try:
            return cls.from_bytes(gzip.decompress(data), source)
        except (OSError, EOFError, zlib.error):
            rule = "a .gz file is whole"
            raise ConfigError(source, "it cannot be decompressed", rule, _AGAIN) from None

    def _sorted(self) -> list[Task]:
        return sorted(self.tasks, key=lambda task: (task.rank, task.number))


def holds_traces(folder: Path) -> list[Path]:
    """Return the traces that a folder holds, in order."""
    return sorted(path for end in ("trace", "trace.gz") for path in folder.glob(f"*.{end}"))


def find_trace(where: Path) -> Path:
    """Return a trace, or the one that a folder holds."""
    if not where.is_dir():
        return where
    found = holds_traces(where)
    if len(found) == 1:
        return found[0]
    rule = "one trace is explained at a time"
    if not found:
        fix = f"syncline train JOB --out DIR --trace {printable(where / 'run.trace')}"
        raise ConfigError(printable(where), "no trace is there", rule, f"Record one: {fix}.")
    names = ", ".join(path.name for path in found)
    holds = f"this folder holds {len(found)} traces ({names})"
    raise ConfigError(printable(where), holds, rule, "Give the path of one of them.")


_WAY_OUT = "Give the path of a file that `syncline train --trace FILE` wrote."
_AGAIN = "It is damaged: write it once more."


class _Kind(msgspec.Struct):
    """What the first line says of itself, in any version."""

    format: str = ""
    version: int = 0


def _header_of(line: bytes, source: str) -> Header:
    try:
        kind = msgspec.json.decode(line, type=_Kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        kind = _Kind()
    if kind.format != FORMAT:
        raise ConfigError(
            source, "this is no trace of ours", "its first line says what it is", _WAY_OUT
        )
    if kind.version != VERSION:
        raise ConfigError(
            source,
            f"this is a trace of format version {kind.version}",
            f"this version of syncline reads version {VERSION}",
            "Record the run again, or read it with the version of syncline that wrote it.",
        )
    try:
        return msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(source, 1, brief(error)) from None


def _check(tasks: Sequence[Task], source: str) -> None:
    """Refuse tasks that no run can have recorded."""
    known = {(task.rank, task.number) for task in tasks}
    before: TaskId = (-1, -1)
    for line, task in enumerate(tasks, 2):
        here = (task.rank, task.number)
        missing = [one for one in task.after if one not in known]
        if here <= before:
            raise _damaged(source, line, "tasks are not in order")
        if not -math.inf < task.start_s <= task.end_s < math.inf:
            raise _damaged(source, line, f"a task from {task.start_s} to {task.end_s} s")
        if missing:
            raise _damaged(source, line, f"it comes after {missing[0]}, which is not there")
        if any(not start_s <= part.end_s for part, start_s in task.spans()):
            raise _damaged(source, line, "a part ends before it begins")
        if task.parts and task.parts[-1].end_s != task.end_s:
            raise _damaged(source, line, "its parts do not end where it ends")
        before = here


def _damaged(source: str, line: int, found: str) -> ConfigError:
    return ConfigError(
        f"{source}, line {line}",
        found,
        "a trace has one whole task in each line after the first",
        _AGAIN,
    )
