"""Hybrid parallelism: what is sent is what the balance equations say, on both clocks."""

from __future__ import annotations

import itertools

import pytest
import torch

import syncline
from ranks import run_ranks
from syncline import models
from syncline.measure.derive import derive
from syncline.perf.balance import exact_split_bytes
from syncline.perf.trace import Trace
from syncline.session import current_session
from syncline.sim.run import simulate
from syncline.strategies import Hybrid, HybridSettings
from traces import check_trace
from training import train_forked
from worlds import cluster

pytestmark = pytest.mark.processes

HIDDEN, OUT, BATCH, RANKS, STEPS = [96, 80, 96], 56, 32, 4, 3
EXCHANGES = ("all_to_all", "reduce_scatter", "all_gather")


JOB = """
[model]
name = "mlp"

[data]
name = "digits"
batch = 32

[optimizer]
lr = 0.05

[strategy]
name = "hybrid"
hybrid = { groups = 2 }

[run]
steps = 6
"""


def make():
    torch.manual_seed(0)
    return models.build("cd-dnn", (40,), OUT, hidden=HIDDEN)


def make_strategy(groups):
    return Hybrid(HybridSettings(groups=groups))


def sent(log):
    """Return the bytes of a step in exchanges of each kind."""
    return [sum(one[2] for one in log if one[1] == what) / STEPS for what in EXCHANGES]


def measured(groups, machines):
    """Return the bytes that each rank sends in a step, by kind of exchange."""

    def work():
        syncline.init(threads=1)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        syncline.distribute(model, optimizer, make_strategy(groups))
        traffic = current_session().comm.traffic
        for step in range(STEPS + 1):
            if step == 1:
                current_session().lane.drain()
                traffic.log = []
            model(torch.ones(BATCH // RANKS, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        current_session().lane.drain()
        log, traffic.log = traffic.log, None
        return sent(log)

    return run_ranks(RANKS, work, machines=machines)


def simulated(groups, **options):
    return simulate(
        derive(make(), (40,), BATCH // RANKS, 1e9),
        cluster(RANKS, rate=1e9, latency_s=1e-5),
        lambda: make_strategy(groups),
        steps=STEPS,
        **options,
    )


def expected(groups):
    """Return what the equations say that a rank sends, by kind of exchange."""
    sizes = [40, *HIDDEN, OUT]
    layers = [
        exact_split_bytes(
            *(into, out, BATCH),
            ranks=RANKS,
            groups=groups,
            is_last=number == len(sizes) - 2,
            needs_input_gradient=number > 0,
            has_bias=True,
        )
        for number, (into, out) in enumerate(itertools.pairwise(sizes))
    ]
    inside = sum(layer.forward + layer.backward for layer in layers)
    across = sum(layer.gradients for layer in layers)
    return [inside, across, sum(layer.parameters for layer in layers)]


@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_send_what_the_equations_say(groups):
    # The mean over ranks: strips end at whole blocks.
    found = [sum(kind) / RANKS for kind in zip(*measured(groups, RANKS), strict=True)]
    assert found == pytest.approx(expected(groups), rel=0.02)


@pytest.mark.parametrize("groups", [1, 2])
def test_virtual_ranks_send_the_same(groups):
    logs = simulated(groups, keeps_messages=True).messages
    for log, real in zip(logs, measured(groups, RANKS), strict=True):
        assert sent(log) == pytest.approx(real)


def test_a_simulated_trace_is_a_graph_with_exchanges_of_activations():
    found = simulated(1, traces=True)
    check_trace(found.trace)
    assert found.strategy == {"groups": 1, "split_layers": ["f1", "f2", "f3", "f4"]}
    kinds = [task.kind for task in found.trace.tasks if task.rank == 0]
    # Into four layers, out of the last, its gradients, and those of all inputs but the first.
    assert kinds.count("activations") == STEPS * (4 + 1 + 1 + 3)
    assert found.exposed_communication > 0


def test_a_measured_trace_has_them_too(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    train_forked(job, tmp_path / "run", ranks=4, trace=tmp_path / "measured.trace")
    trace = Trace.read(tmp_path / "measured.trace")
    check_trace(trace)
    assert any(task.kind == "activations" for task in trace.tasks)
