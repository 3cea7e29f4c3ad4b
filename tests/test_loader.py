"""Data by shard: every sample once, whoever computes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import syncline
from syncline.comm.tree import shard_range
from syncline.errors import UsageError
from syncline.loader import FlatLoader, ShardedLoader, epoch_order, reseed

DATA = TensorDataset(torch.arange(50))


def sharded(shards, mine, *, batch_size=4, shuffle=True, seed=0):
    loader = DataLoader(DATA, batch_size=batch_size, shuffle=shuffle)
    return ShardedLoader(loader, shards, mine, None, seed)


def epoch(loader):
    return [[batch.tolist() for (batch,) in step] for step in loader]


@given(st.integers(1, 6).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s))))
def test_ranks_together_see_what_one_rank_sees(world):
    shards, size = world
    alone = epoch(sharded(shards, range(shards)))
    together = [epoch(sharded(shards, range(*shard_range(shards, size, r)))) for r in range(size)]
    joined = [[shard for rank in step for shard in rank] for step in zip(*together, strict=True)]
    assert joined == alone
    seen = [sample for step in alone for shard in step for sample in shard]
    assert len(seen) == len(set(seen)) == 50 // (4 * shards) * 4 * shards


def test_epochs_differ_and_repeat_with_the_seed():
    loader = sharded(2, range(2))
    first, second = epoch(loader), epoch(loader)
    assert first != second
    again = sharded(2, range(2))
    assert [epoch(again), epoch(again)] == [first, second]
    assert epoch(sharded(2, range(2), seed=1)) != first


def test_without_shuffling_the_order_is_the_data_s():
    assert epoch(sharded(2, range(2), shuffle=False))[0] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_shard_that_the_loop_leaves_out_does_not_shift_the_data():
    steps = iter(sharded(2, range(2), shuffle=False))
    first = next(steps)
    next(first)  # only one of the two shards is read
    assert [batch.tolist() for (batch,) in next(steps)] == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_random_numbers_depend_on_step_and_shard_alone():
    def draws(mine):
        found = {}
        for number, step in enumerate(sharded(4, mine)):
            for shard, _ in zip(mine, step, strict=True):
                found[number, shard] = torch.rand(()).item()
        return found

    alone = draws(range(4))
    assert len(set(alone.values())) == len(alone)
    for shard in range(4):
        for key, value in draws(range(shard, shard + 1)).items():
            assert alone[key] == value


def test_reseeding_is_the_published_function():
    reseed(7, 3, 1)
    ours = torch.rand(3)
    torch.manual_seed(syncline.seed_for(7, "dropout", 3, 1))
    assert torch.equal(ours, torch.rand(3))
    assert epoch_order(5, 0, 0).tolist() == [1, 4, 3, 2, 0]


def test_lengths_count_steps():
    loader = sharded(2, range(1))
    assert len(loader) == len(FlatLoader(loader)) == 6
    assert len(epoch(loader)) == 6


def test_what_cannot_be_cut_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(UsageError, match="without indices"):
        ShardedLoader(DataLoader(Stream()), 2, range(1), None, 0)
    sampler = WeightedRandomSampler([1.0] * 50, 50)
    with pytest.raises(UsageError, match="WeightedRandomSampler"):
        ShardedLoader(DataLoader(DATA, sampler=sampler), 2, range(1), None, 0)
    with pytest.raises(UsageError, match="50 samples do not fill one step"):
        sharded(20, range(1))
    with pytest.raises(UsageError, match="no batch_size"):
        ShardedLoader(DataLoader(DATA, batch_size=None), 2, range(1), None, 0)


@pytest.mark.usefixtures("alone")
def test_one_batch_a_step_needs_one_shard_a_rank():
    syncline.init()
    model = torch.nn.Linear(2, 2)
    syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
    with pytest.raises(UsageError, match="2 shards a step"):
        syncline.shard(DataLoader(DATA, batch_size=4))
    assert len(syncline.shards(DataLoader(DATA, batch_size=4))) == 6


@pytest.mark.usefixtures("alone")
def test_a_loader_may_be_cut_before_the_model_is_given():
    syncline.init()
    assert syncline.world_size() == 1
    assert len(list(syncline.shard(DataLoader(DATA, batch_size=5)))) == 10
