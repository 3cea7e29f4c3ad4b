"""The promises of `local`: by hand with a few ranks and numbers, and in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import syncline
from command import Started
from ranks import run_ranks
from strategies.toys import play
from syncline.checkpoint import digest_of, load, newest
from syncline.contract import Saved
from syncline.strategies import Local, LocalSettings
from test_synchronous_strategies import slow_down
from training import train_forked

DIGITS = Path(__file__).parents[2] / "examples" / "digits.toml"

# c - x_r in each round, with learning rate 1 and one step a round.
BEGIN = [[1.0, 2.0]] * 2
GRADIENTS = [[[0.2, -0.2]] * 2, [[0.4, -0.4]] * 2]


def local(**own):
    return lambda: Local(LocalSettings(**own))


def represented(strategies):
    """Return the values that represent the run, by rank."""
    return [one.last.buckets[0].tolist() for one in strategies]


def test_the_outer_parameters_follow_the_rule():
    rounds, strategies = play(local(period=1), BEGIN, GRADIENTS)
    # g = (0.3, -0.3), b = g: c = (1, 2) - 0.7 * 1.9 g.
    assert rounds[0] == [pytest.approx([0.601, 2.399], abs=1e-6)] * 2
    # b = 1.9 g: c = (0.601, 2.399) - 0.7 (1 + 0.9 * 1.9) g.
    assert rounds[1] == [pytest.approx([0.0319, 2.9681], abs=1e-6)] * 2
    assert represented(strategies) == rounds[1]


def test_alone_a_rank_follows_the_rule_too():
    rounds, _ = play(local(period=1), BEGIN[:1], [[[0.3, -0.3]] * 2])
    assert rounds[0] == [pytest.approx([0.601, 2.399], abs=1e-6)]
    assert rounds[1] == [pytest.approx([0.0319, 2.9681], abs=1e-6)]


def test_each_rank_updates_a_strip_of_its_own():
    _, strategies = play(local(period=1), BEGIN, GRADIENTS)
    # The momentum after two rounds: 1.9 (0.3, -0.3), one number of it on each rank.
    found = [outer.momentum.tolist() for one in strategies for outer in one._outers]
    assert found == [pytest.approx([0.57]), pytest.approx([-0.57])]


def test_ranks_are_alone_for_a_period_and_equal_after_a_round():
    gradients = [[[1.0, 0.0]] * 7, [[0.0, 1.0]] * 7]
    rounds, _ = play(local(period=3, outer_lr=1.0, outer_momentum=0.0), BEGIN, gradients)
    assert rounds == [
        *([[0.0, 2.0], [1.0, 1.0]], [[-1.0, 2.0], [1.0, 0.0]]),
        [[-0.5, 0.5], [-0.5, 0.5]],  # the mean of (-2, 2) and (1, -1)
        *([[-1.5, 0.5], [-0.5, -0.5]], [[-2.5, 0.5], [-0.5, -1.5]]),
        [[-2.0, -1.0], [-2.0, -1.0]],
        [[-2.5, -1.5], [-2.5, -1.5]],  # the last step of the run closes a round
    ]


class UntilNobodyKnows(Local):
    """A run whose end is not known, as in a script."""

    def start(self, model, comm, saved):
        model.total_steps = None
        return super().start(model, comm, saved)


def test_the_run_is_represented_by_the_outer_parameters_and_not_by_a_ranks_own():
    plain = LocalSettings(period=2, outer_lr=1.0, outer_momentum=0.0)
    gradients = [[[1.0, 0.0]] * 3, [[0.0, 1.0]] * 3]
    rounds, strategies = play(lambda: UntilNobodyKnows(plain), BEGIN, gradients)
    assert rounds[1] == [[0.0, 1.0]] * 2
    assert rounds[2] == [[-1.0, 1.0], [0.0, 0.0]]
    assert represented(strategies) == [[0.0, 1.0]] * 2


numbers = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 7))
def test_learning_rate_1_without_momentum_takes_the_mean_of_the_ranks(data, size):
    gradients = [[data.draw(numbers)] for _ in range(size)]
    plain = local(outer_lr=1.0, outer_momentum=0.0)
    rounds, _ = play(plain, [[1.0, 2.0, 3.0]] * size, gradients)
    ended = torch.tensor([1.0, 2.0, 3.0]) - torch.tensor([of_rank[0] for of_rank in gradients])
    mean = ended.double().mean(dim=0)
    assert torch.allclose(torch.tensor(rounds[0]).double(), mean.expand(size, 3), atol=1e-4)


def test_neither_delays_nor_slow_wires_change_a_bit():
    gradients = [[[0.1 * rank, 1 / (rank + 3), -0.7]] * 4 for rank in range(3)]
    begin = [[1.0, 2.0, 3.0]] * 3
    found = [
        play(local(period=2), begin, gradients, delays=delays, rate=rate)[0]
        for delays, rate in [(None, 1e9), ([0.0, 2.5, 0.3], 1e9), ([1.5, 0.0, 0.0], 10.0)]
    ]
    assert found[0] == found[1] == found[2]


class FromStep4(UntilNobodyKnows):
    """The rest of a run that was stopped after four steps."""

    def start(self, model, comm, saved):
        model.bucket.step = 4
        return super().start(model, comm, saved)


def test_a_run_that_is_resumed_within_a_round_goes_on_as_if_it_had_not_been_stopped():
    own = LocalSettings(period=3)
    gradients = [[[0.1 * (rank + step), 1.0 - rank] for step in range(6)] for rank in range(2)]
    first, second = ([of_rank[part] for of_rank in gradients] for part in (slice(4), slice(4, 6)))
    through, _ = play(lambda: UntilNobodyKnows(own), BEGIN, gradients)
    half, before = play(lambda: UntilNobodyKnows(own), BEGIN, first)
    saved = [Saved(one.whole.state(), {"x": one.last.buckets[0]}) for one in before]
    after, _ = play(lambda: FromStep4(own), half[-1], second, saved=saved)
    assert half + after == through


def test_on_another_number_of_ranks_the_momentum_starts_at_zero():
    # Two numbers: rank 1 has a strip of one number both of two ranks and of three.
    _, before = play(local(period=1), BEGIN, GRADIENTS)
    outer = before[0].last.buckets[0]
    states = [*(one.whole.state() for one in before), {}]
    saved = [Saved(state, {"x": outer}) for state in states]
    _, after = play(local(period=1), [outer.tolist()] * 3, [[[0.0, 0.0]]] * 3, saved=saved)
    # Without momentum nothing moves it but the rounding of a mean of three; with it, by 0.3.
    assert represented(after) == [pytest.approx(outer.tolist(), abs=1e-5)] * 3


@pytest.mark.parametrize(
    "wrong", [{"period": 0}, {"outer_lr": 0.0}, {"outer_momentum": 1.0}, {"outer_momentum": -0.1}]
)
def test_what_cannot_work_is_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, LocalSettings)


# In real processes.


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 5))


def train_in_a_script(strategy, steps, kind="auto", bucket_bytes=2000):
    """Take steps as a user's script does; return the hashes of the whole and of this rank's own."""
    rank = syncline.init(comm=kind)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = syncline.distribute(
        model, optimizer, strategy, overlap=True, bucket_bytes=bucket_bytes
    )
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with replica.whole():
        whole = digest_of(model.state_dict())
    return whole, digest_of(dict(model.named_parameters()))


@pytest.mark.processes
def test_whatever_carries_the_bytes_the_bits_are_the_same():
    make = local(period=3)

    def run(steps, machines, kind):
        return run_ranks(4, lambda: train_in_a_script(make(), steps, kind), machines=machines)

    for steps, num_own in [(30, 1), (31, 4)]:  # after a round, and within one
        worlds = [run(steps, *world) for world in [(1, "auto"), (1, "network"), (2, "auto")]]
        assert len({whole for ranks in worlds for whole, _ in ranks}) == 1
        for ranks in worlds:
            assert len({own for _, own in ranks}) == num_own


class SlowReader(Local):
    """Rank 0 comes to every collective, sleeps, and only then reads its peers' memory."""

    def start(self, model, comm, saved):
        if comm.position == 0:
            slow_down(comm)
        return super().start(model, comm, saved)


