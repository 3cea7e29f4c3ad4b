"""The top of the page: where the time went, in a sentence that adds up, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from syncline.report.page.markup import Segment, bar, panel, swatch, table
from syncline.report.page.parts import LEAST, ORDER, css_of, segments, words_of
from syncline.report.page.run import Run
from syncline.report.page.units import accuracy, three

_GROUPS = {
    "computing": "computing",
    "exchange": "standing still for the exchange",
    "waiting": "for slower ranks",
    "input": "for input",
    "update": "for the update",
    "other": "for other things",
}
_LEAST_GROUP = 0.01
_LEAST_GAIN = 0.005
_MOST_HELPS = 3


def cards(runs: Sequence[Run]) -> str:
    """Return a button for each run, which shows it; nothing if there is one."""
    if len(runs) < 2:
        return ""
    longest = max((run.numbers.get("step_s", 0.0) for run in runs), default=0.0)
    inside = "".join(_card(number, run, longest) for number, run in enumerate(runs))
    return f'<div class="runs" role="group" aria-label="Runs">{inside}</div>'


def _card(number: int, run: Run, longest: float) -> str:
    pressed = str(number == 0).lower()
    if not run.is_traced:
        body = '<span class="soft small">no trace</span>'
    else:
        shown, numbers = run.shown, run.numbers
        clock = "simulated" if run.is_virtual else "measured"
        plain = [
            Segment(css, value, "", words)
            for css, value, _, words in segments(shown, "parts_s", numbers["parts_s"])
        ]
        body = (
            f'<span class="big">{shown.seconds("step_s")} a step</span>'
            f'<span class="soft small">{shown.three("samples_per_s")} samples/s on '
            f"{shown.whole('ranks')} ranks, {escape(numbers['strategy'])}, {clock}</span>"
            f"{bar(plain, longest)}"
        )
    return (
        f'<button data-pick="{number}" data-of="{number}" aria-pressed="{pressed}">'
        f'<span class="name">{escape(run.name)}</span>{body}</button>'
    )


def verdict(run: Run) -> str:
    """Return the panel with the verdict of one run."""
    if not run.is_traced:
        return _untraced(run)
    numbers, shown = run.numbers, run.shown
    parts = segments(shown, "parts_s", numbers["parts_s"])
    listed = "".join(
        f"<li>{swatch(css_of(name))}{words_of(name)} <b>{shown.seconds(f'parts_s.{name}')}</b> "
        f'<span class="soft">{shown.share(f"shares.{name}")}</span></li>'
        for name in ORDER
        if numbers["parts_s"][name] > LEAST * numbers["step_s"]
    )
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{words}</small></dd></div>"
        for name, value, words in _figures(run)
    )
    return (
        f'<section class="panel verdict" data-panel="verdict"><h1>{sentence(run)}</h1>'
        f'<p class="then">{what_helps(run)}</p>{bar(parts, numbers["step_s"], labels=True)}'
        f'<ul class="key">{listed}</ul><p class="soft small">The mean step of the mean rank, '
        f"without the first; its parts add up to {shown.seconds('step_s')}.</p>"
        f'<dl class="figures">{cells}</dl></section>'
    )


def sentence(run: Run) -> str:
    """Say what a step takes, and what that is made of: the parts that are named are the step.

    What is shorter than a hundredth of the step goes into "other things".
    """
    shown, groups = run.shown, run.numbers["groups_s"]
    least = _LEAST_GROUP * run.numbers["step_s"]
    told = [
        f"{shown.seconds(f'groups_s.{name}')} {_group_words(run, name)}"
        for name in _GROUPS
        if groups[name] >= least
    ]
    return f"A step takes {shown.seconds('step_s')}: {in_a_row(told)}."


def _group_words(run: Run, name: str) -> str:
    """Return a group of parts in words; what is nearly all time between tasks is called that."""
    between_s = run.numbers["parts_s"]["between"]
    is_between = name == "other" and between_s > 0.9 * run.numbers["groups_s"]["other"]
    return "between tasks" if is_between else _GROUPS[name]


def in_a_row(words: Sequence[str]) -> str:
    """Return words with commas, and "and" before the last.

    >>> in_a_row(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def what_helps(run: Run) -> str:
    """Say what binds, and which changes would make a step shorter."""
    shown, answers = run.shown, run.numbers["what_if"]
    binds = f"What binds: {shown.words('path.binds')}."
    best = [at for at, one in enumerate(answers) if one["gain"] >= _LEAST_GAIN][:_MOST_HELPS]
    if not best:
        return f"{binds} None of the changes tried would make a step shorter by half a per cent."
    told = [
        f"{answers[at]['edit']}, <b>{shown.share(f'what_if.{at}.gain')} less</b>" for at in best
    ]
    rough = " Roughly: see below." if run.numbers["rough"] else ""
    return f"{binds} What would help most: {'; '.join(told)}.{rough}"


def _figures(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and words of the most important figures."""
    shown, numbers = run.shown, run.numbers
    half = f"{shown.seconds('steps_s.quarter_s')} to {shown.seconds('steps_s.three_quarters_s')}"
    if numbers["rough"]:  # ranks that do not meet: no step is typical of all
        yield "half of the steps", half, "each rank takes its own"
    else:
        yield "step, median", shown.seconds("steps_s.median_s"), f"middle half {half}"
    batch = f"samples, {shown.whole('samples')} in a step"
    yield "throughput", f"{shown.three('samples_per_s')} /s", batch
    if numbers["exchange_s"] > 0:
        words = f"of {shown.seconds('exchange_s')} of exchange in a step"
        yield "exchange hidden", shown.share("hidden"), words
    yield "sent", shown.num_bytes("sent_bytes"), "by a rank in a step"
    if numbers["interval_s"]:
        ends = f"{shown.seconds('interval_s.0')} to {shown.seconds('interval_s.1')}"
        yield "step, nine times in ten", ends, "how far the prediction may be off"
    if run.summary.get("efficiency"):
        words = f"{shown('run.summary.speed_up', three)} times one rank alone with this batch"
        yield "efficiency", shown.share("run.summary.efficiency"), words
    if run.summary.get("accuracy") is not None:
        steps = f"after {shown.whole('run.summary.steps')} steps"
        yield "accuracy", shown("run.summary.accuracy", accuracy), steps
    elif run.summary.get("loss") is not None:
        yield "loss", shown("run.summary.loss", three), "of the last step"


def _untraced(run: Run) -> str:
    """Return what is known of a run folder without a trace."""
    shown = run.shown
    if not run.summary:
        title = f"No run has ended in {escape(run.name)}, and no trace is there."
        return panel("verdict", title, "", "")
    body = (
        f'<section class="panel verdict" data-panel="verdict"><h1>A step takes '
        f"{shown.seconds('run.summary.step_s')}, {shown.three('run.summary.samples_per_s')} "
        f"samples a second on {shown.whole('run.summary.ranks')} ranks.</h1>"
    )
    then = "What the time went into is not known: train with <code>--trace</code> to see it."
    return f'{body}<p class="then">{then}</p></section>'


def side_by_side(runs: Sequence[Run]) -> str:
    """Return all traced runs in one table, with bars on one scale."""
    traced = [(number, run) for number, run in enumerate(runs) if run.is_traced]
    if len(traced) < 2:
        return ""
    longest = max(run.numbers["step_s"] for _, run in traced)
    rows = []
    for number, run in traced:
        shown = run.shown
        plain = [
            Segment(one.css, one.value, "", one.plain)
            for one in segments(shown, "parts_s", run.numbers["parts_s"])
        ]
        cells = [
            f'<span title="{escape(run.name)}">{escape(run.name)}</span>',
            escape(run.numbers["strategy"]),
            shown.whole("ranks"),
            bar(plain, longest),
            shown.seconds("step_s"),
            shown.three("samples_per_s"),
            shown.seconds("groups_s.exchange"),
            shown.seconds("groups_s.waiting"),
        ]
        rows.append(
            [
                f'<span data-of="{number}">{cell}</span>' if "data-key" in cell else cell
                for cell in cells
            ]
        )
    heads = [
        ("one", "run"),
        ("hide-small", "strategy"),
        ("n hide-small", "ranks"),
        ("half", "a step"),
        ("n", "step"),
        ("n", "samples/s"),
        ("n hide-small", "exchange exposed"),
        ("n hide-small", "slower ranks"),
    ]
    return panel(
        "beside",
        "Side by side",
        "Mean steps on one scale. Colours are those of the parts above.",
        table(heads, rows),
    )
