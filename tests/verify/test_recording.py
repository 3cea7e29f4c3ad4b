"""What a verified rank records, and the reasons that are found in loops with a mistake."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline
from ranks import run_ranks
from syncline.engine.digests import parameter_digests, tensor_digest
from syncline.launch.env import Verification, read_verification, verification_environment
from syncline.session import current_session
from syncline.verify.compare import first_difference, read_run
from syncline.verify.recording import StepsVerified

pytestmark = pytest.mark.processes

STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 2)

    def forward(self, x):
        return self.second(nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training))


def loop(*, shards=2, seed=0, batch=4, lr=0.1, noise=None, draws=False):
    """An own loop with a mistake or without one; it ends by itself after two epochs."""
    rank = syncline.init(threads=1)
    world = syncline.world_size()
    torch.manual_seed(seed if seed is not None else int.from_bytes(os.urandom(4), "big"))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr(world) if callable(lr) else lr)
    syncline.distribute(model, optimizer, shards=shards)
    data = torch.arange(256.0).reshape(64, 4) / 256
    size = batch(world) if callable(batch) else batch
    loader = DataLoader(TensorDataset(data, torch.arange(64) % 2), batch_size=size, shuffle=True)
    steps = syncline.shards(loader)
    for step in itertools.chain(steps, steps):
        for x, y in step:
            if noise is not None:
                x = x + noise()
            if draws and rank == 0:
                torch.rand(3)
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(folder, ranks, overlap=True, **mistakes):
    folder = folder / f"{ranks}-{overlap}"
    folder.mkdir()

    def work():
        os.environ.update(verification_environment(Verification(str(folder), STEPS, overlap)))
        with pytest.raises(StepsVerified):
            loop(**mistakes)

    run_ranks(ranks, work)
    return read_run(folder, ranks, overlap)


def test_a_right_loop_has_the_same_bits_and_ends_after_the_steps_that_are_wanted(tmp_path):
    runs = [recorded(tmp_path, 1), recorded(tmp_path, 2), recorded(tmp_path, 2, overlap=False)]
    assert first_difference(runs) is None
    assert [run.num_steps for run in runs] == [2 * STEPS] * 3
    numbers = [step.number for step in runs[0].models[0]]
    assert numbers == [1, 2, 3, 6], "between the last two no rank has waited"
    assert [run.facts[0]["overlap"] for run in runs] == [True, True, False]
    (steps,) = runs[1].models
    assert sorted(steps[0].digests) == [0, 1]
    assert "norm.running_mean" in steps[0].first
    assert sorted(steps[0].forwards) == [0, 1]
    assert steps[0].forwards[1][0]["shapes"] == [[4, 4]]


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        ({"shards": None}, "distribute(..., shards=2)"),
        ({"seed": None}, "seed torch before the model is built"),
        ({"batch": lambda world: 8 // world}, "batch_size is the size of one shard"),
        ({"lr": lambda world: 0.1 * world}, "the learning rate was 0.1 there and 0.2 here"),
        ({"noise": lambda: torch.rand(1)}, None),
        ({"noise": lambda: os.urandom(1)[0] / 256}, "got other samples"),
        ({"draws": True}, "torch's generator was in another state"),
    ],
)
def test_a_mistake_is_found_with_its_reason(tmp_path, mistake, reason):
    runs = [recorded(tmp_path, 1, **mistake), recorded(tmp_path, 2, **mistake)]
    found = first_difference(runs)
    if reason is None:
        assert found is None, "noise from torch's generator is seeded for each shard"
    else:
        assert reason in found.reason, found


def test_without_the_variable_nothing_is_recorded():
    def work():
        loop()  # to its end
        replica = current_session().replicas[0]
        return replica.step_number, len(replica.optimizer._optimizer_step_post_hooks)

    assert run_ranks(1, work) == [[16, 0]]


def test_the_variable_comes_back_as_it_was():
    wanted = Verification("/tmp/x y", 7, False)
    assert read_verification(verification_environment(wanted)) == wanted
    assert read_verification({}) is None


def test_a_digest_is_of_type_shape_and_bits():
    model = Net()
    digests = parameter_digests(model)
    assert list(digests) == [name for name, _ in model.named_parameters()]
    assert set(parameter_digests(model, buffers=True)) == {*model.state_dict()}
    assert all(len(digest) == 16 for digest in digests.values())
    square = torch.arange(4.0).reshape(2, 2)
    alike = [square.clone(), square.t().contiguous().t()]
    assert {tensor_digest(one) for one in alike} == {tensor_digest(square)}
    others = [square.reshape(4), square.double(), square + 1, square.t(), torch.tensor(0.0)]
    others.append(torch.ones(2, dtype=torch.bfloat16))
    assert len({tensor_digest(one) for one in [square, *others]}) == 7


def test_two_models_are_recorded_apart_until_both_have_taken_their_steps(tmp_path):
    def work():
        wanted = Verification(str(tmp_path), 2, False)
        os.environ.update(verification_environment(wanted))
        syncline.init(threads=1)
        torch.manual_seed(0)
        pairs = []
        for _ in range(2):
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            syncline.distribute(model, optimizer)
            pairs.append((model, optimizer))

        def train():
            for number in range(100):
                # Of three steps two are the first model's.
                model, optimizer = pairs[number % 3 == 2]
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        with pytest.raises(StepsVerified):
            train()

    run_ranks(1, work)
    found = read_run(tmp_path, 1, overlap=False)
    numbers = [[step.number for step in steps] for steps in found.models]
    assert numbers == [[1, 2, 4, 5, 6, 7, 8], [1, 2, 4]]
    assert list(found.models[0][0].first) == ["weight", "bias"]
