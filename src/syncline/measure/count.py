"""Counts what a model does: operations, activations and memory of each layer, in order of use.

A layer is a module that owns parameters directly. An operation counts for the newest layer: the one
whose first use was last. So operations without parameters count for the layer before them, and so
does a second use of an earlier layer, since its time passes there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from syncline.device import Kind
from syncline.engine.first_use import FirstUse, order_of
from syncline.errors import ConfigError
from syncline.linear_layers import find_linear_layers
from syncline.sizes import Size

_KINDS: tuple[tuple[Kind, tuple[type[nn.Module], ...]], ...] = (
    ("conv", (nn.modules.conv._ConvNd,)),
    ("linear", (nn.Linear, nn.Bilinear)),
    ("norm", (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)),
    ("embedding", (nn.Embedding, nn.EmbeddingBag)),
    ("attention", (nn.MultiheadAttention,)),
)


@dataclass(frozen=True)
class CountedLayer:
    """What a layer does in one forward and one backward of `samples` samples."""

    name: str
    kind: Kind
    samples: int
    size_bytes: int
    """Of its trained parameters."""
    forward_flops: int
    backward_flops: int
    moved_bytes: int
    """Activations that forward's operations read and write."""
    rows: float
    """Rows of its matrix product."""
    input_bytes: int | None
    """Activations that go in, per sample, and that come out."""
    output_bytes: int | None


@dataclass(frozen=True)
class Counted:
    """A model's layers in order of first use, and its trained parameters."""

    layers: tuple[CountedLayer, ...]
    sizes: tuple[Size, ...]
    """Unused parameters come last."""


def count(model: nn.Module, sample: torch.Tensor) -> Counted:
    """Run forward and backward once, and count. The model gets hooks: give a copy.

    Model and sample may be on the meta device, without values.
    """
    found = _Count(model)
    found.run(sample)
    return Counted(tuple(found.layers()), tuple(found.sizes()))


def kind_of(module: nn.Module) -> Kind:
    """Return what a module computes, as far as its speed depends on it."""
    return next((kind for kind, types in _KINDS if isinstance(module, types)), "other")


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _bytes_of(values: Any) -> int:
    return sum(one.numel() * one.itemsize for one in tree_leaves(values) if _is_float(one))


def _moves_nothing(operation: Any) -> bool:
    """Say whether an operation only looks at memory in another way."""
    return bool(operation.is_view) or operation.__name__.startswith("_unsafe_view")


