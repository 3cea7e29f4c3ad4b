"""The memory that a simulated rank needs, worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from small_job import SYNTHETIC
from syncline.cluster import cluster_of
from syncline.config import parse_job
from syncline.sim.job import simulate_job, state_copies
from syncline.sim.run import simulate
from syncline.strategies import Server, ServerSettings
from worlds import cluster, workload

FIRST, SECOND = 409_600, 102_400
P = FIRST + SECOND
TWO = workload((FIRST, 1.0, 2.0), (SECOND, 1.0, 2.0), samples=8)


def figures(found):
    return found.peak_memory_bytes, found.mean_peak_memory_bytes, found.memory_share_bytes


def test_an_mlp_with_momentum_by_hand():
    job = parse_job(
        SYNTHETIC.replace('"cnn"', '"mlp"').replace("lr = 0.05", "lr = 0.05\nmomentum = 0.9"),
        sets=["model.options.hidden=[300]"],
    ).resolved(2)
    found = simulate_job(job, cluster_of(job.cluster, 2, 1), steps=2)
    p = 4 * sum(place.num_elements for place in found.places.places)
    # At set-up: the model's parameters and gradients, and those of the buckets.
    assert found.peak_memory_bytes == pytest.approx(4 * p, rel=1e-3)
    # Then: gradients, half of the one copy of the parameters, and of the momentum.
    assert found.memory_share_bytes == pytest.approx(p + p / 2 + p / 2, rel=5e-3)


@pytest.mark.parametrize(("ranks_per_machine", "copies"), [(1, 1.0), (2, 0.5), (4, 0.25)])
def test_ranks_of_a_machine_share_one_copy_of_the_parameters(ranks_per_machine, copies):
    links = cluster(4, ranks_per_machine, rate=1e9)
    found = simulate(TWO, links, steps=2, state_copies=2)
    # Parameters, gradients, and two numbers for each parameter of a strip, a quarter of all.
    assert figures(found) == (4 * P, 4 * P, copies * P + P + 2 * P / 4)


def test_activations_count_where_the_workload_has_them():
    layers = [msgspec.structs.replace(layer, output_bytes=P) for layer in TWO.layers]
    layers[0] = msgspec.structs.replace(layers[0], input_bytes=1000)
    full = msgspec.structs.replace(TWO, layers=tuple(layers))
    found = simulate(full, cluster(2, rate=1e9), steps=2, state_copies=1)
    # Eight samples' outputs of both layers and their input, and one gradient on its way.
    wanted = 2 * P + P / 2 + 8 * (2 * P + 1000) + FIRST
    assert found.peak_memory_bytes == pytest.approx(wanted, rel=1e-3)


def test_a_server_holds_its_strips_beside_its_own_parameters():
    make = lambda: Server(ServerSettings(servers=1, early=False))  # noqa: E731
    found = simulate(TWO, cluster(3, rate=1e9), make, steps=2, state_copies=1)
    # Two workers: parameters and gradients; each has made two more of them for the set-up. The
    # server: both, the values and a gradient that was pushed, momentum.
    worker, server = 2 * P, 2 * P + 2 * P + P
    assert found.memory_share_bytes == pytest.approx((2 * worker + server) / 3, rel=1e-3)
    assert found.peak_memory_bytes == pytest.approx(server, rel=1e-3)
    assert found.mean_peak_memory_bytes == pytest.approx((2 * 2 * worker + server) / 3, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [("lr = 0.05", 0), ("lr = 0.05\nmomentum = 0.9", 1), ('name = "adam"\nlr = 0.05', 2)],
)
def test_what_an_optimizer_keeps_for_each_parameter(optimizer, copies):
    assert state_copies(parse_job(SYNTHETIC.replace("lr = 0.05", optimizer)).resolved(1)) == copies
