"""What pushing ranks export: vectors that have arrived and are not mixed in yet belong to it."""

from __future__ import annotations

import random

import pytest
import torch

from strategies.toys import LATENCY_S, play
from syncline.contract import Saved
from syncline.errors import CheckpointError
from syncline.strategies import Gossip, GossipSettings


class ToTheNext(Gossip):
    """Rank 0 draws rank 1, which draws itself."""

    def partner(self, step):
        return 1


def zeros(size, steps, length):
    return [[[0.0] * length] * steps] * size


def exported(strategy):
    return [whole[0][0].tolist() for whole in [*strategy.gathered, strategy.last]]


def test_push_exports_what_has_arrived():
    make = lambda: ToTheNext(GossipSettings(rule="push"))  # noqa: E731
    rounds, strategies = play(make, [[0.0], [8.0]], zeros(2, 1, 1), lr=0.0)
    assert rounds == [[[0.0], [8.0]]]
    # With rank 0's vector mixed in rank 1 would be at 4; the mean of 0 and 4.
    assert exported(strategies[0]) == [[2.0]]


def test_mixing_what_has_arrived_does_not_change_what_push_sum_exports():
    make = lambda: ToTheNext(GossipSettings(rule="push", push_sum=True))  # noqa: E731
    (before, unmixed), (after, mixed) = (
        play(make, [[0.0], [8.0]], zeros(2, 1, 1), lr=0.0, delays=delays)
        for delays in ([0.0, 0.0], [0.0, 0.5])
    )
    assert before == [[[0.0], [8.0]]]
    assert after == [[[0.0], [pytest.approx(8 / 1.5)]]]
    assert exported(unmixed[1]) == exported(mixed[1]) == [[4.0]]


def test_push_sum_exports_its_conserved_mean_at_any_instant():
    draw, num_waiting = random.Random(0), 0
    for trial in range(150):
        size, steps = draw.randint(2, 6), draw.randint(1, 12)
        chosen = GossipSettings(
            rule="push",
            push_sum=True,
            partners=draw.choice(["uniform", "ring", "exponential"]),
            period=draw.choice([1, 1, 2, 3]),
        )
        starts = [[draw.uniform(-9, 9) for _ in range(3)] for _ in range(size)]
        _, strategies = play(
            lambda: Gossip(chosen, trial),  # noqa: B023
            starts,
            zeros(size, steps, 3),
            lr=0.0,
            delays=[draw.uniform(0, 4 * LATENCY_S) for _ in range(size)],
            round_s=draw.uniform(LATENCY_S / 4, 4 * LATENCY_S),
            rate=draw.choice([1e9, 1e4]),
            gathers=draw.sample(range(steps), draw.randint(0, min(2, steps - 1))),
        )
        mean = torch.tensor(starts, dtype=torch.float64).mean(dim=0).tolist()
        for strategy in strategies:
            assert exported(strategy) == [pytest.approx(mean, abs=1e-4)] * (
                len(strategy.gathered) + 1
            ), trial
            num_waiting += strategy._boxes[0].arrived_weight > 0
    assert num_waiting > 50, "in many trials something has arrived and is not mixed in"


@pytest.mark.parametrize("push_sum", [False, True])
def test_pushed_vectors_find_their_parameters_whatever_bucket_these_are_in(push_sum):
    make = lambda: ToTheNext(GossipSettings(rule="push", push_sum=push_sum))  # noqa: E731
    starts, nothing = [[0.0, 1.0], [8.0, 4.0]], zeros(2, 1, 2)
    _, before = play(make, starts, nothing, lr=0.0, split=[1, 1])
    state = before[1].whole.state()
    # The parameter that was in the second bucket is now in the first, which has the same size.
    names = {"x0": "x1", "x1": "x0"}
    swapped = {f"{key[:-2]}{names[key[-2:]]}": value for key, value in state.items()}
    saved = [Saved(), Saved(swapped)]
    rounds, _ = play(make, starts, nothing, lr=0.0, split=[1, 1], saved=saved)
    # Rank 0's (0, 1) had arrived: (2 x 8 + 1) / 3, and with weights (8 + 1 / 2) / (3 / 2).
    assert rounds[0][1] == [pytest.approx(17 / 3), pytest.approx(8 / 3)]


def test_pushed_vectors_of_other_buckets_are_refused():
    """A bucket has one weight: two parameters of different weight cannot share it."""
    make = lambda: ToTheNext(GossipSettings(rule="push", push_sum=True))  # noqa: E731
    starts, nothing = [[0.0, 1.0], [8.0, 4.0]], zeros(2, 1, 2)
    _, before = play(make, starts, nothing, lr=0.0, split=[1, 1])
    state = before[1].whole.state()
    missing = {key: value for key, value in state.items() if "x1" not in key}
    of_0_1_0 = {"0/weights": torch.tensor([1.0, 0.0]), "0/arrived": torch.zeros(1)}
    for other in (missing, of_0_1_0):
        with pytest.raises(CheckpointError, match=r"by other buckets .* or by version 0\.1\.0"):
            play(make, starts, nothing, lr=0.0, split=[1, 1], saved=[Saved(), Saved(other)])
