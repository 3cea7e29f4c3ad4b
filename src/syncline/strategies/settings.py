"""The strategies' own settings: the table [strategy.NAME] of a job. No torch here: see config.

Each class also says, as pure functions of the number of ranks, which ranks compute and which may
be lost. The launcher, the job's checks and the strategy itself call these functions.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from syncline.comm.shape import Machines
from syncline.errors import ConfigError

Period = Annotated[int, Meta(ge=1, examples=[10])]


class OwnSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a strategy that has none, and what all have in common."""

    is_synchronous: ClassVar[bool] = True
    """Whether all ranks take every step together, so that they hold one model after it. The result
    then depends on the shards alone; if layers are split, on ranks and groups too, by rounding."""
    splits_layers: ClassVar[bool] = False
    """Whether linear layers may be split over ranks."""
    tuning_exponent: ClassVar[float] = 1.0
    """A search tries learning rates from the job's to the job's times workers ** this. Gradients
    of all workers together allow a higher one: with their number, if steps are much shorter."""

    @property
    def must_choose(self) -> bool:
        """Whether a setting is to be chosen from measured or simulated times."""
        return False

    @property
    def fixes_overlap(self) -> bool:
        """Whether the strategy itself decides if the exchange overlaps compute."""
        return False

    @property
    def fixes_buckets(self) -> bool:
        """Whether the strategy itself decides where buckets end."""
        return False

    def num_workers(self, ranks: int) -> int:
        """Return how many ranks compute, if these are the first ones. See `workers`."""
        return ranks

    def workers(self, machines: Machines) -> tuple[int, ...]:
        """Return the ranks that compute, given all ranks by machine."""
        return tuple(range(self.num_workers(sum(map(len, machines)))))

    def may_lose(self, ranks: int) -> range:
        """Return the ranks that may die without ending the run."""
        return range(0)

    def check(self, ranks: int) -> None:
        """Raise ConfigError if the settings cannot work on this many ranks."""

    def check_shards(self, shards: int, ranks: int) -> None:
        """Raise ConfigError if the settings cannot work with this many shards."""

    def check_optimizer(self, name: str) -> None:
        """Raise ConfigError if the settings cannot work with the optimizer of this name."""

    @property
    def steps_between_exchanges(self) -> int:
        """How many steps a rank takes from one exchange to the next."""
        return 1

    @property
    def goes_at_own_pace(self) -> bool:
        """Whether ranks may take different numbers of steps: none of them waits for the others."""
        return False


class FixedSettings(OwnSettings, frozen=True, kw_only=True):
    """The strategy itself decides when ranks exchange, and what lies in a bucket."""

    @property
    def fixes_overlap(self) -> bool:
        return True

    @property
    def fixes_buckets(self) -> bool:
        return True


class MergedSettings(FixedSettings, frozen=True, kw_only=True):
    """What `merged` needs to know about the network and the layers.

    A message takes `latency_s` and then its bytes at `rate_bytes_per_s`. `times` is
    "first_backward", or the path of a workload file with the seconds of each layer's backward.
    """

    latency_s: Annotated[float, Meta(ge=0, examples=[75e-6])] = 75e-6
    rate_bytes_per_s: Annotated[float, Meta(gt=0, examples=[0.11e9])] = 0.11e9
    times: Annotated[str, Meta(min_length=1, examples=["first_backward"])] = "first_backward"


class PeriodicSettings(OwnSettings, frozen=True, kw_only=True):
    """Each rank trains its own replica; ranks exchange every `period` steps."""

    is_synchronous: ClassVar[bool] = False
    tuning_exponent: ClassVar[float] = 0.5  # a rank steps with its own gradient; mixing takes means

    period: Period = 1

    @property
    def steps_between_exchanges(self) -> int:
        return self.period

    def is_due(self, step: int) -> bool:
        """Say whether there is an exchange in a step."""
        return (step + 1) % self.period == 0


class PublishedSettings(PeriodicSettings, frozen=True, kw_only=True):
    """Settings of a strategy of Jin et al. 2016, which can also be had exactly as published.

    `as_published` exchanges all parameters as one vector of one version, mixes them without the
    look-ahead of Nesterov's momentum, and begins nothing early. The optimizer must be SGD.
    """

    table: ClassVar[str]
    """The key of the strategy's table in a job."""

    as_published: bool = False

    @property
    def fixes_overlap(self) -> bool:
        return self.as_published

    @property
    def fixes_buckets(self) -> bool:
        return self.as_published

    def check_optimizer(self, name: str) -> None:
        if self.as_published and name != "sgd":
            raise ConfigError(
                f"{self.table}.as_published",
                f'got true with optimizer.name = "{name}"',
                "the published rule mixes the parameters of SGD, with or without momentum",
                'Use optimizer.name = "sgd", or as_published = false.',
            )

    def refuse_beside_published(self, setting: str, value: str, rule: str, use: str) -> None:
        """Raise ConfigError if a setting, which has this value, departs from what was published."""
        if self.as_published:
            raise ConfigError(
                f"{self.table}.{setting}",
                f"got {value} with as_published = true",
                rule,
                f"Use {setting} = {use}, or as_published = false.",
            )


