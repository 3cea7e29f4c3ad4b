"""What communicators between processes have in common: plans, the count of bytes, closing.

The first call with some memory prepares a plan for that memory; later calls look the plan up, count
its bytes and run it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from syncline.comm.base import Communicator, Memory, Partials, Strips, each_element_once
from syncline.comm.blocks import Blocks, Tensors, check_blocks
from syncline.comm.busy import BusyTime
from syncline.comm.context import Context
from syncline.comm.shape import Machines

if TYPE_CHECKING:
    from syncline.comm.network import Network
    from syncline.comm.window import Functions, Window


class Prepared(NamedTuple):
    """A collective, ready to run."""

    run: Callable[[str], None]
    """Takes the name of the operation, for error messages."""
    num_bytes: int
    """The bytes that this rank hands to its peers."""


class RealCommunicator(ABC):
    """Collectives of real processes. A subclass prepares each; this class counts and runs it."""

    name: str
    position: int
    size: int
    ranks: tuple[int, ...]
    machines: Machines
    num_machines: int
    num_channels: int
    leaders_busy: BusyTime | None = None

    def __init__(self, context: Context) -> None:
        self.context = context
        self.hub = context.hub
        self.traffic = context.traffic
        self._is_part = False
        self._is_closed = False

    # Every step calls these three. They are written out to save a function call each.

    def reduce_scatter(self, partials: Partials) -> None:
        plan = partials.plans.get("reduce_scatter")
        if plan is None:
            plan = partials.plans["reduce_scatter"] = self.plan_reduce_scatter(partials)
        self.traffic.add(self.hub.channel, "reduce_scatter", plan.num_bytes)
        plan.run("reduce_scatter")

    def all_gather(self, strips: Strips) -> None:
        plan = strips.plans.get("all_gather")
        if plan is None:
            plan = strips.plans["all_gather"] = self.plan_all_gather(strips)
        self.traffic.add(self.hub.channel, "all_gather", plan.num_bytes)
        plan.run("all_gather")

    def all_reduce(self, partials: Partials) -> None:
        plan = partials.plans.get("all_reduce")
        if plan is None:
            plan = partials.plans["all_reduce"] = self.plan_all_reduce(partials)
        self.traffic.add(self.hub.channel, "all_reduce", plan.num_bytes)
        plan.run("all_reduce")

    def reduce(self, partials: Partials, root: int) -> None:
        plan = self.plan_reduce(partials, root)
        self.traffic.add(self.hub.channel, "reduce", plan.num_bytes)
        plan.run("reduce")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        tensor = each_element_once(tensor.detach())
        whole = tensor.contiguous()
        num_bytes = self.copy_from(whole.as_strided((whole.numel(),), (1,)), root)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)
        self.traffic.add(self.hub.channel, "broadcast", num_bytes)

    def all_to_all(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        check_blocks(sends, receives, blocks, self.position, self.size)
        self.traffic.add(self.hub.channel, "all_to_all", blocks.sent_by(self.position))
        self.exchange_blocks(sends, receives, blocks)

    def barrier(self) -> None:
        self.traffic.add(self.hub.channel, "barrier", 0)
        self.meet("barrier")

    @abstractmethod
    def plan_reduce_scatter(self, partials: Partials) -> Prepared: ...

    @abstractmethod
    def plan_all_gather(self, strips: Strips) -> Prepared: ...

    @abstractmethod
    def plan_all_reduce(self, partials: Partials) -> Prepared: ...

    @abstractmethod
    def plan_reduce(self, partials: Partials, root: int) -> Prepared: ...

    @abstractmethod
    def copy_from(self, tensor: torch.Tensor, root: int) -> int:
        """Copy the root's flat tensor to all; return how many bytes this rank handed over."""

    @abstractmethod
    def exchange_blocks(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        """Do an `all_to_all` whose tensors are checked and whose bytes are counted."""

    @abstractmethod
    def meet(self, what: str) -> None:
        """Return when every rank has called it, on this channel."""

    @abstractmethod
    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory: ...

    @abstractmethod
    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory: ...

    @abstractmethod
    def announce(self, partials: Partials) -> None: ...

    @abstractmethod
    def end_lending(self) -> None: ...

    @abstractmethod
    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window: ...

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Communicator | None: ...

    def messages(self) -> Network | None:
        """Return a communicator of the same ranks over the network; None if there is none."""
        return None

    def adopt(self, subgroup: RealCommunicator) -> None:
        """Let the world's communicator close a subgroup, if nothing closes it earlier."""
        subgroup._is_part = True
        self.context.keep(subgroup)

    def close(self) -> None:
        """Free what belongs to this communicator; the world's closes open subgroups first."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_part:
            self.context.forget(self)
        else:
            self.context.close_subgroups()
        self.release()

    @abstractmethod
    def release(self) -> None:
        """Free memory, doorbells and connections."""


def plan_in_two_halves(comm: RealCommunicator, partials: Partials) -> Prepared:
    """Return an all-reduce as a reduce-scatter and an all-gather, whatever its size."""
    gather = comm.plan_all_gather(partials.gathered)
    both = join_plans(comm.plan_reduce_scatter(partials), gather)
    if not partials.is_small:
        return both

    def run(what: str) -> None:
        both.run(what)
        partials.result.copy_(partials.sums[0].mine)
        comm.traffic.spent("copy")

    return Prepared(run, both.num_bytes)


def join_plans(*plans: Prepared) -> Prepared:
    """Return one plan that runs several in order."""

    def run(what: str) -> None:
        for plan in plans:
            plan.run(what)

    return Prepared(run, sum(plan.num_bytes for plan in plans))
