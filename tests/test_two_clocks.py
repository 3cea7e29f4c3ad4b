"""A real and a virtual run of one job are one program: layout, bytes, messages, their order.

Updates are not taken early, machines are equal, and `merged` is given its times: what a real run
measures would differ from what a simulation assumes.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional

import syncline
from ranks import run_ranks
from syncline import workload
from syncline.engine.optimizer import snapshot
from syncline.engine.told_settings import flatten
from syncline.measure.derive import derive
from syncline.sim.run import simulate
from syncline.strategies import STRATEGIES, MergedSettings, make_strategy
from syncline.workload import Layer, Workload
from worlds import cluster

pytestmark = pytest.mark.processes

STEPS = 4
BATCH = 3
EVERY = sorted(STRATEGIES)


class Small(nn.Module):
    """Below a megabyte: batch norm, a parameter without use, layers not in their order of use."""

    shape = (1, 8, 8)

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(33, 7)
        self.unused = nn.Linear(3, 3)
        self.first = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Flatten())
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.middle = nn.Linear(5 * 36, 33)

    def forward(self, x):
        return self.last(self.frozen(torch.tanh(self.middle(self.first(x)))))


class Large(nn.Module):
    """Above a megabyte."""

    shape = (300,)

    def __init__(self):
        super().__init__()
        sizes = (300, 400, 300, 256, 7)
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Tied(nn.Module):
    """A transformer whose output uses the embedding's weight: the input is a row of words."""

    shape = (6, 64)

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 700, bias=False)
        self.embed = nn.Linear(64, 64)
        self.layer = nn.TransformerEncoderLayer(64, 2, 2000, dropout=0.0, batch_first=True)
        self.table = nn.Parameter(torch.randn(700, 64))
        self.out.weight = self.table

    def forward(self, x):
        words = functional.linear(x, self.table)
        return self.out(self.layer(self.embed(x)) + words @ self.table).mean(dim=1)


MODELS = {"small": Small, "large": Large, "tied": Tied}


def make(model):
    torch.manual_seed(0)
    built = MODELS[model]()
    return built, torch.optim.SGD(built.parameters(), lr=0.01, momentum=0.9)


def strategy_of(name, times=None):
    """Make a strategy that does not begin exchanges early; `merged` reads its times from a file."""
    kind = STRATEGIES[name].settings
    settings = kind(early=False) if "early" in kind.__struct_fields__ else kind()
    if name == "merged":
        settings = MergedSettings(times=str(times))
    if "period" in kind.__struct_fields__ and kind().period > STEPS:
        settings = kind(period=2)
    return make_strategy(name, settings)


def real(model, name, ranks, machines, times, clip):
    """Return the layout, each rank's bytes, and its messages in every step."""

    def work():
        syncline.init()
        built, optimizer = make(model)
        strategy = strategy_of(name, times)
        replica = syncline.distribute(built, optimizer, strategy, early=False)
        traffic = replica.comm.traffic
        traffic.log = log = []
        for _ in range(STEPS):
            built(torch.randn(BATCH, *MODELS[model].shape)).square().mean().backward()
            if clip:
                syncline.clip_grad_norm_(built, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            replica.synchronize()
        traffic.log = None
        found = replica.layout.to_json_dict(), repr(replica.layout), traffic.step_bytes, log
        with replica.whole():  # nobody leaves before all have taken their last step
            return found

    return run_ranks(ranks, work, machines=machines)


def virtual(model, name, ranks, machines, times, clip):
    built, optimizer = make(model)
    found = derive(built, MODELS[model].shape, BATCH, 1e9)
    links = cluster(ranks, ranks // machines, rate=1e9, cores=os.cpu_count())
    return simulate(
        found,
        links,
        lambda: strategy_of(name, times),
        steps=STEPS,
        num_settings=len(flatten(snapshot(optimizer))),
        clips=clip,
        keeps_messages=True,
    )


def by_channel(log):
    found = defaultdict(list)
    for channel, what, num_bytes in log:
        found[channel].append((what, num_bytes))
    return dict(found)


@pytest.fixture
def times(tmp_path):
    """Times by which `merged` puts some layers together and others not."""
    names = ["last", "middle", "first.0", "layers.1", "layers.3", "layer.linear1"]
    layers = tuple(Layer(name, 0, 0.0, 2e-3) for name in names)
    workload.write(Workload("times", layers), tmp_path / "times.json")
    return tmp_path / "times.json"


# Every strategy with every model and in every world, and every model in every world.
WORLDS = [(2, 1), (4, 2), (3, 3)]
PAIRS = [
    (name, model, *WORLDS[(row + column) % 3])
    for row, name in enumerate(EVERY)
    for column, model in enumerate(sorted(MODELS))
]


@pytest.mark.parametrize(("name", "model", "ranks", "machines"), PAIRS)
def test_layout_bytes_and_messages_are_equal(name, model, ranks, machines, times):
    check(name, model, ranks, machines, times, clip=False)


@pytest.mark.parametrize("name", ["synchronous", "all_reduce", "gossip"])
def test_with_clipping(name, times):
    check(name, "small", 2, 1, times, clip=True)
    check(name, "large", 3, 3, times, clip=True)


def check(name, model, ranks, machines, times, clip):
    found = real(model, name, ranks, machines, times, clip)
    outcome = virtual(model, name, ranks, machines, times, clip)
    assert {repr_ for _, repr_, _, _ in found} == {repr(outcome.places)}
    assert found[0][0] == outcome.layout
    sent = [num_bytes / STEPS for _, _, num_bytes, _ in found]
    assert sum(sent) / ranks == outcome.sent_bytes
    is_synchronous = STRATEGIES[name].settings.is_synchronous
    for rank, (_, _, _, log) in enumerate(found):
        mine = [tuple(one) for one in log]
        theirs = [tuple(one) for one in outcome.messages[rank]]
        if is_synchronous:
            assert by_channel(mine) == by_channel(theirs), rank
        else:
            assert Counter(mine) == Counter(theirs), rank
