"""Settings of strategies with parameter servers. No torch here: see config."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from syncline.strategies.settings import FixedSettings, PeriodicSettings, check_servers


class SyncServerSettings(FixedSettings, frozen=True, kw_only=True):
    """Which ranks hold the parameters.

    `servers` = 0 spreads strips over all ranks, which compute too; otherwise the last `servers`
    ranks hold them and compute nothing.
    """

    servers: Annotated[int, Meta(ge=0, examples=[1])] = 0

    def num_workers(self, ranks: int) -> int:
        return max(1, ranks - self.servers)

    def check(self, ranks: int) -> None:
        check_servers("strategy.sync_server.servers", self.servers, ranks)


class ServerSettings(PeriodicSettings, frozen=True, kw_only=True):
    """Which ranks hold the parameters, and how often workers push and pull.

    `servers` = 0 spreads strips over all ranks, which compute too; otherwise the last `servers`
    ranks hold them and compute nothing. Workers push gradients and pull parameters every `period`
    steps. A worker more than `max_staleness` steps ahead of the slowest waits; "none" never waits.
    With `early` the next step begins before the answer to a push has come; the answer is used one
    step later, so the exchange overlaps compute. "auto" does so across machines.
    """

    tuning_exponent: ClassVar[float] = -1.0  # workers make as many updates as they are

    servers: Annotated[int, Meta(ge=0, examples=[1])] = 0
    max_staleness: Annotated[int, Meta(ge=0, examples=[4])] | Literal["none"] = "none"
    early: bool | Literal["auto"] = "auto"

    @property
    def goes_at_own_pace(self) -> bool:
        return True

    def num_workers(self, ranks: int) -> int:
        return max(1, ranks - self.servers)

    def may_lose(self, ranks: int) -> range:
        """Return the workers if there are dedicated servers: ranks with strips must not die."""
        return range(self.num_workers(ranks) if self.servers else 0)

    def check(self, ranks: int) -> None:
        check_servers("strategy.server.servers", self.servers, ranks)
