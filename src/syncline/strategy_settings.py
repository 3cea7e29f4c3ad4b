"""The strategies' own settings, the table [strategy.NAME] of a job. No torch here: see config/.

Defaults are the papers': Jin et al. 2016 (arXiv 1611.04581) and the first author's code.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from syncline.errors import ConfigError

Period = Annotated[int, Meta(ge=1, examples=[10])]


class OwnSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the tables have in common: steps between exchanges, and who computes."""

    period: Period = 1

    def num_workers(self, ranks: int) -> int:
        """Return how many of the ranks compute: the first ones."""
        return ranks

    def check(self, ranks: int) -> None:
        """Refuse what cannot work on so many ranks."""


class GossipSettings(OwnSettings, frozen=True, kw_only=True):
    """With whom ranks mix their parameters, and how often.

    `rule`: "pull" takes the mean with what a partner has published, "push" sends to a partner and
    takes the mean with what has arrived. `partners`: drawn uniformly from all ranks, oneself
    included, or given by a topology. `push_sum` weighs what is pushed so that the mean over ranks
    is kept on any topology. `early` fetches the partner's values for the next exchange at once,
    while computing; "auto" does so across machines, where there is something to hide.
    """

    rule: Literal["pull", "push"] = "pull"
    partners: Literal["uniform", "ring", "exponential", "hypercube"] = "uniform"
    push_sum: bool = False
    early: bool | Literal["auto"] = "auto"

    def check(self, ranks: int) -> None:
        if self.partners == "hypercube" and ranks & (ranks - 1):
            raise ConfigError(
                "strategy.gossip.partners",
                f'got "hypercube" with {ranks} ranks',
                "a hypercube has 2, 4, 8, ... corners",
                f'Use "exponential", or {1 << ranks.bit_length()} ranks.',
            )
        if self.push_sum and self.rule == "pull":
            raise ConfigError(
                "strategy.gossip.push_sum",
                'got true with rule = "pull"',
                "what is pulled has no weight",
                'Use rule = "push".',
            )


class ElasticSettings(OwnSettings, frozen=True, kw_only=True):
    """How strongly and how often ranks and center pull at each other.

    Every `period` steps both move towards each other by `beta` / ranks of their distance.
    `synchronous`: all ranks exchange with the same center, and it moves when all have come. `early`
    begins an exchange as soon as the step before has ended, with the same parameters: the wire is
    hidden behind forward and backward. "auto" does so across machines.
    """

    beta: Annotated[float, Meta(gt=0, le=1, examples=[0.8])] = 0.8
    synchronous: bool = False
    early: bool | Literal["auto"] = "auto"

    def check(self, ranks: int) -> None:
        if self.synchronous and self.early is True:
            raise ConfigError(
                "strategy.elastic.early",
                "got true with synchronous = true",
                "all exchange when all have come",
                'Use early = "auto".',
            )


class ServerSettings(OwnSettings, frozen=True, kw_only=True):
    """Where parameters live, and how often workers come.

    `servers` = 0 spreads strips over all ranks, which work too; otherwise the last so many ranks
    serve and do nothing else. Workers push gradients and pull parameters every `period` steps. A
    worker more than `max_staleness` steps ahead of the slowest waits; "none" never waits. `early`
    lets the next step begin before the answer to a push is there, which is then taken over before
    the step after it: older by a step, and the wire is hidden. "auto" does so across machines.
    """

    servers: Annotated[int, Meta(ge=0, examples=[1])] = 0
    max_staleness: Annotated[int, Meta(ge=0, examples=[4])] | Literal["none"] = "none"
    early: bool | Literal["auto"] = "auto"

    def num_workers(self, ranks: int) -> int:
        return max(1, ranks - self.servers)

    def check(self, ranks: int) -> None:
        if self.servers >= ranks:
            raise ConfigError(
                "strategy.server.servers",
                f"got {self.servers} with {ranks} rank{'s' if ranks > 1 else ''}",
                "somebody has to work",
                f"Use at most {ranks - 1}, or 0 for strips on all ranks."
                if ranks > 1
                else "Use 0 for strips on all ranks.",
            )


SETTINGS: dict[str, type[msgspec.Struct] | None] = {
    "synchronous": None,
    "gossip": GossipSettings,
    "elastic": ElasticSettings,
    "server": ServerSettings,
}
"""By the strategy's name; None for one that has no settings."""

GO_ON = frozenset({"gossip", "elastic", "server"})
"""Strategies whose ranks may go on when one of them is gone."""
