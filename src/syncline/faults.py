"""Faults and jitter as plain data: which rank is slow, pauses or dies, and when.

A step's compute time is its mean times three factors: the rank's own (persistent), the jitter of
this step, and the faults of this step. Random draws depend on (seed, rank, step) alone, never on
earlier draws. Jitter has mean 1: it makes ranks wait for each other, but compute takes no longer
on average.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from syncline.comm.group_numbers import in_ranges
from syncline.errors import ConfigError
from syncline.seeds import seed_for


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Can be read from a file; an unknown field is an error."""


ANY_RANK = -1


class Fault(_Data, frozen=True, kw_only=True):
    """Something that happens to a rank at a step.

    "slow": compute takes `factor` times as long for `steps` steps. "pause": the rank pauses for
    `seconds`, once. "death": the rank dies. With a `chance` below 1 the fault happens at random: in
    each of `steps` steps from `step` on, with this chance. `rank` -1 means each rank by itself.
    """

    rank: int
    step: int
    kind: Literal["slow", "pause", "death"]
    factor: float = 1.0
    seconds: float = 0.0
    steps: int = 1
    chance: float = 1.0


class Jitter(_Data, frozen=True, kw_only=True):
    """A random factor on a rank's compute of one step, with mean 1.

    "lognormal" is exp(sigma Z - sigma**2 / 2) with a normal Z; "exponential" is `shift` and, on top
    of it, an exponential with mean 1 - shift: most steps are near the shift, some far above.
    """

    kind: Literal["none", "lognormal", "exponential"] = "none"
    sigma: float = 0.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise ConfigError(
                "cluster.jitter_sigma",
                f"got {self.sigma:g}",
                "a spread is 0 or more",
                "Use 0.1 for ranks that differ by about 10 % from step to step.",
            )
        if not 0 <= self.shift < 1:
            raise ConfigError(
                "cluster.jitter_shift",
                f"got {self.shift:g}",
                "it is the least part of a step whose mean is 1, at least 0 and below 1",
                "Use 0.9 for steps that take 0.9 of the mean at least.",
            )

    def draw(self, source: random.Random) -> float:
        if self.kind == "lognormal":
            return math.exp(self.sigma * source.gauss(0.0, 1.0) - self.sigma**2 / 2)
        if self.kind == "exponential":
            return self.shift + (1 - self.shift) * source.expovariate(1.0)
        return 1.0


class LinkChange(_Data, frozen=True, kw_only=True):
    """From this time on a machine's link has `factor` times the rate that it had at first."""

    time_s: float
    machine: int
    factor: float


class Conditions(_Data, frozen=True, kw_only=True):
    """All faults of a run. `slow_ranks` gives the factor of ranks that are always slow."""

    faults: tuple[Fault, ...] = ()
    jitter: Jitter = Jitter()
    slow_ranks: dict[int, float] = {}
    link_changes: tuple[LinkChange, ...] = ()
    seed: int = 0

    def factor(self, rank: int, step: int) -> float:
        """Return how many times its mean a rank's compute takes in a step."""
        factor = self.slow_ranks.get(rank, 1.0)
        if self.jitter.kind != "none":
            seed = seed_for(self.seed, "jitter", rank, step)
            factor *= self.jitter.draw(random.Random(seed))
        for fault in self._now(rank, step, "slow"):
            factor *= fault.factor
        return factor

    def pause_s(self, rank: int, step: int) -> float:
        """Return how long a rank pauses at a step."""
        return sum(fault.seconds for fault in self._now(rank, step, "pause"))

    def dies(self, rank: int, step: int) -> bool:
        """Whether a rank dies when the step begins, having taken all steps before it."""
        return bool(self._now(rank, step, "death"))

    def _now(self, rank: int, step: int, kind: str) -> list[Fault]:
        """Return the faults of a kind that a rank has in a step."""
        found = []
        for number, fault in enumerate(self.faults):
            if fault.kind != kind or fault.rank not in (rank, ANY_RANK):
                continue
            if fault.step <= step < fault.step + fault.steps:
                place = ("fault", number, rank, step)
                if fault.chance == 1 or _uniform(self.seed, *place) < fault.chance:
                    found.append(fault)
        return found

    def check(
        self,
        ranks: int,
        machines: int,
        table: str = "cluster.faults",
        workers: Sequence[int] | None = None,
    ) -> None:
        """Refuse what cannot happen in a world of this size. `table` is where the faults are.

        `workers` are the ranks that take steps, None for all.
        """
        workers = range(ranks) if workers is None else workers
        for number, fault in enumerate(self.faults):
            key = f"{table}[{number}]"
            if fault.rank != ANY_RANK:
                _check_number(f"{key}.rank", fault.rank, ranks, "rank")
                _check_works(f"{key}.rank", fault.rank, workers)
            if not 0 < fault.chance <= 1:
                raise ConfigError(
                    f"{key}.chance", f"got {fault.chance:g}", "a chance is above 0, at most 1", ""
                )
            _check_at_least(f"{key}.step", fault.step, 0, "steps count from 0")
            _check_at_least(f"{key}.factor", fault.factor, 1, "a fault makes no step shorter")
            _check_at_least(f"{key}.seconds", fault.seconds, 0, "no time is shorter than none")
            _check_at_least(f"{key}.steps", fault.steps, 1, "a fault lasts for one step at least")
        for rank, factor in self.slow_ranks.items():
            _check_number("cluster.slow_ranks", rank, ranks, "rank")
            _check_works("cluster.slow_ranks", rank, workers)
            _check_factor(f"cluster.slow_ranks.{rank}", factor)
        for number, change in enumerate(self.link_changes):
            key = f"cluster.link_changes[{number}]"
            _check_at_least(f"{key}.time_s", change.time_s, 0, "a run begins at 0 s")
            _check_number(f"{key}.machine", change.machine, machines, "machine")
            _check_factor(f"{key}.factor", change.factor)


def _uniform(seed: int, *place: int | str) -> float:
    return random.Random(seed_for(seed, *place)).random()


def _check_number(key: str, number: int, count: int, what: str) -> None:
    if not 0 <= number < count:
        raise ConfigError(
            key,
            f"got {what} {number}",
            f"the world has {count} {what}{'s' if count != 1 else ''}, counted from 0",
            f"Use 0 to {count - 1}." if count > 1 else "Use 0.",
        )


def _check_works(key: str, rank: int, workers: Sequence[int]) -> None:
    if rank not in workers:
        raise ConfigError(
            key,
            f"got rank {rank}",
            "it only serves and takes no steps, by which faults are counted",
            f"Use {in_ranges(workers).replace('-', ' to ')}.",
        )


def _check_at_least(key: str, value: float, least: int, rule: str) -> None:
    if not least <= value < math.inf:
        raise ConfigError(key, f"got {value:g}", rule, f"Use {least} or more.")


def _check_factor(key: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise ConfigError(
            key, f"got {factor:g}", "a factor is more than 0", "Use 2.0 for twice, 0.5 for half."
        )
