"""The contract between a strategy and the engine that drives it.

A strategy says what happens to one bucket between two moments: its gradient has just become ready
(backward), and its parameters are about to be read (next forward). It has six methods.

First it plans, as a pure function: which parameters are treated alike, which ranks add up their
gradients, which ranks update what, in which memory, and where buckets end. Then its hooks run on
the comm lane, bucket by bucket, as blocking, straight-line code. The engine chooses the clock (real
or virtual) and the way messages are sent; a strategy does not know them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from syncline.comm.tree import shard_range
from syncline.errors import ConfigError
from syncline.groups import Group, Leaders, Split
from syncline.sizes import BY_SIZE, BucketRule, Size, Times
from syncline.strategies.settings import OwnSettings

if TYPE_CHECKING:
    import torch

    from syncline.comm.base import Communicator
    from syncline.engine.bucket import Bucket, Slot, StripOptimizer
    from syncline.engine.state import State

MOST_FIGURES = 8
"""How many figures a rank can tell the others at the end of a run (`Whole.tell_figures`)."""


@dataclass(frozen=True)
class World:
    """The ranks of a job by machine: all that a plan may depend on."""

    machines: tuple[Group, ...]

    @property
    def size(self) -> int:
        return sum(len(ranks) for ranks in self.machines)

    @property
    def everybody(self) -> tuple[Group, ...]:
        """One group of all ranks."""
        return (tuple(range(self.size)),)

    @property
    def each_alone(self) -> tuple[Group, ...]:
        """A group for every rank."""
        return tuple((rank,) for rank in range(self.size))


@dataclass(frozen=True)
class Family:
    """Parameters that are treated alike."""

    groups: tuple[Group, ...]
    """All ranks of the world, in disjoint groups. The ranks of a group hold the same values of
    these parameters and add up their gradients, each group by itself."""
    updates: Literal["strips", "each"] = "strips"
    """Which rank runs the optimizer. "strips": the owner of each strip, on that strip, and
    `before_use` gathers the strips. "each": every rank, on everything."""
    owners: frozenset[int] | None = None
    """The ranks that own strips; None for all."""
    memory: Literal["common", "private"] = "common"
    """Whether ranks of a machine share one copy of the parameters."""
    buckets: BucketRule = BY_SIZE
    leaders: Leaders | None = None
    """Ranks that speak for groups in the exchange; None: each rank speaks for itself. The family
    then has one group of all ranks."""
    parameters: frozenset[int] | None = None
    """The parameters' numbers; None for all that no earlier family names."""
    stands_for: int = 1
    """For how many ranks' shards a rank's gradient stands: for those of its whole group, if its
    layers are split over a group."""

    def __post_init__(self) -> None:
        if self.memory == "common" and self.updates == "each":
            raise ValueError("a rank that updates more than its own strip needs private memory")
        if self.leaders is not None and len(self.groups) > 1:
            raise ValueError("leaders speak for groups of all ranks, not of some")
        if self.owners is None:
            return
        if self.updates == "each":
            raise ValueError("where every rank updates everything nobody owns strips")
        if not all(self.owners.intersection(group) for group in self.groups):
            raise ValueError(f"a group of {self.groups} has no rank that owns its strips")


