"""A few shapes of SVG, on white, so that they are readable on pages of any colour."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

DARK, PALE = "#222222", "#777777"


def picture(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    """Return a whole picture; its title is what a screen reader says."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}" '
            'font-family="sans-serif" font-size="13">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *shapes,
            "</svg>\n",
        )
    )


def text(
    x: float, y: float, words: str, *, fill: str = DARK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}"'
    return f"<text {place}{weight}>{escape(words)}</text>"


def on_line(x: float, y: float, words: str) -> str:
    """Return text with a white edge, to be read where it lies on a line."""
    edge = 'stroke="#ffffff" stroke-width="4" paint-order="stroke"'
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{DARK}" {edge}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, about: str = "") -> str:
    title = f"<title>{escape(about)}</title>" if about else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}" stroke="#ffffff" stroke-width="1.5">{title}</rect>'


def line(x: float, y: float, to_x: float, to_y: float, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{PALE}"{dashes}/>'
