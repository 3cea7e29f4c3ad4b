"""Updates taken early: the same bits as taken late, whatever happens between backward and step."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline.checkpoint import digest_of
from syncline.engine.early import BLOCK_STEPS, NUM_BLOCKS, EarlyUpdates
from syncline.engine.steps import Steps

pytestmark = pytest.mark.processes

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
}


class Branches(nn.Module):
    """A network that leaves one of its layers out when told to."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(6))
        self.leaves_out = None

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number != self.leaves_out:
                x = torch.tanh(layer(x))
        return x


def train(early, disturb, optimizer="momentum", steps=5, size=2):
    """Train with a disturbance in step 2; return hashes, early updates taken and reasons."""

    def work():
        # A small network on loopback gains nothing: pretend that it does.
        EarlyUpdates.decide = lambda self, step_s: setattr(self, "_is_wanted", True)
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("syncline").addHandler(handler)
        logging.getLogger("syncline").setLevel(logging.INFO)
        rank = syncline.init(comm="network")
        torch.manual_seed(0)
        model = Branches()
        mine = OPTIMIZERS[optimizer](model.parameters())
        settings = {"overlap": True, "bucket_bytes": 8000, "early": early}
        syncline.distribute(model, mine, **settings)
        taken = []
        run_early = Steps.run_early
        Steps.run_early = lambda self, *args: taken.append(args) or run_early(self, *args)
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * step + rank)
            model.leaves_out = 4 if disturb == "leave out" and step == 2 else None
            model(torch.randn(5, 40, generator=generator)).square().mean().backward()
            if step == 2:
                interfere(disturb, model, mine)
            if not (disturb == "discard" and step == 2):
                mine.step()
            mine.zero_grad()
        state = syncline.optimizer_state(model)
        tensors = {f"{name}/{key}": value for name in state for key, value in state[name].items()}
        tensors = {key: value for key, value in tensors.items() if torch.is_tensor(value)}
        digest = digest_of(dict(model.state_dict()))
        return digest, digest_of(tensors), len(taken), [s for s in said if "no longer" in s]

    return run_ranks(size, work)


def interfere(disturb, model, optimizer):
    if disturb == "clip":
        syncline.clip_grad_norm_(model, 0.01)
    elif disturb == "rate":
        optimizer.param_groups[0]["lr"] *= 0.5
    elif disturb == "load":
        model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
    elif disturb == "ask":
        syncline.optimizer_state(model)
    elif disturb == "load state":
        state = syncline.optimizer_state(model)
        halved = {n: {k: 0.5 * v for k, v in held.items()} for n, held in state.items()}
        syncline.load_optimizer_state(model, halved)
    elif disturb == "discard":
        syncline.discard_gradients(model)


@pytest.mark.parametrize(("optimizer", "size"), [("sgd", 2), ("momentum", 3), ("adamw", 2)])
def test_early_and_late_updates_give_the_same_bits(optimizer, size):
    late = train(False, None, optimizer, size=size)
    early = train(True, None, optimizer, size=size)
    assert [found[:2] for found in early] == [found[:2] for found in late]
    assert len({found[0] for found in early}) == 1
    assert [found[2] for found in late] == [0] * size
    # The later three of six buckets, from the second step on: the first has not begun to measure.
    assert [found[2] for found in early] == [4 * 3] * size


@pytest.mark.parametrize(
    ("disturb", "reason"),
    [
        ("clip", "gradients are clipped"),
        ("rate", "the optimizer's settings changed between backward and step()"),
        ("leave out", "other parameters got gradients"),
        ("load", "parameters were loaded between backward and step()"),
        ("ask", "optimizer state was asked for between backward and step()"),
        ("load state", "optimizer state was asked for between backward and step()"),
    ],
)
def test_what_changes_after_backward_undoes_early_updates(disturb, reason):
    late, early = train(False, disturb), train(True, disturb)
    assert [found[:2] for found in early] == [found[:2] for found in late]
    # Taken in steps 1 and 2, and never again.
    assert [found[2] for found in early] == [2 * 3] * 2
    assert early[0][3] == [f"updates are no longer taken early: {reason}"]


def test_dropped_gradients_undo_early_updates_and_early_updates_go_on():
    late, early = train(False, "discard"), train(True, "discard")
    assert [found[:2] for found in early] == [found[:2] for found in late]
    assert [found[2] for found in early] == [4 * 3] * 2
    assert early[0][3] == []


def decided(late_s, early_s):
    """Let steps take so long; return what is chosen for each, and at last."""
    updates, chosen = EarlyUpdates(None), []
    for _ in range(NUM_BLOCKS * BLOCK_STEPS + 5):
        chosen.append(updates._is_wanted)
        updates.decide(early_s if updates._is_wanted else late_s)
    return chosen


def test_late_and_early_are_tried_twice_and_the_faster_is_kept():
    trial = ([False] * BLOCK_STEPS + [True] * BLOCK_STEPS) * (NUM_BLOCKS // 2)
    assert decided(late_s=1.0, early_s=0.95) == trial + [True] * 5
    assert decided(late_s=1.0, early_s=0.999) == trial + [False] * 5
    assert decided(late_s=1.0, early_s=1.2) == trial + [False] * 5


def train_through_the_trial(early):
    """Let early steps take longer; return the hash, buckets held twice, and what is read."""

    def work():
        EarlyUpdates.step_s = lambda self: 2.0 if self._is_wanted else 1.0
        rank = syncline.init(comm="network")
        torch.manual_seed(0)
        model = Branches()
        mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = {"overlap": True, "bucket_bytes": 8000, "early": early}
        replica = syncline.distribute(model, mine, **settings)
        held_twice = []
        for step in range(NUM_BLOCKS * BLOCK_STEPS + 4):
            generator = torch.Generator().manual_seed(100 * step + rank)
            model(torch.randn(5, 40, generator=generator)).square().mean().backward()
            held_twice.append(sum(bucket.has_copy for bucket in replica.buckets))
            mine.step()
            mine.zero_grad()
        replica.synchronize()
        exchanged = {b.parameters.memory.mine.untyped_storage().data_ptr() for b in replica.buckets}
        read = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return digest_of(dict(model.state_dict())), held_twice, read == exchanged

    first, second = run_ranks(2, work)
    assert first == second
    return first


def test_where_late_is_chosen_nothing_is_left_of_early():
    late, _, _ = train_through_the_trial(early=False)
    early, held_twice, reads_what_is_exchanged = train_through_the_trial(early=True)
    assert early == late
    assert reads_what_is_exchanged
    # Nothing is laid out in the first step; the trial ends with the flags of its last.
    during = NUM_BLOCKS * BLOCK_STEPS - 1
    assert held_twice == [0] + [3] * during + [0] * 4
