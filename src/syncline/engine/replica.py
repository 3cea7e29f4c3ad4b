"""A model on one rank: buckets, hooks and the two lanes.

The compute lane is the user's thread. Autograd's hooks take gradients into the buckets' flat memory
and feed the comm lane, last layers first; `optimizer.step()` feeds it the updates, first layers
first, and returns. Forward waits only for a bucket that it is about to read.

Note: when buckets are built. The order in which forward uses parameters is not known before the
first forward, so parameters stay where they are for the first shard of the first step, and
everything is laid out, by rank 0's order, when its gradients are complete.

Note: when a gradient is complete. Autograd may deliver more than one gradient for a parameter in
a shard: several backward passes, reentrant checkpointing. The first step shows how many; later
steps take a gradient, and send its bucket, when as many have come, or at `step()`. One that comes
after its bucket was sent is refused, never dropped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from syncline.comm.base import Communicator, exchange_bytes, small_sum
from syncline.comm.control import Control
from syncline.comm.hub import ALONE, NUM_CHANNELS, PATIENT
from syncline.comm.tree import LeafPlan
from syncline.engine.bucket import (
    Bucket,
    Slot,
    Step,
    add_gradient,
    choose_bucket_bytes,
    cut_buckets,
    cut_strips,
    place,
    view_of,
)
from syncline.engine.buffers import Buffers, flat_buffers, load_flat_buffers
from syncline.engine.clip import Norm
from syncline.engine.early import EarlyUpdates, why_not_early
from syncline.engine.lane import Lane
from syncline.engine.parameters import (
    GradientTaken,
    Guarded,
    InFlight,
    become,
    raw_grad,
    take_grad,
    version_of,
    waiters,
)
from syncline.engine.state import State
from syncline.engine.update import (
    Hyper,
    Reach,
    StripUpdate,
    find_reach,
    group_numbers,
    idle_copy,
    snapshot,
)
from syncline.errors import RankFailed, UsageError
from syncline.perf.trace import Recorder

if TYPE_CHECKING:
    from syncline.strategies.base import Strategy

log = logging.getLogger("syncline")

INLINE_BYTES = 1 << 20
"""Below this size handing work to another thread costs more than it can hide."""


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
        *,
        shards: int | None = None,
        bucket_bytes: int | None = None,
        overlap: bool | None = None,
        accumulate: int = 1,
        private_parameters: bool = False,
        early: bool = True,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.comm = comm
        self.shards = shards or strategy.num_workers(comm.size)
        self.step_number = 0
        self.waited_s = 0.0
        """Time the compute lane has spent waiting for the comm lane: exposed communication."""
        self._recorder: Recorder | None = None
        self._moment_handles: list[Any] = []
        self.buckets: list[Bucket] = []
        self._control = control
        self._note: Callable[..., None] = lambda *where: None
        if control is not None:
            self._note = control.progress.write
        self._lane = lane
        self._accumulate = accumulate
        self._private_parameters = private_parameters
        self._is_built = False
        self._bucket_bytes = bucket_bytes
        self._order: list[Slot] = []
        self._pending_state: State | None = None

        strategy.check(comm.size, self.shards)
        if strategy.is_taken:
            raise UsageError(
                "this strategy object drives another model already, and keeps state for it. Make "
                "one for each distribute()."
            )
        strategy.is_taken = True
        self.slots = self._find_parameters()
        self._parameters = [slot.parameter for slot in self.slots]
        self._slot_of = {id(slot.parameter): slot for slot in self.slots}
        self.reach = find_reach(optimizer)
        self._idle_optimizer = idle_copy(optimizer)
        total_bytes = sum(s.num_elements * s.parameter.dtype.itemsize for s in self.slots)
        self.overlap = total_bytes >= INLINE_BYTES if overlap is None else overlap
        # Without overlap several buckets would only mean several meetings.
        self.bucket_bytes = bucket_bytes or (
            choose_bucket_bytes(total_bytes) if self.overlap else max(2 * total_bytes, 1)
        )

        share = strategy.share(comm, self.shards)
        self.group, self.my_shards, self._summed = share.group, share.mine, share.summed
        self.spread, self._leaves = share.spread, share.leaves
        # Every rank maps every other's slots, so all have as many as the one that needs most.
        self._num_slots = self.spread.num_slots
        self._shard = self._first_shard
        self._is_shard_closed = False
        self._is_sent = False
        self._entered_step = -1
        self._next_send = 0
        self._told = [0.0] * len(self._summed)
        self._scale = 1.0 / len(self._summed)
        self._without: set[int] = set()
        self._is_spoilt = False
        self._is_loaded = False
        """Whether parameters were loaded after the first step."""
        self._is_in_whole = False
        self._versions: list[int] = []
        self._no_grad = torch.no_grad()  # made once: that costs more than to enter it

        self._early = EarlyUpdates(
            why_not_early(optimizer, self.group, overlap=self.overlap, private=private_parameters)
            if early
            else "early=False"
        )

        self._broadcast_start()
        self.buffers = Buffers(model, self.group, self.spread, self._num_slots)
        self._note_versions()
        self._handles = [*self._hook_state(), *self._hook_optimizer()]
        self._gradient_handles = list(self._hook_parameters())
        self._use_handles = list(self._hook_modules())
        lane.wake_on_failure(self._wake)
        for slot in self.slots:
            become(slot.parameter, InFlight)  # the first touch tells the order of use

    # Recording.

    @property
    def recorder(self) -> Recorder | None:
        """Who is told of tasks, from when it is set. None ends it.

        The compute lane's are told from the next forward on, and only where the exchange is
        overlapped: inline there are no hooks by which to tell one bucket from the next.
        """
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        for handle in self._moment_handles:
            handle.remove()
        self._moment_handles = []
        self._recorder = recorder
        if recorder is None or not self.overlap:
            return

        def begin_forward(*_: Any) -> None:
            if torch.is_grad_enabled():  # otherwise it is no part of a step
                recorder.begin_forward()

        def turn(*_: Any) -> None:
            if torch.is_grad_enabled():
                recorder.turn()

        self._moment_handles = [
            self.model.register_forward_pre_hook(begin_forward, prepend=True),
            self.model.register_forward_hook(turn),
        ]

    # Set-up.

    @property
    def _rank(self) -> int:
        return self.comm.ranks[self.comm.position]

    @property
    def _gone(self) -> dict[int, RankFailed]:
        return {} if self._control is None else self._control.gone

    @property
    def _root(self) -> nn.Module:
        """The user's module, also where the model is its compiled form."""
        return getattr(self.model, "_orig_mod", self.model)

    @property
    def _is_on_one_machine(self) -> bool:
        return self._control is not None and len(self._control.place.leaders) == 1

    def _find_parameters(self) -> list[Slot]:
        """Return a slot for every parameter to be trained; refuse what cannot be right."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        for parameter in held:
            if id(parameter) not in names:
                raise UsageError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have: it would be updated on each rank alone. Make it part of "
                    "the model."
                )
        for module in self.model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                raise UsageError(
                    "Embedding(max_norm=...) rewrites its weights during forward, but ranks of a "
                    "machine share one copy. Normalise the looked-up vectors instead."
                )
        trained = {id(p) for p in held if p.requires_grad}
        order = [p for p in self.model.parameters() if id(p) in trained]
        if not order:
            raise UsageError("the optimizer holds no parameter that needs a gradient")
        for parameter in order:
            if parameter.device.type != "cpu" and self.comm.name == "shared memory":
                raise UsageError("parameters on a GPU need comm='network'")
        self._frozen = [p for p in held if id(p) not in trained]
        self._num_held = [len(group["params"]) for group in self.optimizer.param_groups]
        self._group_of = group_numbers(self.optimizer)
        return [
            Slot(names[id(p)], p, number, expected=self._accumulate)
            for number, p in enumerate(order)
        ]

    def _broadcast_start(self) -> None:
        """Start from rank 0's parameters and buffers, whatever the others have."""
        root = self.comm.ranks.index(min(self.comm.ranks))
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                source = tensor.detach()
                flat = source.contiguous()
                self._lane.call(self.comm.broadcast, flat, root)
                if flat.data_ptr() != source.data_ptr():
                    source.copy_(flat)

    def _hook_parameters(self) -> Iterator[Any]:
        for slot in self.slots:
            waiters.set(slot.parameter, self._make_wait(slot))
            hook = self._make_hook(slot)
            yield slot.parameter.register_post_accumulate_grad_hook(hook)

    def _make_wait(self, slot: Slot) -> Callable[[], None]:
        def wait() -> None:
            if slot.bucket is None:
                self._first_use(slot)
            elif slot.bucket.is_in_flight:
                self._await(slot.bucket)
            else:
                become(slot.parameter, Parameter)

        return wait

    def _first_use(self, slot: Slot) -> None:
        self._order.append(slot)
        become(slot.parameter, Parameter)

    def _hook_modules(self) -> Iterator[Any]:
        whole = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
        compiled = getattr(self.model, "_orig_mod", None)
        if compiled is not None:
            # Hooks inside would be traced: one in front of the compiled module waits for all.
            yield self.model.register_forward_pre_hook(lambda module, args: self.synchronize())
        else:
            for module in self.model.modules():
                owns = [*module.parameters(recurse=isinstance(module, whole))]
                slots = [self._slot_of[id(p)] for p in owns if id(p) in self._slot_of]
                keeps_buffers = any(True for _ in module.buffers(recurse=False))
                if slots or keeps_buffers:
                    yield module.register_forward_pre_hook(self._make_pre_hook(slots))

    def _hook_state(self) -> Iterator[Any]:
        root = self._root
        yield root.register_state_dict_pre_hook(lambda *_: self.synchronize())
        yield root.register_load_state_dict_pre_hook(lambda *_: self.synchronize())
        yield root.register_load_state_dict_post_hook(lambda *_: self._after_load())

    def _make_pre_hook(self, slots: list[Slot]) -> Callable[..., None]:
        buckets: list[Bucket] | None = None

        def before_forward(module: nn.Module, args: Any) -> None:
            nonlocal buckets
            if buckets is None:
                if not self._is_built:
                    for slot in slots:
                        if type(slot.parameter) is InFlight:
                            self._first_use(slot)
                    return
                mine = {slot.bucket.index: slot.bucket for slot in slots if slot.bucket}
                # A module with buffers alone waits for the step's first bucket: buffers are in
                # place before it.
                buckets = list(mine.values()) or self.buckets[:1]
            for bucket in buckets:
                if bucket.is_in_flight:
                    self._await(bucket)
                if self._recorder is not None:
                    self._recorder.reach(bucket.index, bucket.step)

        return before_forward

    def _hook_optimizer(self) -> Iterator[Any]:
        yield self.optimizer.register_step_pre_hook(self._before_step)
        yield self.optimizer.register_state_dict_pre_hook(self._before_optimizer_state)
        yield self.optimizer.register_load_state_dict_post_hook(self._after_optimizer_load)

    @property
    def _first_shard(self) -> int:
        return self.my_shards[0] if self.my_shards else 0

    def serve(self) -> None:
        """Be there for others, on a rank that has no shards of its own."""
        if not self._is_built:
            with torch.no_grad():
                self._build()

    def serve_to_the_end(self) -> None:
        """Serve until every rank that computes has left."""
        self.serve()
        self._lane.call(self.strategy.serve_workers)
        self.check_workers()

    def check_workers(self) -> None:
        """Give up if every rank that computes is gone."""
        gone = self._gone
        workers = range(self.strategy.num_workers(self.comm.size))
        if all(rank in gone for rank in workers):
            raise gone[workers[-1]]

    # Building, once.

    def _build(self) -> None:
        """Lay out buckets in the order of first use and start the strategy. Every rank calls it."""
        if self._recorder is not None:
            self._recorder.lose()
        if self.overlap or self.group is not self.comm:
            # Ranks of other groups may ask this one for something at any time.
            self._lane.start_thread()
        self._lane.drain()
        used = {slot.number for slot in self.slots if slot.fired}
        seen = dict.fromkeys(slot.number for slot in self._order if slot.number in used)
        order = [*seen, *(number for number in sorted(used) if number not in seen)]
        idle = [slot.number for slot in self.slots if slot.number not in used]
        mine = msgspec.json.encode([order, idle, os.cpu_count() or 1])
        everybody = self._lane.call(exchange_bytes, self.comm, mine)
        told = everybody[self.comm.ranks.index(min(self.comm.ranks))]
        layout = tuple[list[int], list[int], int]
        order, idle, self._num_cores = msgspec.json.decode(told, type=layout)
        self._ordered = [self.slots[number] for number in order]
        self._idle = [self.slots[number] for number in idle]
        self._without = set(idle)
        # A bucket of parameters without use is sent last, so that it holds up no other.
        may_lose = self.strategy.may_lose(self.comm.size)
        if may_lose and self._control is not None and self._is_on_one_machine:
            self._control.tolerate(may_lose)
        self._lane.call(self._lay_out)
        self._lane.call(self.strategy.start, self, self.comm)
        self._is_built = True
        for bucket in self.buckets:
            bucket.step = self.step_number
        for slot in self.slots:
            become(slot.parameter, GradientTaken if slot.fired else Parameter)
            slot.expected = max(slot.expected, slot.fired)
        if self._pending_state is not None:
            self.load_optimizer_state(self._pending_state)
            self._pending_state = None
        else:
            self._adopt_optimizer_state()
        self._lane.call(self.strategy.admit)
        if not self.overlap:
            # Parameters are up to date when step() returns, and step() takes the gradients: there
            # is nothing to wait for in forward and nothing to do in backward.
            for handle in [*self._use_handles, *self._gradient_handles]:
                handle.remove()
            self._use_handles, self._gradient_handles = [], []
            for slot in self.slots:
                become(slot.parameter, Guarded)
        for line in self.describe():
            log.info("%s", line)

    def _lay_out(self) -> None:
        """Put parameters and gradients into the group's memory, one strip per position.

        What a rank has for itself lies in memory that its peers outside the group can reach.
        """
        comm = self.group
        used = cut_buckets(self._ordered, self.bucket_bytes)
        idle = cut_buckets(self._idle, self.bucket_bytes, len(used))
        self.buckets = used + idle
        self._send_order = [*reversed(used), *idle]
        is_private = self._private_parameters or comm is not self.comm
        allocate = self.comm.allocate
        for bucket in self.buckets:
            size = (bucket.num_elements, bucket.dtype)
            memory = allocate(*size) if is_private else comm.allocate_common(*size)
            slots = [allocate(*size) for _ in range(self._num_slots)]
            place(
                bucket, memory, slots, self.cut(bucket, comm, self._num_owners(comm)), self.spread
            )
        self._early.prepare(used, comm)
        for bucket in self.buckets:
            memory = bucket.parameters.memory
            writes = not memory.is_common or comm.size == 1 or self._writes_common(comm)
            for slot in bucket.slots:
                if writes:
                    view_of(memory.mine, slot).copy_(slot.parameter.detach())
                read = bucket.in_use or bucket.parameters
                slot.parameter.data = view_of(read.memory.mine, slot)
            if bucket.in_use is not None:
                bucket.in_use.memory.mine.copy_(memory.mine)
        comm.barrier()
        for bucket in self.buckets:
            low, high = bucket.parameters.cuts[comm.position : comm.position + 2]
            mine = (bucket.parameters.memory.mine, bucket.gradient.slots[0].mine)
            bucket.update = self.update_of(bucket, *mine, low, high)
            bucket.untaken = len(bucket.slots)
            self._choose_channels(bucket, comm.num_channels)
        self._make_flags(comm)
        self._norm: Norm | None = None

    def update_of(
        self, bucket: Bucket, parameters: torch.Tensor, gradient: torch.Tensor, low: int, high: int
    ) -> StripUpdate:
        """Make the user's optimizer for elements `low` to `high` of memory laid out as a bucket."""
        memory = (parameters, gradient)
        return StripUpdate(
            self.optimizer, bucket, memory, low, high, self.reach, self._group_number
        )

    def cut(self, bucket: Bucket, comm: Communicator, num_owners: int) -> tuple[int, ...]:
        """Cut a bucket into strips that the optimizer can update one by one."""
        inside = self.reach is not Reach.PARAMETER
        return cut_strips(bucket, comm.size, inside_parameters=inside, num_owners=num_owners)

    def _choose_channels(self, bucket: Bucket, num_channels: int) -> None:
        """Give a bucket's hooks channels for good; buckets that are neighbours have others."""
        if num_channels > 1:
            bucket.channel = bucket.gather_channel = 1 + bucket.index % (num_channels - 1)
        if bucket.in_use is not None:
            # A gather that may take long holds up no other bucket's hooks.
            bucket.gather_channel = NUM_CHANNELS + bucket.index

    @property
    def _step_channel(self) -> int:
        return ALONE if self.group.num_channels == 1 else 0

    def _num_owners(self, comm: Communicator) -> int:
        """Say over how many ranks the update is spread."""
        if self.overlap:
            return comm.size
        # Small strips cost calls rather than arithmetic: more of them than a machine has cores
        # would only take longer.
        return comm.num_machines * min(comm.size // comm.num_machines, self._num_cores)

    def _writes_common(self, comm: Communicator) -> bool:
        """Say whether this rank fills the machine's common memory at the start."""
        return self._control is None or self._control.place.local_rank == 0

    def _group_number(self, slot: Slot) -> int:
        return self._group_of[id(slot.parameter)]

    def _make_flags(self, comm: Communicator) -> None:
        self._flags = small_sum(comm, len(self.slots) + 3 + len(self._summed), torch.float32)
        self._flags_view = self._flags.slots[0].mine.numpy()

    def describe(self) -> list[str]:
        """Say what was chosen, for people."""
        total = sum(bucket.size_bytes for bucket in self.buckets)
        largest = max((bucket.size_bytes for bucket in self.buckets), default=0)
        how = "overlapped on the comm lane" if self.overlap else "inline, nothing to hide behind"
        lines = [
            f"{self.comm.size} rank{'s' if self.comm.size > 1 else ''}, {self.shards} shards, "
            f"{self.comm.name}; exchange {how}",
            f"{total / 1e6:.1f} MB of parameters in {len(self.buckets)} buckets, "
            f"the largest {largest / 1e6:.1f} MB (bucket_bytes {self.bucket_bytes}); "
            f"optimizer updates {self.reach.value}",
        ]
        lines += self.strategy.describe()
        if self.comm.num_machines > 1 and not self.strategy.is_apart:
            why_not = self._early.why_not
            lines.append(
                "updates are not taken early: " + why_not
                if why_not
                else "half of the updates are taken early if that turns out to pay"
            )
        return lines

    # Backward.

    def _make_hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        def gradient_arrived(parameter: torch.Tensor) -> None:
            if slot.is_taken or self._is_sent:
                raise UsageError(
                    f"parameter {slot.name} got another gradient after its gradient was taken: "
                    "this step runs more backward passes than any before it. Tell "
                    f"distribute(..., accumulate={slot.fired + 1}) how many there can be."
                )
            slot.fired += 1
            gradient = raw_grad(parameter)
            assert gradient is not None
            _check_gradient(slot, gradient)
            if slot.fired >= slot.expected and self._is_built:
                self._take(slot, take_grad(parameter), self._leaves[self._shard_order])
                become(slot.parameter, GradientTaken)
                if self.overlap and self._shard == self.my_shards[-1]:
                    self._send_ready()
            else:
                become(slot.parameter, GradientTaken)

        return gradient_arrived

    def _take(self, slot: Slot, gradient: torch.Tensor | None, plan: LeafPlan) -> None:
        """Move a gradient into flat memory and add it to the rank's partial sums."""
        bucket = slot.bucket
        assert bucket is not None
        if bucket.is_in_flight:
            # No forward has read this bucket since the last step, so nobody has waited for it:
            # its last update may still be reading the gradient.
            self._await(bucket)
        add_gradient(slot, plan, gradient, self._scale)
        slot.is_taken = True
        bucket.untaken -= 1
        if self._recorder is not None and not bucket.untaken:
            self._recorder.leave(bucket.index, bucket.step)

    def _send_ready(self) -> None:
        """Give the comm lane every bucket whose turn has come, in the one fixed order."""
        while self._next_send < len(self._send_order):
            bucket = self._send_order[self._next_send]
            if bucket.untaken:
                return
            self._next_send += 1
            bucket.is_reduced = False
            self._lane.submit(self._run_gradient_ready, bucket, channel=bucket.channel)
            if self._early.takes(bucket):
                self._lane.submit(
                    self._run_early,
                    bucket,
                    self._early.hyper(self.optimizer),
                    channel=bucket.gather_channel,
                    urgency=PATIENT + bucket.index,
                )

    def _close_shard(self) -> None:
        """Take what autograd has left of this shard's gradients."""
        if self._is_shard_closed:
            return
        self._is_shard_closed = True
        if not self._is_built:
            self._build()
        plan = self._leaves[self._shard_order]
        for slot in self.slots:
            if not slot.is_taken:
                gradient = take_grad(slot.parameter)
                if gradient is not None and not slot.fired:
                    _check_gradient(slot, gradient)
                    slot.fired = 1
                self._take(slot, gradient, plan)
            if slot.fired:
                slot.has_gradient = True
                if slot.fired > slot.expected:
                    slot.expected = slot.fired
        self.buffers.end_shard(self._shard_order, plan)

    def begin_shard(self, shard: int) -> None:
        """Say which shard the next forward and backward belong to. The first may go unsaid."""
        if shard not in self.my_shards:
            raise UsageError(
                f"shard {shard} is not one of rank {self._rank}'s: {list(self.my_shards)}"
            )
        if shard == self._shard and not self._is_shard_closed:
            return
        if shard != self._shard + 1:
            raise UsageError(f"shard {shard} was begun after shard {self._shard}: go in order")
        with torch.no_grad():
            self._close_shard()
            self._open_shard(shard)
            self.buffers.begin_shard()

    def tell_loss(self, loss: float) -> None:
        """Send this shard's loss along with the step: `losses` holds all of them afterwards."""
        self._told[self._shard_order] = loss

    @property
    def losses(self) -> list[float]:
        """The losses told in the last step, by shard. Known once forward has begun again."""
        return self._flags.result[-len(self._summed) :].tolist()

    @property
    def _shard_order(self) -> int:
        """The present shard's place among those that are added up."""
        return self._shard - self._summed[0]

    def _open_shard(self, shard: int) -> None:
        self._shard = shard
        self._is_shard_closed = False
        for slot in self.slots:
            slot.fired = 0
            slot.is_taken = False
        for bucket in self.buckets:
            bucket.untaken = len(bucket.slots)

    def _finish_backward(self) -> None:
        """Close the last shard and send every bucket that is not on its way yet."""
        if self._is_sent:
            return
        self._close_backward()
        self._send_ready()
        assert self._next_send == len(self._send_order)
        self._is_sent = True

    def _close_backward(self) -> None:
        """Close the last shard; refuse a step whose shards are not all done."""
        if not self.my_shards:
            raise UsageError(
                f"rank {self._rank} serves the others and takes no steps of its own. Loop over "
                "syncline.shard(loader): it yields no batch here, and ends when the others have."
            )
        if self._shard != self.my_shards[-1]:
            raise UsageError(
                f"step() came after {self._shard - self.my_shards[0] + 1} of this rank's "
                f"{len(self.my_shards)} shards. With shards={self.shards} on {self.comm.size} "
                "ranks, loop over `for step in syncline.shards(loader)` and its shards."
            )
        self._close_shard()

    # Step.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Runs in place of the optimizer's own step, which is left with nothing to do."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        instead: dict[str, Any] = {}
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            instead["closure"] = lambda: loss
        self._lane.check()
        self._check_unchanged()
        if self._is_sent and any(raw_grad(slot.parameter) is not None for slot in self.slots):
            raise UsageError("backward() ran again after the gradients were clipped. Clip last.")
        with self._no_grad:
            if self.overlap:
                self._begin_exchange()
            else:
                self._exchange_inline()
        # Writes by the lane or another rank raise no version counter by themselves.
        torch.autograd.graph.increment_version(self._parameters)
        self._versions = [version + 1 for version in self._versions]
        return (self._idle_optimizer,), instead

    def _begin_exchange(self) -> None:
        """Leave the step to the comm lane: parameters wait when they are used."""
        hyper = snapshot(self.optimizer)
        self._finish_backward()
        self._early.check(hyper)
        self._lane.submit(self._run_write_flags, self._new_flags(), channel=self._step_channel)
        self._submit_step(hyper)
        self._begin_next_step()
        for parameter in self._parameters:
            become(parameter, InFlight)

    def _exchange_inline(self) -> None:
        """Take the step here and now."""
        self._close_backward()
        started = time.perf_counter()
        # Nothing is on its way yet, so the small sums can travel with the gradients.
        self._lane.submit(self._run_publish, self._new_flags())
        self._finish_backward()
        self._submit_step(snapshot(self.optimizer))
        self._begin_next_step()
        self._lane.drain()
        self.waited_s += time.perf_counter() - started
        for bucket in self.buckets:
            bucket.is_in_flight = False

    def _submit_step(self, hyper: Hyper) -> None:
        """Give the comm lane what is left of the step."""
        entered = (self.step_number, self._early.spoilt_by)
        self._lane.submit(self._run_step_entered, *entered, channel=self._step_channel)
        for bucket in self.buckets:
            bucket.ready.clear()
            bucket.is_in_flight = True
            self._lane.submit(
                self._run_before_use,
                bucket,
                self.step_number,
                hyper,
                channel=bucket.gather_channel,
                urgency=1 + bucket.index,  # what forward reads first is sent first
            )

    def _check_unchanged(self) -> None:
        versions = [version_of(parameter) for parameter in self._parameters]
        is_own = self._private_parameters or self.strategy.keeps_own
        if versions != self._versions and not is_own:
            pairs = zip(self.slots, versions, self._versions, strict=True)
            name = next(slot.name for slot, now, then in pairs if now != then)
            raise UsageError(
                f"parameter {name} was changed in place outside the optimizer, but ranks of a "
                "machine share one copy, and servers hold another: changes would add up, or be "
                "lost. Change "
                "parameters before distribute(), load them with load_state_dict(), or use "
                "distribute(..., private_parameters=True)."
            )
        self._versions = versions
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    "a parameter that was frozen at distribute() now needs a gradient, and would "
                    "be updated on each rank alone. Unfreeze it before distribute()."
                )
        if self._is_in_whole:
            raise UsageError(
                "step() came inside whole(), whose values are put away at its end. Call it outside."
            )
        if self._is_loaded and self.strategy.is_apart and self.comm.size > 1:
            raise UsageError(
                "parameters were loaded after the first step, but into this rank's own model only, "
                "not into what the ranks hold together. Load them before the first step."
            )
        held = [len(group["params"]) for group in self.optimizer.param_groups]
        if held != self._num_held:
            raise UsageError(
                "the optimizer got new parameters after distribute(): they would be updated on "
                "each rank alone. Add parameter groups before distribute()."
            )

    def _after_load(self) -> None:
        """Take up parameters that were written from outside: by all ranks, with the same values."""
        self._note_versions()
        self._is_loaded = self._is_built and not self._is_in_whole
        self._take_back("parameters were loaded between backward and step()")
        for bucket in self.buckets:
            if bucket.in_use is not None:
                bucket.parameters.memory.mine.copy_(bucket.in_use.memory.mine)

    def _take_back(self, reason: str) -> None:
        """Undo this step's early updates, from the compute lane."""
        if self._next_send and self._early.why_not is None:
            self._lane.drain()
            self._early.spoil(reason)
            for bucket in self.buckets:
                self._early.undo(bucket, self.group.position)

    def _note_versions(self) -> None:
        self._versions = [version_of(parameter) for parameter in self._parameters]

    def _new_flags(self) -> list[float]:
        spoilt = self._early.spoilt_by is not None
        return [
            *[float(slot.has_gradient) for slot in self.slots],
            float(self.buffers.has_changed_others),
            float(spoilt),
            self._early.step_s(),
            *self._told,
        ]

    def _begin_next_step(self) -> None:
        self.step_number += 1
        if self._control is not None:
            self._control.progress.step = self.step_number
        self._is_sent = False
        self._next_send = 0
        self._early.begin_step()
        self._open_shard(self.my_shards[0])
        for slot in self.slots:
            slot.has_gradient = False

    # The comm lane.

    def _run_write_flags(self, flags: list[float]) -> None:
        # On the lane, in order: by now nobody reads the old flags any more.
        self._flags_view[:] = flags

    def _run_publish(self, flags: list[float]) -> None:
        self._flags_view[:] = flags
        self.group.publish(self._flags)
        if self.buffers.statistics is not None:
            self.group.publish(self.buffers.statistics)

    def _run_gradient_ready(self, bucket: Bucket) -> None:
        self._note("reduce", bucket.index)
        started = time.perf_counter()
        self.strategy.gradient_ready(bucket)
        bucket.is_reduced = True
        if self._recorder is not None:
            after = self._recorder.after(("backward", bucket.index))
            self._recorder.add("comm", "reduce", bucket.index, bucket.step, started, after)

    def _run_step_entered(self, number: int, spoilt_by: str | None) -> None:
        self._note("step")
        started = time.perf_counter()
        self.strategy.step_entered(Step(number, self._flags, self.buffers.statistics))
        flags = self._flags.result.tolist()[: -len(self._summed)]
        *has_gradient, has_changed_buffers, spoilt, step_s = flags
        without = {number for number, has in enumerate(has_gradient) if not has}
        self._is_spoilt = spoilt > 0 or without != self._without
        if self._is_spoilt:
            self._early.stop(
                spoilt_by
                or ("another rank's do not hold" if spoilt else "other parameters got gradients")
            )
        self._without = without
        self._early.decide(step_s)
        for _ in self.buffers.end_step(self.group, has_changed_buffers > 0):
            pass
        self._entered_step = number
        if self._recorder is not None:
            after = self._recorder.after(("backward", self._send_order[-1].index))
            self._recorder.add("comm", "step", -1, number, started, after)

    def _run_before_use(self, bucket: Bucket, number: int, hyper: Hyper) -> None:
        if not bucket.is_reduced or self._entered_step < number:
            self._lane.until(lambda: bucket.is_reduced and self._entered_step >= number)
        if self._is_spoilt:
            self._early.undo(bucket, self.group.position)
        if not bucket.is_early:
            bucket.update.leave_out(self._without)
            self._update(bucket, hyper, ("reduce", bucket.index), ("step", -1))
        bucket.is_early = False
        if bucket.in_use is not None:
            bucket.in_use.memory.mine.copy_(bucket.parameters.memory.mine)
        bucket.step += 1
        bucket.ready.set()

    def _run_early(self, bucket: Bucket, hyper: Hyper) -> None:
        self._lane.until(lambda: bucket.is_reduced)
        bucket.update.leave_out(self._without)
        bucket.update.keep()
        self._update(bucket, hyper, ("reduce", bucket.index))
        bucket.is_early = True

    def _update(self, bucket: Bucket, hyper: Hyper, *waited_for: tuple[str, int]) -> None:
        self._note("update", bucket.index)
        started = time.perf_counter()
        bucket.update.hyper = hyper
        self.strategy.before_use(bucket)
        if self._recorder is not None:
            after = self._recorder.after(*waited_for)
            self._recorder.add("comm", "gather", bucket.index, bucket.step, started, after)

    # Waiting.

    def _await(self, bucket: Bucket) -> None:
        """Wait, on the compute lane, until a bucket may be read."""
        if not bucket.ready.is_set():
            if self._recorder is not None:
                self._recorder.pause()
            started = time.perf_counter()
            bucket.ready.wait()
            self.waited_s += time.perf_counter() - started
            if self._recorder is not None:
                self._recorder.waited(bucket.index, bucket.step, started)
        self._lane.check()
        if self._recorder is not None:
            self._recorder.reach(bucket.index, bucket.step)
        bucket.is_in_flight = False
        for slot in bucket.slots:
            if type(slot.parameter) is InFlight:
                become(slot.parameter, Parameter)
        if bucket.in_use is not None and self._early.why_not is not None:
            self._early.give_back(bucket)

    def _wake(self) -> None:
        for bucket in self.buckets:
            bucket.ready.set()

    def synchronize(self) -> None:
        """Wait until every parameter and buffer is up to date."""
        self._lane.check()
        for bucket in self.buckets:
            if bucket.is_in_flight:
                self._await(bucket)

    # Clipping and dropping.

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the step's gradients so that their global norm is at most `max_norm`.

        Returns the norm before scaling. It is summed over fixed blocks in float64, so it is equal
        for any number of ranks; it may differ from torch's own in the last digits.
        """
        with torch.no_grad():
            self._finish_backward()
        self._early.spoil("gradients are clipped")
        total: list[torch.Tensor] = []
        self._lane.submit(self._run_clip, max_norm, total)
        started = time.perf_counter()
        self._lane.drain()
        self.waited_s += time.perf_counter() - started
        return total[0]

    def _run_clip(self, max_norm: float, total: list[torch.Tensor]) -> None:
        if self._norm is None:
            self._norm = Norm(self.slots, self.buckets, self.group)
        total.append(self._norm.clip(max_norm))

    def discard_gradients(self) -> None:
        """Drop this step's gradients. Call it on every rank, or on none."""
        with torch.no_grad():
            self._finish_backward()
        # Peers may still be adding up what was sent here; what they get, they drop as well.
        self._lane.drain()
        self._take_back("gradients were dropped")
        for bucket in self.buckets:
            self._lane.call(self.strategy.discard, bucket)
        self.step_number -= 1
        self._begin_next_step()
        for slot in self.slots:
            become(slot.parameter, Parameter if self.overlap else Guarded)

    # Optimizer state: spread over ranks, whole in checkpoints.

    def _before_optimizer_state(self, optimizer: Optimizer) -> None:
        if self._is_built and self.comm.size > 1:
            raise UsageError(
                "optimizer.state_dict() on one rank would hold that rank's strips only. Call "
                "syncline.optimizer_state(model) on every rank: it returns the whole state."
            )
        if self._is_built:
            whole = self.optimizer_state()
            for slot in self.slots:
                if slot.name in whole:
                    self.optimizer.state[slot.parameter] = whole[slot.name]

    def _after_optimizer_load(self, optimizer: Optimizer) -> None:
        self._adopt_optimizer_state()

    def _adopt_optimizer_state(self) -> None:
        """Spread state that the user's optimizer holds itself (loaded, or from before)."""
        if not self._is_built:
            return
        state = {
            slot.name: dict(self.optimizer.state[slot.parameter])
            for slot in self.slots
            if slot.parameter in self.optimizer.state
        }
        self.optimizer.state.clear()
        if state:
            self.load_optimizer_state(state)

    def load_optimizer_state(self, state: State) -> None:
        """Take the whole state, by parameter name; each rank keeps its strips. No collective."""
        if not self._is_built:
            self._pending_state = state
            return
        self.synchronize()
        self._take_back("optimizer state was loaded between backward and step()")
        self._lane.call(self._run_load_state, state)

    def _run_load_state(self, state: State) -> None:
        # On the lane: where others' gradients are served, no update may come in between.
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.name in state:
                    bucket.update.load_state(slot, state[slot.name])

    def optimizer_state(self, *, is_wanted: bool = True) -> State:
        """Return the whole optimizer state by parameter name. Every rank calls it.

        Where a rank does not want it, it may come out empty.
        """
        if not self._is_built:
            return self._pending_state or {}
        self.synchronize()
        self._take_back("optimizer state was asked for between backward and step()")
        gather = functools.partial(self.strategy.gather_state, is_wanted=is_wanted)
        return self._lane.call(gather, self, self.comm)

    # What stands for the run as a whole.

    def flat_buffers(self) -> torch.Tensor:
        """Return a copy of all buffers that hold numbers, flat."""
        return flat_buffers(self.model)

    def load_own(self, values: dict[str, torch.Tensor]) -> None:
        """Give this rank parameters and buffers of its own, before the first step."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        # Without waiting: a wait before the first step is taken for the first use.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name, tensor in named:
                if name in values:  # buffers that are not kept are not there
                    tensor.copy_(values[name])
            self.buffers.begin_step()
        self._note_versions()

    @contextlib.contextmanager
    def whole(self, *, is_wanted: bool = True) -> Iterator[None]:
        """Put into the model, for a while, what stands for the run as a whole.

        That is this rank's own model, unless the strategy keeps one on every rank. Every rank calls
        it at the same step; those that do not want the values help others to get them.
        """
        self.synchronize()
        found = None
        if self.strategy.is_apart and self._is_built:
            if self._is_sent or any(slot.is_taken for slot in self.slots):
                raise UsageError(
                    "whole() came between backward() and step(), when gradients are on their way. "
                    "Call it after step()."
                )
            gather = functools.partial(self.strategy.gather, is_wanted=is_wanted)
            found = self._lane.call(gather)
            self._tell_who_left()
        if found is None:
            yield
            return
        memories = [bucket.parameters.memory.mine for bucket in self.buckets]
        kept, kept_buffers = [memory.clone() for memory in memories], self.flat_buffers()
        with torch.no_grad():
            self._put(memories, *found)
        was_in_whole, self._is_in_whole = self._is_in_whole, True
        try:
            yield
        finally:
            self._is_in_whole = was_in_whole
            with torch.no_grad():
                self._put(memories, kept, kept_buffers)

    def _tell_who_left(self) -> None:
        """Say which ranks are not part of the whole: they have ended without coming to it."""
        left = [rank for rank in self.strategy.missing() if rank not in self._gone]
        if left and self.my_shards:
            log.warning(
                "whole() is without rank%s %s, which left before. Call it on every rank.",
                "s" if len(left) > 1 else "",
                ", ".join(map(str, left)),
            )

    def warn_of_own(self) -> None:
        """Say, once, when a script takes for the whole what is this rank's own."""

        is_said = False

        def warn(*_: Any) -> None:
            nonlocal is_said
            if self._is_built and not self._is_in_whole and not is_said:
                is_said = True
                log.warning(
                    "state_dict() holds rank %d's own parameters. `with replica.whole():` around "
                    "it, on every rank, gives those that stand for the run.",
                    self._rank,
                )

        if self.strategy.is_apart and self.comm.size > 1:
            self._handles.append(self._root.register_state_dict_pre_hook(warn))

    def meet(self) -> None:
        """Wait for all ranks that are not gone, where ranks otherwise do not wait."""
        self._lane.call(self.strategy.meet)

    def stay_while_needed(self) -> None:
        """Before this rank leaves: serve the others, if they cannot go on without it."""
        if self._is_built:
            self._lane.call(self.strategy.stay)

    def _put(
        self, memories: list[torch.Tensor], values: list[torch.Tensor], buffers: torch.Tensor
    ) -> None:
        for memory, value in zip(memories, values, strict=True):
            memory.copy_(value)
        load_flat_buffers(self.model, buffers)

    def detach(self) -> None:
        """Take the hooks off; the model keeps its parameters, in memory of its own."""
        self.synchronize()
        self.recorder = None
        for handle in [*self._handles, *self._use_handles, *self._gradient_handles]:
            handle.remove()
        for slot in self.slots:
            become(slot.parameter, Parameter)
            slot.parameter.data = slot.parameter.detach().clone(memory_format=torch.preserve_format)


def _check_gradient(slot: Slot, gradient: torch.Tensor) -> None:
    """Refuse gradients that cannot be sent."""
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"parameter {slot.name} has a sparse gradient, but buckets are dense. Use sparse=False."
        )
    if gradient.requires_grad:
        raise UsageError(
            f"parameter {slot.name}: backward(create_graph=True) leaves a graph on the "
            "gradient, which cannot be sent to other ranks. Compute second derivatives "
            "with torch.autograd.grad and call backward() without it."
        )
