"""The rules of the asynchronous strategies, worked out by hand: three ranks, two numbers each,
three steps, learning rate 1. And what must hold for any numbers."""

from __future__ import annotations

import functools
import math
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from strategies.toys import LATENCY_S, ROUND_S, play
from syncline.contract import Saved
from syncline.errors import CheckpointError, ConfigError
from syncline.strategies import (
    Elastic,
    ElasticSettings,
    Gossip,
    GossipSettings,
    Server,
    ServerSettings,
)


def no_gradients(size, rounds, length=3):
    """Return gradients that are all zero, by rank and round."""
    return [[[0.0] * length] * rounds] * size


APART = [[0.0, 0.0], [4.0, 8.0], [8.0, -8.0]]
TOGETHER = [[4.0, 8.0]] * 3
GRADIENTS = [[[1.0, 0.0]] * 3, [[0.0, 2.0]] * 3, [[-1.0, 1.0]] * 3]
GRADIENTS_OF_4 = [[of_rank[0]] * 4 for of_rank in GRADIENTS]
DRAWS = [[1, 0, 2], [2, 2, 1], [0, 1, 2]]
"""The partner of each rank in each step; rank 0 draws itself in step 1, rank 2 in step 2."""


class Drawn(Gossip):
    def partner(self, step):
        return DRAWS[self.comm.position][step % 3]


def close_to(*values):
    return pytest.approx(list(values))


def close(rounds):
    return [close_to(*values) for values in rounds]


def test_pull_takes_the_mean_with_what_the_partner_published_after_its_step():
    rounds, strategies = play(lambda: Drawn(GossipSettings(early=False)), APART, GRADIENTS)
    # Step 0: (-1, 0), (4, 6), (9, -9) are published; 0 pulls 1, 1 pulls 2, 2 pulls 0.
    assert rounds[0] == [[1.5, 3.0], [6.5, -1.5], [4.0, -4.5]]
    # Step 1: (0.5, 3), (6.5, -3.5), (5, -5.5); 0 draws itself, 1 and 2 pull each other.
    assert rounds[1] == [[0.5, 3.0], [5.75, -4.5], [5.75, -4.5]]
    # Step 2: (-0.5, 3), (5.75, -6.5), (6.75, -5.5); 0 pulls 2, 1 pulls 1, 2 pulls 2.
    assert rounds[2] == [[3.125, -1.25], [5.75, -6.5], [6.75, -5.5]]
    # What stands for the run is the mean.
    assert strategies[0].last[0][0].tolist() == pytest.approx([15.625 / 3, -13.25 / 3])
    # Two exchanges of two numbers, for a rank that drew itself once: 0 and 2; 1 once as well.
    assert [one.whole.traffic for one in strategies] == [(2, 16), (2, 16), (2, 16)]
    # Squares of the distances to the mean: 14.3681, 4.6337, 3.5504; of the mean's norm: 46.6337.
    distances = (14.3681 + 4.6337 + 3.5504) / 3
    found = strategies[0].whole.report()["distance_to_consensus"]
    assert found == pytest.approx(math.sqrt(distances / 46.6337), rel=1e-4)


def test_an_early_pull_takes_what_was_published_a_step_before():
    rounds, _ = play(lambda: Drawn(GossipSettings(early=True)), APART, GRADIENTS)
    # The first exchange has fetched nothing yet and pulls as ever.
    assert rounds[0] == [[1.5, 3.0], [6.5, -1.5], [4.0, -4.5]]
    # Fetched after step 0: what was published in it, so 1 gets (9, -9) and 2 gets (4, 6).
    assert rounds[1] == [[0.5, 3.0], [7.75, -6.25], [4.5, 0.25]]


