"""From a job to a simulation: what is built and loaded, and workload files."""

from __future__ import annotations

import msgspec
import pytest
import torch

from small_job import small
from syncline import data, workload
from syncline.cluster import cluster_of
from syncline.config import OptimizerSettings
from syncline.engine.optimizer import snapshot
from syncline.engine.told_settings import flatten
from syncline.errors import ConfigError
from syncline.presets import PRESETS
from syncline.recipe import build_optimizer
from syncline.sim.job import find_workload, num_settings, simulate_job, state_copies
from worlds import run_program

RANKS = 4


def resolved(**sets):
    return small(**sets).resolved(RANKS)


def links(job):
    return cluster_of(job.cluster, RANKS)


@pytest.fixture
def _no_data(monkeypatch):
    def load(*args, **settings):
        raise AssertionError("a simulation of sizes loads no data")

    monkeypatch.setattr(data, "load", load)


@pytest.mark.parametrize(
    "sets",
    [
        {},
        {"data__name": "fashion-mnist", "data__path": "nowhere"},
        {"data__name": "folder", "model__classes": "7", "data__image_size": "64"},
        {
            "data__name": "synthetic",
            "model__name": "resnet-50",
            "data__sample_shape": "[3, 64, 64]",
        },
    ],
)
@pytest.mark.usefixtures("_no_data")
def test_sizes_only_needs_no_data_and_no_weights(monkeypatch, sets):
    made = []
    empty = torch.nn.Parameter.__new__

    def note(kind, values=None, requires_grad=True):
        made.append(values.device.type)
        return empty(kind, values, requires_grad)

    monkeypatch.setattr(torch.nn.Parameter, "__new__", note)
    job = resolved(**sets)
    assert simulate_job(job, links(job), steps=2).steps == 2
    assert set(made) == {"meta"}


WITHOUT_COMPILER = """
import sys
from small_job import small
from syncline.cli.main import main
from syncline.cluster import cluster_of
from syncline.sim.job import simulate_job
from syncline.strategies.registry import STRATEGIES
from worlds import workload
work = workload((4096, 0.1, 0.1), (400_000, 0.1, 0.1), samples=16)
for name in STRATEGIES:
    job = small(strategy__name=name, run__steps="20", optimizer__momentum="0.9").resolved(4)
    simulate_job(job, cluster_of(job.cluster, 4), steps=2, workload=work)
assert "torch" in sys.modules
assert "torch._dynamo" not in sys.modules
"""


def test_sizes_only_does_not_load_torch_s_compiler():
    # Loading it takes four seconds, more than most simulations.
    run_program(WITHOUT_COMPILER)


OPTIMIZERS = [
    *({"momentum": m, "nesterov": n} for m, n in ((None, None), (0.0, False), (0.9, True))),
    {"momentum": 0.9},
    {"weight_decay": 0.1},
    *(
        {"name": name, "betas": betas, "weight_decay": decay}
        for name in ("adam", "adamw")
        for betas in (None, (0.0, 0.0), (0.8, 0.9))
        for decay in (None, 0.0, 0.1)
    ),
]


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=str)
def test_an_optimizer_s_numbers_are_those_of_the_real_one(settings):
    job = msgspec.structs.replace(small(), optimizer=OptimizerSettings(lr=0.1, **settings))
    job = job.resolved(1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer(job.optimizer, torch.nn.ParameterList([parameter]))
    parameter.grad = torch.zeros(2)
    optimizer.step()
    kept = [one for one in optimizer.state[parameter].values() if isinstance(one, torch.Tensor)]
    assert state_copies(job) == sum(one.shape == parameter.shape for one in kept)
    assert num_settings(job) == len(flatten(snapshot(optimizer)))


@pytest.mark.usefixtures("_no_data")
def test_a_folder_that_is_not_there_has_no_known_classes():
    job = resolved(data__name="folder", data__path="nowhere")
    with pytest.raises(ConfigError, match=r"model\.classes: it is not there"):
        find_workload(job, links(job))


@pytest.mark.parametrize("name", ["synchronous", "elastic"])
def test_a_workload_that_was_written_gives_the_same_run(tmp_path, name):
    job = resolved(strategy__name=name, cluster__input_s="0.001")
    path = tmp_path / "cnn.json"
    found = find_workload(job, links(job))
    workload.write(found, path)
    again = find_workload(resolved(strategy__name=name), links(job), path)
    assert again == found
    runs = [
        simulate_job(job, links(job), steps=3, workload=one, traces=True) for one in (None, again)
    ]
    assert runs[0].trace.to_bytes() == runs[1].trace.to_bytes()
    assert runs[0].batch == runs[1].batch == 64


def test_learning_with_a_workload_computes_with_the_model_and_takes_the_file_s_time(tmp_path):
    job = resolved(run__steps="3")
    found = find_workload(job, links(job))
    slower = [
        workload.Layer(one.name, one.size_bytes, one.forward_s + 1.0, one.backward_s)
        for one in found.layers
    ]
    workload.write(
        workload.Workload("x", tuple(slower), 0.0, found.parameters, samples=found.samples),
        tmp_path / "slow.json",
    )
    slow = find_workload(job, links(job), tmp_path / "slow.json")
    runs = [simulate_job(job, links(job), learns=True, workload=one) for one in (None, slow)]
    assert runs[0].weights_sha256 == runs[1].weights_sha256
    assert runs[1].step_s == pytest.approx(runs[0].step_s + len(slower), rel=1e-3)
    other = resolved(model__name="mlp", run__steps="3")
    with pytest.raises(ConfigError, match=r"--workload: parameter .* is not the same"):
        simulate_job(other, links(other), learns=True, workload=slow)


def test_a_workload_for_other_shards_and_rates_without_effect_are_refused(tmp_path):
    job = resolved()
    workload.write(find_workload(job, links(job)), tmp_path / "x.json")
    other = resolved(data__batch="128")
    with pytest.raises(ConfigError, match=r"has times for 16 samples, but a shard .* has 32\."):
        find_workload(other, links(other), tmp_path / "x.json")
    fast = resolved(cluster__flops_per_s="1e12")
    with pytest.raises(ConfigError, match=r"^cluster\.flops_per_s: got 1e\+12 with --workload"):
        find_workload(fast, links(fast), tmp_path / "x.json")
    timed = resolved(cluster__input_s="0.5")
    assert find_workload(timed, links(timed), tmp_path / "x.json").input_s == 0.5


def test_a_cluster_may_say_on_what_its_ranks_compute():
    job, named = resolved(), resolved(cluster__device="k80")
    of_preset = cluster_of(job.cluster, RANKS, facts=PRESETS["k80-10gbe"])
    found = find_workload(job, of_preset)
    assert found == find_workload(named, links(named))
    assert found != find_workload(job, links(job))
