"""What a rank of `gossip` keeps for one vector: its window, and values sent, fetched or arrived."""

from __future__ import annotations

import contextlib
import struct

import torch

from syncline.comm.window import Call, Pending, Window
from syncline.contract import Saved
from syncline.errors import CheckpointError, PeerGone
from syncline.strategies.replicas import OwnReplicas
from syncline.strategies.settings import GossipSettings
from syncline.strategies.vector import Vector

_WEIGHT = struct.Struct("<d")


class Box:
    """One vector's exchange with other ranks."""

    mean: torch.Tensor
    """The mean over ranks, as it was gathered last."""

    def __init__(
        self, replicas: OwnReplicas, vector: Vector, settings: GossipSettings, saved: Saved
    ) -> None:
        """Every rank calls it."""
        self.vector = vector
        self._pushes = settings.rule == "push"
        self._is_weighted = settings.push_sum
        size = vector.num_elements if self._pushes else 0
        self.arrived = torch.zeros_like(vector.memory.mine[:size])
        """The weighted sum of what has arrived and is not mixed in yet."""
        self.arrived_weight = 0.0
        self.weight = 1.0
        """The rank's own weight; always 1 without push-sum."""
        self._outgoing = replicas.comm.allocate(size, vector.dtype)
        self._sending: Pending | None = None
        self.fetched: Pending | None = None
        functions = {"push": self._take}
        self.window = replicas.window(vector.num_elements, vector.dtype, functions)
        self.weights: Window | None = None
        """Where ranks publish their weights; None without push-sum."""
        if self._is_weighted:
            self.weights = replicas.comm.window(1, torch.float64, {})
        self._load(saved)

    def send(self, partner: int, values: torch.Tensor, weight: float) -> None:
        """Send a copy, so that the rank need not wait; one is under way at a time."""
        self.settle()
        self._outgoing.mine.copy_(values)
        note = _WEIGHT.pack(weight)
        self._sending = self.window.call(partner, "push", self._outgoing, note=note)

    def settle(self) -> None:
        """Wait until the last values sent have arrived."""
        if self._sending is not None:
            with contextlib.suppress(PeerGone):  # the receiver died: what was sent to it is lost
                self._sending.wait()

    def _take(self, call: Call) -> int:
        """Add what a peer has pushed."""
        (weight,) = _WEIGHT.unpack(call.note)
        assert call.values is not None
        self.arrived.add_(call.values, alpha=weight)
        self.arrived_weight += weight
        return 0

    def mix_into(self, mine: torch.Tensor, kept: float) -> float:
        """Mix what has arrived into the vector, which weighs `kept`; return the sum of weights."""
        total = kept + self.arrived_weight
        if self.arrived_weight:
            mine.mul_(kept / total).add_(self.arrived, alpha=1 / total)
            self.vector.write()
            self.arrived.zero_()
            self.arrived_weight = 0.0
        return total

    def mixed(self) -> tuple[torch.Tensor, float]:
        """Return the vector with all that has arrived mixed in, and its weight. Nothing changes."""
        mine, total = self.vector.read(), self.weight + self.arrived_weight
        if self.arrived_weight:
            mine = (mine * (self.weight / total)).add_(self.arrived, alpha=1 / total)
        return mine, total if self._is_weighted else 1.0

    # State, by parameter.

    def state(self) -> dict[str, torch.Tensor]:
        state = self.vector.save_look_ahead()
        if self._pushes:
            weights = torch.tensor([self.weight, self.arrived_weight], dtype=torch.float64)
            state |= {f"weights/{name}": weights.clone() for name in self.vector.names()}
            state |= self.vector.save("arrived", self.arrived)
        return state

    def _load(self, saved: Saved) -> None:
        self.vector.load_look_ahead(saved.state)
        if not (self._pushes and saved.state):
            return
        found = [saved.state.get(f"weights/{name}") for name in self.vector.names()]
        weights = [(-1.0, -1.0) if one is None else tuple(one.tolist()) for one in found]
        if len({*weights}) > 1 or weights[0][0] < 0:
            raise CheckpointError(
                "the checkpoint holds the vectors that were pushed, and their weights, by other "
                "buckets than this run has, or by version 0.1.0. Set strategy.bucket_bytes and "
                "strategy.overlap back, or go on with the version that wrote it."
            )
        self.weight, self.arrived_weight = weights[0]
        self.vector.load("arrived", self.arrived, saved.state)