def test_an_early_pull_with_a_period_is_a_step_old_too():
    rounds, _ = play(lambda: Drawn(GossipSettings(early=True, period=2)), APART, GRADIENTS_OF_4)
    assert rounds[0] == [[-1.0, 0.0], [4.0, 6.0], [9.0, -9.0]]
    # Fetched after step 0, for step 1: 1 gets (9, -9) from 2 and 2 gets (4, 6) from 1, which are at
    # (4, 4) and (10, -10) by then.
    assert rounds[1] == [[-2.0, 0.0], [6.5, -2.5], [7.0, -2.0]]
    assert rounds[2] == [[-3.0, 0.0], [6.5, -4.5], [8.0, -3.0]]
    # Fetched after step 2, for step 3: 0 pulls 1, 1 pulls 2, 2 pulls 0.
    assert rounds[3] == [[1.25, -2.25], [7.25, -4.75], [3.0, -2.0]]


def test_push_weighs_what_arrived_with_one_or_two_of_its_own():
    rounds, _ = play(lambda: Drawn(GossipSettings(rule="push")), APART, GRADIENTS)
    # Step 0: everybody sends, nothing has arrived.
    assert rounds[0] == [[-1.0, 0.0], [4.0, 6.0], [9.0, -9.0]]
    # Step 1: 0 has (-2, 0) and drew itself: (2 (-2, 0) + (9, -9)) / 3.
    # 1 has (4, 4): ((4, 4) + (-1, 0)) / 2; 2 has (10, -10): ((10, -10) + (4, 6)) / 2.
    assert rounds[1] == close([[5 / 3, -3.0], [1.5, 2.0], [7.0, -2.0]])
    # Step 2: 0 sends to 2, nothing has arrived. 1 has (1.5, 0), got (10, -10) and drew 2's 1:
    # itself, so (2 (1.5, 0) + (10, -10)) / 3. 2 has (8, -3), got (4, 4) and drew itself.
    assert rounds[2] == close([[2 / 3, -3.0], [13 / 3, -10 / 3], [20 / 3, -2 / 3]])


def test_push_sum_sends_half_of_its_weight_along():
    rounds, strategies = play(
        lambda: Drawn(GossipSettings(rule="push", push_sum=True)), APART, GRADIENTS
    )
    assert rounds[0] == [[-1.0, 0.0], [4.0, 6.0], [9.0, -9.0]]
    # Step 1, weights 1/2 each, and 1/2 has arrived at each. 0 sends nothing: (-2, 0) and (9, -9)
    # weigh alike. 1 keeps 1/4: ((4, 4) / 4 + (-1, 0) / 2) / (3/4); 2 keeps 1/4 likewise.
    assert rounds[1] == close([[3.5, -4.5], [2 / 3, 4 / 3], [6.0, 2 / 3]])
    assert sum(one._boxes[0].weight + one._boxes[0].arrived_weight for one in strategies) == 3.0


def test_elastic_moves_rank_and_center_by_the_same_distance():
    rounds, strategies = play(
        lambda: Elastic(ElasticSettings(beta=0.75, early=False)),
        TOGETHER,
        GRADIENTS,
        delays=[0, 0.1, 0.2],
    )
    # a = 1/4. Step 0: all stand on the center (4, 8), so nothing pulls.
    assert rounds[0] == [[3.0, 8.0], [4.0, 6.0], [5.0, 7.0]]
    # Step 1: 0 moves by (-1/4, 0) towards the center, and it to (3.75, 8); 1 by (1/16, -1/2), and
    # it to (3.8125, 7.5); 2 by ((5, 7) - (3.8125, 7.5)) / 4.
    assert rounds[1] == [[2.25, 8.0], [3.9375, 4.5], [5.703125, 6.125]]
    center = [3.8125 + 1.1875 / 4, 7.5 - 0.5 / 4]
    move = [(2.25 - center[0]) / 4, (8.0 - center[1]) / 4]
    assert rounds[2][0] == [2.25 - 1.0 - move[0], 8.0 - move[1]]
    # What stands for the run is the center, and all distances went into it.
    everything = [sum(values[k] for values in rounds[2]) for k in (0, 1)]
    gradients = [3 * sum(g[0][k] for g in GRADIENTS) for k in (0, 1)]
    center = strategies[0].last[0][0].tolist()
    assert [e + c for e, c in zip(everything, center, strict=True)] == pytest.approx(
        [16.0 - gradients[0], 32.0 - gradients[1]]
    )


