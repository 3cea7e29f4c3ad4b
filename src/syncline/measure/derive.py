"""Makes a workload by counting floating-point operations, without running the model.

The count ignores memory and caches, so measured layer times are better if there are any.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from syncline.engine.buffer_homes import find_statistics
from syncline.engine.first_use import FirstUse, order_of
from syncline.errors import ConfigError
from syncline.sizes import Size
from syncline.workload import Layer, Workload


def derive(
    model: nn.Module,
    sample_shape: Sequence[int],
    batch: int,
    flops_per_s: float,
    input_s: float = 0.0,
    name: str = "",
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """Return a model's workload; `batch` is the number of samples of one forward: a shard.

    `dtype` is the type of a sample: integers, for example, for the words of a text.

    A layer is a module that owns parameters directly. An operation counts for the newest layer: the
    one whose first use was last. So operations without parameters count for the layer before them,
    and so does a second use of an earlier layer, since its time passes there. A tied weight's bytes
    count where it is used first. Unused parameters make layers without time at the end.

    Convolutions and matrix products are counted, a multiplication and an addition as two. Backward
    is counted by running it; if it cannot run, it takes twice the time of forward. The model itself
    is not touched: a copy on the meta device runs.
    """
    counted = _Count(_copy_to_meta(model))
    counted.run(tuple(sample_shape), batch, dtype)
    layers = [
        Layer(layer, size_bytes, forward / flops_per_s, backward / flops_per_s)
        for layer, size_bytes, forward, backward in counted.layers()
    ]
    sizes = tuple(counted.sizes())
    statistics, counters = find_statistics(model)
    return Workload(
        name or type(model).__name__,
        tuple(layers),
        input_s,
        sizes,
        sum(buffer.numel() for buffer in statistics),
        len(counters),
        batch,
    )


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; tied parameters stay tied."""

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        alike = torch.empty_like(parameter.detach(), device="meta")
        memo[id(parameter)] = torch.nn.Parameter(alike, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo).train()


class _Count:
    """Runs a model on the meta device and counts the operations of each layer."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._name_of: dict[int, str] = {}
        """By id of a parameter: the module that owns it; after use, the first that used it."""
        self._owners = []
        for name, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            if own:
                self._owners.append((name, module))
            for parameter in own:
                self._name_of.setdefault(id(parameter), name)
        self._forward: dict[str, int] = {}
        """Operations by layer, in the order of first use."""
        self._before_all = 0
        self._backward: dict[str, int] = {}
        self._size_of: dict[str, int] = {}
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._has_gradient: set[int] = set()
        """Trained parameters that got a gradient, by number."""
        self._order: list[int] = []
        """Trained parameters in their order of first use."""
        self._unplaced = {id(parameter): parameter for parameter in model.parameters()}

    def layers(self) -> list[tuple[str, int, int, int]]:
        """Return name, bytes, and operations of forward and backward of each layer."""
        return [
            (name, self._size_of.get(name, 0), flops, self._backward.get(name, 0))
            for name, flops in self._forward.items()
        ]

    def sizes(self) -> Iterator[Size]:
        """Yield the trained parameters in their order of first use, unused ones last."""
        named = list(self._trained.items())
        order, idle = order_of(self._order, self._has_gradient, len(named))
        for number in (*order, *idle):
            name, parameter = named[number]
            dtype = str(parameter.dtype).removeprefix("torch.")
            size, bytes_ = parameter.numel(), parameter.element_size()
            yield Size(name, number, size, bytes_, dtype, number in self._has_gradient)

    def run(self, sample_shape: tuple[int, ...], batch: int, dtype: torch.dtype) -> None:
        first_use = FirstUse([*self._trained.values()])
        first_use.watch(self._model)
        self._order = first_use.order
        sample = torch.empty((batch, *sample_shape), dtype=dtype, device="meta")
        for name, module in self._owners:
            module.register_forward_pre_hook(self._make_pre_hook(name, module))
        # The order matters: the second mode sees an operation first, then the counter counts it.
        with FlopCounterMode(display=False) as counter, self._noting(counter):
            try:
                output = self._model(sample)
            except Exception as error:
                raise ConfigError(
                    "model",
                    f"forward fails without data ({str(error).splitlines()[0]})",
                    "operations are counted on tensors that have a shape and no values",
                    "Look at the sample's shape, or measure the layers instead.",
                ) from error
        with FlopCounterMode(display=False) as counter:
            if not self._count_backward(output, counter):
                self._backward = {name: 2 * flops for name, flops in self._forward.items()}
                self._has_gradient = set(self._order)
        for parameter in list(self._unplaced.values()):
            self._begin(self._name_of[id(parameter)], [parameter])

    def _make_pre_hook(self, name: str, module: nn.Module) -> Any:
        own = list(module.parameters(recurse=False))
        return lambda *_: self._begin(name, own)

    def _begin(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        """Note that a layer is used. At its first use it becomes the newest layer."""
        if name not in self._forward:
            self._forward[name] = 0
            self._spend(0)
        for parameter in parameters:
            if self._unplaced.pop(id(parameter), None) is not None and parameter.requires_grad:
                self._name_of[id(parameter)] = name
                size_bytes = parameter.numel() * parameter.element_size()
                self._size_of[name] = self._size_of.get(name, 0) + size_bytes

    def _spend(self, flops: int) -> None:
        """Add operations to the newest layer; those before the first layer go to that one."""
        self._before_all += flops
        if self._forward:
            self._forward[next(reversed(self._forward))] += self._before_all
            self._before_all = 0

    def _noting(self, counter: Any) -> Any:
        """Return a mode that adds each operation of forward to the newest layer.

        It also sees parameters that are used without calling their module.
        """

        count = self

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                for value in tree_leaves((args, kwargs)):
                    if id(value) in count._unplaced:
                        count._begin(count._name_of[id(value)], [value])
                before = counter.get_total_flops()
                result = func(*args, **(kwargs or {}))
                count._spend(counter.get_total_flops() - before)
                return result

        return Noting()

    def _count_backward(self, output: Any, counter: Any) -> bool:
        """Run backward, counting for each layer up to its gradient; False if it cannot run."""

        newest = next(reversed(self._forward), "")
        done = 0

        def note(name: str) -> None:
            nonlocal newest, done
            newest = name
            self._backward[name] = self._backward.get(name, 0) + counter.get_total_flops() - done
            done = counter.get_total_flops()

        def arrived(number: int, name: str, parameter: torch.Tensor) -> None:
            self._has_gradient.add(number)
            note(name)

        for number, parameter in enumerate(self._trained.values()):
            note_one = functools.partial(arrived, number, self._name_of[id(parameter)])
            parameter.register_post_accumulate_grad_hook(note_one)
        floats = [
            value
            for value in tree_leaves(output)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        try:
            torch.autograd.backward([value.sum() for value in floats])
        except (RuntimeError, NotImplementedError):
            return False
        note(newest)  # operations after the last gradient
        return bool(floats)
