"""What a report is about: runs, from traces and run folders, and comparisons."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.config import printable
from syncline.errors import ConfigError
from syncline.perf.explain import Explanation, explain
from syncline.perf.graph import Graph, Timing, retime
from syncline.perf.numbers import to_json_dict
from syncline.perf.trace import Header, Trace, find_trace, holds_traces
from syncline.report.page.compare_folder import Comparison, holds_comparison, read_comparison
from syncline.report.page.markup import Shown
from syncline.run_curve import read_curve
from syncline.run_folder import SUMMARY

_SUFFIX = re.compile(r"\.trace(\.gz)?$")


@dataclass(frozen=True)
class Run:
    """A run that is shown: its numbers, as `syncline explain --json` has them."""

    name: str
    numbers: dict[str, Any]
    """Without a trace only "run", which has what the run folder's files say."""
    explanation: Explanation | None = None

    @property
    def shown(self) -> Shown:
        return Shown(self.numbers)

    @property
    def graph(self) -> Graph:
        assert self.explanation is not None, self.name
        return self.explanation.graph

    @property
    def header(self) -> Header:
        return self.graph.header

    @property
    def timing(self) -> Timing:
        return retime(self.graph)

    @property
    def is_traced(self) -> bool:
        return self.explanation is not None

    @property
    def is_virtual(self) -> bool:
        return self.is_traced and self.header.clock == "virtual"

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = (self.numbers.get("run") or {}).get("summary", {})
        return found

    @property
    def curve(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (self.numbers.get("run") or {}).get("curve", [])
        return found

    @property
    def job(self) -> str:
        """The resolved job as TOML; empty if it is not known."""
        return str(self.numbers.get("job", "")) or (self.header.job if self.is_traced else "")


def run_of(
    name: str, trace: Trace | None, known: dict[str, Any] | None = None, job: str = ""
) -> Run:
    """Return a run; `known` is what is known besides its trace, as `read_curve` returns it."""
    if trace is None:
        return Run(name, {"run": known, "job": job})
    found = explain(trace, name)
    numbers = to_json_dict(found)
    return Run(name, numbers | {"run": known, "job": job}, found)


def read(paths: Sequence[Path]) -> tuple[list[Run], list[Comparison]]:
    """Read what paths name: traces, run folders, folders of a comparison."""
    runs, comparisons = [], []
    for path in paths:
        if path.is_dir() and holds_comparison(path):
            comparisons.append(read_comparison(path))
        elif path.is_dir():
            runs.append(run_of_folder(path))
        else:
            runs.append(run_of(printable(path), Trace.read(path)))
    return _named_apart(runs), comparisons


def run_of_folder(folder: Path, trace: Path | None = None) -> Run:
    """Return the run of a folder, with a trace that is elsewhere or in it."""
    known = read_curve(folder) if (folder / SUMMARY).exists() else None
    job = folder / "job.toml"
    text = job.read_text(errors="replace") if job.exists() else ""
    if trace is not None or known is None or holds_traces(folder):
        return run_of(printable(folder), Trace.read(trace or find_trace(folder)), known, text)
    return run_of(printable(folder), None, known, text)


def _named_apart(runs: list[Run]) -> list[Run]:
    """Name runs by the last parts of their paths, as many as tell them apart."""
    parts = [Path(_SUFFIX.sub("", run.name)).parts for run in runs]
    names = [run.name for run in runs]
    for count in range(max(map(len, parts), default=0), 0, -1):
        fewer = ["/".join(one[-count:]) for one in parts]
        names = fewer if len(set(fewer)) == len(fewer) else names
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def check(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> None:
    """Refuse a report about nothing."""
    if not runs and not comparisons:
        rule, fix = "a report is about runs", "Give a trace, a run folder or a compare folder."
        raise ConfigError("syncline report", "nothing was given", rule, fix)


def as_json(value: object) -> str:
    """Return JSON that can stand inside a page: no tag can begin in it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