def test_elastic_with_a_period_exchanges_in_its_last_step_only():
    rounds, strategies = play(
        lambda: Elastic(ElasticSettings(beta=0.75, period=2, early=False)),
        TOGETHER,
        GRADIENTS,
        delays=[0, 0.1, 0.2],
    )
    assert rounds[0] == [[3.0, 8.0], [4.0, 6.0], [5.0, 7.0]]
    # Step 1, as above: moves by (-1/4, 0), (1/16, -1/2) and ((5, 7) - (3.8125, 7.5)) / 4.
    assert rounds[1] == [[2.25, 8.0], [3.9375, 4.5], [5.703125, 6.125]]
    # Step 2: steps alone, and the center stays.
    assert rounds[2] == [[1.25, 8.0], [3.9375, 2.5], [6.703125, 5.125]]
    assert strategies[0].last[0][0].tolist() == [3.8125 + 1.1875 / 4, 7.5 - 0.5 / 4]


EARLY_ELASTIC = ElasticSettings(beta=0.75, early=True)


def test_early_elastic_asks_when_a_step_has_ended_and_moves_in_the_next():
    rounds, strategies = play(
        lambda: Elastic(EARLY_ELASTIC), TOGETHER, GRADIENTS, delays=[0, 0.1, 0.2]
    )
    # a = 1/4. Rank 0 asks in step 0, where the center is, steps to (3, 8), and asks for step 1 at
    # once: it will move by (-1/4, 0), and the center is at (3.75, 8).
    # Rank 1 asks with (4, 8): moves by (1/16, 0), center at (3.8125, 8). It asks with (3.9375, 6):
    # will move by (1/32, -1/2), center at (3.84375, 7.5).
    # Rank 2 asks with (4, 8): moves by (5/128, 1/8), center at (3.8828125, 7.625).
    assert rounds[0] == [[3.0, 8.0], [3.9375, 6.0], [5 - 5 / 128, 6.875]]
    moves = [(5 - 5 / 128 - 3.8828125) / 4, -0.1875]
    assert rounds[1] == [
        [2.25, 8.0],
        [3.9375 - 1 / 32, 4.5],
        [6 - 5 / 128 - moves[0], 5.875 - moves[1]],
    ]
    # The center has moved for answers that the ranks have not used yet.
    center = strategies[0].last[0][0].tolist()
    unused = [one._centers[0].answer.tolist() for one in strategies]
    for k, total in enumerate([16.0, 32.0]):
        found = sum(values[k] for values in rounds[2]) + center[k] - sum(one[k] for one in unused)
        assert found == pytest.approx(total - 3 * sum(g[0][k] for g in GRADIENTS))


def test_answers_that_are_not_used_yet_go_on_from_where_they_were_saved():
    delays = [0, 0.1, 0.2]
    twice = [of_rank * 2 for of_rank in GRADIENTS]
    through, _ = play(lambda: Elastic(EARLY_ELASTIC), TOGETHER, twice, delays=delays)
    half, before = play(lambda: Elastic(EARLY_ELASTIC), TOGETHER, GRADIENTS, delays=delays)
    saved = [Saved(one.whole.state(), {"x": one.last[0][0]}) for one in before]
    make = functools.partial(Elastic, EARLY_ELASTIC)
    after, _ = play(make, half[-1], GRADIENTS, delays=delays, saved=saved)
    assert half + after == through


