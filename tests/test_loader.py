"""Data by shard: every sample once, whoever computes it."""

from __future__ import annotations

import copy
import itertools
import os
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import syncline
from syncline.comm.tree import shard_range
from syncline.errors import UsageError
from syncline.loader import FlatLoader, ShardedLoader, epoch_order, reseed
from syncline.step_batches import Dealt
from worlds import run_program

DATA = TensorDataset(torch.arange(50))


def sharded(shards, mine, *, batch_size=4, shuffle=True, seed=0):
    loader = DataLoader(DATA, batch_size=batch_size, shuffle=shuffle)
    return cut(loader, shards, mine, seed)


def cut(loader, shards, mine, seed=0, **settings):
    return ShardedLoader(loader, lambda: Dealt(shards, mine), seed, **settings)


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
        cut(DataLoader(Stream()), 2, range(1))
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
    for args in ({"sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 4, False)}):
        with pytest.raises(UsageError, match="a DistributedSampler, which gives each rank a part"):
            cut(DataLoader(DATA, **args), 2, range(1))
    with pytest.raises(UsageError, match="50 samples do not fill one step"):
        len(sharded(20, range(1)))
    with pytest.raises(UsageError, match="a generator, has no length"):
        cut(DataLoader(DATA, sampler=(k for k in range(9))), 2, range(1))


@pytest.mark.usefixtures("alone")
def test_a_loader_may_be_cut_before_the_model_is_given():
    syncline.init()
    assert syncline.world_size() == 1
    assert len(list(syncline.shard(DataLoader(DATA, batch_size=5)))) == 10


# Random numbers of augmentation.


class Augmented(Dataset):
    """Adds noise from three generators to each sample."""

    def __init__(self, size=48):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(
            [index, torch.rand(()).item(), random.random(), numpy.random.rand()],
            dtype=torch.float64,
        )


class AugmentedAtOnce(Augmented):
    """The same through `__getitems__`, as data sets that fetch whole batches have it."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def noisy_collate(samples):
    return torch.stack(samples) + torch.rand(()).item()


@pytest.mark.parametrize("kind", [Augmented, AugmentedAtOnce])
@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_does_not_depend_on_the_number_of_ranks_or_workers(kind, workers):
    def epochs(mine, workers):
        loader = DataLoader(
            kind(), batch_size=4, shuffle=True, num_workers=workers, collate_fn=noisy_collate
        )
        made = cut(loader, 4, mine)
        return [[[batch.tolist() for batch in step] for step in made] for _ in range(2)]

    alone = epochs(range(4), 0)
    assert alone[0] != alone[1]
    noise = [sample[1:] for step in alone[0] for batch in step for sample in batch]
    assert len({tuple(numbers) for numbers in noise}) == 48  # no two samples have the same noise
    for shard in (0, 3):
        mine = epochs(range(shard, shard + 1), workers)
        assert mine == [[[step[shard]] for step in epoch] for epoch in alone]


def test_a_user_s_worker_init_fn_is_still_called():
    calls = torch.zeros(2).share_memory_()

    def begin(worker):
        calls[worker] += 1
        numpy.random.seed(7)

    loader = DataLoader(Augmented(), batch_size=4, num_workers=2, worker_init_fn=begin)
    seeded = [batch.tolist() for step in cut(loader, 2, range(1)) for batch in step]
    assert calls.tolist() == [1, 1]
    plain = DataLoader(Augmented(), batch_size=4)
    assert seeded == [batch.tolist() for step in cut(plain, 2, range(1)) for batch in step]


def test_random_numbers_of_the_loop_itself_depend_on_step_and_shard_alone():
    def draws(mine):
        found = {}
        for number, step in enumerate(cut(DataLoader(Augmented(), batch_size=4), 4, mine)):
            for shard, _ in zip(mine, step, strict=True):
                found[number, shard] = (torch.rand(()).item(), random.random(), numpy.random.rand())
        return found, (torch.rand(()).item(), random.random(), numpy.random.rand())

    alone, after = draws(range(4))
    assert len(set(alone.values())) == len(alone)
    for shard in range(4):
        mine, mine_after = draws(range(shard, shard + 1))
        assert mine.items() <= alone.items()
        assert mine_after == after  # validation draws the same numbers on every rank


# Epochs and positions.


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("make", [syncline.shard, syncline.shards])
def test_the_same_loader_given_again_goes_on_with_the_next_epoch(make):
    syncline.init()
    loader = DataLoader(DATA, batch_size=5, shuffle=True)
    once = make(copy.copy(loader))
    expected = [list(map(str, map(list, once))) for _ in range(3)]
    assert len(set(map(str, expected))) == 3
    assert [list(map(str, map(list, make(loader)))) for _ in range(3)] == expected


@pytest.mark.usefixtures("alone")
def test_a_new_session_starts_anew_with_the_same_loader():
    loader = DataLoader(DATA, batch_size=5, shuffle=True)
    orders = []
    for _ in range(2):
        syncline.init()
        orders.append([batch.tolist() for (batch,) in syncline.shard(loader)])
        syncline.session.close_session()
    assert orders[0] == orders[1]


def test_a_look_at_the_first_batch_is_not_an_epoch():
    loader = sharded(2, range(2))
    expected = epoch(sharded(2, range(2)))
    next(iter(next(iter(loader))))  # perhaps on rank 0 alone
    assert loader.epoch == 0
    assert epoch(loader) == expected


def test_a_loop_that_is_left_counts_as_an_epoch():
    loader, other = sharded(2, range(2)), sharded(2, range(2))
    epoch(other)
    for _ in itertools.islice(loader, 2):
        pass
    assert loader.epoch == 1
    assert epoch(loader) == epoch(other)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_in_the_middle_of_an_epoch_is_saved_and_loaded(workers):
    def make(mine):
        loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)
        return cut(loader, 2, mine)

    def rest(loader):
        found = []
        for step in loader:
            for batch in step:
                found.append((batch.tolist(), torch.rand(()).item()))
        return found

    unbroken = make(range(2))
    first, second = rest(unbroken), rest(unbroken)
    killed = make(range(2))
    rest(killed)
    for number, step in enumerate(killed):
        list(step)
        if number == 2:
            saved = killed.state_dict()
            break
    assert (saved["epoch"], saved["step"]) == (1, 3)
    resumed = make(range(2))
    resumed.load_state_dict(saved)
    resumed.sampler.set_epoch(resumed.epoch)  # as scripts do: must not begin the epoch again
    assert rest(resumed) == second[6:]
    assert resumed.state_dict()["epoch"] == 2
    one = make(range(1, 2))
    one.load_state_dict(saved)
    assert rest(one) == second[7::2]
    assert first != second


def test_a_position_behind_the_last_step_is_still_in_the_loop():
    """A script that goes on from there ends the epoch first: its schedule and its validation."""
    loader = sharded(2, range(2))
    for step in loader:
        list(step)
        saved = loader.state_dict()
    assert (saved["epoch"], saved["step"]) == (0, 6)
    after = loader.state_dict()
    assert (after["epoch"], after["step"]) == (1, 0)
    resumed = sharded(2, range(2))
    resumed.load_state_dict(saved)
    assert epoch(resumed) == []
    assert epoch(resumed) == epoch(loader)


def test_set_epoch_sets_the_order_of_the_next_loop():
    loader, other = sharded(2, range(2)), sharded(2, range(2))
    epoch(other), epoch(other)
    third = epoch(other)
    loader.set_epoch(2)
    assert epoch(loader) == third
    loader.sampler.set_epoch(2)
    assert epoch(loader) == third
    assert loader.epoch == 3


def test_a_position_of_another_loader_is_refused():
    saved = sharded(2, range(2)).state_dict()
    for change, text in (
        ({"seed": 4}, "saved with seed 4, but this loader has 0"),
        ({"batch_size": 8}, "saved with batch_size 8, but this loader has 4"),
        ({"num_samples": 49}, "saved with num_samples 49, but this loader has 50"),
        ({"accumulate": 2}, "saved with accumulate 2, but this loader has 1"),
    ):
        with pytest.raises(UsageError, match=text):
            sharded(2, range(2)).load_state_dict(saved | change)
    with pytest.raises(UsageError, match="not the state of a loader: it lacks accumulate, batch"):
        sharded(2, range(2)).load_state_dict({"state": {}})
    loader = sharded(2, range(2))
    loader.load_state_dict(saved | {"shards": 4})
    with pytest.raises(UsageError, match=r"saved with shards 4, but this loader has 2.*shards=4"):
        epoch(loader)


def spread(**settings):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, syncline.distribute(model, optimizer, **settings)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_flat_loop_s_position_counts_steps_that_were_taken(overlap, set_to_none):
    syncline.init()
    model, optimizer, _ = spread(overlap=overlap)
    loader = syncline.shard(DataLoader(DATA, batch_size=5))
    places = []
    for number, _ in enumerate(loader):
        places.append(loader.state_dict()["step"])  # before the step: its batch is given again
        assert loader.ends_step
        model(torch.ones(1, 2)).sum().backward()
        if number < 2:
            with pytest.raises(UsageError, match=r"state_dict\(\) came in the middle of a step"):
                loader.state_dict()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        places.append(loader.state_dict()["step"])
    assert places == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10]


class Told:
    """Stands for a model: notes which shards it is told, and takes steps."""

    def __init__(self):
        self.step_number = 0
        self.told = []
        self.has_gradient = False
        self.comm, self.buffers = SimpleNamespace(size=1), SimpleNamespace(put_back=lambda: None)

    def begin_shard(self, shard, *, is_flat):
        self.told.append((shard, is_flat))

    def tell_buffers(self):
        pass

    def compute(self, *, is_last):
        self.has_gradient = not is_last
        self.step_number += is_last


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_flat_loop_gives_each_shard_in_turn_and_says_where_the_step_ends(accumulate):
    models = [Told(), Told()]
    loader = DataLoader(TensorDataset(torch.arange(60)), batch_size=5)
    deal = lambda mine: lambda: Dealt(3, mine, models)  # noqa: E731
    steps = ShardedLoader(loader, deal(range(1, 3)), 0, accumulate=accumulate)
    ours = FlatLoader(steps)
    assert (len(ours), ours.num_steps) == (8, 4 // accumulate)
    seen, places = [], []
    for (batch,) in ours:
        seen.append(batch[0].item() // 5)
        for model in models:
            model.compute(is_last=ours.ends_step)
        if ours.ends_step:
            places.append(ours.state_dict()["step"])
        else:
            with pytest.raises(UsageError, match=r"state_dict.. came in the middle of a step"):
                ours.state_dict()
    if accumulate == 1:
        assert seen == [1, 2, 4, 5, 7, 8, 10, 11]
    else:
        assert seen == [2, 3, 4, 5, 8, 9, 10, 11]
    assert places == list(range(1, 4 // accumulate + 1))
    assert models[0].told == models[1].told == [(1, True), (2, True)] * (4 // accumulate)


@pytest.mark.parametrize("mine", [range(4), range(2), range(1, 2)])
def test_a_loader_counts_the_steps_of_an_epoch_alike_on_any_number_of_ranks(mine):
    loader = sharded(4, mine, batch_size=3)
    flat = FlatLoader(loader)
    for _ in range(2):
        assert [flat.step for _ in flat if flat.ends_step] == [0, 1, 2, 3]
        assert [loader.step for step in loader for _ in step][:: len(mine)] == [0, 1, 2, 3]
        assert flat.step == 0
    resumed = sharded(4, mine, batch_size=3)
    resumed.load_state_dict(loader.state_dict() | {"epoch": 1, "step": 3})
    assert [resumed.step for _ in resumed] == [3]


def test_a_step_can_be_gone_through_for_each_model_in_turn():
    model = Told()
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=5)
    steps = ShardedLoader(loader, lambda: Dealt(2, range(2), [model]), 0)
    for step in steps:
        assert len(step) == 2
        passes = [[(b.tolist(), torch.rand(()).item()) for (b,) in step] for _ in range(2)]
        assert passes[0] == passes[1]
    assert model.told == [(0, False), (1, False)] * 4


def test_too_small_numbers_of_batches_are_refused(alone):
    syncline.init()
    with pytest.raises(syncline.SynclineError, match="accumulate: got 0, but it must be at least"):
        syncline.shard(DataLoader(DATA), accumulate=0)
    with pytest.raises(UsageError, match="do not fill one step of 1 shards of 5 with 11 batches"):
        len(syncline.shard(DataLoader(DATA, batch_size=5), accumulate=11))


# Loaders that look like the loader they came from.


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("make", [syncline.shard, syncline.shards])
def test_a_sharded_loader_has_the_attributes_of_its_loader(make):
    syncline.init()
    loader = DataLoader(DATA, batch_size=5, shuffle=True, drop_last=True, num_workers=2)
    ours = make(loader)
    names = ["dataset", "batch_size", "num_workers", "collate_fn", "drop_last", "batch_sampler"]
    for name in names:
        assert getattr(ours, name) is getattr(loader, name), name
    assert len(ours.dataset) == len(ours.sampler) == 50
    assert ours.sampler.replacement is False
    ours.sampler.set_epoch(3)
    assert ours.epoch == 3
    with pytest.raises(AttributeError, match="nosuch"):
        _ = ours.nosuch
    with pytest.raises(UsageError, match="function that draws one batch, but got a"):
        syncline.shard(ours)


class Workers(Dataset):
    """Tells which process fetched a sample."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return os.getpid()


@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_workers_live_on_for_the_next_epoch(persistent):
    loader = DataLoader(Workers(), batch_size=4, num_workers=2, persistent_workers=persistent)
    ours = cut(loader, 2, range(2))
    first, second = ({int(b[0]) for s in ours for b in s} for _ in range(2))
    assert len(first) == 2
    assert (first == second) is persistent


# Samplers.


class EveryOther(Sampler):
    """Depends on the epoch alone."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(range(self.epoch % 2, 48, 2))


class Drifting(Sampler):
    """Keeps numbers of its own: its order depends on how often it was asked."""

    def __init__(self):
        self.own = random.Random(3)

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(self.own.sample(range(48), 24))


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(48.0), 24),
    "weighted, own generator": lambda: WeightedRandomSampler(
        torch.arange(48.0), 24, generator=torch.Generator()
    ),
    "with replacement": lambda: RandomSampler(Augmented(), replacement=True, num_samples=24),
    "subset": lambda: SubsetRandomSampler(range(0, 48, 2)),
    "own": EveryOther,
}


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sampler_gives_every_rank_the_same_order_and_goes_on_after_a_resume(name, in_batches):
    def make(mine):
        sampler = SAMPLERS[name]()
        if in_batches:
            loader = DataLoader(Augmented(), batch_sampler=BatchSampler(sampler, 3, False))
        else:
            loader = DataLoader(Augmented(), batch_size=3, sampler=sampler)
        return cut(loader, 2, mine)

    def rest(loader):
        return [batch[:, 0].int().tolist() for step in loader for batch in step]

    torch.manual_seed(1)
    alone = make(range(2))
    epochs = [rest(alone) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [8, 8, 8]
    assert epochs[0] != epochs[1]
    torch.manual_seed(2)  # ranks may have drawn other numbers before
    other = make(range(1, 2))
    assert [rest(other) for _ in range(3)] == [epoch[1::2] for epoch in epochs]
    again = make(range(2))
    rest(again)
    for number, step in enumerate(again):
        list(step)
        if number == 1:
            saved = again.state_dict()
    resumed = make(range(2))
    resumed.load_state_dict(saved)
    assert rest(resumed) + rest(resumed) == epochs[1][4:] + epochs[2]


READY = [torch.full((3,), float(number)) for number in range(9)]
"""Batches that a script has made by hand."""


class Noisy(Dataset):
    """Gives batches made by hand, with random numbers added."""

    def __len__(self):
        return len(READY)

    def __getitem__(self, index):
        return READY[index] + 0.5 * torch.rand(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_items_that_are_batches_are_a_shard_each(workers):
    def make(mine):
        return cut(DataLoader(Noisy(), batch_size=None, num_workers=workers), 4, mine)

    def values(loader):
        return [[batch.tolist() for batch in step] for step in loader]

    whole = values(make(range(4)))
    assert [[int(batch[0]) for batch in step] for step in whole] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert values(make(range(2, 4))) == [step[2:] for step in whole]
    assert make(range(4)).state_dict()["num_samples"] == 9


def test_items_that_are_batches_come_in_the_sampler_s_order():
    def order(**settings):
        loader = cut(DataLoader(READY, batch_size=None, **settings), 3, range(3))
        return [int(batch[0]) for step in loader for batch in step]

    assert order(shuffle=True) == epoch_order(9, 0, 0).tolist()
    assert order(sampler=[8, 6, 4, 2, 0, 1]) == [8, 6, 4, 2, 0, 1]
    assert order(collate_fn=lambda batch: batch[:1] + 1) == list(range(1, 10))


def test_a_sampler_that_cannot_go_on_is_refused():
    def make():
        return cut(DataLoader(Augmented(), batch_size=3, sampler=Drifting()), 2, range(2))

    loader = make()
    list(loader), list(loader)
    saved = loader.state_dict()
    with pytest.raises(UsageError, match="a Drifting, gives another order for epoch 1"):
        make().load_state_dict(saved)


# Several models, and loaders made before them.


@pytest.mark.usefixtures("alone")
def test_every_model_is_told_the_shard_whenever_the_loader_was_made():
    syncline.init()
    early = syncline.shards(DataLoader(DATA, batch_size=5))
    one = spread(shards=2)
    between = syncline.shards(DataLoader(DATA, batch_size=5))
    two = spread(shards=2)
    for loader in (early, between):
        assert len(loader) == 5
        for step in itertools.islice(loader, 2):
            for _ in step:
                for model, *_ in (one, two):
                    model(torch.ones(1, 2)).sum().backward()
            for _, optimizer, _ in (one, two):
                optimizer.step()
                optimizer.zero_grad()
    assert one[2].step_number == two[2].step_number == 4


@pytest.mark.usefixtures("alone")
def test_a_loader_that_was_counted_before_the_model_came_is_refused():
    syncline.init()
    loader = syncline.shard(DataLoader(DATA, batch_size=5))
    assert len(loader) == 10  # a schedule may have been made from it
    spread(shards=2)
    with pytest.raises(UsageError, match=r"used before distribute.., when a step had 1 shards"):
        list(loader)


@pytest.mark.usefixtures("alone")
def test_models_with_different_shards_are_refused():
    syncline.init()
    spread(shards=2)
    spread(shards=4)
    with pytest.raises(UsageError, match="the models have 2 and 4 shards"):
        syncline.shards(DataLoader(DATA, batch_size=5))


@pytest.mark.usefixtures("alone")
def test_validation_by_shards_tells_the_model_nothing():
    syncline.init()
    model, optimizer, _ = spread(shards=2)
    train, test = (syncline.shards(DataLoader(DATA, batch_size=5)) for _ in range(2))
    for step in itertools.islice(train, 2):
        for _ in step:
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert sum(len(list(step)) for step in test) == 10


FIRST_DRAW = """
import numpy as np
from torch.utils.data import DataLoader
import syncline

class Drawn:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.random.random()  # the first use of numpy.random, which loads it

syncline.init()
print(*syncline.shard(DataLoader(Drawn(), batch_size=2)))
"""


def test_the_very_first_draw_from_numpy_is_seeded_too():
    assert run_program(FIRST_DRAW) == run_program(FIRST_DRAW) != b""


class Doubled(DataLoader):
    """Changes batches after they were fetched."""

    def __iter__(self):
        return (batch * 2 for batch in super().__iter__())


def test_a_loader_whose_own_iteration_would_not_run_is_refused(alone):
    syncline.init()
    with pytest.raises(UsageError, match="Doubled, whose __iter__ is not DataLoader's"):
        syncline.shard(Doubled(torch.arange(8.0), batch_size=2))
