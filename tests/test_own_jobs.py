"""Jobs with a model, data and a loss of the user's own: in training, simulated and resumed."""

from __future__ import annotations

import json

import pytest
import torch

from command import Started
from own_code import POINTS, WORDS, write_job
from ranks import RankError, run_ranks
from syncline.cluster import cluster_of
from syncline.config import read_job
from syncline.loader import reseed
from syncline.recipe import Order, build_model, build_optimizer, load_data
from syncline.report.progress import LineProgress
from syncline.sim.job import simulate_job
from syncline.train import train
from training import train_forked

pytestmark = pytest.mark.processes


def simulated(job_file, *sets, ranks=1, learns=True):
    job = read_job(job_file, sets).resolved(ranks)
    return simulate_job(job, cluster_of(job.cluster, ranks, None), learns=learns, steps=2)


def test_a_language_model_has_one_hash_on_any_number_of_ranks_and_simulated(own, tmp_path):
    job = write_job(own(WORDS), "texts", "[model.options]", "width = 12")
    one = train_forked(job, tmp_path / "one")
    two = train_forked(job, tmp_path / "two", ranks=2)
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["num_parameters"] == 11 * 12 + 12 * 13 + 11 * 13, "width = 12 was passed on"
    assert (one["loss"], one["test_loss"]) == (two["loss"], two["test_loss"])
    assert 0 <= one["accuracy"] == two["accuracy"] <= 1
    assert (one["accuracy"] * 16 * 6) % 1 == pytest.approx(0), "counted by word"
    found = simulated(job, ranks=2)
    assert found.weights_sha256 == one["weights_sha256"]
    assert (found.test_loss, found.accuracy) == (one["test_loss"], one["accuracy"])


def test_it_is_what_a_plain_loop_computes(own, tmp_path):
    file = write_job(own(WORDS), "texts")
    sets = ["strategy.shards=1"]
    job = read_job(file, sets).resolved(1)
    data = load_data(job)
    order, model = Order(job, data), build_model(job, data)
    optimizer = build_optimizer(job.optimizer, model)
    model.train()
    for step in range(6):
        inputs, targets = data.train.batch(order.indices(step, 0))
        reseed(0, step, 0)
        scores = model(inputs)
        assert (inputs.dtype, scores.shape) == (torch.int64, (16, 6, 11))
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    from syncline.checkpoint import digest_of

    found = train_forked(file, tmp_path / "run", *sets)
    assert found["weights_sha256"] == digest_of(model.state_dict())


def test_random_augmentation_and_float_targets_have_one_hash_too(own, tmp_path):
    job = write_job(own(POINTS), "points", "[data.options]", "size = 32")
    sets = ["model.loss=mse"]
    one = train_forked(job, tmp_path / "one", *sets)
    two = train_forked(job, tmp_path / "two", *sets, ranks=2)
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["test_loss"] == two["test_loss"]
    assert one["accuracy"] is two["accuracy"] is None
    found = simulated(job, *sets, ranks=2)
    assert found.weights_sha256 == one["weights_sha256"]
    assert found.accuracy is None


def test_a_resumed_run_ends_in_the_same_bits_and_job_toml_keeps_the_names(own, tmp_path):
    module = own(POINTS)
    job = write_job(module, "points", "[data.options]", "size = 48")
    sets = [f"model.loss={module}:loss", "run.checkpoint_every=3"]
    whole = train_forked(job, tmp_path / "whole", *sets)
    started = Started(
        *("train", "job.toml", "--out", "part", "--json"),
        *(word for one in (*sets, "run.steps=3") for word in ("--set", one)),
        traced=False,
    )
    out, said = started.communicate()
    assert started.returncode == 0, said
    kept = read_job(tmp_path / "part" / "job.toml")
    assert (kept.model.name, kept.model.loss) == (f"{module}:make", f"{module}:loss")
    assert (kept.data.name, kept.data.options) == (f"{module}:points", {"size": 48})
    assert json.loads(out)["accuracy"] is None
    resumed = train_forked(job, tmp_path / "part", *sets, ranks=2, resume=True)
    assert (resumed["resumed_at"], resumed["steps"]) == (3, 6)
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_a_run_does_not_go_on_with_another_loss_or_other_options(own, tmp_path):
    module = own(POINTS)
    job = write_job(module, "points")
    train_forked(job, tmp_path / "run", "model.loss=mse", "run.checkpoint_every=3")
    for setting, key in (
        ("model.loss=l1", "model.loss"),
        ("data.options={size = 64}", "data.options"),
    ):
        sets = ["model.loss=mse", setting, "run.steps=9"]
        with pytest.raises(RankError, match=f"made with {key} = "):
            train_forked(job, tmp_path / "run", *sets, resume=True)