def test_answers_find_their_parameters_whatever_bucket_these_are_in():
    make = functools.partial(Elastic, EARLY_ELASTIC)
    options = {"lr": 0.0, "split": [1, 1], "delays": [0.0, 0.5]}
    for moves in ({"x0": 1.0, "x1": 2.0}, {"x0": 2.0, "x1": 1.0}):
        state = {f"moves/{name}": torch.tensor([value]) for name, value in moves.items()}
        saved = [Saved(state), Saved()]
        rounds, _ = play(make, TOGETHER[:2], no_gradients(2, 1, 2), saved=saved, **options)
        assert rounds[0][0] == [4.0 - moves["x0"], 8.0 - moves["x1"]]
    saved = [Saved({"0/moves": torch.tensor([1.0])}), Saved()]
    with pytest.raises(CheckpointError, match=r"in the form of version 0\.1\.0"):
        play(make, TOGETHER[:2], no_gradients(2, 1, 2), saved=saved, **options)


def test_synchronous_elastic_uses_one_center_for_all():
    rounds, strategies = play(
        lambda: Elastic(ElasticSettings(beta=0.75, synchronous=True)),
        TOGETHER,
        GRADIENTS,
        delays=[0, 1.5, 3.5],
    )
    # Step 1: all pull at (4, 8) with a quarter of (-1, 0), (0, -2), (1, -1).
    assert rounds[1] == [[2.25, 8.0], [4.0, 4.5], [5.75, 6.25]]
    # The center has moved by the sum, a quarter of (0, -3); step 2 pulls at (4, 7.25).
    assert rounds[2][0] == [2.25 - 1.0 + 1.75 / 4, 8.0 - 0.75 / 4]
    # What stands for the run has moved for step 2 as well, by a quarter of (0, -3) again.
    assert strategies[0].last[0][0].tolist() == [4.0, 6.5]


def test_elastic_with_momentum_pulls_before_the_step_of_the_optimizer():
    one = [[[1.0, 0.0]] * 3]
    rounds, _ = play(
        lambda: Elastic(ElasticSettings(beta=0.5, early=False)),
        TOGETHER[:2],
        one * 2,
        momentum=0.5,
    )
    # Both ranks alike, a = 1/4, center at 4; velocities 1, 1.5, 1.75.
    assert rounds[0][0][0] == 3.0
    # The center is pulled at twice, from 4 by -1/4, then from 3.75 by -3/16.
    assert sorted(values[0] for values in rounds[1]) == [1.5 + 3 / 16, 1.75]


def test_a_server_updates_once_for_every_push_and_answers_with_the_result():
    rounds, strategies = play(
        lambda: Server(ServerSettings(early=False)), TOGETHER, GRADIENTS, delays=[0, 0.1, 0.2]
    )
    assert rounds[0] == [[3.0, 8.0], [3.0, 6.0], [4.0, 5.0]]
    assert rounds[1] == [[3.0, 5.0], [3.0, 3.0], [4.0, 2.0]]
    assert rounds[2] == [[3.0, 2.0], [3.0, 0.0], [4.0, -1.0]]
    assert strategies[0].last[0][0].tolist() == [4.0, -1.0]
    # Two strips. The first pushes: nothing, one, two others since the start; then always two.
    found = sum((one.staleness for one in strategies), start=type(strategies[0].staleness)())
    assert found == {0: 2, 1: 2, 2: 14}


def test_a_server_with_a_period_gets_the_sum_and_workers_go_on_meanwhile():
    rounds, _ = play(
        lambda: Server(ServerSettings(period=2, early=False)),
        TOGETHER,
        GRADIENTS,
        delays=[0, 0.1, 0.2],
        total_steps=4,
    )
    assert rounds[0] == [[3.0, 8.0], [4.0, 6.0], [5.0, 7.0]]
    # Pushed: (2, 0), (0, 4), (-2, 2), one after the other from (4, 8).
    assert rounds[1] == [[2.0, 8.0], [2.0, 4.0], [4.0, 2.0]]
    assert rounds[2] == [[1.0, 8.0], [2.0, 2.0], [5.0, 1.0]]


