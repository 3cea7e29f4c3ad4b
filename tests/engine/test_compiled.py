"""torch.compile with tied weights and several backward passes a step, as in a small GPT."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import syncline
from syncline.errors import UsageError

pytestmark = pytest.mark.usefixtures("alone")


class Block(nn.Module):
    """Attention alone: compiling takes most of a test's time, and grows with the layers."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = self.attend(self.norm(x)).chunk(3, dim=-1)
        return x + self.project(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class SmallGPT(nn.Module):
    """Tokens and scores share their weight."""

    def __init__(self, words=32, width=16):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.block = Block(width)
        self.scores = nn.Linear(width, words, bias=False)
        self.scores.weight = self.tokens.weight

    def forward(self, x, y):
        scores = self.scores(self.block(self.tokens(x)))
        return functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def words(step, length=8):
    shape = (3, length + 1)
    found = torch.randint(32, shape, generator=torch.Generator().manual_seed(step))
    return found[:, :-1], found[:, 1:]


def train(*, compile_with, distributed, overlap=None, passes=3):
    torch.manual_seed(0)
    plain = SmallGPT()
    model = torch.compile(plain, backend=compile_with) if compile_with else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if distributed:
        syncline.distribute(model, optimizer, overlap=overlap, bucket_bytes=1024)
    for step in range(3):
        for part in range(passes):
            # Another length makes torch compile anew, while gradients wait for the step.
            (model(*words(10 * step + part, length=8 + part)) / passes).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return plain.state_dict()


@functools.cache
def expected(backend):
    """Return the weights of the plain loop. Backend "eager" has the bits of no compiler at all."""
    return train(compile_with=None if backend == "eager" else backend, distributed=False)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_gpt_with_accumulation_has_the_bits_of_the_plain_loop(backend, overlap):
    syncline.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        plain = expected(backend)
        torch._dynamo.reset()
        found = train(compile_with=backend, distributed=True, overlap=overlap)
    assert plain.keys() == found.keys()
    for name, value in plain.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("overlap", [True, False])
def test_a_user_s_read_of_a_pending_gradient_is_still_refused(overlap):
    syncline.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = SmallGPT()
        model = torch.compile(plain, backend="eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        syncline.distribute(model, optimizer, overlap=overlap)
        model(*words(0)).backward()
        with pytest.raises(UsageError, match="read between"):
            _ = plain.tokens.weight.grad
        optimizer.step()
        with pytest.raises(UsageError, match="read after"):
            _ = plain.tokens.weight.grad
        model.zero_grad()
        assert plain.tokens.weight.grad is None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("is_evaluated", [True, False])
@pytest.mark.parametrize("is_part", [True, False])
def test_compiled_code_does_not_depend_on_what_a_rank_did_before(overlap, is_evaluated, is_part):
    """Rank 0 may evaluate alone: its training must then run the same graphs as its peers'."""
    graphs = []

    def backend(graph, inputs):
        graphs.append((torch.is_grad_enabled(), graph.code))
        assert all(type(one) in (nn.Parameter, torch.Tensor) for one in inputs)
        return graph.forward

    syncline.init()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = SmallGPT()
    if is_part:
        model.block = torch.compile(model.block, backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    syncline.distribute(model, optimizer, overlap=overlap, bucket_bytes=1024)
    for step in range(3):
        for part in range(2):
            model(*words(10 * step + part)).backward()
            if is_evaluated:
                with torch.no_grad():
                    model(*words(5))
        optimizer.step()
        if is_evaluated:
            with torch.no_grad():
                model(*words(5))
        optimizer.zero_grad()
    assert [with_gradient for with_gradient, _ in graphs].count(True) == 1
    assert len(graphs) == 1 + is_evaluated


def test_a_model_that_was_compiled_in_place_is_refused():
    syncline.init()
    model = SmallGPT()
    model.block.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(UsageError, match="module block was compiled in place"):
        syncline.distribute(model, optimizer)


def test_a_compiled_forward_between_shards_is_refused():
    syncline.init()
    model = torch.compile(SmallGPT(), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = syncline.distribute(model, optimizer, shards=2)
    replica.begin_shard(0)
    model(*words(0)).backward()
    optimizer.step()
    with pytest.raises(UsageError, match="read after a step"):
        model(*words(1))


@functools.cache
def plain_layers():
    return train_layers(lambda layers, forward: forward, overlap=None)


def train_layers(compile_late, overlap):
    """Train layers that are compiled after distribute(), if at all."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    if overlap is not None:
        syncline.distribute(layers, optimizer, overlap=overlap, bucket_bytes=6000)

    def forward(x):
        for layer in layers:
            x = torch.tanh(nn.functional.linear(layer(x), layer.weight))
        return x

    forward = compile_late(layers, forward)
    for step in range(4):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in layers.parameters()]


def compile_function(layers, forward):
    return torch.compile(forward, backend="eager")


def compile_parts(layers, forward):
    for at in range(len(layers)):
        layers[at] = torch.compile(layers[at], backend="eager")
    return forward


def compile_in_place(layers, forward):
    for layer in layers:
        layer.compile(backend="eager")
    return forward


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it compiles
@pytest.mark.parametrize("compile_late", [compile_function, compile_parts, compile_in_place])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_compiled_after_distribute_waits_for_parameters(compile_late, overlap):
    torch._dynamo.reset()
    syncline.init()
    found = train_layers(compile_late, overlap)
    assert all(map(torch.equal, found, plain_layers()))