class _Count:
    """Runs a model and counts the operations of each layer."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._samples = 1
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
        self._activations: dict[str, tuple[int, int]] = {}
        """Bytes per sample into and out of each layer, in its last call."""
        self._rows: dict[str, int] = {}
        self._moved: dict[str, int] = {}
        self._before_all = (0, 0)
        self._held = {
            value.untyped_storage()._cdata for value in (*model.parameters(), *model.buffers())
        }
        """The memory of what is no activation."""
        self._backward: dict[str, int] = {}
        self._size_of: dict[str, int] = {}
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._linear = find_linear_layers(model, self._trained)
        self._has_gradient: set[int] = set()
        """Trained parameters that got a gradient, by number."""
        self._order: list[int] = []
        """Trained parameters in their order of first use."""
        self._unplaced = {id(parameter): parameter for parameter in model.parameters()}

    def layers(self) -> Iterator[CountedLayer]:
        """Yield the layers in the order of first use."""
        modules = dict(self._model.named_modules())
        for name, flops in self._forward.items():
            into, out = self._activations.get(name, (None, None))
            yield CountedLayer(
                name=name,
                kind=kind_of(modules[name]),
                samples=self._samples,
                size_bytes=self._size_of.get(name, 0),
                forward_flops=flops,
                backward_flops=self._backward.get(name, 0),
                moved_bytes=self._moved[name],
                rows=self._rows.get(name, self._samples),
                input_bytes=into,
                output_bytes=out,
            )

    def sizes(self) -> Iterator[Size]:
        """Yield the trained parameters in their order of first use, unused ones last."""
        named = list(self._trained.items())
        order, idle = order_of(self._order, self._has_gradient, len(named))
        for number in (*order, *idle):
            name, parameter = named[number]
            dtype = str(parameter.dtype).removeprefix("torch.")
            size, bytes_ = parameter.numel(), parameter.element_size()
            linear = self._linear.get(name.rpartition(".")[0])
            how = (0, "") if linear is None else (linear.rows, linear.follows)
            yield Size(name, number, size, bytes_, dtype, number in self._has_gradient, *how)

    def run(self, sample: torch.Tensor) -> None:
        self._samples = max(1, len(sample))
        first_use = FirstUse([*self._trained.values()])
        first_use.watch(self._model)
        self._order = first_use.order
        for name, module in self._owners:
            module.register_forward_pre_hook(self._make_pre_hook(name, module))
            module.register_forward_hook(self._make_hook(name))
        # The order matters: the second mode sees an operation first, then the counter counts it.
        with FlopCounterMode(display=False) as counter, self._noting(counter):
            try:
                output = self._model(sample)
            except Exception as error:
                raise _refusal(error, has_values=sample.device.type != "meta") from error
        with FlopCounterMode(display=False) as counter:
            if not self._count_backward(output, counter):
                self._backward = {name: 2 * flops for name, flops in self._forward.items()}
                self._has_gradient = set(self._order)
        for parameter in list(self._unplaced.values()):
            self._begin(self._name_of[id(parameter)], [parameter])

    def _make_pre_hook(self, name: str, module: nn.Module) -> Any:
        own = list(module.parameters(recurse=False))
        return lambda *_: self._begin(name, own)

    def _make_hook(self, name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            into, out = _bytes_of(inputs), _bytes_of(output)
            self._activations[name] = into // self._samples, out // self._samples
            first = next(filter(_is_float, tree_leaves(output)), None)
            if first is not None and 2 <= first.dim() <= 3 and first.shape[-1]:
                self._rows[name] = first.numel() // first.shape[-1]

        return note

    def _begin(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        """Note that a layer is used. At its first use it becomes the newest layer."""
        if name not in self._forward:
            self._forward[name] = self._moved[name] = 0
            self._spend(0, 0)
        for parameter in parameters:
            if self._unplaced.pop(id(parameter), None) is not None and parameter.requires_grad:
                self._name_of[id(parameter)] = name
                size_bytes = parameter.numel() * parameter.element_size()
                self._size_of[name] = self._size_of.get(name, 0) + size_bytes

    def _spend(self, flops: int, moved_bytes: int) -> None:
        """Add an operation to the newest layer; those before the first layer go to that one."""
        if not self._forward:
            before_flops, before_bytes = self._before_all
            self._before_all = before_flops + flops, before_bytes + moved_bytes
            return
        newest, before = next(reversed(self._forward)), self._before_all
        self._forward[newest] += flops + before[0]
        self._moved[newest] += moved_bytes + before[1]
        self._before_all = (0, 0)

    def _moved_by(self, operation: Any, inputs: Any, output: Any) -> int:
        """Return the bytes of activations that an operation reads and writes."""
        tensors = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
        if not tensors or _moves_nothing(operation):
            return 0
        tensors += [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
        return sum(
            one.numel() * one.itemsize
            for one in tensors
            if one.untyped_storage()._cdata not in self._held
        )

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
                moved_bytes = count._moved_by(func, (args, kwargs), result)
                count._spend(counter.get_total_flops() - before, moved_bytes)
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


def _refusal(error: Exception, *, has_values: bool) -> ConfigError:
    why = (str(error) or type(error).__name__).splitlines()[0]
    if has_values:
        rule, fix = "the model takes what the data gives", "Look at the sample's shape."
        return ConfigError("model", f"forward fails ({why})", rule, fix)
    return ConfigError(
        "model",
        f"forward fails without data ({why})",
        "operations are counted on tensors that have a shape and no values",
        "Look at the sample's shape, or measure the layers instead: syncline measure layers.",
    )
