"""From a job to a simulation: what is built and loaded, and workload files."""

from __future__ import annotations

import pytest
import torch

from small_job import small
from syncline import data, workload
from syncline.cluster import cluster_of
from syncline.errors import ConfigError
from syncline.sim.job import find_workload, simulate_job

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
    # num_settings and state_copies make the optimizers of models with one parameter or two.
    assert [kind for kind in made if kind != "meta"] == ["cpu"] * 3


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
