"""Objects for strategies in which each rank trains its own replica.

They gather the parameters that represent the run, and say how ranks meet and leave. There are two.
`OwnReplicas` is for ranks that do not wait for each other: they call each other through windows,
and no rank waits for a rank that is gone. `MeetingReplicas` is for ranks that meet in collectives
now and then: a lost rank ends the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from syncline.comm.base import Communicator, small_sum, tell_all
from syncline.comm.meeting import Meeting
from syncline.comm.window import Functions, Window
from syncline.contract import (
    MOST_FIGURES,
    Family,
    Held,
    Model,
    Plan,
    Saved,
    WholeValues,
    World,
    deal,
)
from syncline.engine.bucket import Bucket, view_of
from syncline.engine.state import State
from syncline.errors import PeerGone
from syncline.strategies.settings import OwnSettings


def plan_own_replicas(
    world: World,
    shards: int,
    settings: OwnSettings,
    *,
    answers_calls: bool = True,
    keeps_own: bool = True,
) -> Plan:
    """Return a plan in which each rank is a group by itself and holds its own parameters.

    Without `keeps_own` a checkpoint does not hold the ranks' own parameters.
    """
    family = Family(world.each_alone, memory="private")
    dealt = deal(shards, settings.num_workers(world.size), world.size)
    return Plan((family,), dealt, answers_calls=answers_calls, keeps_own=keeps_own)


def begins_early(early: bool | str, comm: Communicator) -> bool:
    """Say whether exchanges begin early; "auto" means across machines only."""
    return comm.num_machines > 1 if early == "auto" else bool(early) and comm.size > 1


def run_values(bucket: Bucket, saved: Saved) -> torch.Tensor:
    """Return a bucket's parameters that represented the saved run, in memory laid out like it.

    At a fresh start they are the rank's own parameters, in their own memory.
    """
    values = bucket.parameters.memory.mine
    if saved.parameters:
        values = values.clone()
        for slot in bucket.slots:
            if slot.name in saved.parameters:
                view_of(values, slot).copy_(saved.parameters[slot.name])
    return values


def own_first(comm: Communicator) -> list[int]:
    """Return all positions, this rank's first, so that not all ranks call the same one first."""
    return [(comm.position + turn) % comm.size for turn in range(comm.size)]


