"""Data by shard: which samples a shard of a step gets, on whichever rank computes it.

The loader's `batch_size` is the size of one shard; a step takes one batch for each shard. The
order of samples depends on (seed, epoch) alone. Samples that do not fill a whole step are left out,
so that all shards have the same weight. A loader knows its position, so a script can save it and go
on from it, on another number of ranks as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from syncline.engine.replica import Replica
from syncline.errors import UsageError
from syncline.like_loader import LikeLoader
from syncline.position import Position, Turn
from syncline.samples import (
    Batches,
    Drawn,
    Order,
    SeededBatch,
    seed_generators,
    seed_torch,
    seeded_loader,
)
from syncline.samples import epoch_order as epoch_order
from syncline.seeds import seed_for
from syncline.step_batches import Dealt, Step


def reseed(seed: int, step: int, shard: int, *, everywhere: bool = False) -> None:
    """Seed torch's generator for one shard of one step: dropout and other random forward code.

    With `everywhere` those of Python and numpy too.
    """
    value = seed_for(seed, "dropout", step, shard)
    (seed_generators if everywhere else seed_torch)(value)


class ShardedLoader(LikeLoader):
    """Iterates over steps; each step iterates over this rank's shards and informs the replicas."""

    def __init__(
        self,
        loader: DataLoader[Any],
        deal: Callable[[], Dealt],
        seed: int,
        *,
        accumulate: int = 1,
    ) -> None:
        """`deal` says how shards are dealt now: a model may still come. `accumulate` is how many
        batches a shard has."""
        self.loader = loader
        self.seed = seed
        self.accumulate = accumulate
        self._deal = deal
        self._order = Order(loader, seed)
        self._position = Position()
        self._batches = Batches()
        self._seeded: DataLoader[Any] | None = None
        self._is_by_next = False
        """Whether steps are taken by `next()`, without an end."""
        self._known: Dealt | None = None
        self._under_way: Step | None = None
        if deal().replicas:
            self._steps_in(self.dealt())

    def dealt(self) -> Dealt:
        """Return how shards are dealt; refuse if something was counted on other numbers."""
        dealt, known = self._deal(), self._known
        if known is not None and (known.shards, known.mine) != (dealt.shards, dealt.mine):
            raise UsageError(
                f"this loader was used before distribute(), when a step had {known.shards} shards; "
                f"now it has {dealt.shards}. Call shard() or shards() after distribute()."
            )
        self._known = dealt
        self._position.check_shards(dealt.shards)
        return dealt

    def _steps_in(self, dealt: Dealt) -> int:
        num_steps = self._order.num_batches // (dealt.shards * self.accumulate)
        if num_steps == 0:
            parts = f" with {self.accumulate} batches" if self.accumulate > 1 else ""
            raise UsageError(
                f"{self._order.num_samples} samples do not fill one step of {dealt.shards} shards "
                f"of {self.loader.batch_size or 'a batch'}{parts}. Use smaller shards or fewer of "
                "them."
            )
        return num_steps

    @property
    def num_steps(self) -> int:
        """Steps in an epoch: what a learning-rate schedule counts, on any number of ranks."""
        return self._steps_in(self.dealt())

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.num_steps

    @property
    def mine(self) -> range:
        """The shards that this rank computes."""
        return self.dealt().mine

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """The number of the step under way in this epoch, from 0, on any number of ranks.

        Between two loops it is that of the next loop's first step.
        """
        return self._position.step

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be this epoch. Not needed: each loop is the next epoch.

        If this loader resumes in the middle of that very epoch, it still does.
        """
        self._position.set_epoch(epoch)

    def __iter__(self) -> Iterator[Step]:
        dealt = self.dealt()
        num_steps = self._steps_in(dealt)
        turn = self._position.begin()
        drawn = self._draw(dealt, turn.epoch)
        turn.last = len(drawn) // (dealt.shards * self.accumulate)
        batches = self._fetch(dealt, drawn, turn.epoch * num_steps, turn.step, turn.last)
        under_way = None
        try:
            while turn.step < turn.last:
                number = turn.epoch * num_steps + turn.step
                is_here = not self.loader.num_workers
                under_way = Step(
                    dealt, self.accumulate, self.seed, number, batches, is_fetched_here=is_here
                )
                self._under_way = under_way
                yield under_way
                under_way.finish()
                turn.advance()
        finally:
            # With `next()` there is no loop that ends, and this runs whenever Python's garbage
            # collection finds the loader.
            if not self._is_by_next:
                self._leave(turn, under_way)

    def _leave(self, turn: Turn, under_way: Step | None) -> None:
        """End a loop, at its end or where it was left: the next one is the next epoch.

        But a look at the first batch, perhaps on one rank, is no loop.
        """
        turn.end(is_begun=under_way is not None and under_way.is_begun())
        if under_way is not None:
            under_way.leave()
        self._under_way = None
        # Outside of loops all ranks have the same random numbers.
        seed_generators(seed_for(self.seed, "between", turn.epoch))

    def _draw(self, dealt: Dealt, epoch: int) -> Drawn:
        drawn = self._order.draw(epoch)
        told = self._order.fingerprint
        if told is not None and torch.is_grad_enabled():
            for replica in dealt.replicas:
                replica.tell_alike("order of data", told)
        return drawn

    def _fetch(
        self, dealt: Dealt, drawn: Drawn, number: int, first: int, last: int
    ) -> Iterator[Any]:
        """Return an iterator over this rank's batches of the steps from `first` to `last`.

        `number` is that of the epoch's first step.
        """
        per_shard, seed = self.accumulate, self.seed

        def batches() -> Iterator[SeededBatch]:
            for step in range(first, last):
                for shard in dealt.mine:
                    start = (step * dealt.shards + shard) * per_shard
                    for part in range(per_shard):
                        value = seed_for(seed, "fetch", number + step, shard, part)
                        yield SeededBatch(value, drawn[start + part])

        self._batches.begin(batches)
        if self._seeded is None:
            self._seeded = seeded_loader(self.loader, self._batches)
        return iter(self._seeded)

    # Saving and loading.

    @property
    def ends_step(self) -> bool:
        """Whether the last batch that was given is this rank's last of its step."""
        return self._under_way is None or self._under_way.is_all_given

    def state_dict(self) -> dict[str, Any]:
        """Return the position, to be saved with the model after the last step that was taken."""
        dealt, step = self.dealt(), self._position.step
        if self._under_way is not None:
            step += self._under_way.is_taken()
        place = {"epoch": self._position.epoch, "step": step}
        return place | self._facts(dealt) | self._order.state()

    def _facts(self, dealt: Dealt) -> dict[str, Any]:
        """Return what the order of data depends on."""
        return {
            "seed": self.seed,
            "shards": dealt.shards,
            "batch_size": self.loader.batch_size,
            "accumulate": self.accumulate,
            "num_samples": self._order.num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position: the next loop begins there. Other data or shards are refused."""
        facts = self._facts(self._deal())
        missing = sorted({"epoch", "step", *facts} - state.keys())
        if missing:
            raise UsageError(
                f"this is not the state of a loader: it lacks {', '.join(missing)}. Load what its "
                "state_dict() returned."
            )
        if not self._deal().replicas:
            facts.pop("shards")  # the model that has them may come later
        for name, value in facts.items():
            if state[name] != value:
                raise UsageError(
                    f"the loader's state was saved with {name} {state[name]}, but this loader has "
                    f"{value}: the order of data would be another. Use the same {name}."
                )
        self._order.check_state(state.get("drawn_epoch"), state.get("drawn"))
        self._position.load(state["epoch"], state["step"], state["shards"])
        self._under_way = None


class FlatLoader(LikeLoader):
    """Iterates over this rank's batches, one after the other."""

    def __init__(self, steps: ShardedLoader) -> None:
        self._steps = steps
        self.loader = steps.loader

    def __len__(self) -> int:
        """Batches in an epoch on this rank. `num_steps` counts steps."""
        steps = self._steps
        return steps.num_steps * len(steps.mine) * steps.accumulate

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps:
            yield from step.give(is_flat=True)

    @property
    def num_steps(self) -> int:
        """Steps in an epoch: what a learning-rate schedule counts, on any number of ranks."""
        return self._steps.num_steps

    @property
    def ends_step(self) -> bool:
        """Whether the last batch that was given is this rank's last of its step."""
        return self._steps.ends_step

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one."""
        return self._steps.epoch

    @property
    def step(self) -> int:
        """The number of the step under way in this epoch, from 0, on any number of ranks."""
        return self._steps.step

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be this epoch. Not needed: each loop is the next epoch."""
        self._steps.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, to be saved with the model after the last step that was taken."""
        return self._steps.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position: the next loop begins there. Other data or shards are refused."""
        self._steps.load_state_dict(state)


class ServingLoader(FlatLoader):
    """For a rank that only serves: it yields no data, and ends when all other ranks have ended."""

    def __init__(self, replica: Replica, others: ShardedLoader) -> None:
        """`others` is the loader of a rank that computes."""
        super().__init__(others)
        self._replica = replica

    def __len__(self) -> int:
        """Steps in an epoch of the ranks that compute: learning-rate schedules need it."""
        return self._steps.num_steps

    def __iter__(self) -> Iterator[Any]:
        self._replica.serve_to_the_end()
        return iter(())


class _Made:
    """The sharded loaders made from a DataLoader, kept with it: a second `shard()` goes on."""

    def __init__(self, session: object) -> None:
        self.session = weakref.ref(session)
        self.by_settings: dict[tuple[int, int], ShardedLoader] = {}

    def __reduce__(self) -> Any:
        return object, ()  # a copy of the DataLoader starts anew


def made_of(loader: DataLoader[Any], session: object) -> dict[tuple[int, int], ShardedLoader]:
    """Return the sharded loaders made from a loader in this session, by seed and `accumulate`."""
    made = vars(loader).get("_syncline_made")
    if not isinstance(made, _Made) or made.session() is not session:
        made = _Made(session)
        vars(loader)["_syncline_made"] = made
    return made.by_settings
