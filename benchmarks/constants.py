"""A constant of a prediction: its value, its range, where it comes from, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mark = Literal["fact", "derived", "assumed", "unverified"]
"""A published or measured fact; arithmetic on facts; a judgement; said of a paper, not checked."""


@dataclass(frozen=True)
class Constant:
    """A value, and between which bounds it surely lies."""

    value: float
    low: float
    high: float
    mark: Mark
    source: str

    def __post_init__(self) -> None:
        assert self.low <= self.value <= self.high, self

    def at(self, part: float) -> float:
        """Return the value at a part of the range: 0 is its low end, 1 its high end."""
        return self.low + part * (self.high - self.low)