def test_an_early_server_lets_a_step_begin_with_what_the_push_before_brought():
    rounds, strategies = play(
        lambda: Server(ServerSettings(early=True)), TOGETHER, GRADIENTS, delays=[0, 0.1, 0.2]
    )
    # Nothing has come back yet after the first push; then what it brought, a step later.
    assert rounds[0] == [[4.0, 8.0]] * 3
    assert rounds[1] == [[3.0, 8.0], [3.0, 6.0], [4.0, 5.0]]
    assert rounds[2] == [[3.0, 5.0], [3.0, 3.0], [4.0, 2.0]]
    assert strategies[0].last[0][0].tolist() == [4.0, -1.0]


@pytest.mark.parametrize("early", [False, True])
def test_what_was_pushed_last_is_in_the_whole_however_slow_the_wire(early):
    server = lambda: Server(ServerSettings(early=early))  # noqa: E731
    _, strategies = play(server, TOGETHER, GRADIENTS, rate=1e3)
    assert strategies[0].last[0][0].tolist() == [4.0, -1.0]


@pytest.mark.parametrize("early", [False, True])
def test_what_was_pushed_last_is_in_the_optimizers_state_however_slow_the_wire(early):
    server = lambda: Server(ServerSettings(early=early))  # noqa: E731
    _, strategies = play(server, TOGETHER, GRADIENTS, momentum=1.0, rate=1e3, keeps_state=True)
    # With momentum 1 the velocity is the sum of all gradients, in whatever order they came.
    for one in strategies:
        assert one.last_state["x"]["momentum_buffer"].tolist() == [0.0, 9.0]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rate", [2.0, 100.0, 1e9])
def test_a_push_is_used_with_the_pushers_own_settings(rate, early):
    server = lambda: Server(ServerSettings(early=early))  # noqa: E731
    _, strategies = play(server, TOGETHER, GRADIENTS, lr=[0.5, 0.0, 2.0], rate=rate)
    # Three times (1, 0) / 2 by rank 0, nothing by rank 1, three times 2 (-1, 1) by rank 2.
    assert strategies[0].last[0][0].tolist() == [4.0 - 1.5 + 6.0, 8.0 - 6.0]


def test_a_worker_waits_when_it_is_too_far_ahead():
    delays = [0.0, 0.0, 30.0]
    free = play(lambda: Server(ServerSettings(early=False)), TOGETHER, GRADIENTS, delays=delays)[1]
    bound = play(
        lambda: Server(ServerSettings(max_staleness=0, early=False)),
        TOGETHER,
        GRADIENTS,
        delays=delays,
    )
    # Without a bound the slow rank finds all six pushes of the others before its own first.
    assert max(max(one.staleness, default=0) for one in free) == 6
    assert max(max(one.staleness, default=0) for one in bound[1]) == 2


def test_a_center_goes_on_from_where_it_was_saved():
    make = functools.partial(Elastic, ElasticSettings(beta=0.75, early=False))
    saved = [Saved({}, {"x": torch.tensor([8.0, 8.0])})] * 3
    delays = [0, 0.1, 0.2]
    rounds, strategies = play(
        make, TOGETHER, no_gradients(3, 1, 2), lr=0.0, delays=delays, saved=saved
    )
    # Ranks begin at (4, 8) and pull the center from (8, 8): to 7, 6.25, 5.6875.
    assert rounds[0] == [[5.0, 8.0], [4.75, 8.0], [4.5625, 8.0]]
    assert strategies[0].last[0][0].tolist() == [5.6875, 8.0]


@pytest.mark.parametrize("push_sum", [False, True])
def test_pushes_that_are_not_mixed_in_yet_and_weights_go_on_from_where_they_were_saved(push_sum):
    push = GossipSettings(rule="push", push_sum=push_sum)
    twice = [of_rank * 2 for of_rank in GRADIENTS]
    through, _ = play(lambda: Drawn(push), APART, twice)
    half, before = play(lambda: Drawn(push), APART, GRADIENTS)
    saved = [Saved(one.whole.state()) for one in before]
    after, _ = play(lambda: Drawn(push), half[-1], GRADIENTS, saved=saved)
    assert half + after == through


