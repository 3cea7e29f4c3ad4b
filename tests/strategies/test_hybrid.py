"""Hybrid parallelism: the result of one process on the whole batch, whatever is split."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import syncline
from patience import one_of_three
from ranks import run_ranks
from syncline.checkpoint import digest_of
from syncline.strategies import Hybrid, HybridSettings, make_strategy
from training import train_forked
from whole_batch import NETWORKS, distance, train_in_groups, train_plain

pytestmark = pytest.mark.processes


def train(name, groups, size=4, machines=1, **settings):
    """Train on some ranks; return the hash that all agree on, and the distance to one process."""
    keep = {key: value for key, value in settings.items() if key != "comm"}

    def work():
        strategy = make_strategy("synchronous")
        if groups is not None:
            strategy = Hybrid(HybridSettings(groups=groups))
        found = train_in_groups(name, strategy, **settings)
        apart = distance(found, train_plain(name, **keep)) if syncline.rank() == 0 else 0.0
        return [digest_of(found), apart]

    found = run_ranks(size, work, machines=machines)
    (digest,) = {digest for digest, _ in found}
    return digest, found[0][1]


IN_FLOAT64 = [(name, groups, 1e-13) for name in sorted(NETWORKS) for groups in (1, 2)]
# Of the networks that compute for seconds, only with the more general of both groups.
IN_FLOAT32 = [
    (name, groups, 2e-6)
    for name, groups, _ in IN_FLOAT64
    if groups == 2 or name not in ("alexnet", "vgg-a")
]


@pytest.mark.parametrize(("name", "groups", "bound"), IN_FLOAT64 + IN_FLOAT32)
def test_the_result_is_that_of_one_process_on_the_whole_batch(name, groups, bound):
    if bound == 1e-13:
        assert train(name, groups, dtype=torch.float64)[1] <= bound
        return
    # Of three seeds, one: where a ReLU or a maximum is at its edge, float32 goes either way, for
    # plain PyTorch in parts of the batch, too (docs/decisions/0032).
    seeds = iter((5, 6, 7))

    def distances():
        seed = next(seeds)
        found = train(name, groups, seed=seed)[1]
        return found, 0.0 if found <= bound else train(name, None, seed=seed)[1]

    one_of_three(distances, lambda found: found[0] <= bound or found[0] <= 3 * found[1])


def test_as_many_groups_as_ranks_split_nothing():
    assert train("uneven", 4)[0] == train("uneven", None)[0]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"clip": 0.1, "optimizer": torch.optim.AdamW}])
def test_the_hash_does_not_depend_on_machines_and_networks(groups, settings):
    expected = train("uneven", groups, **settings)
    assert expected[1] < 1e-4
    assert train("uneven", groups, comm="network", **settings) == expected
    assert train("uneven", groups, machines=2, **settings) == expected
    assert train("uneven", groups, machines=4, **settings) == expected


DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"
JOB = [
    *("run.steps=12", "run.epochs=", "run.checkpoint_every=4", "strategy.shards=12"),
    *("data.batch=60", "optimizer.clip_norm=0.5", "run.evaluate_every=6"),
    "optimizer.warmup_steps=3",
]
WITHOUT_DROPOUT = "model.options={dropout=0.0, batch_norm=true}"


def hybrid(groups):
    return ["strategy.name=hybrid", f"strategy.hybrid.groups={groups}"]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_run_that_was_killed_goes_on_to_the_same_hash(groups, tmp_path):
    whole = train_forked(DIGITS, tmp_path / "whole", *JOB, *hybrid(groups), ranks=4)
    out, stops = tmp_path / "broken", 'faults=[{rank=1, step=9, kind="death"}]'
    with pytest.raises(AssertionError):
        train_forked(DIGITS, out, *JOB, *hybrid(groups), stops, ranks=4)
    found = train_forked(DIGITS, out, *JOB, *hybrid(groups), ranks=4, resume=True)
    assert found["weights_sha256"] == whole["weights_sha256"]
    assert found["accuracy"] == whole["accuracy"]


@pytest.fixture(scope="module")
def broken_and_plain(tmp_path_factory):
    """Return the folder of a run of four ranks that was killed, and what one rank finds alone."""
    folder, job = tmp_path_factory.mktemp("checkpoint"), [*JOB, WITHOUT_DROPOUT]
    stops = 'faults=[{rank=1, step=9, kind="death"}]'
    with pytest.raises(AssertionError):
        train_forked(DIGITS, folder / "run", *job, *hybrid(1), stops, ranks=4)
    return folder / "run", train_forked(DIGITS, folder / "plain", *job)


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)])
def test_a_checkpoint_goes_on_with_other_ranks_and_groups(
    ranks, groups, tmp_path, broken_and_plain
):
    job, out = [*JOB, WITHOUT_DROPOUT], tmp_path / "run"
    broken, plain = broken_and_plain
    shutil.copytree(broken, out)
    found = train_forked(DIGITS, out, *job, *hybrid(groups), ranks=ranks, resume=True)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert found["accuracy"] == pytest.approx(plain["accuracy"], abs=0.01)


@settings(max_examples=8, deadline=None)
@given(some.data())
def test_any_layers_ranks_and_groups_give_the_result_of_one_process(data):
    ranks = data.draw(some.integers(2, 4))
    groups = data.draw(some.sampled_from([one for one in range(1, ranks) if ranks % one == 0]))
    sizes = data.draw(some.lists(some.integers(1, 9), min_size=2, max_size=5))
    bias = data.draw(some.booleans())
    shards = ranks * data.draw(some.integers(1, 2))

    def make():
        torch.manual_seed(3)
        layers = [
            layer
            for into, out in itertools.pairwise(sizes)
            for layer in (nn.Linear(into, out, bias=bias), nn.Sigmoid())
        ]
        model = nn.Sequential(*layers).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def work():
        syncline.init(threads=1)
        batch = torch.randn(3, shards, 2, sizes[0], generator=torch.manual_seed(4)).double()
        plain, own = make()
        for step in batch:
            plain(step.flatten(0, 1)).square().mean().backward()
            own.step()
            own.zero_grad()
        model, optimizer = make()
        strategy = Hybrid(HybridSettings(groups=groups))
        replica = syncline.distribute(model, optimizer, strategy, shards=shards)
        for step in batch:
            for shard in replica.my_shards:
                replica.begin_shard(shard)
                model(step[shard]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with replica.whole():
            return distance(model.state_dict(), plain.state_dict())

    assert max(run_ranks(ranks, work)) < 1e-13