@dataclass(frozen=True)
class Plan:
    """What a strategy does with a model's parameters: the same value on every rank."""

    families: tuple[Family, ...]
    shards: tuple[range, ...]
    """By rank: the shards of a step that it computes; none on a rank that only serves others."""
    overlap: bool | None = None
    """Whether the exchange overlaps compute; None: the engine decides by the model's size."""
    answers_calls: bool = False
    """Whether other ranks may call this one at any time, through windows."""
    keeps_own: bool = False
    """Whether ranks hold different parameters, which a checkpoint saves for each rank."""
    split: Split | None = None
    """Layers that are split over groups of ranks."""
    pulls: bool = False
    """Whether a rank's parameters are replaced by those that it pulls: what a user writes into them
    would be lost."""

    def __post_init__(self) -> None:
        for family in self.families:
            ranks = sorted(rank for group in family.groups for rank in group)
            if ranks != list(range(len(self.shards))):
                raise ValueError(f"the groups {family.groups} do not hold each rank once")
        for group in self.step_groups:
            if len(group) > 1 and not self.shards[group[0]]:
                raise ValueError(f"rank {group[0]} speaks for {group}, so it has to compute")

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The ranks that compute."""
        return tuple(rank for rank, shards in enumerate(self.shards) if shards)

    @property
    def has_own(self) -> bool:
        """Whether ranks hold different parameters: a rank's own do not represent the run."""
        return self.keeps_own or self.answers_calls

    def family_of(self, number: int) -> int:
        """Return the index of the family that a parameter belongs to."""
        for index, family in enumerate(self.families):
            if family.parameters is None or number in family.parameters:
                return index
        raise ValueError(f"no family holds parameter {number}")

    def elements_of(self, size: Size, place: int) -> int:
        """Return how many elements of a parameter a rank holds, in this place of its group."""
        if self.split is None or size.number not in self.split.numbers:
            return size.num_elements
        return size.num_elements // size.rows * len(self.split.rows(size.rows, place))

    def report(self) -> dict[str, Any]:
        """Return which layers are split, for a run's result; empty if none are."""
        if self.split is None:
            return {}
        names = [layer.name for layer in self.split.layers]
        return {"groups": len(self.split.groups), "split_layers": names}

    def times_for(self, measured: Callable[[], Times]) -> Times:
        """Return seconds of backward by layer if a bucket rule needs them; else ().

        `measured` is called if the rule does not know the times itself.
        """
        for family in self.families:
            if family.buckets.needs_times:
                return measured() if family.buckets.times is None else family.buckets.times
        return ()

    def serves(self, group: Group) -> bool:
        """Say whether some rank of the group computes nothing and only serves in others' steps."""
        return len(group) > 1 and not all(self.shards[rank] for rank in group)

    @property
    def step_leaders(self) -> Leaders | None:
        """The leaders who speak for the ranks that take each step together, if all families agree.

        Flags, statistics and norms then take the same way as gradients.
        """
        leaders = {family.leaders for family in self.families}
        return leaders.pop() if len(leaders) == 1 else None

    @cached_property
    def step_groups(self) -> tuple[Group, ...]:
        """The ranks that take each step together: those joined by groups of any family."""
        group_of = {rank: {rank} for rank in range(len(self.shards))}
        groups = [group for family in self.families for group in family.groups]
        for group in [*groups, *(() if self.split is None else self.split.groups)]:
            joined = set().union(*(group_of[rank] for rank in group))
            group_of.update(dict.fromkeys(joined, joined))
        return tuple(dict.fromkeys(tuple(sorted(group_of[rank])) for rank in sorted(group_of)))


def deal(shards: int, workers: int | Sequence[int], ranks: int) -> tuple[range, ...]:
    """Deal shards to these ranks, or to the first so many, in order; the others get none.

    If the shards cannot be dealt evenly, the first ranks get one more.

    >>> deal(5, 2, 3)
    (range(0, 3), range(3, 5), range(0, 0))
    >>> deal(2, [0, 2], 3)
    (range(0, 1), range(0, 0), range(1, 2))
    """
    chosen = range(workers) if isinstance(workers, int) else workers
    dealt = [range(0)] * ranks
    for place, rank in enumerate(chosen):
        dealt[rank] = range(*shard_range(shards, len(chosen), place))
    return tuple(dealt)


ParamGroups = list[dict[str, Any]]
"""The settings of each parameter group of an optimizer, without the parameters."""


class UpdateSettings(NamedTuple):
    """How the optimizer runs in one step."""

    groups: ParamGroups
    """The optimizer's settings when `optimizer.step()` was called."""
    without: frozenset[int]
    """Parameters that get no update: no rank has a gradient for them."""


