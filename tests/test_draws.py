"""Batches that a function draws: the same by shard, on whichever rank draws them."""

from __future__ import annotations

import gc
import random

import numpy
import pytest
import torch

import syncline
from syncline.draws import DrawnBatches, DrawnSteps, Streams
from syncline.errors import UsageError
from syncline.step_batches import Dealt


def draw():
    return torch.randn(2), numpy.random.rand(), {"name": "x", "number": random.random()}


def drawn(shards, mine, *, streams=None, function=draw, seed=0, **settings):
    return DrawnSteps(function, lambda: Dealt(shards, mine), seed, streams or Streams(), **settings)


def flat(batch):
    return [*batch[0].tolist(), batch[1], batch[2]["number"]]


def take(steps, number):
    return [[flat(batch) for batch in next(steps)] for _ in range(number)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_together_draw_what_one_rank_draws(accumulate):
    alone = take(drawn(4, range(4), accumulate=accumulate), 3)
    parts = [take(drawn(4, mine, accumulate=accumulate), 3) for mine in (range(3), range(3, 4))]
    assert [a + b for a, b in zip(*parts, strict=True)] == alone
    every = [tuple(batch) for step in alone for batch in step]
    assert len(set(every)) == len(every) == 3 * 4 * accumulate


def test_what_is_drawn_in_between_changes_nothing():
    expected = take(drawn(2, range(2)), 3)
    steps, found = drawn(2, range(2)), []
    for _ in range(3):
        found += take(steps, 1)
        draw()
    assert found == expected


def test_a_loop_and_next_over_batches_draw_the_same():
    batches = DrawnBatches(drawn(2, range(2)))
    looped = [flat(batch) for batch, _ in zip(batches, range(4), strict=False)]
    batches = DrawnBatches(drawn(2, range(2)))
    assert [flat(next(batches)) for _ in range(4)] == looped


def test_loaders_made_one_after_the_other_draw_different_batches():
    streams = Streams()
    first, second = (take(drawn(2, range(2), streams=streams), 2) for _ in range(2))
    assert first != second
    streams = Streams()
    assert [take(drawn(2, range(2), streams=streams), 2) for _ in range(2)] == [first, second]
    assert take(drawn(2, range(2), seed=1), 2) != first


def test_a_position_goes_on_on_another_number_of_ranks():
    streams = Streams()
    drawn(4, range(4), streams=streams)
    steps = drawn(4, range(4), streams=streams)
    take(steps, 2)
    state = steps.state_dict()
    expected = take(steps, 2)
    later = take(drawn(4, range(4), streams=streams), 1)
    streams = Streams()
    again = drawn(4, range(2), streams=streams)
    take(again, 1)
    again.load_state_dict(state)
    assert take(again, 2) == [step[:2] for step in expected]
    assert take(drawn(4, range(4), streams=streams), 1) == later


@pytest.mark.parametrize(
    ("change", "message"),
    [({"shards": 2}, "shards 2"), ({"seed": 7}, "seed 7"), ({"accumulate": 3}, "accumulate 3")],
)
def test_a_position_of_other_settings_is_refused(change, message):
    steps = drawn(4, range(4))
    with pytest.raises(UsageError, match=message):  # noqa: PT012
        steps.load_state_dict(steps.state_dict() | change)
        next(steps)


@pytest.mark.usefixtures("alone")
def test_the_position_of_a_loader_is_not_that_of_a_function():
    syncline.init()
    data = torch.utils.data.TensorDataset(torch.arange(8))
    loader = syncline.shard(torch.utils.data.DataLoader(data, batch_size=2))
    with pytest.raises(UsageError, match="lacks is_drawn"):
        syncline.shard(draw).load_state_dict(loader.state_dict())


def test_a_loader_that_is_forgotten_leaves_the_generators_alone():
    steps = drawn(2, range(2))
    take(steps, 1)
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    del steps
    gc.collect()
    assert torch.equal(torch.randn(2), expected)


def test_a_function_with_a_generator_of_its_own_is_refused():
    generator = torch.Generator()
    steps = drawn(2, range(2), function=lambda: torch.randn(3, generator=generator))
    with pytest.raises(UsageError, match="two different batches for one seed"):
        take(steps, 1)


def test_a_function_that_counts_its_calls_is_refused():
    numbers = iter(range(100))
    steps = drawn(2, range(2), function=lambda: {"x": next(numbers)})
    with pytest.raises(UsageError, match="not by counting calls"):
        next(iter(next(steps)))


def test_a_batch_with_nan_is_taken():
    steps = drawn(1, range(1), function=lambda: torch.tensor([float("nan")]))
    assert next(iter(next(steps))).isnan().all()


def test_there_is_no_end_and_no_length():
    batches = DrawnBatches(drawn(2, range(2)))
    for ask in (len, lambda one: one.num_steps):
        with pytest.raises(UsageError, match="without an end"):
            ask(batches)


@pytest.mark.usefixtures("alone")
def test_what_is_neither_a_loader_nor_a_function_is_refused():
    syncline.init()
    with pytest.raises(UsageError, match="function that draws one batch, but got a list_iterator"):
        syncline.shard(iter([1, 2]))