IN_FLIGHT_S = LATENCY_S / 2


def test_who_pulls_from_a_rank_that_dies_goes_on_as_if_it_had_drawn_itself():
    make = lambda: Drawn(GossipSettings(early=False))  # noqa: E731
    rounds, strategies = play(make, APART, GRADIENTS, death=(1, IN_FLIGHT_S))
    # Rank 0 has asked 1 for (4, 6), which never comes. Rank 2 pulls from 0 as ever.
    assert rounds[0] == [[-1.0, 0.0], None, [4.0, -4.5]]
    # 0 draws itself, 2 draws 1.
    assert rounds[1] == [[-2.0, 0.0], None, [5.0, -5.5]]
    # (-3, 0) and (6, -6.5); 0 pulls 2, 2 draws itself.
    assert rounds[2] == [[1.5, -3.25], None, [6.0, -6.5]]
    assert strategies[0].last[0][0].tolist() == [3.75, -4.875]


def test_what_was_pushed_to_a_rank_that_dies_is_lost_and_nothing_else():
    push = lambda: Drawn(GossipSettings(rule="push"))  # noqa: E731
    rounds, _ = play(push, APART, GRADIENTS, death=(1, IN_FLIGHT_S))
    assert rounds[0] == [[-1.0, 0.0], [4.0, 6.0], [9.0, -9.0]]
    # 0 has (-2, 0), drew itself and got (9, -9). 2 has (10, -10), drew 1, so keeps both halves, and
    # got (4, 6), which 1 had sent.
    assert rounds[1] == [close_to(5 / 3, -3.0), None, close_to(8.0, -14 / 3)]
    assert rounds[2] == [close_to(2 / 3, -3.0), None, close_to(9.0, -17 / 3)]


WITHSTAND = {
    "pull": lambda: Drawn(GossipSettings(early=False)),
    "pull, early": lambda: Drawn(GossipSettings(early=True)),
    "push": lambda: Drawn(GossipSettings(rule="push")),
    "push-sum": lambda: Drawn(GossipSettings(rule="push", push_sum=True)),
    "elastic": lambda: Elastic(ElasticSettings(beta=0.75, early=False)),
    "elastic, early": lambda: Elastic(EARLY_ELASTIC),
    "elastic, synchronous": lambda: Elastic(ElasticSettings(beta=0.75, synchronous=True)),
}


@pytest.mark.parametrize("name", WITHSTAND)
@pytest.mark.parametrize("rank", range(3))
def test_whenever_a_rank_dies_the_others_go_on_between_where_all_began(name, rank):
    round_s = 4 * LATENCY_S
    others = {0, 1, 2} - {rank}
    for fifth in range(100):  # the last of them when all is over
        after_s = fifth * LATENCY_S / 5
        death = rank, after_s
        rounds, strategies = play(
            WITHSTAND[name], APART, no_gradients(3, 3, 2), lr=0.0, round_s=round_s, death=death
        )
        whole = [strategies[other].last[0][0].tolist() for other in others]
        if after_s < 2 * round_s:  # while the mean is taken, one may still find it, one not
            assert whole[0] == pytest.approx(whole[1]), death
        for x, y in [*whole, *(values[other] for values in rounds for other in others)]:
            assert 0.0 <= x <= 8.0, death
            assert -8.0 <= y <= 8.0, death
    assert rounds[-1][rank] is not None


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("rank", range(3))
def test_a_strip_that_is_taken_over_begins_near_the_others(rank, synchronous):
    """Zero is far from them here."""
    starts = [[104.0, 108.0], [100.0, 104.0], [108.0, 100.0]]
    elastic = lambda: Elastic(  # noqa: E731
        ElasticSettings(beta=0.75, synchronous=synchronous, early=False)
    )
    for fifth in range(60):
        death = rank, fifth * LATENCY_S / 5
        rounds, strategies = play(
            elastic, starts, no_gradients(3, 3, 2), lr=0.0, round_s=4 * LATENCY_S, death=death
        )
        others = [other for other in range(3) if other != rank]
        whole = [strategies[other].last[0][0].tolist() for other in others]
        for values in [*whole, *(values[other] for values in rounds for other in others)]:
            assert 99.999 <= min(values) <= max(values) <= 108.001, death


