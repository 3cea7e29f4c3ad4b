"""The strategies, by name. A strategy is one file here and one line below."""

from __future__ import annotations

from collections.abc import Callable

from syncline.bucket import Step
from syncline.strategies.base import Strategy
from syncline.strategies.synchronous import Synchronous

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "synchronous": Synchronous,
}

__all__ = ["STRATEGIES", "Step", "Strategy", "Synchronous"]
