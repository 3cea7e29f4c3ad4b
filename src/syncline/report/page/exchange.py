"""Which exchange shows and which hides, bucket by bucket; and what ranks that do not meet do."""

from __future__ import annotations

from html import escape
from typing import Any

from syncline.report.page.draw import Axis, Plot, both
from syncline.report.page.markup import Segment, bar, panel, swatch, table
from syncline.report.page.run import Run
from syncline.report.page.units import rate, seconds, three, whole

MOST_BUCKETS = 48
_KINDS = {"reduce": ("hidden", "wire"), "gather": ("hidden-gather", "gather")}
"""Colours of what is hidden and of what is exposed."""


def exchange(run: Run) -> str:
    """Return the table of buckets; nothing if nothing was exchanged by bucket."""
    buckets = run.numbers["buckets"]
    if not any(one["busy_s"] for one in buckets):
        return ""
    kinds = [kind for kind in _kinds(buckets) if any(_busy_s(one, kind) for one in buckets)]
    longest = max(_busy_s(one, kind) for one in buckets for kind in kinds)
    places = list(range(len(buckets)))
    said = ""
    if len(buckets) > MOST_BUCKETS:
        order = sorted(places, key=lambda at: -buckets[at]["exposed_s"])
        places = sorted(order[:MOST_BUCKETS])
        most = f"The {MOST_BUCKETS} buckets of {len(buckets)} that show most."
        said = f'<p class="soft small">{most}</p>'
    heads = [("", "bucket"), ("one hide-small", "first parameter"), ("n", "size")]
    for kind in kinds:
        heads += [("half", kind), ("n", "exposed")]
    heads += [("n hide-small", "sent"), ("n hide-small", "rate")]
    rows = [_row(run, at, kinds, longest) for at in places]
    pale, strong = (
        "".join(swatch(_KINDS.get(kind, _KINDS["gather"])[at]) for kind in kinds) for at in (0, 1)
    )
    ask = (
        f"{pale}pale: behind compute, it costs nothing. "
        f"{strong}strong: compute stood still for it. Mean of a step and rank. The rate is what a "
        f"rank sent for a bucket, by the time that took{_link(run)}."
    )
    return panel("exchange", "Which exchange shows?", ask, table(heads, rows) + said)


def _kinds(buckets: list[dict[str, Any]]) -> list[str]:
    """Return the kinds of tasks, those of every strategy first."""
    found = {kind for one in buckets for kind in one["kinds"]}
    return [*(kind for kind in _KINDS if kind in found), *sorted(found - _KINDS.keys())]


def _busy_s(bucket: dict[str, Any], kind: str) -> float:
    return float(bucket["kinds"].get(kind, {}).get("busy_s", 0.0))


def _row(run: Run, at: int, kinds: list[str], longest: float) -> list[str]:
    shown, one = run.shown, run.numbers["buckets"][at]
    name = escape(one["first_parameter"])
    cells = [
        str(one["bucket"]),
        f'<span title="{name}">{name}</span>',
        shown.num_bytes(f"buckets.{at}.num_bytes"),
    ]
    for kind in kinds:
        times, key = one["kinds"].get(kind), f"buckets.{at}.kinds.{kind}"
        if times is None:
            cells += ["", "-"]
            continue
        pale, strong = _KINDS.get(kind, _KINDS["gather"])
        parts = [
            Segment(pale, times["hidden_s"], "", f"hidden {seconds(times['hidden_s'])}"),
            Segment(strong, times["exposed_s"], "", f"exposed {seconds(times['exposed_s'])}"),
        ]
        cells += [bar(parts, longest), shown.seconds(f"{key}.exposed_s")]
    cells.append(shown.num_bytes(f"buckets.{at}.sent_bytes"))
    cells.append(shown(f"buckets.{at}.rate_bytes_per_s", rate))
    return cells


def _link(run: Run) -> str:
    """Return the rate of the link between machines, if the trace has it."""
    if run.numbers["network"] is None:
        return ""
    return f"; the link between machines carries {run.shown('network.rate_bytes_per_s', rate)}"


def together(run: Run) -> str:
    """Return how far ranks that do not meet are apart; nothing for a run whose ranks do."""
    figures = run.summary.get("strategy") or {}
    key, shown = "run.summary.strategy", run.shown
    said = []
    if "distance_to_consensus" in figures:
        distance = shown(f"{key}.distance_to_consensus", three)
        said.append(
            f"At the end ranks were {distance} apart: the distance of their parameters to the mean "
            "of all ranks, relative to its norm."
        )
    body = ""
    if figures.get("staleness"):
        mean = shown(f"{key}.mean_staleness", three)
        said.append(
            f"A gradient was {mean} versions old on average when a server used it: so many updates "
            "had been made since its worker had fetched the parameters."
        )
        body = _histogram(figures["staleness"])
    if not said:
        return ""
    text = "".join(f"<p>{one}</p>" for one in said)
    return panel("together", "How far apart are ranks?", "", text + body)


def _histogram(counts: dict[str, int]) -> str:
    """Return how many gradients had each staleness."""
    known = {int(staleness): count for staleness, count in counts.items()}
    last = max(known)

    def draw(width: int) -> str:
        across = Axis(-0.6, last + 0.6, "staleness, versions", written=whole)
        across = Axis(across.low, across.high, across.label, written=whole, ticks=_ticks(last))
        plot = Plot(
            width, 220, across, Axis(0, max(known.values()) * 1.08, "gradients", written=whole)
        )
        for staleness, count in known.items():
            left, right = staleness - 0.4, staleness + 0.4
            top = [(left, count), (right, count)]
            plot.band([(left, 0.0), (right, 0.0)], top, "f-backward")
        return plot.svg()

    return f"<figure>{both(draw, 'how many gradients had each staleness')}</figure>"


def _ticks(last: int) -> list[float]:
    every = max(1, -(-last // 12))
    return [float(at) for at in range(0, last + 1, every)]
