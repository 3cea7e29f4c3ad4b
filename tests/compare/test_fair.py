"""Every run computes on the same samples, whoever computes them, and is evaluated alike."""

from __future__ import annotations

from collections import Counter

import pytest

from comparing import ALL, found_of, plan_of, write_study
from syncline.recipe import Order
from syncline.sim.course import EachItsPart, WhoeverComes


@pytest.mark.parametrize("scenario", ["calm", "straggling"])
def test_all_strategies_end_at_the_same_number_of_samples(tmp_path, scenario):
    found = found_of(write_study(tmp_path, ALL), scenario)
    assert [*found] == [*ALL]
    for name, one in found.items():
        assert one.failed is None
        assert sum(one.rank_samples) == 480, name
        assert [point.samples for point in one.points] == [120, 240, 360, 480], name
        times = [point.time_s for point in one.points]
        assert times == sorted(times)
        sent = [point.sent_bytes for point in one.points]
        assert sent == sorted(sent)


def test_a_fast_rank_computes_what_a_slow_one_does_not(tmp_path):
    path = write_study(tmp_path, ALL)
    path.write_text(path.read_text().replace("[cluster]", "[cluster]\nslow_ranks = {0 = 6.0}"))
    found = found_of(path, "calm")
    for name in ("synchronous", "layered", "local"):
        assert set(found[name].rank_samples) == {120}
    for name in ("gossip", "elastic", "server"):
        slow, *fast = found[name].rank_samples
        assert slow < 60 < 120 < min(fast), name


def test_each_sample_of_an_epoch_is_computed_on_once(tmp_path, monkeypatch):
    path, seen = write_study(tmp_path, ALL), Counter()
    original = Order.indices

    def indices(self, step, shard):
        found = original(self, step, shard)
        seen.update(found.tolist())
        return found

    monkeypatch.setattr(Order, "indices", indices)
    for place in plan_of(path).places:
        if place.scenario.name == "straggling":
            seen.clear()
            from syncline.compare.running import simulate_cell

            simulate_cell(plan_of(path).cell(place, 0))
            assert len(seen) == 480, place.variant.name
            assert {*seen.values()} == {1}


def steps_of(course, ranks):
    """Let ranks take turns; return the sources of each."""
    turns = [course.turns(rank) for rank in range(ranks)]
    taken = [[] for _ in range(ranks)]
    going = set(range(ranks))
    while going:
        for rank in sorted(going):
            turn = next(turns[rank], None)
            if turn is None:
                going.discard(rank)
            else:
                taken[rank].append(turn)
    return taken


def test_ranks_that_come_in_turn_get_the_shards_of_train():
    shards = (range(0, 2), range(2, 4))
    whoever = steps_of(WhoeverComes(shards, 3), 2)
    each = steps_of(EachItsPart(shards, 3), 2)
    assert [[turn.sources for turn in mine] for mine in whoever] == [
        [turn.sources for turn in mine] for mine in each
    ]


def test_a_rank_takes_whole_periods_and_knows_when_the_last_one_is_short():
    course = WhoeverComes((range(0, 1), range(1, 2)), 5, period=3)
    mine = list(course.turns(0))  # the other rank never comes
    assert [turn.sources for turn in mine] == [((k // 2, k % 2),) for k in range(10)]
    assert [turn.total for turn in mine] == [None] * 9 + [10]


def test_what_a_rank_that_dies_has_taken_goes_to_another():
    course = WhoeverComes((range(0, 1), range(1, 2)), 2)
    dying, other = course.turns(0), course.turns(1)
    assert next(dying).sources == ((0, 0),)
    assert next(other).sources == ((0, 1),)
    dying.close()
    assert [turn.sources for turn in other] == [((0, 0),), ((1, 0),), ((1, 1),)]
