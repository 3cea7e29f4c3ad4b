"""What communicators between processes have in common: plans, the count of bytes, closing.

The first call with some memory prepares a plan for that memory; later calls look the plan up, count
its bytes and run it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from syncline.comm.base import Partials, Strips, each_element_once
from syncline.comm.context import Context


class Prepared(NamedTuple):
    """A collective, ready to run."""

    run: Callable[[str], None]
    """Takes the name of the operation, for error messages."""
    num_bytes: int
    """The bytes that this rank hands to its peers."""


class RealCommunicator(ABC):
    """Collectives of real processes. A subclass prepares each; this class counts and runs it."""

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
    def meet(self, what: str) -> None:
        """Return when every rank has called it, on this channel."""

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


def join_plans(*plans: Prepared) -> Prepared:
    """Return one plan that runs several in order."""

    def run(what: str) -> None:
        for plan in plans:
            plan.run(what)

    return Prepared(run, sum(plan.num_bytes for plan in plans))
