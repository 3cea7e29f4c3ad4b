"""Refuses, with a reason, what cannot be right on many ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from syncline.comm.base import each_element_once
from syncline.contract import Plan
from syncline.engine.bucket import Slot, is_dense
from syncline.engine.parameters import is_plain_kind
from syncline.errors import UsageError


class Holder(Protocol):
    """What holds parameters and their optimizer: a replica."""

    slots: list[Slot]
    optimizer: Optimizer


def refuse_claimed(slots: Sequence[Slot], optimizer: Optimizer, others: Iterable[Holder]) -> None:
    """Refuse a model or an optimizer that was given to `distribute` already."""
    mine = {id(slot.parameter): slot.name for slot in slots}
    for other in others:
        shared = [mine[id(one.parameter)] for one in other.slots if id(one.parameter) in mine]
        if shared or other.optimizer is optimizer:
            what = f"parameter {shared[0]} was" if shared else "this optimizer was"
            raise UsageError(
                f"{what} given to distribute() already. Call it once for each model and its "
                "optimizer; to distribute anew, call replica.detach() on every rank first."
            )


def refuse_detached() -> UsageError:
    """Return the error for a loader whose replica was detached."""
    return UsageError(
        "this loader was made for a model that was detached since. Make it anew after "
        "distribute(): syncline.shards(loader)."
    )


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


def refuse_unknown_kinds(model: nn.Module) -> None:
    """Refuse modules and parameters that cannot be watched, or have no shape yet."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"module {name or type(module).__name__} was made by torch.jit, whose code reads "
                "parameters unseen, while they may be on their way. Use the module that it was "
                "made from, or torch.compile; a module that is not trained may stay outside the "
                "model."
            )
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            if torch.nn.parameter.is_lazy(tensor):
                raise UsageError(
                    f"{kind} {name} of a lazy module has no shape yet, but ranks lay out memory by "
                    "shapes. Call the model once on a batch before distribute()."
                )
            if kind == "buffer" and tensor.layout is not torch.strided:
                raise UsageError(
                    f"buffer {name} is sparse ({tensor.layout}), but ranks compare and exchange "
                    "dense buffers. Make it an attribute of the module that is no buffer, or dense."
                )


def refuse_subclass(slots: Sequence[Slot]) -> None:
    """Refuse parameters of a class of their own: a strip's optimizer would not see it."""
    for slot in slots:
        if not is_plain_kind(slot.parameter):
            raise UsageError(
                f"parameter {slot.name} is a {type(slot.parameter).__name__}, but ranks update "
                "strips of plain parameters, and what the class adds would be lost. Use "
                "torch.nn.Parameter."
            )


def refuse_shared_memory(model: nn.Module, slots: Sequence[Slot]) -> None:
    """Refuse a trained parameter whose memory is also that of another parameter or a buffer."""
    trained = {id(slot.parameter) for slot in slots}
    named = [*model.named_parameters(), *model.named_buffers()]
    begun: list[tuple[int, str, torch.Tensor]] = []
    """Tensors that begin before the present one, each with the end of its memory."""
    for start, name, tensor in sorted((t.data_ptr(), name, t) for name, t in named if t.numel()):
        begun = [other for other in begun if other[0] > start]
        for _, before, other in begun:
            is_trained = id(tensor) in trained or id(other) in trained
            if is_trained and _share_elements(other, tensor):
                raise UsageError(
                    f"{before} and {name} share memory, but are not one parameter: ranks would "
                    "give each memory of its own, and they would part. To tie them, assign the "
                    "parameter itself (a.weight = b.weight), not its .data; else clone one of them."
                )
        begun.append((start + _extent(tensor) * tensor.element_size(), name, tensor))


def _extent(tensor: torch.Tensor) -> int:
    """Return how many elements of memory a tensor covers, holes included."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((length - 1) * stride for length, stride in pairs)


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors whose ranges of memory overlap have elements in common."""
    if (is_dense(one) and is_dense(other)) or one.dtype != other.dtype:
        return True
    first = min(one.storage_offset(), other.storage_offset())
    ends = [tensor.storage_offset() - first + _extent(tensor) for tensor in (one, other)]
    covered = torch.zeros(max(ends), dtype=torch.bool)
    one_place, its_place = (
        covered.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first)
        for tensor in (one, other)
    )
    each_element_once(one_place).fill_(True)
    return bool(its_place.any())


def find_parameters(model: nn.Module, optimizer: Optimizer, accumulate: int) -> Found:
    """Return a slot for every parameter to be trained; refuse what cannot be right."""
    refuse_devices(model)
    refuse_unknown_kinds(model)
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
    refuse_subclass(slots)
    refuse_shared_memory(model, slots)
    return Found(slots, [p for p in held if id(p) not in trained])


