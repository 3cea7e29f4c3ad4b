"""Numbers as people read them: three digits, and the unit that fits."""

from __future__ import annotations

import math


def three(value: float) -> str:
    """Return a number with three digits, or all those before the point.

    >>> three(0.012345), three(36.06), three(1572.4), three(0.0)
    ('0.0123', '36.1', '1,572', '0')
    """
    if not math.isfinite(value):
        return "?"
    if value == 0.0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 12)}f}" if digits < 12 else f"{value:.2e}"


def seconds(value: float) -> str:
    """Return a time.

    >>> seconds(0.0361), seconds(12.3), seconds(4.5e-6), seconds(0)
    ('36.1 ms', '12.3 s', '4.50 µs', '0 s')
    """
    size = abs(value)
    if size >= 1.0 or size == 0.0:
        return f"{three(value)} s"
    return f"{three(value * 1e3)} ms" if size >= 1e-3 else f"{three(value * 1e6)} µs"


def num_bytes(value: float) -> str:
    """Return a size.

    >>> num_bytes(5.75e6), num_bytes(12)
    ('5.75 MB', '12 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{three(value / size)} {unit}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    """Return bytes a second."""
    return f"{num_bytes(value)}/s"


def plain(value: float) -> str:
    """Return a number without zeros that say nothing.

    >>> plain(2.0), plain(0.25)
    ('2', '0.25')
    """
    return f"{value:.3g}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def share(value: float) -> str:
    """Return a share as per cent: with one digit after the point below ten.

    >>> share(0.2834), share(0.0312), share(1)
    ('28%', '3.1%', '100%')
    """
    per_cent = value * 100
    return f"{per_cent:.1f}%" if 0 < abs(per_cent) < 9.95 else f"{per_cent:.0f}%"


def accuracy(value: float) -> str:
    return f"{value * 100:.1f}%"


def off(value: float) -> str:
    """Return how far a prediction is off, as a part of what was measured.

    >>> off(0.123), off(-0.04), off(3.2), off(-0.8)
    ('+12%', '-4%', '4.2 times too long', '5.0 times too short')
    """
    if value > 1.0:
        return f"{value + 1:.1f} times too long"
    if value < -0.5:
        return f"{1 / (1 + value):.1f} times too short" if value > -1 else "no time"
    return f"{value * 100:+.0f}%"
