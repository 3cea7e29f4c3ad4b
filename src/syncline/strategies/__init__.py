"""The strategies. `registry.py` lists them by name; their classes are loaded when first used.

A strategy with settings is made from its class: `Gossip(GossipSettings(period=10))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncline.strategies.group_settings import HybridSettings, LayeredSettings
from syncline.strategies.registry import STRATEGIES, make_strategy
from syncline.strategies.server_settings import ServerSettings, SyncServerSettings
from syncline.strategies.settings import (
    ElasticSettings,
    GossipSettings,
    LocalSettings,
    MergedSettings,
    OwnSettings,
)

if TYPE_CHECKING:
    from syncline.strategies.all_reduce import AllReduce
    from syncline.strategies.elastic import Elastic
    from syncline.strategies.gossip import Gossip
    from syncline.strategies.hybrid import Hybrid
    from syncline.strategies.layered import Layered
    from syncline.strategies.local import Local
    from syncline.strategies.merged import Merged
    from syncline.strategies.server import Server
    from syncline.strategies.sync_server import SyncServer
    from syncline.strategies.synchronous import Synchronous
    from syncline.strategies.wait_free import WaitFree

__all__ = [
    "STRATEGIES",
    "AllReduce",
    "Elastic",
    "ElasticSettings",
    "Gossip",
    "GossipSettings",
    "Hybrid",
    "HybridSettings",
    "Layered",
    "LayeredSettings",
    "Local",
    "LocalSettings",
    "Merged",
    "MergedSettings",
    "OwnSettings",
    "Server",
    "ServerSettings",
    "SyncServer",
    "SyncServerSettings",
    "Synchronous",
    "WaitFree",
    "make_strategy",
]

_CLASSES = {entry.path.partition(":")[2]: entry for entry in STRATEGIES.values()}


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _CLASSES[name].load()
    raise AttributeError(f"module 'syncline.strategies' has no attribute {name!r}")