class OwnReplicas:
    """A `Whole` (`contract.py`) for ranks that do not wait for each other.

    The strategy passes functions. `collect` returns the values of a bucket that represent the run.
    Before it, `settle` waits until what this rank sent has arrived; when all ranks have done so,
    `expose` publishes what the others' `collect` needs (also once, before calls are allowed).
    `own_state` copies what a rank keeps besides parameters and optimizer state; `gather_state`
    returns the whole optimizer state, if it is not each rank's own, and `read_state` returns it on
    one rank alone; `figures` are added to the report.
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        settings: OwnSettings,
        *,
        collect: Callable[[Bucket], torch.Tensor],
        held: Callable[[Bucket], Iterator[Held]],
        settle: Callable[[], None] = lambda: None,
        expose: Callable[[], None] | None = None,
        own_state: Callable[[], dict[str, torch.Tensor]] = dict,
        gather_state: Callable[[bool], State] | None = None,
        read_state: Callable[[], State | None] = lambda: None,
        figures: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Every rank calls it."""
        self.comm = comm
        self.meeting = Meeting(comm)
        self._model = model
        self._settings = settings
        self._collect, self._settle, self._expose = collect, settle, expose
        self._own_state = own_state
        self._gather_state = gather_state
        self.held = held
        self.read_state = read_state
        self._figures = figures
        self._farewell = Meeting(comm, "farewell")
        self._windows: list[Window] = []
        self._gathering = (0, 0)
        """Calls and bytes of gathers, which do not count as the steps'."""
        self._snapshot: dict[str, torch.Tensor] = {}
        self._buffers = model.flat_buffers()
        self._statistics = comm.window(self._buffers.numel(), torch.float64, {})
        self._figures_told = comm.window(MOST_FIGURES, torch.float64, {})
        self.spread = 0.0
        """The mean square distance of the ranks' values to the last `mean`."""

    # For the strategy.

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        """Return a window whose traffic is counted. Every rank calls it."""
        window = self.comm.window(num_elements, dtype, functions)
        self._windows.append(window)
        return window

    def publish(self, window: Window, values: torch.Tensor) -> None:
        """Publish, and wait for a slow reader of the old version as long as it takes."""
        window.until(
            lambda: window.publish(values), lambda: "a peer still reads the values published before"
        )

    def mean(
        self,
        window: Window,
        like: torch.Tensor,
        positions: set[int] | None = None,
        weights: Window | None = None,
    ) -> torch.Tensor:
        """Return the mean of what the ranks, or those in `positions`, have published.

        In the window `weights` each rank has published its weight; None: all weigh the same. Ranks
        that are gone are left out; if none is left, return `like`. `spread` is set to the ranks'
        mean square distance to the mean.
        """
        total, count, squares = torch.zeros_like(like, dtype=torch.float64), 0.0, 0.0
        for position in self.meeting.living():
            if positions is not None and position not in positions:
                continue
            with contextlib.suppress(PeerGone):
                weight = 1.0 if weights is None else _published(weights, position)[0]
                pending = window.get(position)
                pending.wait()
                total.add_(pending.values, alpha=weight)
                squares += weight * pending.values.double().square().sum().item()
                count += weight
                pending.release()
        if not count:
            return like
        total.div_(count)
        self.spread = max(0.0, squares / count - total.square().sum().item())
        return total.to(like.dtype)

    def takes_no_steps(self, rank: int) -> bool:
        """Say whether a rank waits for this one in a meeting, or has ended and only serves."""
        return self.meeting.is_called_by(rank) or self._has_ended(rank)

    # For the engine: see `Whole`.

    def open(self) -> None:
        if self._expose is not None:
            self._expose()
        self.comm.barrier()

    def meet(self) -> None:
        self.meeting.meet()

    def missing(self) -> list[int]:
        return self.meeting.missing()

    def gather(self, *, is_wanted: bool) -> WholeValues | None:
        """Wait for all ranks that are not gone, and return the values that represent the run.

        Buffers are the mean over the ranks that compute; after these have left, their last mean.
        """
        before = self.traffic
        self._settle()
        self.publish(self._statistics, self._model.flat_buffers())
        self.meeting.meet()
        if self._expose is not None:
            # Now all that was sent has arrived, and can be exposed too.
            self._expose()
            self.meeting.meet()
        whole, workers = None, self._workers()
        if is_wanted or self.comm.position not in workers:
            self._buffers = self.mean(self._statistics, self._buffers, workers)
        if is_wanted:
            buckets = [self._collect(bucket) for bucket in self._model.buckets]
            whole = WholeValues(buckets, self._buffers)
        # Everything that others sent before this meeting has arrived.
        self._snapshot = self._own_state()
        self.meeting.meet()
        now = self._traffic()
        self._gathering = now[0] - before[0], now[1] - before[1]
        return whole

    def gather_state(self, *, is_wanted: bool) -> State | None:
        return None if self._gather_state is None else self._gather_state(is_wanted)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the rank's own state as it was at the last meeting."""
        return self._snapshot

    def tell_figures(self, mine: Sequence[float]) -> list[list[float]]:
        told = torch.zeros(MOST_FIGURES, dtype=torch.float64)
        told[: len(mine)] = torch.tensor(mine, dtype=torch.float64)
        self.publish(self._figures_told, told)
        self.meeting.meet()
        found = []
        for position in self.meeting.living():
            with contextlib.suppress(PeerGone):
                found.append(_published(self._figures_told, position)[: len(mine)])
        self.meeting.meet()
        return found

    def stay(self) -> None:
        """Serve until each other rank has left or only serves; join in when they gather."""
        comm = self.comm
        if comm.ranks[comm.position] in self._settings.may_lose(comm.size):
            return
        self._farewell.tell(1)
        others = set(range(comm.size)) - {comm.position}
        while self.meeting.until_called(others, but=self._has_ended):
            self.gather(is_wanted=False)

    def serve(self) -> None:
        """Return when every rank that computes has left; join in when they gather."""
        while self.meeting.until_called(self._workers()):
            self.gather(is_wanted=False)

    def report(self) -> dict[str, Any]:
        exchanges, num_bytes = self.traffic
        return {"exchanges": exchanges, "exchanged_bytes": num_bytes, **self._figures()}

    @property
    def traffic(self) -> tuple[int, int]:
        """How many exchanges this rank's steps began with other ranks, and their bytes."""
        now, apart = self._traffic(), self._gathering
        return now[0] - apart[0], now[1] - apart[1]

    def _traffic(self) -> tuple[int, int]:
        windows = self._windows
        return sum(one.num_calls for one in windows), sum(one.sent_bytes for one in windows)

    def _workers(self) -> set[int]:
        """Return the positions of the ranks that compute."""
        num_workers = self._settings.num_workers(self.comm.size)
        return {at for at, rank in enumerate(self.comm.ranks) if rank < num_workers}

    def _has_ended(self, rank: int) -> bool:
        return self._farewell.reached[rank] > 0


def _published(window: Window, position: int) -> list[float]:
    """Return the numbers that a rank has published. Raises PeerGone."""
    pending = window.get(position)
    pending.wait()
    numbers: list[float] = pending.values.tolist()
    pending.release()
    return numbers


class MeetingReplicas:
    """A `Whole` (`contract.py`) for ranks that meet in collectives.

    `collect` returns a bucket's values that represent the run. Every rank calls it, for all buckets
    in turn, so it may be a collective. `held` is this rank's part of them (`Whole.held`).
    `own_state` copies what a rank keeps besides parameters and optimizer state.
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        *,
        collect: Callable[[Bucket], torch.Tensor],
        held: Callable[[Bucket], Iterator[Held]],
        own_state: Callable[[], dict[str, torch.Tensor]] = dict,
    ) -> None:
        """Every rank calls it."""
        self._model = model
        self._comm = comm
        self.held = held
        self._collect = collect
        self.state = own_state
        self._buffers = small_sum(comm, model.flat_buffers().numel(), torch.float64)

    def gather(self, *, is_wanted: bool) -> WholeValues | None:
        """Collect every bucket, and the mean of all ranks' buffers."""
        values = [self._collect(bucket) for bucket in self._model.buckets]
        mine = self._buffers.sums[0].mine
        mine.copy_(self._model.flat_buffers())
        self._comm.all_reduce(self._buffers)
        mean = self._buffers.result / self._comm.size
        self._comm.barrier()  # now peers have read this rank's buffers: it may write them again
        return WholeValues(values, mean) if is_wanted else None

    def gather_state(self, *, is_wanted: bool) -> State | None:
        return None

    def read_state(self) -> State | None:
        return None

    def tell_figures(self, mine: Sequence[float]) -> list[list[float]]:
        return tell_all(self._comm, mine)

    def meet(self) -> None:
        self._comm.barrier()

    def missing(self) -> list[int]:
        return []

    def stay(self) -> None:
        pass

    def serve(self) -> None:
        pass

    def open(self) -> None:
        pass

    def report(self) -> dict[str, Any]:
        return {}
