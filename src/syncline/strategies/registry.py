"""The strategies by name. A strategy is one file in this folder, its settings and one line here.

No torch here: the command line checks a job before it imports torch, which takes seconds. A class
is named as "module:class" and imported when it is first used.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from syncline.errors import ConfigError
from syncline.strategies.group_settings import HybridSettings, LayeredSettings
from syncline.strategies.server_settings import ServerSettings, SyncServerSettings
from syncline.strategies.settings import (
    ElasticSettings,
    FixedSettings,
    GossipSettings,
    LocalSettings,
    MergedSettings,
    OwnSettings,
)

if TYPE_CHECKING:
    from syncline.contract import Strategy


class Entry(NamedTuple):
    """Where a strategy's class is, and the class of its settings."""

    path: str
    settings: type[OwnSettings]

    def load(self) -> Any:
        """Import the class."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(f"syncline.strategies.{module}"), name)


STRATEGIES: dict[str, Entry] = {
    "synchronous": Entry("synchronous:Synchronous", OwnSettings),
    "layered": Entry("layered:Layered", LayeredSettings),
    "hybrid": Entry("hybrid:Hybrid", HybridSettings),
    "all_reduce": Entry("all_reduce:AllReduce", FixedSettings),
    "wait_free": Entry("wait_free:WaitFree", FixedSettings),
    "merged": Entry("merged:Merged", MergedSettings),
    "sync_server": Entry("sync_server:SyncServer", SyncServerSettings),
    "gossip": Entry("gossip:Gossip", GossipSettings),
    "elastic": Entry("elastic:Elastic", ElasticSettings),
    "local": Entry("local:Local", LocalSettings),
    "server": Entry("server:Server", ServerSettings),
}


def make_strategy(name: str, settings: OwnSettings | None = None, seed: int = 0) -> Strategy:
    """Return a strategy with these settings (None: the defaults). `seed` is for random draws."""
    if name not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        near = difflib.get_close_matches(name, STRATEGIES, n=1)
        fix = f'Did you mean "{near[0]}"?' if near else f"Choose from {known}."
        raise ConfigError("strategy", f'got "{name}"', "no such strategy exists", fix)
    entry = STRATEGIES[name]
    strategy: Strategy = entry.load()(settings or entry.settings(), seed)
    return strategy
