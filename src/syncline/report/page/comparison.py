"""A comparison of strategies: who reaches the target first, at how many ranks, and how surely."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any

from syncline.report.page.compare_folder import Comparison
from syncline.report.page.draw import legend
from syncline.report.page.learning import curves, ups_of
from syncline.report.page.markup import Shown, panel, table
from syncline.report.page.time_to_target import target, title
from syncline.report.page.units import accuracy, seconds, three
from syncline.report.page.verdict import in_a_row


def panels(at: int, one: Comparison) -> str:
    """Return all panels of a comparison, the `at`-th in the page."""
    found = [
        _verdict(one),
        _winners(one),
        target(one),
        _curves(one, at),
        _settings(one),
        _study(one),
    ]
    return f'<div data-of="compare {at}">{"".join(found)}</div>'


def _verdict(one: Comparison) -> str:
    """Say who is first at how many ranks: of the first table large, of the others below."""
    shown, summary = Shown(one.summary), one.summary
    first, *others = [f"{_first(one, at)}." for at in range(len(summary["tables"]))]
    target_words = "First is who is most accurate at the end."
    if summary["target"] is not None:
        reached = shown("target", accuracy)
        target_words = f"First is who reaches {reached} accuracy on test samples soonest."
    done, failed = shown.whole("cells.done"), shown.whole("cells.failed")
    cells = [
        ("runs", done, f"of {shown.whole('cells.wanted')}, {failed} failed"),
        ("samples", shown.whole("samples"), "of every run, over all ranks"),
        ("seeds", str(len(summary["seeds"])), "ranges are from the least to the most"),
        ("settings tried", shown.whole("tune"), "for each strategy and number of ranks"),
    ]
    figures = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{words}</small></dd></div>"
        for name, value, words in cells
    )
    missing = "" if summary["is_complete"] else '<p class="bad">Some runs are still missing.</p>'
    time = "virtual time" if summary["clock"] == "virtual" else "wall time"
    more = "".join(f'<p class="then">{words}</p>' for words in others)
    return (
        f'<section class="panel verdict" data-panel="verdict"><h1>{first}</h1>{more}'
        f"<p>In {time}. {target_words}</p>{missing}"
        f'<dl class="figures">{figures}</dl></section>'
    )


def _first(one: Comparison, at: int) -> str:
    """Say who is first in a table, ranks with the same answer together."""
    found = one.summary["tables"][at]
    pieces = []
    for said, same in groupby(found["winners"], key=lambda row: _said(row[_by(one)])):
        ranks = [row["ranks"] for row in same]
        where = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        pieces.append(f"at {where} ranks {said}")
    name = ", ".join(part for part in (found["scenario"], found["grid"]) if part)
    return f"{escape(name[:1].upper() + name[1:])}: {'; '.join(pieces)}"


def _said(by: dict[str, Any]) -> str:
    """Say who is first at a number of ranks."""
    if by["first"] is None:
        return "nobody reaches it with all seeds"
    if not by["tied"]:
        return f"{escape(by['first'])} is first"
    return f"{in_a_row([escape(name) for name in (by['first'], *by['tied'])])} cannot be told apart"


def _by(one: Comparison) -> str:
    """Return by what strategies are compared first: time to the target, if there is one."""
    return "by_accuracy" if one.summary["target"] is None else "by_time"


def _winners(one: Comparison) -> str:
    body = ""
    for at, found in enumerate(one.summary["tables"]):
        rows = [_winner(one, at, place) for place in range(len(found["winners"]))]
        heads = [("n", "ranks")]
        if one.summary["target"] is not None:
            heads += [("", "first to the target"), ("n", "after"), ("hide-small", "others")]
        heads += [("", "most accurate at the end"), ("n", "accuracy")]
        body += f"{title(found)}{table(heads, rows)}"
    ask = (
        '"Cannot be told apart" means that the seeds do not say who is first. Of the others, how '
        "many times as long they took, with the interval of that."
    )
    rules = "".join(f"<li>{escape(rule)}</li>" for rule in one.summary.get("rules", {}).values())
    return panel(
        "winners", "Who is first, at how many ranks?", ask, f'{body}<ul class="rules">{rules}</ul>'
    )


def _winner(one: Comparison, at: int, place: int) -> list[str]:
    shown, found = Shown(one.summary), one.summary["tables"][at]
    row, key = found["winners"][place], f"tables.{at}.winners.{place}"
    cells = [shown.whole(f"{key}.ranks")]
    if one.summary["target"] is not None:
        by_time = row["by_time"]
        cells += [
            _words(by_time),
            _figure(one, at, row["ranks"], by_time, "to_target.time_s.mean", seconds),
        ]
        others = [
            _other(shown, f"{key}.by_time.others.{n}", other)
            for n, other in enumerate(by_time["others"])
        ]
        cells.append(f'<span class="small">{"; ".join(others)}</span>')
    cells.append(_words(row["by_accuracy"]))
    cells.append(
        _figure(one, at, row["ranks"], row["by_accuracy"], "final.accuracy.mean", accuracy)
    )
    return cells


def _words(by: dict[str, Any]) -> str:
    """Return who is first; whoever cannot be told apart from it stands beside it."""
    if by["first"] is None:
        return '<span class="soft">nobody with all seeds</span>'
    return escape(by["words"]) if by["tied"] else f"<b>{escape(by['words'])}</b>"


def _figure(
    one: Comparison, at: int, ranks: int, by: dict[str, Any], name: str, written: Any
) -> str:
    """Return a figure of who is first."""
    rows = one.summary["tables"][at]["rows"]
    for place, row in enumerate(rows):
        if row["ranks"] == ranks and row["variant"] == by["first"]:
            return Shown(one.summary)(f"tables.{at}.rows.{place}.{name}", written)
    return "-"


def _other(shown: Shown, key: str, other: dict[str, Any]) -> str:
    """Return how far behind a strategy is."""
    name = escape(other["variant"])
    if other["ratio"] is None:
        return f"{name} {escape(other['why'])}"
    ratio = shown(f"{key}.ratio", _times)
    if other["low"] is None:
        return f"{name} {ratio}"
    ends = f"{shown(f'{key}.low', three)} to {shown(f'{key}.high', three)}"
    return f"{name} {ratio} ({ends})"


def _times(value: float) -> str:
    return f"{three(value)}x"


def _curves(one: Comparison, at: int) -> str:
    """Return the curves of all strategies: a table and a number of ranks at a time."""
    names, choices = one.variants, []
    for found in one.summary["tables"]:
        for ranks in found["ranks"]:
            lines = [
                {"name": name, "number": names.index(name), "points": points}
                for name in found["variants"]
                if (points := one.curves.get((found["grid"], found["scenario"], ranks, name)))
            ]
            chart = {
                "title": "",
                "ups": ups_of(lines),
                "lines": lines,
                "target": one.summary["target"],
            }
            title = ", ".join(
                part for part in (found["scenario"], found["grid"], f"{ranks} ranks") if part
            )
            choices.append({"name": title, "charts": [chart]})
    if not choices:
        return ""
    ask = "Mean over seeds; bands are from the least to the most. The dashed line is the target."
    body = curves(f"c-{at}", choices, "Runs:", legend(names))
    return panel("compared", "How do they learn?", ask, body)


def _settings(one: Comparison) -> str:
    """Return what was tuned, and what each strategy ran with."""
    shown, body = Shown(one.summary), ""
    for at, found in enumerate(one.summary["tables"]):
        rows = []
        for place, row in enumerate(found["rows"]):
            key, tuning = f"tables.{at}.rows.{place}", row["tuning"]
            tuned = "nothing"
            if tuning is not None:
                tuned = f"{escape(', '.join(tuning['tuned_keys']))}: {len(tuning['tried'])} tried"
            settings = ", ".join(f"{name} = {value}" for name, value in row["settings"].items())
            rows.append(
                [
                    shown.whole(f"{key}.ranks"),
                    escape(row["variant"]),
                    shown.whole(f"{key}.batch"),
                    f"<code>{escape(settings)}</code>",
                    tuned,
                    shown(f"{key}.final.accuracy.mean", accuracy),
                    shown(f"{key}.final.time_s.mean", seconds),
                ]
            )
        heads = [
            ("n", "ranks"),
            ("", "strategy"),
            ("n", "batch"),
            ("", "settings"),
            ("hide-small", "tuned"),
        ]
        heads += [("n", "accuracy at the end"), ("n", "time")]
        name = f"{escape(found['scenario'])}, {escape(found['grid'])}"
        body += f"<details><summary>{name}</summary>{table(heads, rows)}</details>"
    return panel("tuned", "Settings, and what was tuned", "", body)


def _study(one: Comparison) -> str:
    """Return the job, the study and the runs that failed."""
    summary = one.summary
    texts = [("The resolved job", summary.get("job", "")), ("The study", summary.get("study", ""))]
    body = "".join(
        f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>"
        for name, text in texts
        if text
    )
    rows = [
        [escape(str(run[key])) for key in ("variant", "ranks", "scenario", "seed", "why")]
        for run in summary.get("failed", [])
    ]
    if rows:
        heads = [("", name) for name in ("strategy", "ranks", "scenario", "seed", "why")]
        body = f"<h3>Runs that failed</h3>{table(heads, rows)}{body}"
    return panel("job", "Job and study", f"syncline {escape(summary['syncline'])}", body)
