"""Compiled modules: while the forward of one runs, all its parameters are plain.

torch.compile makes code for the class of each parameter, and makes it anew, with other graphs, when
it meets another class. Parameters change their class here (`parameters.py`). So the code that a
rank runs, and the last bits of what it computes, would depend on the moments at which it had called
the model before: a rank that evaluates alone would compute other bits than its peers. torch also
gives up compiling after a few classes.

What is compiled otherwise (after `distribute`, or a function that calls the model) calls the
engine's code as it stands: compiled with the forward, it would not wait for parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter

from syncline.engine.parameters import BetweenShards, become, refuse_between
from syncline.errors import UsageError


@functools.cache
def keep_engine_out_of_graphs() -> None:
    """Let torch.compile split its graphs where the engine's code is called.

    Called for each model that is distributed: before the first of them, nothing that is compiled
    can call the engine. Importing `torch._dynamo` takes seconds, and a simulation of sizes does
    not need it.
    """
    from torch._dynamo import trace_rules

    trace_rules.add("syncline.engine")


def compiled_in(model: nn.Module) -> list[nn.Module]:
    """Return what torch.compile returned: the model, or parts of it, each part once.

    A module that was compiled in place is refused.
    """
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise UsageError(
                f"{f'module {name}' if name else 'the model'} was compiled in place by its "
                "compile(), so that waiting for parameters would be compiled with it. Use "
                "model = torch.compile(model), and give that to distribute()."
            )
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # a module comes before those inside it
        if id(module) not in inside and getattr(module, "_orig_mod", None) is not None:
            found.append(module)
            inside.update(map(id, module.modules()))
    return found


class CompiledForward:
    """Makes the parameters of a compiled module plain while its forward runs."""

    def __init__(self, module: nn.Module, synchronize: Callable[[], None]) -> None:
        """`synchronize` waits until every parameter may be read."""
        self._module = module
        self._parameters = [*module.parameters()]
        self._synchronize = synchronize
        self._classes: list[list[type[Parameter]]] = []
        """The parameters' classes outside of each forward under way."""

    def hook(self) -> Iterator[Any]:
        """Hook the module, whose own hooks are not compiled; yield the handles."""
        yield self._module.register_forward_pre_hook(self._enter)
        yield self._module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._synchronize()
        classes = [type(parameter) for parameter in self._parameters]
        if BetweenShards in classes:
            raise refuse_between()
        self._classes.append(classes)
        for parameter in self._parameters:
            become(parameter, Parameter)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._classes:
            return  # refused before it began
        for parameter, kind in zip(self._parameters, self._classes.pop(), strict=True):
            become(parameter, kind)
