"""What was run, on what: the resolved job, the machine, versions, and words of the page."""

from __future__ import annotations

from html import escape
from typing import Any

from syncline.report.page.markup import panel
from syncline.report.page.run import Run
from syncline.report.page.units import rate

WORDS = {
    "exposed": "exchange during which the compute lane of the same rank stands still",
    "hidden": "exchange behind forward or backward: it costs nothing",
    "waiting for slower ranks": "from a rank's coming to a collective until the last one has come",
    "critical path": "from the end of the run back to what was waited for last, across ranks",
    "between tasks": "time of the compute lane that belongs to no task: the loop's own code",
}


def job(run: Run) -> str:
    """Return the panel about the job and the machine."""
    facts = "".join(f"<dt>{name}</dt><dd>{words}</dd>" for name, words in _facts(run).items())
    text = ""
    if run.job:
        text = f"<details><summary>The resolved job</summary><pre>{escape(run.job)}</pre></details>"
    if run.is_traced and run.header.cluster:
        rows = "\n".join(_lines(run.header.cluster))
        text += f"<details><summary>The cluster</summary><pre>{escape(rows)}</pre></details>"
    words = "".join(f"<dt>{name}</dt><dd>{said}</dd>" for name, said in WORDS.items())
    body = (
        f'<div class="two"><div><dl class="facts">{facts}</dl>{text}</div>'
        f'<div><h3>Words</h3><dl class="facts">{words}</dl></div></div>'
    )
    return panel("job", "Job and machine", "", body)


def _facts(run: Run) -> dict[str, str]:
    """Return what is known of a run, in words."""
    shown, found = run.shown, dict[str, str]()
    if not run.is_traced:
        return found
    header, numbers = run.header, run.numbers
    if numbers["model"]:
        found["model"] = escape(numbers["model"])
    clock = "simulated, on a virtual clock" if run.is_virtual else "measured"
    found["strategy"] = f"{escape(header.strategy)}, {clock}"
    machines = "machine" if numbers["machines"] == 1 else "machines"
    found["ranks"] = f"{shown.whole('ranks')} on {shown.whole('machines')} {machines}"
    found["batch"] = f"{shown.whole('samples')} samples in a step, in {header.shards} shards"
    steps = (
        f"{shown.whole('steps')}, {shown.whole('tasks')} tasks, {shown.seconds('run_s')} together"
    )
    found["steps"] = steps
    if numbers["network"] is not None:
        carries = shown("network.rate_bytes_per_s", rate)
        found["link between machines"] = f"{carries}, {shown.seconds('network.latency_s')}"
    if numbers["clocks_error_s"]:
        error = shown.seconds("clocks_error_s")
        found["one clock"] = f"the difference of two ranks' times is wrong by {error} at most"
    if numbers["unknown_s"]:
        unknown = f"{shown.seconds('unknown_s')} of all ranks' time has no cause in the trace"
        found["unknown"] = unknown
    found["versions"] = f"syncline {escape(header.syncline)}, torch {escape(header.torch)}"
    return found


def _lines(facts: dict[str, Any], before: str = "") -> list[str]:
    """Return nested facts as lines; what is not known is left out."""
    found = []
    for name, value in facts.items():
        if isinstance(value, dict):
            found += _lines(value, f"{before}{name}.")
        elif value not in (None, [], ""):
            found.append(f"{before}{name} = {value}")
    return found