def test_the_forces_on_the_center_are_shared_by_those_who_are_left():
    make = functools.partial(Elastic, ElasticSettings(beta=0.75, early=False))
    saved = [Saved({}, {"x": torch.tensor([8.0, 8.0])})] * 3
    rounds, strategies = play(
        *(make, TOGETHER, no_gradients(3, 1, 2)),
        lr=0.0,
        delays=[0.1, 0.2, 0.3],
        saved=saved,
        death=(2, 0.05),
    )
    # Two are left: a = 3/8. Rank 0 moves from 4 by 3/2 towards 8, and the center to 6.5; rank 1
    # from 4 by 3/8 of 2.5. The second number's strip was rank 2's.
    assert [values and values[0] for values in rounds[0]] == [5.5, 4.9375, None]
    assert strategies[0].last[0][0][0].item() == 5.5625


# What holds for any numbers.

numbers = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3)


@settings(max_examples=25)
@given(st.data(), st.sampled_from([2, 4, 8]), st.integers(1, 3))
def test_pairwise_mixing_keeps_the_mean_and_a_hypercube_ends_in_it(data, size, period):
    starts = [data.draw(numbers) for _ in range(size)]
    turns = (size.bit_length() - 1) * period
    partners = GossipSettings(partners="hypercube", early=False, period=period)
    rounds, _ = play(lambda: Gossip(partners), starts, no_gradients(size, turns), lr=0.0)
    mean = torch.tensor(starts, dtype=torch.float64).mean(dim=0)
    for values in rounds:
        assert torch.allclose(torch.tensor(values).double().mean(dim=0), mean, atol=1e-4)
    assert torch.allclose(torch.tensor(rounds[-1]).double(), mean.expand(size, 3), atol=1e-4)


@settings(max_examples=25)
@given(
    st.data(),
    st.integers(2, 7),
    st.sampled_from(["uniform", "ring", "exponential"]),
    st.integers(0, 1000),
    st.sampled_from([ROUND_S, LATENCY_S / 3]),
)
def test_push_sum_conserves_mass_and_ends_in_the_true_mean(data, size, partners, seed, round_s):
    starts = [data.draw(numbers) for _ in range(size)]
    chosen = GossipSettings(rule="push", push_sum=True, partners=partners)
    turns = 60 * size
    gathers = (0, 3)  # and at the end: before ranks agree, plain and weighted mean differ
    rounds, strategies = play(
        lambda: Gossip(chosen, seed),
        starts,
        no_gradients(size, turns),
        lr=0.0,
        round_s=round_s,
        gathers=gathers,
    )
    boxes = [one._boxes[0] for one in strategies]
    assert sum(box.weight + box.arrived_weight for box in boxes) == pytest.approx(size)
    mass = torch.zeros(3, dtype=torch.float64)
    for box, values in zip(boxes, rounds[-1], strict=True):
        mass += box.weight * torch.tensor(values).double() + box.arrived.double()
    mean = torch.tensor(starts, dtype=torch.float64).mean(dim=0)
    assert torch.allclose(mass / size, mean, atol=1e-3)
    for whole in [*strategies[0].gathered, strategies[0].last]:
        assert torch.allclose(whole[0][0].double(), mean, atol=1e-3)
    assert torch.allclose(torch.tensor(rounds[-1]).double(), mean.expand(size, 3), atol=1e-2)


