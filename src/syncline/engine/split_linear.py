"""A linear layer whose output features are divided among the ranks of a group.

Each member holds some rows of the weight and computes its features of all the group's samples. In
the middle of a chain of split layers, activations stay divided by features and lie transposed,
features first, so that a member's part is one block of memory. At the chain's ends they are divided
by samples, as everywhere else in the model.

            takes samples: gather the members' samples      gives samples: deal the outputs back
  x [b, in] ------------------------------------------> [.] ------------------------------> [b, out]
            takes features: gather the members' features    gives features: nothing is sent

In backward the gradient of the input is a sum over the members; each gets its own part of it. That
exchange begins before this rank's own part and the weight's gradient are computed, which hides it.
In forward a layer inside a chain begins with this rank's features while the others come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from syncline.engine.activations import Activations
from syncline.errors import UsageError
from syncline.groups import Split, SplitLayer

_EXCHANGES = ("gather", "sum", "deal", "collect")
"""What members of a group exchange for a layer."""


class Chain:
    """Split layers between which activations are divided by features.

    That is right where the forward runs that was traced to find the chain. Another one may do more
    with what is between the layers.
    """

    def __init__(self, within: str = "") -> None:
        self.within = within
        """The module whose forward was traced; "" is the model."""
        self.depth = 0
        """How many calls of that module are under way."""
        self.leading: tuple[int, ...] = ()
        """All dimensions but the last, of the last input: inside the chain there is one only."""

    def hook(self, module: nn.Module) -> Iterator[Any]:
        """Count calls of the module that was traced; yields handles."""

        def enter(*_: Any) -> None:
            self.depth += 1

        def leave(*_: Any) -> None:
            self.depth -= 1

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave, always_call=True)

    def check(self, layer: SplitLayer) -> None:
        """Refuse to call a layer by itself. In backward, checkpointing calls it once more."""
        is_linked = layer.takes_features or layer.gives_features
        if is_linked and not self.depth and torch._C._current_graph_task_id() == -1:
            whose = f"{self.within!r}" if self.within else "the model"
            raise UsageError(
                f"layer {layer.name} was called without {whose}, whose forward shows that features "
                "may stay divided between layers. Call that module, or name the layers that may "
                "be split, without this one (layers=, strategy.hybrid.layers)."
            )


class SplitShape:
    """One split layer, and who holds what of its features."""

    def __init__(
        self, layer: SplitLayer, split: Split, activations: Activations, chain: Chain
    ) -> None:
        self.layer = layer
        self.chain = chain
        self.activations = activations
        places = range(split.size)
        self.rows = [split.rows(layer.out_features, place) for place in places]
        """By member: its output features."""
        self.columns = [split.rows(layer.in_features, place) for place in places]
        """By member: its input features, if the input is divided by features."""

    @property
    def size(self) -> int:
        return self.activations.size

    @property
    def place(self) -> int:
        return self.activations.place

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the layer's output, for an input of any number of dimensions."""
        self.chain.check(self.layer)
        if not self.layer.takes_features:
            self.chain.leading = tuple(x.shape[:-1])
            x = x.reshape(-1, x.shape[-1])
        found: torch.Tensor = SplitLinear.apply(x, weight, bias, self)
        if self.layer.gives_features:
            return found
        return found.view(*self.chain.leading, self.layer.out_features)

    def _label(self, what: str) -> int:
        """Return a number for this layer's exchange of a kind, which no other exchange has."""
        return len(_EXCHANGES) * self.layer.weight + _EXCHANGES.index(what)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Write the product of the weight and the inputs of all the group's samples to `output`.

        Returns these inputs, a sample in each row. What needs only this rank's part of them is
        computed while the rest comes.
        """
        if not self.layer.takes_features:
            wait = self.activations.begin_gather(
                x.contiguous(), [x.shape[0]] * self.size, self._label("gather")
            )
            inputs = wait()
            torch.mm(weight, inputs.t(), out=output)
            return inputs
        features = x.t().contiguous()
        wait = self.activations.begin_gather(
            features, [len(one) for one in self.columns], self._label("gather")
        )
        mine = self.columns[self.place]
        torch.mm(weight[:, mine.start : mine.stop], features, out=output)
        inputs = wait()
        for part in (slice(0, mine.start), slice(mine.stop, None)):
            output.addmm_(weight[:, part], inputs[part])
        return inputs.t()

    def begin_input_gradient(
        self, gradient: torch.Tensor, weight: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Begin to exchange the gradient of the input; the function returned waits for it."""
        item_bytes = gradient.itemsize
        if self.layer.takes_features:
            columns = self.columns

            def of_features(member: int) -> torch.Tensor:
                part = columns[member]
                return weight[:, part.start : part.stop].t() @ gradient

            gives = [gradient.shape[1] * item_bytes] * self.size
            takes = [len(part) for part in columns]
            finish = self.activations.begin_sum(of_features, gives, takes, self._label("sum"))
            return lambda: finish().t()
        samples = gradient.shape[1] // self.size

        def of_samples(member: int) -> torch.Tensor:
            return gradient[:, member * samples : (member + 1) * samples].t() @ weight

        gives = [self.layer.in_features * item_bytes] * self.size
        takes = [samples] * self.size
        return self.activations.begin_sum(of_samples, gives, takes, self._label("sum"))

    def deal(self, output: torch.Tensor) -> torch.Tensor:
        """Give each member the output of its samples; return this rank's, with all features."""
        samples = output.shape[1] // self.size
        sends = [part.t().contiguous() for part in output.split(samples, dim=1)]
        found = output.new_empty((samples, self.layer.out_features))
        receives = [output.new_empty((samples, len(part))) for part in self.rows]
        receives[self.place] = sends[self.place]
        gives = [len(part) * output.itemsize for part in self.rows]
        takes = [samples] * self.size
        self.activations.exchange(sends, receives, gives, takes, self._label("deal"))()
        for part, block in zip(self.rows, receives, strict=True):
            found[:, part.start : part.stop] = block
        return found

    def collect(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's features for all samples, features first."""
        samples = gradient.shape[0]
        sends = [gradient[:, part.start : part.stop].contiguous() for part in self.rows]
        found = gradient.new_empty((self.size * samples, len(self.rows[self.place])))
        receives = found.split(samples)
        receives[self.place].copy_(sends[self.place])
        gives = [samples * gradient.itemsize] * self.size
        takes = [len(part) for part in self.rows]
        self.activations.exchange(sends, receives, gives, takes, self._label("collect"))()
        return found.t()


class SplitLinear(torch.autograd.Function):
    """y = x W' + b, with this rank's rows of W and b. `x` has a sample in each row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shape: SplitShape,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        # Inside a chain `x` has all the group's samples, elsewhere those of one member.
        samples = x.shape[0] * (1 if shape.layer.takes_features else shape.size)
        # Made transposed, not as a view: an activation function may change it in place.
        output = torch.empty_strided((samples, weight.shape[0]), (1, samples), dtype=x.dtype)
        inputs = shape.multiply(x, weight, output.t())
        if bias is not None:
            output.add_(bias)
        ctx.shape = shape
        ctx.save_for_backward(inputs, weight)
        return output if shape.layer.gives_features else shape.deal(output.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shape: SplitShape = ctx.shape
        inputs, weight = ctx.saved_tensors
        (gradient,) = gradients
        is_last = not shape.layer.gives_features
        features = shape.collect(gradient) if is_last else gradient.t().contiguous()
        finish = None
        if ctx.needs_input_grad[0]:
            finish = shape.begin_input_gradient(features, weight)
        of_weight = features @ inputs if ctx.needs_input_grad[1] else None
        of_bias = features.sum(dim=1) if ctx.needs_input_grad[2] else None
        of_input = None if finish is None else finish()
        return of_input, of_weight, of_bias, None
