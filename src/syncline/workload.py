"""A workload: what a model costs, layer by layer, in the order in which forward uses the layers.

All that the model of time needs to know about a model: how long a rank computes on a layer, and how
many bytes of parameters it has. `derive` counts floating-point operations without running the
model; it knows nothing of memory and caches, so measured layers are better where there are any.

No torch at the top: a workload is read and written without it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from syncline.errors import ConfigError
from syncline.files import write_atomically

if TYPE_CHECKING:
    import torch
    from torch import nn

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer on one rank, called as its module: the model itself is "".

    Times are those of one forward and one backward, of as many samples as it was derived for.
    """

    name: str
    size_bytes: Bytes
    forward_s: Seconds
    backward_s: Seconds


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's layers in order of use; `input_s` loads one rank's batch of a step."""

    name: str
    layers: tuple[Layer, ...]
    input_s: Seconds = 0.0

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_s for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)


def read(path: str | Path) -> Workload:
    """Read a workload from JSON; ConfigError for what is none."""
    way_out = "Give the path of a JSON file that Syncline wrote, or write it once more."
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Workload)
    except OSError as error:
        found = f"cannot be read ({(error.strerror or type(error).__name__).lower()})"
        raise ConfigError(str(path), found, "a workload is a file", way_out) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        rule = "a workload is JSON with a name and layers"
        raise ConfigError(str(path), str(error), rule, way_out) from None


def write(workload: Workload, path: str | Path) -> None:
    """Write a workload as JSON, whole or not at all."""
    write_atomically(Path(path), msgspec.json.format(msgspec.json.encode(workload)) + b"\n")


def derive(
    model: nn.Module,
    sample_shape: Sequence[int],
    batch: int,
    flops_per_s: float,
    input_s: float = 0.0,
    name: str = "",
) -> Workload:
    """Count a model's floating-point operations; `batch` is the samples of one forward: a shard.

    A layer is a module that owns parameters directly. Time goes to the layer that was the last to
    be used for the first time: so what has no parameters counts for the layer before it, and so
    does a second use of an earlier layer, whose time passes then and not earlier. A tied weight's
    bytes count where it is used first. Parameters without use make layers without time at the end.

    Convolutions and matrix products are counted, a multiplication and an addition as two. Backward
    is counted as it runs; where it cannot run, it takes twice the time of forward. The model itself
    is not touched: a copy without memory is run.
    """
    counted = _Count(_copy_to_meta(model))
    counted.run(tuple(sample_shape), batch)
    layers = [
        Layer(layer, size_bytes, forward / flops_per_s, backward / flops_per_s)
        for layer, size_bytes, forward, backward in counted.layers()
    ]
    return Workload(name or type(model).__name__, tuple(layers), input_s)


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Copy a model without copying its memory; what is tied stays tied."""
    import torch

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        alike = torch.empty_like(parameter.detach(), device="meta")
        memo[id(parameter)] = torch.nn.Parameter(alike, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo).train()


class _Count:
    """Runs a model on the meta device and notes which layer the operations belong to."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._name_of: dict[int, str] = {}
        """By a parameter's identity: the module that owns it; once used, the first that did."""
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
        self._unplaced = {id(parameter): parameter for parameter in model.parameters()}

    def layers(self) -> list[tuple[str, int, int, int]]:
        """Return name, bytes, and operations of forward and backward of each layer."""
        return [
            (name, self._size_of.get(name, 0), flops, self._backward.get(name, 0))
            for name, flops in self._forward.items()
        ]

    def run(self, sample_shape: tuple[int, ...], batch: int) -> None:
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        sample = torch.empty((batch, *sample_shape), device="meta")
        for name, module in self._owners:
            module.register_forward_pre_hook(self._make_pre_hook(name, module))
        # The order matters: an operation is noted by the second, then counted by the first.
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
        for parameter in list(self._unplaced.values()):
            self._begin(self._name_of[id(parameter)], [parameter])

    def _make_pre_hook(self, name: str, module: nn.Module) -> Any:
        own = list(module.parameters(recurse=False))
        return lambda *_: self._begin(name, own)

    def _begin(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        """A layer is used; if for the first time, what follows belongs to it."""
        if name not in self._forward:
            self._forward[name] = 0
            self._spend(0)
        for parameter in parameters:
            if self._unplaced.pop(id(parameter), None) is not None:
                self._name_of[id(parameter)] = name
                size_bytes = parameter.numel() * parameter.element_size()
                self._size_of[name] = self._size_of.get(name, 0) + size_bytes

    def _spend(self, flops: int) -> None:
        """Give operations to the newest layer, or to the first to come."""
        self._before_all += flops
        if self._forward:
            self._forward[next(reversed(self._forward))] += self._before_all
            self._before_all = 0

    def _noting(self, counter: Any) -> Any:
        """Make a mode that gives each operation of forward to the newest layer.

        It also sees parameters that are used without calling the module that owns them.
        """
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

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
        """Run backward: what was done when a layer's gradient comes was done for it."""
        import torch
        from torch.utils._pytree import tree_leaves

        newest = next(reversed(self._forward), "")
        done = 0

        def note(name: str) -> None:
            nonlocal newest, done
            newest = name
            self._backward[name] = self._backward.get(name, 0) + counter.get_total_flops() - done
            done = counter.get_total_flops()

        for parameter in self._model.parameters():
            if parameter.requires_grad and id(parameter) not in self._unplaced:
                name = self._name_of[id(parameter)]
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
        floats = [
            value
            for value in tree_leaves(output)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        try:
            torch.autograd.backward([value.sum() for value in floats])
        except (RuntimeError, NotImplementedError):
            return False
        note(newest)  # what came after the last gradient
        return bool(floats)
