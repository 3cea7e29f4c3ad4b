"""What ranks may ask of each other outside of steps: to wait for all, and to add up numbers."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import syncline
from ranks import RankError, run_ranks

pytestmark = pytest.mark.processes


def take_step(overlap, strategy="synchronous"):
    """Take a first step; return a function that takes another."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.distribute(model, optimizer, strategy, overlap=overlap)

    def step():
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


@pytest.mark.parametrize("overlap", [True, False])
def test_a_barrier_lets_ranks_read_what_rank_0_wrote(tmp_path, overlap):
    path = tmp_path / "best"

    def work():
        rank = syncline.init()
        take_step(overlap)
        if rank == 0:
            time.sleep(0.3)
            path.write_text("written")
        syncline.barrier()
        return path.read_text()

    assert run_ranks(3, work) == ["written"] * 3


@pytest.mark.parametrize(("size", "machines"), [(3, 1), (2, 2), (4, 2)])
def test_sums_are_those_of_all_ranks_and_the_same_bits_on_each(size, machines):
    def work():
        rank = syncline.init()
        take_step(overlap=True)
        counts = syncline.sum_over_ranks(torch.tensor([rank, 10]))
        losses = torch.tensor([0.1, 0.7]) / (rank + 1)
        table = syncline.sum_over_ranks(losses.expand(2, 2).t())
        right = syncline.sum_over_ranks(torch.tensor([rank < 2, True]))
        return counts.tolist(), table.tolist(), right.tolist(), str(right.dtype)

    expected = torch.zeros(2)
    for rank in range(size):
        expected += torch.tensor([0.1, 0.7]) / (rank + 1)
    table = expected.expand(2, 2).t().tolist()
    counts = [sum(range(size)), 10 * size]
    found = run_ranks(size, work, machines=machines)
    assert found == [[counts, table, [2, size], "torch.int64"]] * size


@pytest.mark.parametrize("strategy", ["gossip", "elastic", "server", "local"])
def test_a_rank_that_waits_still_serves_ranks_that_take_steps(strategy):
    def work():
        rank = syncline.init()
        step = take_step(None, strategy)
        for _ in range(3):
            time.sleep(0.1 * rank)  # the others wait at the barrier by then
            step()
        syncline.barrier()
        found = syncline.sum_over_ranks(torch.tensor([rank + 1])).item()
        step()
        return found

    assert run_ranks(3, work) == [6, 6, 6]


def test_a_rank_that_has_left_is_named_by_those_that_wait():
    def work():
        rank = syncline.init()
        take_step(None, "gossip")
        if rank == 0:
            syncline.barrier()

    with pytest.raises(RankError, match="rank 1 ended its run in good order, but rank 0 still"):
        run_ranks(2, work)


def test_a_rank_alone_has_its_own_sum_in_memory_of_its_own():
    def work():
        syncline.init()
        syncline.barrier()
        values = torch.tensor([1.5, 2.0], requires_grad=True)
        found = syncline.sum_over_ranks(values)
        found += 1
        return values.tolist(), found.tolist(), found.requires_grad

    assert run_ranks(1, work) == [[[1.5, 2.0], [2.5, 3.0], False]]


def test_sums_of_different_shapes_are_refused():
    def work():
        rank = syncline.init()
        return syncline.sum_over_ranks(torch.zeros(2 + rank)).tolist()

    with pytest.raises(RankError, match="all ranks must make the same calls"):
        run_ranks(2, work)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_barrier_of_some_ranks_only_is_refused(overlap):
    def work():
        rank = syncline.init()
        step = take_step(overlap)
        if rank == 0:
            syncline.barrier()
        step()

    with pytest.raises(RankError, match="all ranks must make the same calls"):
        run_ranks(2, work)