def check_gradient(slot: Slot, gradient: torch.Tensor | None) -> None:
    """Refuse gradients that cannot be sent."""
    assert gradient is not None
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


def refuse_incomplete_step(plan: Plan, done: int, of: int) -> UsageError:
    """Return the error for dropping a step's gradients before all of a rank's shards are done."""
    shards, ranks = sum(map(len, plan.shards)), len(plan.shards)
    return UsageError(
        f"discard_gradients() came after {done} of this rank's {of} shards (shards={shards} on "
        f"{ranks} ranks), but it drops a whole step. Call it after the last shard: loop over `for "
        "step in syncline.shards(loader)` and its shards."
    )


def refuse_mixed_loop(done: int, of: int) -> UsageError:
    """Return the error for a loop that calls `step()` after some of a step's shards only."""
    return UsageError(
        f"step() came after some of this step's first {done + 1} batches only, but this rank has "
        f"{of} shards a step, and with more ranks each batch would be on a rank of its own. Call "
        "step() after every batch, or once after all shards of a step of syncline.shards(loader). "
        "To add up K batches for each shard, say so: syncline.shard(loader, accumulate=K)."
    )


def refuse_second_step() -> UsageError:
    """Return the error for two steps after one batch, in the middle of a step."""
    return UsageError(
        "step() came twice after one batch, but this rank has several shards a step, and each "
        "step() ends one. Call it once for each batch."
    )


def refuse_gradient_between_shards() -> UsageError:
    """Return the error for a backward pass over parameters that other ranks have updated."""
    return UsageError(
        "backward() ran after a step() that ended a shard, not the step: with more ranks the "
        "parameters would be updated by then. If a model's gradients depend on another's step, "
        "loop over `for step in syncline.shards(loader)`: first all shards for one model and its "
        "step(), then all shards for the other."
    )


def refuse_partial_discard(num_shards: int) -> UsageError:
    """Return the error for dropping the gradients of one shard out of several."""
    return UsageError(
        f"zero_grad() came between backward() and step(), on a rank with {num_shards} shards a "
        "step: this shard's gradients were already added to those of the shards before it. To drop "
        "the whole step, call syncline.discard_gradients(model) on every rank after the last shard."
    )


def refuse_schedule_before_step() -> UsageError:
    """Return the error for a scheduler that is advanced before the end of a shard."""
    return UsageError(
        "scheduler.step() came before optimizer.step() in the middle of a step: this rank has "
        "several shards a step, and the schedule would advance once for each. Call it after "
        "optimizer.step()."
    )


def refuse_change_in_step(slot: Slot, what: str) -> UsageError:
    """Return the error for a parameter that was changed between two shards of a step."""
    return UsageError(
        f"parameter {slot.name} was {what} between two shards of a step: this rank computes "
        "several shards a step, and with more ranks it would change once. Change it `if "
        "syncline.step_ended(model):` after step()."
    )


def refuse_settings_between_shards() -> UsageError:
    """Return the error for a learning rate that was set between two shards of a step."""
    return UsageError(
        "the learning rate or another setting of the optimizer was changed between two shards of a "
        "step: this rank computes several shards a step, and with more ranks it would change once. "
        "Change it `if syncline.step_ended(model):` after step(), and count steps, not batches."
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
        f"parameter {name} got gradient number {num_gradients} of this step, but no earlier step "
        f"brought more than {num_gradients - 1}, so it is on its way to other ranks. Call "
        "distribute(..., accumulate=K), K being the most gradients of a parameter in any step: its "
        "number of backward passes, more with reentrant checkpointing. (Below 1 MB of parameters "
        "nothing is sent before step(), and it is not needed.)"
    )


def refuse_gradient_after_clipping() -> UsageError:
    """Return the error for a backward pass between clipping and `step()`."""
    return UsageError("backward() ran again after the gradients were clipped. Clip last.")


def check_shard_order(shard: int, mine: Sequence[int], present: int, rank: int) -> None:
    """Refuse a shard that is another rank's, or out of order."""
    if shard not in mine:
        raise UsageError(f"shard {shard} is not one of rank {rank}'s: {list(mine)}")
    if shard == present:
        raise UsageError(
            "the gradients were clipped, but the next batch came without step(). Call step(), or "
            "drop them with zero_grad()."
        )
    if shard != present + 1:
        raise UsageError(
            f"shard {shard} was begun after shard {present}, but a step goes through rank {rank}'s "
            f"shards {mine[0]} to {mine[-1]} in order. Did the loop leave a step before its last "
            "shard, or call step() without a batch?"
        )
