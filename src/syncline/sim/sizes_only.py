"""A simulation of sizes: what ranks send besides gradients, and tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from syncline.comm.base import Communicator, Partials, allocate_sums, small_sum
from syncline.contract import Plan
from syncline.engine.bucket import Slot
from syncline.engine.buffers import sum_type
from syncline.engine.share import Part
from syncline.sizes import Size


class SizesOnly:
    """The sizes of norm layers' statistics and of a norm's squares, as `StepBuffers`."""

    def __init__(self, step: Part, slots: Sequence[Slot], num_statistics: int, clips: bool) -> None:
        """`step` is the rank's part in the step group's sums."""
        self._comm = step.comm
        self.statistics: Partials | None = None
        if num_statistics:
            size = (num_statistics, sum_type(torch.float32, step.spread.shards))
            self.statistics = allocate_sums(step.comm, *size, step.spread, 1.0)
        self._squares: Partials | None = None
        if clips:
            blocks = sum(slot.num_blocks for slot in slots)
            self._squares = small_sum(step.comm, blocks, torch.float64)

    def clip(self) -> None:
        """Exchange as many bytes as clipping does. Runs on the comm lane."""
        assert self._squares is not None
        with self._comm.traffic.task("clip", after="reduce"):
            self._comm.all_reduce(self._squares)

    def end_step(self, comm: Communicator, others_changed: bool) -> Iterable[None]:
        return ()

    def load_counts(self, told: Sequence[float]) -> None:
        pass


_IN_PLACE = {getattr(torch.Tensor, f"{name}_") for name in ("add", "sub", "mul", "div", "lerp")}
_NEW = {torch.sub, torch.add, torch.Tensor.sub, torch.Tensor.add}


class WithoutNumbers(TorchFunctionMode):
    """Skips the commonest arithmetic on `meta` tensors, whose results have sizes only.

    torch computes these sizes in Python, which takes most of the time of a simulated exchange.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_PLACE and _is_alike(args):
            return args[0]
        if func in _NEW and _is_alike(args):
            out = kwargs.get("out")
            if out is None:
                return args[0].clone()
            if _is_alike((args[0], out)):
                return out
        return func(*args, **kwargs)


def _is_alike(args: Sequence[Any]) -> bool:
    """Say whether the tensors are on `meta`, of one size and type: so is the result."""
    first, second = args[0], args[1]
    if not isinstance(second, torch.Tensor):
        return bool(first.is_meta)
    return bool(
        first.is_meta
        and second.is_meta
        and first.shape == second.shape
        and first.dtype == second.dtype
    )


def slots_of(
    sizes: Sequence[Size], parameters: Sequence[Parameter], plan: Plan, rank: int
) -> list[Slot]:
    """Return a rank's slots; of split layers it holds some rows."""
    split, found = plan.split, []
    for size, parameter in zip(sizes, parameters, strict=True):
        slot = Slot(size.name, parameter, size.number)
        if split is not None and size.number in split.numbers:
            slot.parameter = Parameter(parameter.view(size.rows, -1), requires_grad=False)
            slot.shape = tuple(slot.parameter.shape)
            parts = [split.rows(size.rows, place) for place in range(split.size)]
            slot.keep_rows(parts, split.place_of(rank))
        found.append(slot)
    return found


def meta_parameters(sizes: Sequence[Size]) -> list[Parameter]:
    """Return parameters on the meta device, which all ranks may share."""
    found = []
    for size in sizes:
        dtype: torch.dtype = getattr(torch, size.dtype)
        memory = torch.empty(size.num_elements, dtype=dtype, device="meta")
        found.append(Parameter(memory, requires_grad=False))
    return found