def test_progress_says_nothing_of_accuracy_where_it_has_no_meaning(own, tmp_path):
    job = read_job(write_job(own(POINTS), "points"), ["model.loss=mse", "run.evaluate_every=3"])

    def work():
        with open(tmp_path / "said", "w") as said:
            train(job, tmp_path / "run", False, LineProgress(said))

    run_ranks(1, work)
    lines = [line for line in (tmp_path / "said").read_text().splitlines() if "evaluated" in line]
    assert [line.split(":")[0] for line in lines] == ["evaluated at step 3", "evaluated at step 6"]
    assert "accuracy" not in "".join(lines)


def test_a_built_in_network_trains_on_own_data_if_it_knows_the_classes(own, tmp_path):
    text = "import torch\ndef points(): return (torch.rand(64, 5), torch.arange(64) % 3), None\n"
    module = own(text)
    job = write_job(module, "points")
    sets = ["model.name=mlp", "model.options.hidden=[7]"]
    found = train_forked(job, tmp_path / "run", *sets, "model.classes=3")
    assert found["num_parameters"] == 5 * 7 + 7 + 7 * 3 + 3
    assert found["test_loss"] is None
    with pytest.raises(RankError, match=r"model\.classes: it is not there, but the classes of"):
        train_forked(job, tmp_path / "other", *sets)


def test_an_own_network_trains_on_built_in_data(own, tmp_path):
    text = "from torch import nn\n"
    text += "def make(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    job = write_job(own(text), "nothing")
    found = train_forked(job, tmp_path / "run", "data.name=digits", "run.steps=60")
    assert found["accuracy"] > 0.5


def test_integer_inputs_are_simulated_by_their_sizes(own):
    job = write_job(own(WORDS), "texts")
    found = simulated(job, "strategy.overlap=true", ranks=2, learns=False)
    assert found.step_s > 0
    assert found.weights_sha256 is None


DRAWN = """
import numpy as np
import torch
from torch import nn


def make():
    return nn.Linear(2, 1)


def points():
    inputs = torch.from_numpy(np.random.default_rng().random((64, 2))).float()
    return (inputs, inputs.sum(1, keepdim=True)), None
"""


def test_ranks_that_load_different_data_are_refused(own, tmp_path):
    job = write_job(own(DRAWN), "points")
    with pytest.raises(RankError, match="returned other samples on rank 1 than on rank 0"):
        train_forked(job, tmp_path / "run", "model.loss=mse", ranks=2)


def test_generators_are_seeded_before_own_functions_are_called(own, tmp_path):
    text = DRAWN.replace("np.random.default_rng().random((64, 2))", "np.random.rand(64, 2)")
    # Each process starts in a state of its own; tests fork theirs, so the module makes it so.
    text += "import os\nnp.random.seed(os.getpid())\ntorch.manual_seed(os.getpid())\n"
    job = write_job(own(text), "points")
    one = train_forked(job, tmp_path / "one", "model.loss=mse")
    two = train_forked(job, tmp_path / "two", "model.loss=mse", ranks=2)
    assert one["weights_sha256"] == two["weights_sha256"]


# -- the command line ------------------------------------------------------------------------------


def refused(*sets):
    words = [word for one in sets for word in ("--set", one)]
    started = Started("train", "job.toml", "--ranks", "2", "--out", "run", *words, traced=False)
    out, said = started.communicate()
    assert (started.returncode, out) == (2, ""), said
    assert said.count("\n") == 1, said
    return said.removeprefix("syncline: ").strip()


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (["model.name=nowhere:make"], "model.name: got 'nowhere:make', but there is no module"),
        (["model.name={}:mkae"], "model.name: got '{}:mkae', but module {} has no function mkae."),
        (["model.options.widht=3"], "model.options.widht: got 3, but {}:make has no such keyword."),
        (["data.options.size=3"], "data.options.size: got 3, but {}:texts has no such keyword."),
        (["model.name={}:texts"], "model.name: {}:texts returned tuple, but it must return an"),
        (["data.name={}:make"], "data.name: {}:make returned Net, but it must return (train,"),
        (["model.loss=mse"], "model.loss: mse got an output of shape (4, 6, 11) and targets of"),
        (
            ["model.options.words=3"],
            "model.name: {}:make on a batch of shape (4, 6), int64, failed with IndexError: index",
        ),
        (
            ["model.name=mlp", "model.classes=11"],
            "model.name: mlp on a batch of shape (4, 6), int64, failed with RuntimeError:",
        ),
        (["data.batch=128"], "data.batch: got 128, but {}:texts has 64 samples to train on."),
    ],
)
def test_a_mistake_is_one_line_before_ranks_start(own, tmp_path, sets, line):
    module = own(WORDS)
    write_job(module, "texts")
    found = refused(*(one.format(module) for one in sets))
    assert found.startswith(line.format(module, module, module))
    assert not (tmp_path / "run").exists()


def test_simulate_refuses_in_one_line_too(own):
    module = own(WORDS)
    write_job(module, "texts")
    started = Started(*("simulate", "job.toml", "--set", f"model.name={module}:mkae"), traced=False)
    out, said = started.communicate()
    assert (started.returncode, out) == (2, "")
    assert said.startswith(f"syncline: model.name: got '{module}:mkae', but module {module} has")
    assert said.count("\n") == 1
