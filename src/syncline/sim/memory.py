"""The memory that a rank would need, from what its buckets, strategy and optimizers hold.

Counted are tensors: parameters, gradients, the state of optimizers that have run, and what the
strategy has allocated; activations and input, if the workload gives their sizes. Not counted:
Python, torch and other libraries, the data set, buffers of connections, what kernels need while
they run, parameters that are not trained, copies for updates taken early and for checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from syncline.comm.base import Communicator, Memory, Partials, Strips
from syncline.comm.virtual_window import VirtualWindow
from syncline.comm.window import Counted
from syncline.sim.alike import updated_elements
from syncline.sim.rank import VirtualRank
from syncline.workload import Workload

_PLAIN = (str, bytes, int, float)


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank, in bytes."""

    peak_bytes: int
    """With all of the memory that it shares with other ranks of its machine."""
    share_bytes: int
    """Between two steps, with its share of that memory: shares add up."""


def memory_of(rank: VirtualRank, workload: Workload, state_copies: int) -> list[RankMemory]:
    """Return what a rank needs; an optimizer keeps `state_copies` numbers for each parameter.

    If the rank stands for all, it is what each of them needs.

    The peak is the greater of two. When buckets are made, after the first backward, the model's
    own parameters and gradients are still there. Later there are activations, the state of the
    optimizer, and one gradient at a time on its way into a bucket.
    """
    held = _held(rank)
    sharers = {part.comm: _sharers(rank, part.comm) for part in rank.share.families}
    shared = sum(
        bucket.size_bytes * (1 - 1 / sharers[bucket.comm])
        for bucket in rank.buckets
        if bucket.parameters.memory.is_common
    )
    sizes = [size.size_bytes for size in rank.setting.sizes]
    in_use, set_up = held, held
    if rank.share.mine:
        in_use += max(sizes, default=0) + _activations(workload)
        set_up += 2 * sum(sizes)
    else:
        set_up += sum(sizes)  # a rank that only serves has a model, and no gradients of it
    states = [state_copies * size_bytes for size_bytes in _updated_bytes(rank)]
    return [
        RankMemory(max(in_use + state, set_up), round(held + state - shared)) for state in states
    ]


def _updated_bytes(rank: VirtualRank) -> list[int]:
    """Return the bytes of parameters that a rank updates, or each of all for which it stands."""
    if not rank.world.one_for_all:
        return [sum(one.size_bytes for one in rank.optimizers if one.is_used)]
    found = [0] * rank.world.cluster.ranks
    for bucket, optimizer in zip(rank.buckets, rank.optimizers, strict=True):
        for other, num_elements in updated_elements(bucket).items():
            found[other] += num_elements * bucket.dtype.itemsize if optimizer.is_used else 0
    return found


def _activations(workload: Workload) -> int:
    """Return the bytes of a shard's input and of all layers' outputs, as far as they are known."""
    samples = workload.samples or 1
    sizes = [layer.output_bytes or 0 for layer in workload.layers]
    return samples * ((workload.layers[0].input_bytes or 0) + sum(sizes))


def _sharers(rank: VirtualRank, comm: Communicator) -> int:
    """Return how many ranks of a group are on this rank's machine."""
    return next(len(machine) for machine in comm.machines if rank.rank in machine)


def _held(rank: VirtualRank) -> int:
    """Return the bytes of all tensors that a rank's buckets and its strategy hold."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(
        [[[b.parameters, b.in_use, b.gradient] for b in rank.buckets], rank.strategy], set()
    ):
        if isinstance(tensor, int):
            sizes[-len(sizes) - 1] = tensor
        else:
            # Of memory that is used in part only that part counts.
            key = tensor.untyped_storage()._cdata
            sizes[key] = max(sizes.get(key, 0), tensor.nbytes)
    return sum(sizes.values())


def _tensors(found: Any, seen: set[int]) -> Iterator[torch.Tensor | int]:
    """Yield the tensors in containers and in objects of strategies; of a window, its bytes."""
    if isinstance(found, _PLAIN) or id(found) in seen:
        return
    seen.add(id(found))
    inner: Any = ()
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Memory):
        yield found.mine
    elif isinstance(found, VirtualWindow):
        # Two versions in shared memory; over a network the rank's own, and one that it got.
        yield 2 * found.published_bytes
        inner = list(found.functions.values())  # what they serve may be held by them alone
    elif isinstance(found, Counted):
        inner = [found.function]
    elif isinstance(found, MethodType):
        inner = [found.__self__]
    elif isinstance(found, dict):
        inner = list(found.values())
    elif isinstance(found, (list, tuple, set)):
        inner = list(found)
    elif isinstance(found, Strips):
        inner = [found.memory]
    elif isinstance(found, Partials):
        inner = [*found.sums, found.result]
    elif type(found).__module__.startswith("syncline.strategies."):
        inner = list(getattr(found, "__dict__", {}).values())
    for one in inner:
        yield from _tensors(one, seen)
