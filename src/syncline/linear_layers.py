"""Finds a model's linear layers that can be split over ranks, and chains of them.

In a chain, each layer's input is the output of the layer before it, changed element by element
only. So its features may stay divided among ranks. The model's forward is traced (torch.fx) to see
that, on a copy without numbers; where it cannot be traced, its parts are. What no trace shows is no
chain: such a layer still can be split by itself.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import operator
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

log = logging.getLogger("syncline")


class LinearLayer(NamedTuple):
    """A linear layer that can be split by its output features."""

    name: str
    rows: int
    """Its output features: the rows of its weight."""
    follows: str = ""
    """The layer before it in a chain."""
    within: str = ""
    """The module whose forward was traced to see that; "" is the model."""


# What these do to an element depends on it alone, so they may get some of the features. What they
# leave out, such as softmax and norms, ends a chain: that costs bytes, never correctness.
_ELEMENTWISE_MODULES = (
    nn.CELU,
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)
_ELEMENTWISE_FUNCTIONS = {
    *(F.relu, F.relu6, F.gelu, F.silu, F.elu, F.selu, F.leaky_relu, F.mish, F.hardtanh),
    *(F.hardswish, F.softplus, F.sigmoid, F.tanh, F.dropout),
    *(torch.relu, torch.tanh, torch.sigmoid, torch.square),
}
_ELEMENTWISE_METHODS = {"relu", "relu_", "tanh", "sigmoid", "square", "contiguous"}


def find_linear_layers(model: nn.Module, trained: Collection[str]) -> dict[str, LinearLayer]:
    """Return the layers that can be split, by name; `trained` are names of trained parameters.

    A layer can be split if it is torch's own, all its parameters are real and trained, and no other
    module has them.
    """
    uses = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    found = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        own = dict(module.named_parameters(recurse=False))
        is_trained = all(f"{name}.{one}".lstrip(".") in trained for one in own)
        if "weight" not in own or not is_trained or own["weight"].is_complex():
            continue
        if all(uses[id(one)] == 1 for one in own.values()):
            found[name] = LinearLayer(name, module.out_features)
    # A chain must be one in training and in evaluation, with optional arguments and without.
    cases = list(itertools.product((True, False), repeat=2))
    traces = [list(_traces(model, "", *case)) for case in cases]
    for name in {name for trace in traces for part in trace for name in _read_directly(*part)}:
        found.pop(name, None)
    chains = [{link for part in trace for link in _chains(*part)} for trace in traces]
    for name, before, within in set.intersection(*chains):
        if name in found and before in found:
            found[name] = found[name]._replace(follows=before, within=within)
    return found


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        alike = torch.empty_like(parameter.detach(), device="meta")
        memo[id(parameter)] = torch.nn.Parameter(alike, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo).train()


Traced = tuple[str, fx.Graph, dict[str, nn.Module]]
"""A part of a model that could be traced: the beginning of its names, its graph, its modules."""


def _traces(
    model: nn.Module, prefix: str, is_training: bool, has_defaults: bool
) -> Iterator[Traced]:
    """Trace a model or, where that fails, its parts.

    With `has_defaults` no optional argument is given, otherwise all are: values that are not there
    are not None.
    """
    is_layer = type(model) is nn.Linear  # it reads its own parameters
    if is_layer or not any(isinstance(one, nn.Linear) for one in model.modules()):
        return
    try:
        traced = copy_to_meta(model).train(is_training)
        with torch.random.fork_rng(devices=()):
            graph = fx.Tracer().trace(traced, _defaults(model) if has_defaults else None)
    except Exception as error:  # whatever the user's forward raises on values that are not there
        log.debug("forward of %s cannot be traced: %s", prefix or "the model", error)
        for name, child in model.named_children():
            yield from _traces(child, f"{prefix}{name}.", is_training, has_defaults)
        return
    for module in traced.modules():
        for node in _kept_nodes(list(vars(module).values())):
            graph.call_function(_kept_nodes, (node,))  # who reads it later is not in the graph
    yield prefix, graph, dict(model.named_modules())


def _defaults(model: nn.Module) -> dict[str, Any]:
    """Return the optional arguments of forward."""
    arguments = inspect.signature(type(model).forward).parameters.values()
    plain = (bool, int, float, str, type(None))
    return {one.name: one.default for one in arguments if isinstance(one.default, plain)}


def _kept_nodes(value: Any) -> Iterator[fx.Node]:
    """Yield what forward has left in a module's attribute."""
    if isinstance(value, fx.Proxy):
        yield value.node
    elif isinstance(value, dict):
        yield from _kept_nodes(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _kept_nodes(one)


def _read_directly(prefix: str, graph: fx.Graph, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the layers whose parameters forward reads itself, without calling the layer."""
    for node in graph.nodes:
        if node.op == "get_attr":
            yield prefix + str(node.target).rpartition(".")[0]


def _chains(
    prefix: str, graph: fx.Graph, modules: dict[str, nn.Module]
) -> Iterator[tuple[str, str, str]]:
    """Yield layers that follow each other in a chain: the second, the first, what was traced."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    num_calls = Counter(node.target for node in calls)
    for node in calls:
        module = modules[str(node.target)]
        if module._forward_pre_hooks or _has_backward_hooks(module):
            continue  # as in `_layer_before`; a forward hook sees the output, which may be whole
        if type(module) is nn.Linear and num_calls[node.target] == 1:
            before = _layer_before(node, modules)
            if before is not None and num_calls[before] == 1:
                yield prefix + str(node.target), prefix + before, prefix.removesuffix(".")


def _layer_before(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """Return the linear layer whose output alone, changed by elements, goes into a layer."""
    while True:
        if len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
        if len(node.users) != 1:
            return None
        if node.op == "call_module":
            # A hook would see some features only. What goes into the first layer is whole.
            module = modules[str(node.target)]
            is_layer = type(module) is nn.Linear
            if module._forward_hooks or _has_backward_hooks(module):
                return None
            if module._forward_pre_hooks and not is_layer:
                return None
            if is_layer:
                return str(node.target)
        if not _is_elementwise(node, modules):
            return None


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _is_elementwise(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Say whether each element of what a call returns depends on one element of its input."""
    if node.op == "call_module":
        return type(modules[str(node.target)]) in _ELEMENTWISE_MODULES
    if node.op == "call_method":
        return node.target in _ELEMENTWISE_METHODS
    if node.op != "call_function":
        return False
    if node.target in (operator.mul, operator.add, operator.truediv, operator.sub, operator.pow):
        return all(isinstance(one, fx.Node | int | float) for one in node.args)
    return node.target in _ELEMENTWISE_FUNCTIONS
