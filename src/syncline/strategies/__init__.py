"""The strategies, by name. A strategy is one file here and one line below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from syncline.engine.bucket import Step
from syncline.errors import ConfigError
from syncline.strategies.base import Strategy
from syncline.strategies.elastic import Elastic
from syncline.strategies.gossip import Gossip
from syncline.strategies.server import Server
from syncline.strategies.synchronous import Synchronous
from syncline.strategy_settings import (
    SETTINGS,
    ElasticSettings,
    GossipSettings,
    ServerSettings,
)

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "synchronous": Synchronous,
    "gossip": Gossip,
    "elastic": Elastic,
    "server": Server,
}

__all__ = [
    "STRATEGIES",
    "Elastic",
    "ElasticSettings",
    "Gossip",
    "GossipSettings",
    "Server",
    "ServerSettings",
    "Step",
    "Strategy",
    "Synchronous",
    "make_strategy",
]


def make_strategy(name: str, settings: msgspec.Struct | None = None, seed: int = 0) -> Strategy:
    """Make a strategy with its settings, the paper's where there are none. `seed` is for draws."""
    if name not in STRATEGIES:
        raise ConfigError(
            "strategy", f"got {name!r}", f"there are {', '.join(sorted(STRATEGIES))}", ""
        )
    make: Any = STRATEGIES[name]
    return make(settings, seed) if SETTINGS.get(name) is not None else make()
