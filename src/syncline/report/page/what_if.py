"""What would help: a bar for each change that `syncline explain` tries, which sets the sliders."""

from __future__ import annotations

from html import escape

from syncline.perf.what_if import Edit
from syncline.report.page.run import Run, as_json


def bars(run: Run) -> str:
    """Return the bars of one run."""
    assert run.explanation is not None
    answers = run.numbers["what_if"]
    most = max((one["gain"] for one in answers), default=0.0)
    if most <= 0:
        return "<p>None of the changes tried makes a step shorter.</p>"
    rows = "".join(_row(run, at, one.edit, most) for at, one in enumerate(run.explanation.answers))
    rough = (
        f'<p class="soft small">Rough: {escape(run.numbers["rough"])}.</p>'
        if run.numbers["rough"]
        else ""
    )
    return f'<h3>What would help most</h3><div class="help">{rows}</div>{rough}'


def _row(run: Run, at: int, edit: Edit, most: float) -> str:
    shown, gain = run.shown, run.numbers["what_if"][at]["gain"]
    if gain < 5e-4:
        return ""
    change = {"factors": dict(edit.factors), "noStragglers": edit.no_stragglers}
    return (
        f'<div class="helps">'
        f'<button data-edit="{escape(as_json(change))}">{escape(edit.name)}</button>'
        f'<div class="track"><i style="width:{100 * gain / most:.1f}%"></i></div>'
        f"<b>{shown.seconds(f'what_if.{at}.step_s')}, {shown.share(f'what_if.{at}.gain')} less</b>"
        "</div>"
    )