class Model(Protocol):
    """What a strategy may ask of a model whose buckets are laid out, on either clock."""

    slots: Sequence[Slot]
    buckets: Sequence[Bucket]
    total_steps: int | None
    """The number of the run's last step plus one; None if it is not known, as in a script."""

    def cut(self, bucket: Bucket, owns: Sequence[bool]) -> tuple[int, ...]:
        """Cut a bucket into strips that the optimizer can update one by one.

        There is a strip for each position; a position that owns nothing gets an empty one.
        """

    def optimizer_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> StripOptimizer:
        """Return the user's optimizer for elements `low` to `high` of memory like a bucket's."""

    def flat_buffers(self) -> torch.Tensor:
        """Return a flat copy of all floating-point buffers; empty in a simulation of sizes only."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds for a strategy that goes on from it; empty at a fresh start."""

    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What this rank's `Whole.state` returned; empty on a new rank. The number of ranks and the
    buckets may have changed since: if a value depends on them, put them into its name."""
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The parameters that represented the run, by name."""


class WholeValues(NamedTuple):
    """The parameters and buffers that represent a run."""

    buckets: list[torch.Tensor]
    buffers: torch.Tensor


class Held(NamedTuple):
    """Elements `low` to `high` of a bucket; where several ranks hold them, their mean counts."""

    low: int
    high: int
    values: torch.Tensor
    weight: float = 1.0


class Whole(Protocol):
    """The parameters that represent a run whose ranks hold different ones.

    A strategy whose ranks all hold the same parameters needs none: `start` returns None.
    """

    def gather(self, *, is_wanted: bool) -> WholeValues | None:
        """Return the values; None if not `is_wanted`. Every rank that is not gone calls it."""

    def held(self, bucket: Bucket) -> Iterator[Held]:
        """Yield what this rank holds of a bucket now. It waits for nobody, and nothing changes."""

    def gather_state(self, *, is_wanted: bool) -> State | None:
        """Return the whole optimizer state; None: each rank has its own. Every rank calls it."""

    def read_state(self) -> State | None:
        """Return the whole optimizer state, on this rank alone; None: each rank has its own."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must hold besides parameters and optimizer state."""

    def meet(self) -> None:
        """Wait for all ranks that are not gone."""

    def missing(self) -> list[int]:
        """Return the ranks that did not come to the last `gather`."""

    def stay(self) -> None:
        """Serve the others until they leave, if they need this rank. Called before it leaves."""

    def serve(self) -> None:
        """Serve the others until every rank that computes has left."""

    def open(self) -> None:
        """Allow calls from other ranks, once saved state is in place. Every rank calls it."""

    def tell_figures(self, mine: Sequence[float]) -> list[list[float]]:
        """Return the figures of each rank that is not gone, at most `MOST_FIGURES` of a rank.

        Every rank calls it.
        """

    def report(self) -> dict[str, Any]:
        """Return the strategy's figures for the run's summary, as plain data."""


class Strategy:
    """One way to spread SGD over ranks. All hooks run on the comm lane, in one fixed order."""

    settings: OwnSettings

    def plan(self, world: World, sizes: Sequence[Size], shards: int) -> Plan:
        """Plan for these ranks, parameters and shards. A pure function."""
        raise NotImplementedError

    def start(self, model: Model, comm: Communicator, saved: Saved) -> Whole | None:
        """Allocate state, after the buckets are laid out. Every rank of the world calls it.

        `comm` is the world's communicator; `bucket.comm` is that of the bucket's group.
        """
        return None

    def gradient_ready(self, bucket: Bucket) -> None:
        """Called when backward has finished this bucket on this rank. Last layers come first."""

    def step_entered(self, step: int) -> None:
        """Called when all ranks of this rank's step group have entered `optimizer.step()`."""

    def before_use(self, bucket: Bucket, update: UpdateSettings) -> None:
        """Called before forward reads the bucket's parameters. First layers come first."""
        raise NotImplementedError

    def discard(self, bucket: Bucket) -> None:
        """Called when every rank drops a gradient that was ready, instead of taking a step."""


def check_shards(shards: int, workers: int) -> None:
    """Refuse a number of shards that leaves a rank without one."""
    if shards < workers:
        raise ConfigError(
            "strategy.shards",
            f"got {shards} with {workers} ranks",
            "each rank needs a shard",
            f"Use at least {workers} shards, or at most {shards} rank{'s' if shards > 1 else ''}.",
        )
