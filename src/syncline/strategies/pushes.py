"""A worker's side of the parameter server: gradients that it adds up, its pushes, their answers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, cast

import torch

from syncline.comm.base import Memory
from syncline.comm.many_calls import PendingCalls, Strip, Targets
from syncline.contract import Saved, UpdateSettings
from syncline.engine.bucket import Bucket, view_of
from syncline.engine.state import gather_optimizer_state
from syncline.engine.strip_state import spread_keys
from syncline.errors import PeerGone
from syncline.strategies.replicas import OwnReplicas, begins_early, own_first
from syncline.strategies.strip import ServedStrip
from syncline.strategies.terms import Terms

if TYPE_CHECKING:
    from syncline.strategies.server import Server


class Pushes:
    """A rank's pushes of one bucket's gradients, and its pulls, to and from all strips."""

    def __init__(
        self,
        server: Server,
        replicas: OwnReplicas,
        bucket: Bucket,
        strip: ServedStrip,
        cuts: tuple[int, ...],
        saved: Saved,
    ) -> None:
        """`cuts` says which elements each position holds. Every rank calls it."""
        comm = server.comm
        self._server = server
        self._bucket = bucket
        self._mine = bucket.parameters.memory
        self._cuts = cuts
        self._local = bucket.optimizer
        """The worker's own optimizer, for steps between two pushes."""
        bucket.optimizer = strip.optimizer
        self._terms = strip.terms
        self.held = strip.held
        places = [Strip(at, at, *cuts[at : at + 2]) for at in own_first(comm)]
        self._targets = Targets(tuple(one for one in places if one.start < one.stop))
        self._pulled = [0] * len(self._targets.strips)
        self._computed_on = [0] * len(self._targets.strips)
        """By strip: the version on which the last pushed gradient was computed, or the next one."""
        self._unpushed = 0
        """How many gradients were added up since the last push."""
        self._without: Set[int] = frozenset()
        """Parameters without a gradient since the last push."""
        self._sum: Memory | None = None
        self._inbox = self._mine
        self._is_early = begins_early(server.settings.early, comm)
        if server.settings.period > 1 or self._is_early:
            self._sum = comm.allocate(bucket.num_elements, bucket.dtype)
        if self._is_early:
            self._inbox = comm.allocate(bucket.num_elements, bucket.dtype)
        self._asked: PendingCalls | None = None
        self._has_answer = False
        """Whether the inbox holds an answer from before this run, not taken over yet."""
        self._load(saved.state)
        self.window = replicas.window(0, bucket.dtype, strip.functions)

    def accumulate(self, without: Set[int]) -> None:
        """Add up gradients between pushes; if early, first take over the last push's answer."""
        self._without = self._without & without if self._unpushed else without
        if self._is_early:
            self._pull()
        self._unpushed += 1
        if self._sum is not None:
            self._sum.mine.add_(self._bucket.gradient.sums[0].mine)

    def step_alone(self, update: UpdateSettings) -> None:
        """Take a step on the worker's own copy, between two pushes."""
        self._local.run(update)

    def push(self, update: UpdateSettings) -> None:
        """Push the gradients to every strip; the answers are the updated strips."""
        gradient = self._sum or self._bucket.gradient.sums[0]
        absent = [slot.number for slot in self._bucket.slots if slot.number in self._without]
        terms = Terms.encode(update.groups, absent, self._unpushed)
        note = self._terms.note(self.window, self._targets.positions, terms)
        self._asked = self.window.call_all(
            "push", self._targets, gradient, self._inbox, lambda number: note
        )
        self._unpushed = 0
        if not self._is_early:
            self._pull()

    def settle(self) -> None:
        """Wait until the owners have applied the last push. This does not take over the answers."""
        if self._asked is not None:
            self._versions(self._asked)

    def _pull(self) -> None:
        """Take over the strips that answer the last push."""
        if self._asked is None and not self._has_answer:
            return
        if self._asked is not None:
            versions = self._versions(self._asked)
            both = zip(versions, self._computed_on, strict=True)
            self._server.staleness.update([version - 1 - on for version, on in both])
            # If early, the next gradient was already computed, on the version pulled before.
            self._computed_on = self._pulled if self._is_early else versions
            self._pulled = versions
        self._asked, self._has_answer = None, False
        if self._sum is not None:
            self._sum.mine.zero_()
        if self._is_early:
            self._mine.mine.copy_(self._inbox.mine)

    def _versions(self, asked: PendingCalls) -> list[int]:
        """Return the versions of all strips that a push has made. Raises PeerGone."""
        versions = asked.wait()
        if None in versions:
            raise PeerGone(self._server.comm.ranks[self._targets.positions[versions.index(None)]])
        return cast("list[int]", versions)

    def read(self) -> torch.Tensor:
        """Return all strips, read into the gradient's memory, which is free between steps."""
        free = self._bucket.gradient.sums[0]
        for _, position, low, high in self._targets.strips:
            self.window.call(position, "read", None, free.part(low, high)).wait()
        return free.mine.clone()

    def is_held_by(self, position: int) -> bool:
        """Say whether a position holds a strip of this bucket."""
        return self._cuts[position] < self._cuts[position + 1]

    # State, by parameter: what a worker has not pushed or taken over, and its own optimizer's.

    def state(self) -> dict[str, torch.Tensor]:
        """Return what this worker needs to go on. What it sent has arrived."""
        state: dict[str, torch.Tensor] = {}
        for slot in self._bucket.slots:
            if self._unpushed and self._sum is not None and slot.number not in self._without:
                state[f"unpushed/{slot.name}"] = view_of(self._sum.mine, slot).clone()
            if self._is_early and (self._asked is not None or self._has_answer):
                state[f"answer/{slot.name}"] = view_of(self._inbox.mine, slot).clone()
        state["num_unpushed"] = torch.tensor(self._unpushed)
        # It is gathered from this rank alone: a bucket's group has one rank.
        bucket = copy.copy(self._bucket)
        bucket.optimizer = self._local
        for name, of_slot in gather_optimizer_state(bucket.slots, [bucket]).items():
            for key, value in of_slot.items():
                if isinstance(value, torch.Tensor):
                    state[f"own/{name}/{key}"] = value
                elif value is not None:
                    state[f"number/{name}/{key}"] = torch.tensor(value)
        return state

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        unpushed, names = state.get("num_unpushed"), [slot.name for slot in self._bucket.slots]
        if self._sum is None or unpushed is None:
            return
        self._unpushed = int(unpushed)
        self._without = {
            slot.number for slot in self._bucket.slots if f"unpushed/{slot.name}" not in state
        }
        whole: dict[str, dict[str, Any]] = {}
        for slot in self._bucket.slots:
            for kind, memory in (("unpushed", self._sum), ("answer", self._inbox)):
                if f"{kind}/{slot.name}" in state:
                    view_of(memory.mine, slot).copy_(state[f"{kind}/{slot.name}"])
            own: dict[str, Any] = dict(_named(state, "own", slot.name))
            own |= {key: value.item() for key, value in _named(state, "number", slot.name)}
            if own:
                whole[slot.name] = own
        if whole:
            self._local.load_state(whole, spread_keys(whole, self._bucket.slots))
        self._has_answer = self._is_early and any(f"answer/{name}" in state for name in names)


def _named(
    state: Mapping[str, torch.Tensor], kind: str, name: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the last part of keys KIND/NAME/KEY, and their values."""
    for key, value in state.items():
        before, _, last = key.rpartition("/")
        if before == f"{kind}/{name}":
            yield last, value
