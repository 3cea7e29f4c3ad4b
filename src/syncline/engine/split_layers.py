"""The split layers of one model: each rank keeps its rows, and gives the whole back when asked.

The user's modules and parameters stay the same objects. A split layer's weight and bias have this
rank's rows only, and its forward exchanges activations with the group (`split_linear.py`). For
evaluation, checkpoints and export `whole` makes them plain for a while.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from syncline.comm.base import Communicator
from syncline.engine.activations import Activations
from syncline.engine.bucket import Slot
from syncline.engine.compiled import compiled_in
from syncline.engine.digests import tensor_digest
from syncline.engine.lane import Lane
from syncline.engine.optimizer import Reach
from syncline.engine.split_linear import Chain, SplitShape
from syncline.errors import UsageError
from syncline.groups import Split
from syncline.linear_layers import find_linear_layers
from syncline.strategies.settings import OwnSettings

log = logging.getLogger("syncline")


class SplitLayers:
    """Splits a model's linear layers on one rank."""

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Slot],
        split: Split,
        comm: Communicator,
        lane: Lane,
    ) -> None:
        """`comm` is for activations alone. All ranks hold the same parameters."""
        self.loaded: dict[str, str] = {}
        """Digests of whole values that were loaded since ranks have last compared, by name."""
        self.activations = Activations(comm, lane)
        self._slots = slots
        self._shapes: dict[nn.Linear, SplitShape] = {}
        self.is_whole = False
        """Whether the model has whole layers now."""
        place, before = self.activations.place, {one.name: one.follows for one in split.layers}
        self._chains: dict[Chain, nn.Module] = {}
        """Chains of several layers, and the modules whose forward shows them."""
        chains = {name: Chain() for name, follows in before.items() if not follows}
        for layer in split.layers:
            first = layer.name
            while before[first]:
                first = before[first]
            module = model.get_submodule(layer.name)
            assert isinstance(module, nn.Linear)
            for number in layer.parameters:
                parts = [split.rows(layer.out_features, at) for at in range(split.size)]
                slots[number].keep_rows(parts, place)
            chain = chains[first]
            if layer.takes_features:
                linear = slots[layer.weight].linear
                chain.within = "" if linear is None else linear.within
                self._chains[chain] = model.get_submodule(chain.within)
            self._shapes[module] = SplitShape(layer, split, self.activations, chain)
        self._set_forward()

    def _set_forward(self) -> None:
        for module, shape in self._shapes.items():
            vars(module)["forward"] = functools.partial(_forward, module, shape)

    def hook(self) -> Iterator[Any]:
        """Watch saving and loading of the split layers, and calls of chains; yields handles."""
        for chain, whose in self._chains.items():
            yield from chain.hook(whose)
        for module in self._shapes:
            yield module.register_state_dict_pre_hook(self._before_save)
            yield module.register_load_state_dict_pre_hook(self._before_load)

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self.is_whole:
            raise refuse_part(prefix.removesuffix("."))

    def _before_load(self, module: nn.Linear, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Keep this rank's rows of what is loaded."""
        shape = self._shapes[module]
        rows = shape.rows[shape.place]
        for name in ("weight", "bias"):
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape[:1] == (shape.layer.out_features,):
                parameter = f"{shape.layer.name}.{name}".lstrip(".")  # the model may be the layer
                self.loaded[f"whole parameter {parameter}"] = tensor_digest(value)
                state[prefix + name] = value[rows.start : rows.stop]

    def take_loaded(self) -> dict[str, str]:
        """Return the digests of what was loaded, once."""
        found, self.loaded = self.loaded, {}
        return found

    def refuse_load(self) -> None:
        """Refuse to load while the model has whole layers."""
        if self.is_whole:
            raise UsageError(
                "load_state_dict() came inside whole(), whose layers are put away at its end. Call "
                "it outside, on every rank: it takes whole weights there too."
            )

    def check_whole(self) -> None:
        """Refuse to copy a model of which this rank holds a part."""
        if not self.is_whole:
            raise refuse_part(next(iter(self._shapes.values())).layer.name)

    def check_step(self) -> None:
        """Refuse a step while the model has whole layers."""
        if self.is_whole:
            raise UsageError(
                "step() or detach() came inside whole(), whose layers are put away at its end. "
                "Call it outside."
            )

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Give the model whole layers for the block. Every rank calls it."""
        if self.is_whole:
            yield
            return
        kept = self.make_whole()
        # Buckets have room for this rank's rows of a gradient only.
        trained = [slot.parameter for slot, _ in kept if slot.parameter.requires_grad]
        handles = [parameter.register_hook(_refuse_gradient) for parameter in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for slot, mine in kept:
                    slot.parameter.data = mine
            self._set_forward()
            self.is_whole = False

    def make_whole(self) -> list[tuple[Slot, torch.Tensor]]:
        """Give the model whole layers, for good; return what it had. Every rank calls it."""
        kept, waited_s = [], self.activations.waited_s
        recorder, self.activations.recorder = self.activations.recorder, None  # no part of a step
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for module, shape in self._shapes.items():
                for number in shape.layer.parameters:
                    slot = self._slots[number]
                    mine = slot.parameter.detach()
                    kept.append((slot, mine))
                    sizes = [len(part) for part in shape.rows]
                    gathered = self.activations.begin_gather(mine, sizes, -1 - number)
                    slot.parameter.data = gathered()
                del vars(module)["forward"]
        self.activations.waited_s, self.activations.recorder = waited_s, recorder
        self.is_whole = True
        return kept


def _forward(module: nn.Linear, shape: SplitShape, input: torch.Tensor) -> torch.Tensor:
    return shape(input, module.weight, module.bias)


def _refuse_gradient(gradient: torch.Tensor) -> None:
    raise UsageError(
        "backward() came inside whole(), but ranks add up gradients of their rows of split layers "
        "only. Call it outside."
    )


def refuse_part(name: str) -> UsageError:
    """Return the error for reading a layer of which this rank holds a part."""
    return UsageError(
        f"layer {name or 'of the model'} is split over ranks, and this rank holds some of its rows "
        "only. Put `with replica.whole():` around it, on every rank: inside it the model is whole."
    )


def refuse_split(model: nn.Module, reach: Reach) -> None:
    """Refuse a model or an optimizer that cannot work with split layers."""
    if reach is Reach.PARAMETER:
        raise UsageError(
            "the optimizer looks at whole parameters, but ranks hold some rows of a split layer "
            "only. Use an elementwise optimizer such as SGD or AdamW, or another strategy."
        )
    if any(compiled_in(model)):
        raise UsageError(
            "the model is compiled, but a split layer exchanges activations in the middle of "
            "forward, which compiled code does not do. Leave torch.compile away, or use another "
            "strategy."
        )


def mark_linear_layers(model: nn.Module, slots: Sequence[Slot], settings: OwnSettings) -> None:
    """Note at each slot whether its layer can be split, and which layer is before it in a chain."""
    if settings.must_choose:
        log.warning(
            'hybrid: groups = "auto" needs measured times, which a script does not have: nothing '
            "is split. Give HybridSettings(groups=N), where N divides the number of ranks."
        )
    found = find_linear_layers(model, {slot.name for slot in slots})
    for slot in slots:
        slot.linear = found.get(slot.name.rpartition(".")[0])


def describe_split(split: Split) -> str:
    """Return a log line that says which layers are split."""
    names = ", ".join(layer.name for layer in split.layers)
    return (
        f"{len(split.groups)} group{'s' if len(split.groups) > 1 else ''} of {split.size} ranks "
        f"split {names}; all else is replicated"
    )
