"""Refuses, with a reason, what cannot be right on many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from syncline.contract import Plan
from syncline.engine.bucket import Slot
from syncline.engine.parameters import version_of
from syncline.errors import UsageError


class Found(NamedTuple):
    """A model's parameters, as the optimizer holds them."""

    slots: list[Slot]
    frozen: list[Parameter]
    """Parameters that the optimizer holds, but that need no gradient."""


def refuse_devices(model: nn.Module) -> None:
    """Refuse a model with a parameter or a buffer that is not in the CPU's memory."""
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            if tensor.device.type != "cpu":
                raise UsageError(
                    f"{kind} {name} is on the device {tensor.device}, but this version trains "
                    "models in the memory of the CPU only. Call model.cpu() before the optimizer "
                    "is made and before distribute(), or train on devices with torch's "
                    "DistributedDataParallel."
                )


def find_parameters(model: nn.Module, optimizer: Optimizer, accumulate: int) -> Found:
    """Return a slot for every parameter to be trained; refuse what cannot be right."""
    refuse_devices(model)
    names = {id(p): name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in held:
        if id(parameter) not in names:
            raise UsageError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the "
                "model does not have: it would be updated on each rank alone. Make it part of "
                "the model."
            )
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UsageError(
                "Embedding(max_norm=...) rewrites its weights during forward, but ranks of a "
                "machine share one copy. Normalise the looked-up vectors instead."
            )
    trained = {id(p) for p in held if p.requires_grad}
    order = [p for p in model.parameters() if id(p) in trained]
    if not order:
        raise UsageError("the optimizer holds no parameter that needs a gradient")
    slots = [Slot(names[id(p)], p, number, expected=accumulate) for number, p in enumerate(order)]
    return Found(slots, [p for p in held if id(p) not in trained])


def check_gradient(slot: Slot, gradient: torch.Tensor) -> None:
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


class ChangesOutside:
    """Refuses changes of parameters outside the optimizer between two steps."""

    def __init__(self, found: Found, optimizer: Optimizer, *, may_change_parameters: bool) -> None:
        self._slots = found.slots
        self._parameters = [slot.parameter for slot in found.slots]
        self._frozen = found.frozen
        self._optimizer = optimizer
        self._num_held = [len(group["params"]) for group in optimizer.param_groups]
        self.may_change_parameters = may_change_parameters
        self._versions: list[int] = []
        self.note()

    def note(self) -> None:
        """Accept the parameters as they are now."""
        self._versions = [version_of(parameter) for parameter in self._parameters]

    def raise_versions(self) -> None:
        """Raise autograd's version counters after a step: the lane and other ranks do not."""
        torch.autograd.graph.increment_version(self._parameters)
        self._versions = [version + 1 for version in self._versions]

    def check(self) -> None:
        """Raise if something has changed since the last step."""
        versions = [version_of(parameter) for parameter in self._parameters]
        if versions != self._versions and not self.may_change_parameters:
            pairs = zip(self._slots, versions, self._versions, strict=True)
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
        held = [len(group["params"]) for group in self._optimizer.param_groups]
        if held != self._num_held:
            raise UsageError(
                "the optimizer got new parameters after distribute(): they would be updated on "
                "each rank alone. Add parameter groups before distribute()."
            )


def refuse_incomplete_step(plan: Plan, done: int, of: int) -> UsageError:
    """Return the error for a step before all of a rank's shards are done."""
    shards, ranks = sum(map(len, plan.shards)), len(plan.shards)
    return UsageError(
        f"step() came after {done} of this rank's {of} shards. With shards={shards} on {ranks} "
        "ranks, loop over `for step in syncline.shards(loader)` and its shards."
    )


def refuse_steps_of_server(rank: int) -> UsageError:
    """Return the error for a step on a rank that only serves others."""
    return UsageError(
        f"rank {rank} serves the others and takes no steps of its own. Loop over "
        "syncline.shard(loader): it yields no batch here, and ends when the others have."
    )


def refuse_other_gradient(name: str, num_gradients: int) -> UsageError:
    """Return the error for a gradient that comes after the parameter's gradient was taken."""
    return UsageError(
        f"parameter {name} got another gradient after its gradient was taken: this step runs more "
        f"backward passes than any before it. Tell distribute(..., accumulate={num_gradients}) how "
        "many there can be."
    )


def check_shard_order(shard: int, mine: Sequence[int], present: int, rank: int) -> None:
    """Refuse a shard that is another rank's, or out of order."""
    if shard not in mine:
        raise UsageError(f"shard {shard} is not one of rank {rank}'s: {list(mine)}")
    if shard != present + 1:
        raise UsageError(f"shard {shard} was begun after shard {present}: go in order")
