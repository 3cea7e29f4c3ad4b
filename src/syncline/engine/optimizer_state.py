"""The optimizer's state as the user sees it: whole, in torch's format, on any one rank.

Each rank holds the state of its strips. `optimizer.state_dict()` reads the other strips from their
owners (`state_service.py`), `optimizer.load_state_dict()` keeps this rank's part. Neither is a
collective.

Note: what a reader gets. It asks for the state after its own number of steps and of loads. An owner
cannot be further: its next update takes the reader's gradients. If an owner has updated early, or
has loaded since, it still has the state of before (`OptimizerOnStrip`). So no lock is needed on the
path of a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from syncline.comm.base import Communicator, exchange_bytes
from syncline.comm.control import Control
from syncline.contract import ParamGroups, Whole
from syncline.engine.bucket import Bucket
from syncline.engine.build import LaidOutModel
from syncline.engine.compute import ComputeLane
from syncline.engine.lane import Lane
from syncline.engine.optimizer import snapshot
from syncline.engine.spread_state import SpreadState, refuse_state
from syncline.engine.state import Held, State, gather_optimizer_state, held_by, put_together
from syncline.engine.state_check import StateShape, by_name, fingerprint, is_torch_format, rename
from syncline.engine.state_service import StateRequest, StateService, ask
from syncline.errors import CommError, UsageError

_LOOK_S = 1e-3
"""How often a request looks whether this rank has come to the step it asks for: soon, mostly."""


class OptimizerState:
    """Gives the whole state on one rank, and loads this rank's strips from it."""

    def __init__(
        self,
        model: LaidOutModel,
        comm: Communicator,
        control: Control | None,
        lane: Lane,
        compute: ComputeLane,
    ) -> None:
        """`comm` is the world's."""
        self._optimizer = model.optimizer
        self._slots = model.slots
        self._comm = comm
        self._control = control
        self._lane = lane
        self._compute = compute
        self._model = model
        self._buckets: Sequence[Bucket] = ()
        self._whole: Whole | None = None
        self._is_open = False
        self._address: str | None = None
        self._service: StateService | None = None
        self._where: dict[int, str] = {}
        self._spread_state = SpreadState()
        self._num_loads = self._num_loaded = 0
        """How many loads have begun, and how many have ended."""

    def hook(self) -> Iterator[Any]:
        """Watch the user's optimizer; yields handles."""
        yield self._optimizer.register_state_dict_pre_hook(self._before_state_dict)
        yield self._optimizer.register_state_dict_post_hook(self._after_state_dict)
        yield self._optimizer.register_load_state_dict_pre_hook(self._before_load)
        yield self._optimizer.register_load_state_dict_post_hook(self._after_load)

    def open(self, address: str | None) -> None:
        """Answer other ranks from the first step on. Every rank calls it, or none."""
        self._is_open, self._address = True, address

    def begin(self, buckets: Sequence[Bucket], whole: Whole | None) -> None:
        """Spread the state loaded so far, once the buckets are built. Every rank calls it."""
        self._buckets, self._whole = buckets, whole
        if any(slot.parameter in self._optimizer.state for slot in self._slots):
            self._spread(self._take())
        self._close_state()
        self._compute.checks.append(self._check_state)
        if self._is_open and self._control is not None and any(map(_is_divided, buckets)):
            self._service = StateService(self._control, self._address, self._answer)
            mine = self._service.where.encode()
            found = self._lane.call(exchange_bytes, self._comm, mine)
            self._where = {
                rank: text.decode() for rank, text in zip(self._comm.ranks, found, strict=True)
            }

    def _close_state(self) -> None:
        """Let the user's optimizer hold only the state of parameters that are frozen."""
        held = self._optimizer.state
        self._optimizer.state = self._spread_state
        self._spread_state.hold(held)

    def _check_state(self) -> None:
        if self._optimizer.state is not self._spread_state:
            raise refuse_state()

    @property
    def is_asked(self) -> bool:
        """Whether other ranks may ask this one for state."""
        return self._service is not None

    def close(self) -> None:
        """Answer no more."""
        if self._service is not None:
            self._service.close()

    # Reading.

    def gather(self, *, is_wanted: bool) -> State:
        """Return the whole state by parameter name. Every rank calls it."""
        if not self._buckets:
            return self._waiting()
        self._compute.settle("optimizer state was asked for between backward and step()")
        return self._lane.call(self._gather, is_wanted)

    def give_back(self) -> None:
        """Put the whole state into the user's optimizer. Every rank calls it."""
        whole = self.gather(is_wanted=True)
        if self._buckets:
            self._optimizer.state = self._spread_state.plain()
        for slot in self._slots:
            if slot.name in whole:
                self._optimizer.state[slot.parameter] = whole[slot.name]

    def _gather(self, is_wanted: bool) -> State:
        found = None if self._whole is None else self._whole.gather_state(is_wanted=is_wanted)
        return gather_optimizer_state(self._slots, self._buckets) if found is None else found

    def read(self) -> State:
        """Return the whole state by parameter name, on this rank alone.

        It is this rank's own where each rank trains its own replica.
        """
        self._compute.synchronize()
        if self._whole is not None:
            found = self._lane.call(self._whole.read_state)
            if found is not None:
                return found
        return put_together(self._slots, self._held())

    def _held(self) -> Iterator[Held]:
        for bucket in self._buckets:
            yield from held_by(bucket)
        step, loads = self._compute.step_number, self._num_loads
        for rank, indices in self._owners().items():
            if self._control is None or rank not in self._where:
                raise UsageError(
                    "optimizer.state_dict() on one rank would hold that rank's strips only. Call "
                    "replica.optimizer_state() on every rank: it returns the whole state."
                )
            request = StateRequest(step, loads, indices)
            yield from ask(self._control, rank, self._where[rank], request)

    def _owners(self) -> dict[int, list[int]]:
        """Return the other ranks that own strips, each with the buckets' indices."""
        found: dict[int, list[int]] = {}
        for bucket in filter(_is_divided, self._buckets):
            cuts, comm = bucket.parameters.cuts, bucket.holders
            for position, rank in enumerate(comm.ranks):
                # Ranks that hold other rows have cut them elsewhere: each of them is asked.
                owns = comm is not bucket.comm or cuts[position] < cuts[position + 1]
                if position != comm.position and owns:
                    found.setdefault(rank, []).append(bucket.index)
        return found

    def _answer(self, request: StateRequest) -> Iterator[list[Held]]:
        """Yield this rank's entries of the buckets that another rank asks for. On any thread."""
        for index in request.buckets:
            if not 0 <= index < len(self._buckets):
                raise CommError(f"there is no bucket {index}")
            bucket = self._buckets[index]
            while bucket.step < request.step or self._num_loaded < request.loads:
                self._check_waiting(request)
                time.sleep(_LOOK_S)
            if bucket.step > request.step:
                raise CommError(f"state of step {request.step} was asked for in {bucket.step}")
            yield held_by(bucket, before_load=request.loads < self._num_loads)

    def _check_waiting(self, request: StateRequest) -> None:
        """Raise if this rank will never have the state that another rank asks for."""
        if self._lane.failure is not None:
            raise CommError(f"it failed: {self._lane.failure}")
        if self._num_loads < request.loads and self._compute.has_entered(request.step):
            raise CommError(
                "optimizer state was loaded on other ranks, but not here. Load it on every rank."
            )

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if not self._buckets:
            return
        whole = self.read()
        self._check_state()
        self._spread_state.is_open = True
        names = {id(slot.parameter): slot.name for slot in self._slots}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter))
            if name in whole:
                optimizer.state[parameter] = whole[name]

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if self._buckets:
            self._take()  # the dictionary has it: do not hold the whole state on this rank
            self._spread_state.is_open = False

    # Loading.

    def load(self, state: State) -> None:
        """Load the whole state, by parameter name or in torch's format. No collective.

        Each rank keeps its strips, so every rank loads the same. Until the next step, another rank
        can still read the state of before.
        """
        if is_torch_format(state):
            self._optimizer.load_state_dict(state)
            return
        named, shape = rename(state, self._slots), self._shape()
        if not named and self._compute.step_number and shape.keeps_any(self._slots):
            raise UsageError(
                "the optimizer state is empty, but steps were taken: the optimizer would start "
                "from zero. Load what optimizer.state_dict() returned; for a fresh start, load one "
                "from before the first step."
            )
        shape.check(named, self._slots)
        if self._buckets:
            self._spread(named)
            return
        self._take()
        for slot in self._slots:
            if slot.name in named:
                self._optimizer.state[slot.parameter] = dict(named[slot.name])

    def _shape(self, groups: Sequence[dict[str, Any]] = ()) -> StateShape:
        """Return what the optimizer keeps, with the settings of `groups` or its own."""
        settings = snapshot(self._optimizer)
        for mine, loaded in zip(settings, groups, strict=False):
            mine.update({key: value for key, value in loaded.items() if key != "params"})
        return StateShape(self._optimizer, self._model.reach, settings)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if not is_torch_format(state_dict):
            raise UsageError(
                "optimizer.load_state_dict() takes what optimizer.state_dict() returned, with the "
                f"keys 'state' and 'param_groups', but got {sorted(map(str, state_dict))[:4]}. For "
                "values by name use syncline.load_optimizer_state(model, state)."
            )
        named = by_name(state_dict, optimizer, self._slots)
        self._shape(state_dict["param_groups"]).check(named, self._slots)

    def _after_load(self, optimizer: Optimizer) -> None:
        if self._buckets:
            self._spread(self._take(), snapshot(optimizer))
            self._close_state()  # torch has put another dictionary there

    def _waiting(self) -> State:
        """Return the state of the slots that the user's optimizer holds itself."""
        held = self._optimizer.state
        return {s.name: dict(held[s.parameter]) for s in self._slots if s.parameter in held}

    def _take(self) -> State:
        """Take that state out of the user's optimizer: the strips hold it from now on."""
        found = self._waiting()
        for slot in self._slots:
            self._optimizer.state.pop(slot.parameter, None)
        return found

    def _spread(self, whole: State, settings: ParamGroups | None = None) -> None:
        """Load this rank's strips, for the next update on; `settings` were loaded with them."""
        self._compute.settle("optimizer state was loaded between backward and step()")
        self._num_loads += 1
        self._lane.call(self._load, whole, self._shape().spread(self._slots))
        self._num_loaded = self._num_loads
        self._compute.alike.tell("optimizer state", fingerprint(whole, settings or []))

    def _load(self, whole: State, spread: frozenset[str]) -> None:
        # On the lane, where a server also updates: no update may come in between.
        for bucket in self._buckets:
            bucket.optimizer.load_state(whole, spread)


def _is_divided(bucket: Bucket) -> bool:
    """Say whether other ranks hold part of a bucket's state."""
    return bucket.holders.size > 1 and bucket.family.updates == "strips"