@pytest.mark.processes
def test_a_slow_reader_reads_what_was_meant_for_it():
    # One bucket: no other's collective comes before the memory is written again.
    own = LocalSettings(period=1)
    runs = [
        run_ranks(2, lambda: train_in_a_script(kind(own), 20, bucket_bytes=1 << 20))  # noqa: B023
        for kind in (Local, SlowReader)
    ]
    assert runs[0] == runs[1]


SETS = ("strategy.name=local", "strategy.local.period=8", "strategy.shards=")


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_learns_and_its_bits_repeat_in_virtual_time_too(tmp_path):
    sets, ranks = (*SETS, "run.epochs=6"), 4
    first = train_forked(DIGITS, tmp_path / "first", *sets, ranks=ranks)
    # Another timing: rank 1 is slow for a while.
    slow = 'faults=[{rank=1, step=10, kind="slow", factor=3, steps=40}]'
    second = train_forked(DIGITS, tmp_path / "second", *sets, slow, ranks=ranks)
    words = [word for one in sets for word in ("--set", one)]
    started = Started("simulate", str(DIGITS), "--ranks", str(ranks), "--learn", "--json", *words)
    out, said = started.communicate()
    assert started.returncode == 0, said
    simulated = json.loads(out)
    assert first["accuracy"] > 0.9
    assert first["weights_sha256"] == second["weights_sha256"] == simulated["weights_sha256"]


@pytest.mark.processes
def test_a_run_that_is_resumed_gives_the_hash_of_the_unbroken_one(tmp_path):
    # Checkpoints lie within rounds: each rank has parameters of its own then.
    sets, ranks = (*SETS, "run.steps=44", "run.checkpoint_every=20"), 2
    # The unbroken run is evaluated more often, which changes nothing.
    unbroken = train_forked(
        DIGITS, tmp_path / "unbroken", *sets, "run.evaluate_every=7", ranks=ranks
    )
    fault = 'faults=[{rank=1, step=30, kind="death"}]'
    broken = tmp_path / "broken"
    words = [word for one in (*sets, fault) for word in ("--set", one)]
    where = ("--ranks", str(ranks), "--out", str(broken))
    died = Started("train", str(DIGITS), *where, *words, traced=False)
    _, said = died.communicate()
    assert died.returncode == 1, said
    own = [load(newest(broken / "checkpoints" / f"rank-{rank}")) for rank in range(ranks)]
    whole = load(newest(broken / "checkpoints"))
    assert len({digest_of(one.model) for one in [whole, *own]}) == ranks + 1
    resumed = train_forked(DIGITS, broken, *sets, ranks=ranks, resume=True)
    assert resumed["resumed_at"] == 20
    assert resumed["weights_sha256"] == unbroken["weights_sha256"]
