"""Where a step goes: each rank's mean step, each step's time, and how steady steps are."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from syncline.perf.spread import every_step_s
from syncline.report.page.draw import Axis, Plot, Point, both
from syncline.report.page.markup import Segment, Shown, bar, panel, table
from syncline.report.page.parts import ORDER, css_of, segments, words_of
from syncline.report.page.run import Run
from syncline.report.page.units import seconds

MOST_RANKS = 32
"""If there are more ranks, those that compute longest are shown."""


def where(run: Run) -> str:
    """Return the panel of ranks and steps."""
    body = (
        f'<div class="two"><div><h3>By rank</h3>{_ranks(run)}</div>'
        f"<div><h3>By step</h3>{_over_steps(run)}</div>"
        f"<div><h3>How steady</h3>{_steady(run)}</div>"
        f"<div><h3>Longest steps</h3>{_longest(run)}</div></div>"
    )
    ask = "Much compute in one rank: it is slow. Much waiting: others are slower than this one."
    return panel("where", "Where does a step go?", ask, body)


def _ranks(run: Run) -> str:
    """Return a bar for each rank, all on one scale."""
    ranks = run.numbers["ranks_s"]
    longest = max((one["step_s"] for one in ranks), default=0.0)
    places = list(range(len(ranks)))
    said = ""
    if len(ranks) > MOST_RANKS:
        slow = sorted(places, key=lambda at: -_compute_s(ranks[at]))[:MOST_RANKS]
        places = sorted(slow)
        most = f"The {MOST_RANKS} of {len(ranks)} ranks that compute longest."
        said = f'<p class="soft small">{most}</p>'
    rows = "".join(_row(run.shown, at, ranks[at], longest) for at in places)
    return f"{rows}{said}{_gone(run)}"


def _row(shown: Shown, at: int, one: dict[str, Any], longest: float) -> str:
    parts = segments(shown, f"ranks_s.{at}.parts_s", one["parts_s"])
    plain = [Segment(part.css, part.value, "", part.plain) for part in parts]
    took = shown.seconds(f"ranks_s.{at}.step_s")
    name = f"<span>rank {one['rank']}</span>"
    return f'<div class="rowbar">{name}{bar(plain, longest)}<span>{took}</span></div>'


def _compute_s(one: dict[str, Any]) -> float:
    return float(one["parts_s"].get("forward", 0.0) + one["parts_s"].get("backward", 0.0))


def _gone(run: Run) -> str:
    """Say which ranks were lost."""
    shown, gone, missing = run.shown, run.numbers["gone"], run.numbers["missing"]
    told = [f"rank {rank} stopped after step {shown.whole(f'gone.{rank}')}" for rank in gone]
    told += [
        f"rank {rank} {escape(how)}"
        for rank, how in run.summary.get("gone", {}).items()
        if rank not in gone
    ]
    if missing:
        names = ", ".join(map(str, missing[:20]))
        told.append(f"the trace has no tasks of rank{'s' if len(missing) > 1 else ''} {names}")
    return f'<p class="bad" id="gone">Lost: {"; ".join(told)}.</p>' if told else ""


def _over_steps(run: Run) -> str:
    """Return the time of each step, stacked by part, and the longest step of any rank."""
    bins = run.numbers["steps_by_s"]
    if len(bins) < 2:
        return "<p class='soft'>There is one step only.</p>"
    top = max(one["longest_s"] for one in bins) * 1.06
    unit, scale = _unit(top)
    first, last = bins[0]["steps"][0], bins[-1]["steps"][1] + 1

    def draw(width: int) -> str:
        across = Axis(first, last, "step", written=lambda value: f"{value:,.0f}")
        plot = Plot(width, 240, across, Axis(0, top * scale, unit))
        low = [0.0] * len(bins)
        for part in ORDER:
            high = [
                at + one["parts_s"].get(part, 0.0) * scale
                for at, one in zip(low, bins, strict=True)
            ]
            if sum(high) - sum(low) > 1e-9:
                plot.band(_stairs(bins, low), _stairs(bins, high), f"f-{css_of(part)}")
            low = high
        plot.line(_stairs(bins, [one["longest_s"] * scale for one in bins]), "l-max")
        return plot.svg()

    picture = both(draw, "time of each step, by part")
    said = "Mean over ranks; the thin line is the longest step of any rank. Colours as above."
    return f"<figure>{picture}<figcaption>{said}</figcaption></figure>"


def _stairs(bins: Sequence[dict[str, Any]], values: Sequence[float]) -> list[Point]:
    """Return a line that is level within each group of steps."""
    return [
        (step, value)
        for one, value in zip(bins, values, strict=True)
        for step in (one["steps"][0], one["steps"][1] + 1)
    ]


def _steady(run: Run) -> str:
    """Return how many steps take at most how long."""
    ordered = sorted(every_step_s(run.timing))
    shown, spread = run.shown, run.numbers["steps_s"]
    if len(ordered) < 2:
        return "<p class='soft'>There is one step only.</p>"
    most = ordered[min(len(ordered) - 1, int(0.995 * len(ordered)))]
    margin = max(most - ordered[0], most * 0.02) * 0.08
    unit, scale = _unit(most)
    every = max(1, len(ordered) // 240)

    def draw(width: int) -> str:
        across = Axis((ordered[0] - margin) * scale, (most + margin) * scale, f"step, {unit}")
        plot = Plot(width, 240, across, Axis(0, 100, "% of steps at most so long"))
        points = [
            (min(value, most) * scale, (at + 1) / len(ordered) * 100)
            for at, value in enumerate(ordered)
        ]
        plot.line([*points[::every], points[-1]], "l-main")
        for part, name in ((50, "median_s"), (95, "high_s")):
            x, y = min(spread[name], most) * scale, part
            plot.mark(x, y, "d-main")
            is_right = plot.x(x) > width - 120
            key = f' data-key="steps_s.{name}" data-value="{spread[name]!r}"'
            words = f"{part} % {seconds(spread[name])}"
            if is_right:
                plot.text(plot.x(x) - 7, plot.y(y) - 8, words, "mark end", key)
            else:
                plot.text(plot.x(x) + 9, plot.y(y) + 14, words, "mark", key)
        return plot.svg()

    picture = both(draw, "how many steps take at most how long")
    said = (
        f"{shown.whole('steps_s.count')} steps of all ranks, the first left out: nine in ten take "
        f"{shown.seconds('steps_s.low_s')} to {shown.seconds('steps_s.high_s')}."
    )
    return f"<figure>{picture}<figcaption>{said}</figcaption></figure>"


def _longest(run: Run) -> str:
    """Return the steps that took longest, and the part that was longer than usual."""
    steps, mean = run.numbers["by_rank"], run.numbers["parts_s"]
    first = run.header.first_step
    counted = [at for at, one in enumerate(steps) if one["step"] > first] or list(range(len(steps)))
    rows = []
    for at in sorted(counted, key=lambda at: -steps[at]["step_s"])[:6]:
        one = steps[at]
        more = {name: value - mean.get(name, 0.0) for name, value in one["parts_s"].items()}
        name = max(more, key=lambda part: more[part])
        took = run.shown.seconds(f"by_rank.{at}.step_s")
        part = run.shown.seconds(f"by_rank.{at}.parts_s.{name}")
        rows.append([f"step {one['step']}, rank {one['rank']}", took, f"{words_of(name)} {part}"])
    return table([("", "step"), ("n", "took"), ("", "longer than usual")], rows)


def _unit(most_s: float) -> tuple[str, float]:
    if most_s < 1e-3:
        return "µs", 1e6
    return ("ms", 1e3) if most_s < 1 else ("s", 1.0)
