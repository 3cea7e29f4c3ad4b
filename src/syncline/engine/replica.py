"""`Replica`, which `distribute` returns: a model on one rank, as scripts and the trainer use it.

It passes calls on to the parts of the engine (`parts.py`). The compute lane is the user's thread.
Autograd's hooks put gradients into the buckets' flat memory (`gradients.py`) and give complete
buckets to the comm lane, last layers first. `optimizer.step()` gives it the updates, first layers
first, and returns (`steps.py`). Forward waits only for a bucket that it is about to read
(`waiting.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.comm.base import Communicator
from syncline.comm.busy import BusyTime
from syncline.comm.control import Control
from syncline.contract import Saved, Strategy
from syncline.engine.bucket import Bucket
from syncline.engine.lane import Lane
from syncline.engine.layout import Layout
from syncline.engine.parts import Options, Parts
from syncline.engine.refusals import refuse_detached
from syncline.engine.state import State
from syncline.engine.whole import load_values
from syncline.errors import UsageError
from syncline.perf.recorder import Recorder


class Replica:
    """A model and its optimizer, spread over ranks by a strategy. Made by `distribute`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        comm: Communicator,
        control: Control | None,
        lane: Lane,
        options: Options | None = None,
    ) -> None:
        """Every rank calls it."""
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.comm = comm
        parts = Parts(model, optimizer, strategy, comm, control, lane, options or Options())
        self._parts = parts
        self.plan = parts.plan
        self.shards = parts.shards
        self.slots = parts.slots
        self.my_shards = parts.share.mine
        self.overlap = parts.overlap
        self.buffers = parts.buffers
        self.run = parts.run
        """Gathers the parameters that represent the run; keeps a rank while others need it."""
        self.state = parts.state
        self._compute = self.loop = parts.compute
        """Also `loop`: what a user's loop asks for, such as clipping."""
        self.tell_alike = parts.compute.alike.tell
        self._rank = parts.share.rank
        self.is_detached = False

    # What was chosen, and what is measured.

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in their order of first use; empty before the first step."""
        return self._parts.buckets

    @property
    def layout(self) -> Layout:
        """How the parameters lie in buckets. Known after the first backward."""
        return self._parts.laid_out.layout

    def describe(self) -> list[str]:
        """Return log lines that say what was chosen."""
        return self._parts.describe()

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of this rank's tasks. Set it to begin recording, to None to stop.

        Every rank sets it, between the same steps. In the first step, and where the exchange is
        inline, forward and backward are one task each.
        """
        return self._parts.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._parts.record(recorder)

    @property
    def leaders_busy(self) -> BusyTime | None:
        """When a leader exchanges for this rank's group; None if no leader speaks for it."""
        return self._parts.share.step.comm.leaders_busy

    @property
    def leaders_exposed_s(self) -> float:
        """How long compute has waited meanwhile."""
        return self._parts.timing.leaders_exposed_s

    @leaders_exposed_s.setter
    def leaders_exposed_s(self, seconds: float) -> None:
        self._parts.timing.leaders_exposed_s = seconds

    @property
    def waited_s(self) -> float:
        """Time the compute lane has spent waiting for the comm lane: exposed communication."""
        steps, split = self._compute.steps, self._parts.split
        activations_s = 0.0 if split is None else split.activations.waited_s
        return activations_s + (0.0 if steps is None else steps.waited_s)

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        if self._parts.split is not None:
            self._parts.split.activations.waited_s = 0.0
        if self._compute.steps is not None:
            self._compute.steps.waited_s = seconds

    # Shards.

    def begin_shard(self, shard: int, *, is_flat: bool = False) -> None:
        """Say which shard the next batch belongs to; `is_flat`: `step()` comes after each batch."""
        if self.is_detached:
            raise refuse_detached()
        if len(self.my_shards) > 1:
            self._parts.guards.outside.begin_shard(is_first=shard == self.my_shards[0])
        self._compute.gradients.begin_shard(shard, self._rank, is_flat=is_flat)

    def tell_buffers(self) -> None:
        """Let ranks compare buffers that were changed since the last step, with its flags.

        Every shard of the step to come starts from them, so they must be the same on all ranks.
        """
        self._parts.compute.gradients.wait_for_buffers()
        if self.buffers.has_changed:
            self.tell_alike("buffers", self.buffers.fingerprint())

    @property
    def has_gradient(self) -> bool:
        """Whether gradients wait for `optimizer.step()`."""
        return self._compute.gradients.has_gradient()

    def tell_loss(self, loss: float) -> None:
        """Send this shard's loss with the step's flags: `losses` then has those of all shards."""
        self._compute.gradients.tell_loss(loss)

    @property
    def losses(self) -> list[float]:
        """The losses told in the last step, by shard; NaN for a shard without. Waits for them."""
        if self._compute.steps is None:
            raise UsageError("replica.losses holds the losses of the last step: take one first.")
        self._compute.gradients.wait_for_buffers()  # the flags come with them
        return self._parts.flags.losses

    # Steps.

    @property
    def step_number(self) -> int:
        """How many steps this rank has taken."""
        return self._compute.step_number

    @step_number.setter
    def step_number(self, number: int) -> None:
        assert self._compute.steps is None, "the buckets count steps by now"
        self._compute.step_number = number

    def synchronize(self) -> None:
        """Wait until every parameter and buffer is up to date."""
        self._compute.synchronize()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the step's gradients so that their global norm is at most `max_norm`; return it.

        The norm is summed over fixed blocks: it is equal for any number of ranks.
        """
        return self._compute.clip_grad_norm_(max_norm)

    def discard_gradients(self) -> None:
        """Drop this step's gradients. Call it on every rank, or on none."""
        self._compute.discard_gradients()

    # Loading and saving.

    @property
    def saved(self) -> Saved:
        """The checkpoint's state for the strategy; may be set until the first step."""
        return self._parts.saved

    @saved.setter
    def saved(self, saved: Saved) -> None:
        self._parts.saved = saved

    def load_own(self, values: dict[str, torch.Tensor]) -> None:
        """Load this rank's own parameters and buffers, before the first step."""
        load_values(self.model, values)
        self.buffers.begin_step()
        self._parts.guards.outside.note()

    def load_optimizer_state(self, state: State) -> None:
        """Load the whole state, by parameter name; each rank keeps its strips. No collective."""
        self.state.load(state)

    def optimizer_state(self, *, is_wanted: bool = True) -> State:
        """Return the whole optimizer state by parameter name. Every rank calls it.

        It may be empty on a rank that does not want it.
        """
        self.synchronize()
        with self.comm.traffic.apart():
            return self.state.gather(is_wanted=is_wanted)

    # The parameters that represent the run.

    @property
    def has_own(self) -> bool:
        """Whether ranks hold different parameters: a rank's own do not represent the run."""
        return self.plan.has_own

    @contextlib.contextmanager
    def whole(self, *, is_wanted: bool = True) -> Iterator[None]:
        """Put the parameters that represent the run into the model for the block.

        They are this rank's own, unless ranks hold different ones. Every rank calls it at the same
        step; ranks that do not want the values still help others to get them.
        """
        self.synchronize()
        if self.run.whole is None:
            with self.comm.traffic.apart(), self._parts.with_whole_layers():
                yield
            return
        gradients = self._compute.gradients
        if gradients.num_closed or any(slot.is_taken for slot in self.slots):
            raise UsageError(
                "whole() came between backward() and step(), when gradients are on their way. "
                "Call it after step()."
            )
        with self.comm.traffic.apart(), self.run.in_model(is_wanted=is_wanted):
            if self.my_shards:
                self.run.tell_who_left()
            yield

    def warn_of_own(self) -> None:
        """Warn, once, when a script saves this rank's own parameters instead of the run's."""
        if self.has_own and self.comm.size > 1:
            self._parts.handles.append(self.run.warn_of_own(self._parts.root))

    # Serving.

    @property
    def is_served(self) -> bool:
        """Whether ranks that compute nothing take part in every step of the others."""
        return self._parts.share.is_served

    def serve(self) -> None:
        """Begin to serve the other ranks, on a rank that has no shards."""
        if self._compute.steps is None:
            with torch.no_grad():
                self._parts.build()

    def serve_step(self, clip_norm: float | None = None) -> None:
        """Take part in a step of the other ranks, if they need this rank in every step.

        `clip_norm` is given if the others clip their gradients in this step.
        """
        self.serve()
        if self.is_served:
            self._compute.serve_step(clip_norm)

    def serve_to_the_end(self) -> None:
        """Serve until every rank that computes has left."""
        self.serve()
        self.run.serve()
        self.run.check_workers()

    # The end.

    def detach(self) -> None:
        """Give model and optimizer back to plain training, each rank with the whole state.

        Every rank calls it. Afterwards the model may be cast, changed and distributed again.
        """
        self.synchronize()
        self._parts.detach()
        self.is_detached = True