class GossipSettings(PublishedSettings, frozen=True, kw_only=True):
    """With which partner ranks mix their parameters, and how often.

    `rule`: "pull" takes the mean with a partner's published parameters; "push" sends to a partner
    and takes the mean with what has arrived. `partners`: drawn uniformly from all ranks, including
    the rank itself, or given by a topology. `push_sum` gives weights to what is pushed, so that the
    mean over ranks is kept on any topology. `early` fetches the partner's values for the next
    exchange one step before it, during compute; "auto" does so across machines, where fetching
    takes time.
    """

    table: ClassVar[str] = "strategy.gossip"

    rule: Literal["pull", "push"] = "pull"
    partners: Literal["uniform", "ring", "exponential", "hypercube"] = "uniform"
    push_sum: bool = False
    early: bool | Literal["auto"] = "auto"

    @property
    def goes_at_own_pace(self) -> bool:
        return True

    @property
    def wants_early(self) -> bool | Literal["auto"]:
        """`early`, where it has an effect."""
        return False if self.as_published or self.rule == "push" else self.early

    def may_lose(self, ranks: int) -> range:
        return range(ranks)

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
        if self.early is True and self.rule == "push":
            raise ConfigError(
                "strategy.gossip.early",
                'got true with rule = "push"',
                "a rank that pushes fetches nothing that could be fetched early",
                'Use early = "auto", or rule = "pull".',
            )
        if self.early is True:
            self.refuse_beside_published(
                "early", "true", "Jin et al. fetch when they mix", '"auto"'
            )
        if self.push_sum:
            self.refuse_beside_published("push_sum", "true", "Jin et al. push no weights", "false")
        if self.partners != "uniform":
            self.refuse_beside_published(
                "partners", f'"{self.partners}"', "Jin et al. draw from all ranks", '"uniform"'
            )


class ElasticSettings(PublishedSettings, frozen=True, kw_only=True):
    """How strongly and how often ranks and center pull at each other.

    Every `period` steps both move towards each other by `beta` / ranks of their distance; ranks
    that only serve, or are gone, do not count. `servers` = 0 spreads the center over all ranks,
    which compute too; otherwise the last `servers` ranks hold it and compute nothing.
    `synchronous`: all ranks exchange with the same center, and it moves when all have come. `early`
    begins an exchange as soon as the previous step has ended, with the same parameters, so that it
    overlaps forward and backward. "auto" does so across machines.
    """

    table: ClassVar[str] = "strategy.elastic"

    beta: Annotated[float, Meta(gt=0, le=1, examples=[0.8])] = 0.8
    servers: Annotated[int, Meta(ge=0, examples=[1])] = 0
    synchronous: bool = False
    early: bool | Literal["auto"] = "auto"

    @property
    def goes_at_own_pace(self) -> bool:
        return not self.synchronous

    @property
    def wants_early(self) -> bool | Literal["auto"]:
        """`early`, where it has an effect."""
        return False if self.as_published or self.synchronous else self.early

    def num_workers(self, ranks: int) -> int:
        return max(1, ranks - self.servers)

    def may_lose(self, ranks: int) -> range:
        """Return all ranks; if the center is on dedicated ranks, the workers only.

        A rank that computes can take over a strip of the center, since its own parameters are never
        far from it. A dedicated rank has none that would do.
        """
        return range(self.num_workers(ranks))

    def check(self, ranks: int) -> None:
        check_servers("strategy.elastic.servers", self.servers, ranks)
        if self.synchronous and self.early is True:
            raise ConfigError(
                "strategy.elastic.early",
                "got true with synchronous = true",
                "all exchange when all have come",
                'Use early = "auto".',
            )
        if self.early is True:
            self.refuse_beside_published(
                "early", "true", "Jin et al. ask when a gradient is there", '"auto"'
            )
        if self.synchronous:
            self.refuse_beside_published(
                "synchronous", "true", "Jin et al. let ranks come one by one", "false"
            )


class LocalSettings(PeriodicSettings, frozen=True, kw_only=True):
    """How long ranks train alone, and how the outer parameters are updated.

    After `period` steps the outer parameters take a step of SGD with Nesterov momentum, with
    `outer_lr` and `outer_momentum`, towards the mean of the ranks' parameters. The defaults are
    DiLoCo's; `outer_lr` 1 and `outer_momentum` 0 take the mean itself.
    """

    period: Period = 20
    outer_lr: Annotated[float, Meta(gt=0, examples=[0.7])] = 0.7
    outer_momentum: Annotated[float, Meta(ge=0, lt=1, examples=[0.9])] = 0.9


def check_servers(key: str, servers: int, ranks: int) -> None:
    """Refuse so many dedicated servers that no rank is left to compute."""
    if servers >= ranks:
        raise ConfigError(
            key,
            f"got {servers} with {ranks} rank{'s' if ranks > 1 else ''}",
            "at least one rank must compute",
            f"Use at most {ranks - 1}, or 0 for strips on all ranks."
            if ranks > 1
            else "Use 0 for strips on all ranks.",
        )