def distance(values):
    values = torch.tensor(values, dtype=torch.float64)
    return (values - values.mean(dim=0)).norm().item()


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_ring_contracts_at_its_second_eigenvalue(size):
    draw = random.Random(size)
    starts = [[draw.uniform(-1, 1) for _ in range(3)] for _ in range(size)]
    ring = GossipSettings(partners="ring", early=False)
    rounds, _ = play(lambda: Gossip(ring), starts, no_gradients(size, 20), lr=0.0)
    # x_i <- (x_i + x_{i+1}) / 2: the eigenvalues are (1 + w) / 2 for the size-th roots of one w.
    found = (distance(rounds[19]) / distance(rounds[9])) ** (1 / 10)
    assert found == pytest.approx(math.cos(math.pi / size), rel=0.05)


def test_uniform_draws_contract_as_expected():
    # Of the squared distance to the mean 1/2 - 1/(4 N) is left on average after each round.
    size, ratios = 6, []
    for seed in range(40):
        draw = random.Random(seed)
        starts = [[draw.gauss(0, 1) for _ in range(3)] for _ in range(size)]
        gossip = GossipSettings(early=False)
        rounds, _ = play(lambda: Gossip(gossip, seed), starts, no_gradients(size, 5), lr=0.0)  # noqa: B023
        ratios += [distance(b) ** 2 / distance(a) ** 2 for a, b in zip(rounds, rounds[1:])]  # noqa: B905, RUF007
    assert sum(ratios) / len(ratios) == pytest.approx(1 / 2 - 1 / (4 * size), rel=0.05)


@settings(max_examples=15)
@given(st.data(), st.integers(2, 5), st.booleans())
def test_center_and_ranks_meet_where_all_springs_rest(data, size, synchronous):
    starts = [data.draw(numbers) for _ in range(size)]
    elastic = ElasticSettings(synchronous=synchronous)
    rounds, strategies = play(
        lambda: Elastic(elastic), starts, no_gradients(size, 12 * size), lr=0.0
    )
    # Every exchange keeps the sum of ranks and center; a strip began on its owner's values.
    (center,), _ = strategies[0].last
    total = torch.tensor(rounds[-1]).double().sum(dim=0) + center.double()
    cuts = strategies[0]._centers[0]._cuts
    began = [x for at in range(size) for x in starts[at][cuts[at] : cuts[at + 1]]]
    begun = torch.tensor([*starts, began], dtype=torch.float64).sum(dim=0)
    assert torch.allclose(total, begun, atol=2e-2)
    rest = begun / (size + 1)
    for values in [*rounds[-1], center.tolist()]:
        assert torch.allclose(torch.tensor(values).double(), rest, atol=2e-2)


def test_the_staleness_of_equal_workers_is_that_of_all_the_others():
    for size in (2, 4, 8):
        starts, steps = [[0.0] * 3] * size, 40
        delays = [rank / (2 * size) for rank in range(size)]
        _, strategies = play(
            lambda: Server(ServerSettings(early=False)),
            starts,
            no_gradients(size, steps),
            delays=delays,
        )
        found = [pair for one in strategies for pair in one.staleness.items()]
        count = sum(times for _, times in found)
        strips = min(size, 3)  # of three numbers
        assert count == size * steps * strips
        mean = sum(staleness * times for staleness, times in found) / count
        assert mean == pytest.approx(size - 1, rel=0.1)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=r"a hypercube has 2, 4, 8, ... corners. Use"):
        GossipSettings(partners="hypercube").check(6)
    with pytest.raises(ConfigError, match="what is pulled has no weight"):
        GossipSettings(push_sum=True).check(4)
    with pytest.raises(ConfigError, match="all exchange when all have come"):
        ElasticSettings(synchronous=True, early=True).check(4)
    for kind in (ServerSettings, ElasticSettings):
        with pytest.raises(ConfigError, match="at least one rank must compute"):
            kind(servers=4).check(4)
    with pytest.raises(ConfigError, match="a rank that pushes fetches nothing"):
        GossipSettings(rule="push", early=True).check(4)
    GossipSettings(rule="push").check(4)
