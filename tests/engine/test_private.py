"""Private parameters are private: a user may change them, and no other rank reads what is changed.

The changes multiply: done twice, or not at all, they show. Clamping would hide both.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import syncline
import syncline.session
from ranks import RankError, run_ranks
from syncline.checkpoint import digest_of
from syncline.comm.shared_memory import SharedMemory
from syncline.errors import UsageError
from syncline.session import current_session

pytestmark = pytest.mark.processes


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step, shard):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + shard))


def scale(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.98)


def train(comm="auto", steps=8, change=scale, **settings):
    rank = syncline.init(comm=comm)
    model, optimizer = make(rank)
    settings = {"shards": 4, "private_parameters": True, "bucket_bytes": 512} | settings
    replica = syncline.distribute(model, optimizer, **settings)
    for step in range(steps):
        for shard in replica.my_shards:
            replica.begin_shard(shard)
            model(batch(step, shard)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        change(model)
    return digest_of(model.state_dict())


def slow_readers():
    """Let ranks other than 0 take their time after each meeting, when they read peers' memory."""
    meet = SharedMemory.meet

    def meet_slowly(self, *args):
        meet(self, *args)
        if self.position:
            time.sleep(0.0005)

    SharedMemory.meet = meet_slowly


@pytest.mark.parametrize("overlap", [True, False])
def test_changes_in_place_give_the_same_bits_on_any_number_of_ranks(overlap):
    (expected,) = run_ranks(1, lambda: train(overlap=overlap))

    def slowly():
        slow_readers()
        return train(overlap=overlap)

    assert run_ranks(2, slowly) == [expected] * 2
    assert run_ranks(4, slowly) == [expected] * 4


@pytest.mark.parametrize(("ranks", "machines", "comm"), [(2, 1, "network"), (4, 2, "auto")])
def test_changes_in_place_give_the_same_bits_over_a_network(ranks, machines, comm):
    (expected,) = run_ranks(1, train)
    found = run_ranks(ranks, lambda: train(comm, overlap=True), machines=machines)
    assert found == [expected] * ranks


@pytest.mark.parametrize("strategy", ["wait_free", "all_reduce", "merged", "sync_server"])
def test_changes_in_place_give_the_same_bits_with_every_synchronous_strategy(strategy):
    def work():
        return train(strategy=strategy, bucket_bytes=None)

    (expected,) = run_ranks(1, train)
    assert run_ranks(2, work) == [expected] * 2


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("alone")
def test_one_rank_has_the_bits_of_a_plain_loop(overlap):
    syncline.init()
    results = []
    for is_ours in (False, True):
        model, optimizer = make()
        if is_ours:
            syncline.distribute(model, optimizer, private_parameters=True, overlap=overlap)
        for step in range(4):
            model(batch(step, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scale(model)
        results.append(digest_of(model.state_dict()))
    assert results[0] == results[1]


@pytest.mark.parametrize("overlap", [True, False])
def test_no_other_rank_can_see_memory_that_the_user_may_change(overlap):
    def work():
        rank = syncline.init()
        model, optimizer = make()
        replica = syncline.distribute(model, optimizer, private_parameters=True, overlap=overlap)
        model(batch(0, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.synchronize()
        if rank == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(7.0)
        current_session().lane.call(current_session().comm.barrier)
        memories = [bucket.parameters.memory for bucket in replica.buckets]
        mapped = [one for memory in memories for one in (memory.mine, *(memory.peers or ()))]
        return [bool((one == 7.0).any()) for one in mapped if one.numel()]

    assert not any(run_ranks(2, work)[1])


@pytest.mark.parametrize("strategy", ["synchronous", "wait_free"])
def test_changes_that_differ_between_ranks_are_refused_by_name(strategy):
    def work():
        def change(model):
            with torch.no_grad():
                model[3].bias.mul_(1.0 + syncline.rank())

        train(steps=2, strategy=strategy, bucket_bytes=None, change=change)

    with pytest.raises(RankError, match=r"parameter 3\.bias differs between ranks: rank 1 holds"):
        run_ranks(2, work)


def test_a_change_that_one_rank_undoes_is_no_change():
    """As when one rank puts averaged weights into its model, evaluates, and puts the old back."""

    def work():
        def swap(model):
            if syncline.rank() == 0:
                kept = {name: value.clone() for name, value in model.state_dict().items()}
                scale(model)
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(kept[name])

        return train(change=swap)

    (expected,) = run_ranks(1, lambda: train(change=lambda model: None))
    assert run_ranks(2, work) == [expected] * 2


@pytest.mark.parametrize("strategy", ["gossip", "elastic"])
def test_a_rank_s_own_replica_takes_changes_and_gathers_them(strategy):
    """On one rank these strategies are plain SGD, also with the last change, inside whole()."""

    def work(size):
        rank = syncline.init()
        model, optimizer = make(rank)
        replica = syncline.distribute(
            model, optimizer, strategy, private_parameters=True, overlap=True
        )
        for step in range(3):
            model(batch(step, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scale(model)
        before = digest_of(model.state_dict())
        with replica.whole():
            whole = digest_of(model.state_dict())
        assert digest_of(model.state_dict()) == before
        return whole if size == 1 else None

    plain, optimizer = make()
    for step in range(3):
        plain(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scale(plain)
    assert run_ranks(1, lambda: work(1)) == [digest_of(plain.state_dict())]
    run_ranks(2, lambda: work(2))


def test_servers_hold_the_parameters_so_changes_of_a_copy_are_refused():
    def work():
        syncline.init()
        model, optimizer = make()
        syncline.distribute(model, optimizer, "server", private_parameters=True)
        for step in range(2):
            model(batch(step, 0)).square().mean().backward()
            if step:
                with pytest.raises(UsageError, match="before the first step"):
                    optimizer.step()
                return
            optimizer.step()
            optimizer.zero_grad()
            scale(model)

    run_ranks(1, work)


def train_flat(change_before_step=None, change_after_step=None, steps=3):
    """A loop over batches: `step()` after each."""
    syncline.init()
    model, optimizer = make()
    replica = syncline.distribute(
        model, optimizer, shards=4, private_parameters=True, bucket_bytes=512
    )
    for step in range(steps):
        for shard in replica.my_shards:
            replica.begin_shard(shard, is_flat=True)
            model(batch(step, shard)).square().mean().backward()
            if change_before_step is not None:
                change_before_step(model)
            optimizer.step()
            if change_after_step is not None and syncline.step_ended(model):
                change_after_step(model)
            optimizer.zero_grad()
    return digest_of(model.state_dict())


def test_changes_once_a_step_of_a_flat_loop_give_the_same_bits():
    (expected,) = run_ranks(1, lambda: train(steps=3))
    for size in (1, 2, 4):
        assert run_ranks(size, lambda: train_flat(change_after_step=scale)) == [expected] * size


@pytest.mark.usefixtures("alone")
def test_a_change_for_every_batch_is_refused():
    """With more ranks a parameter would change once a step."""
    with pytest.raises(UsageError, match=r"0.weight was changed in place between two shards"):
        train_flat(change_before_step=scale)


def thaw(model):
    model[3].requires_grad_(True)


@pytest.mark.usefixtures("alone")
def test_thawing_in_the_middle_of_a_step_is_refused():
    """With more ranks no shard of the step would have the gradient yet."""
    syncline.init()
    model, optimizer = make()
    replica = syncline.distribute(model, optimizer, shards=2)
    model[3].requires_grad_(False)
    replica.begin_shard(0, is_flat=True)
    model(batch(0, 0)).square().mean().backward()
    thaw(model)
    with pytest.raises(UsageError, match=r"3.weight was thawed between two shards"):
        optimizer.step()


@pytest.mark.usefixtures("alone")
def test_thawing_between_two_steps_is_taken():
    syncline.init()
    model, optimizer = make()
    replica = syncline.distribute(model, optimizer, shards=2)
    model[3].requires_grad_(False)
    for step in range(2):
        for shard in (0, 1):
            replica.begin_shard(shard, is_flat=True)
            model(batch(step, shard)).square().mean().backward()
            optimizer.step()
            if syncline.step_ended(model):
                thaw(model)
            optimizer.zero_grad()
    assert optimizer.state_dict()["state"][4]["step"] == 1


@pytest.mark.usefixtures("alone")
def test_a_change_between_the_shards_of_a_step_is_refused():
    syncline.init()
    model, optimizer = make()
    replica = syncline.distribute(model, optimizer, shards=2, private_parameters=True)
    scale(model)  # before the step's first shard
    replica.begin_shard(0)
    model(batch(0, 0)).square().mean().backward()
    scale(model)
    with pytest.raises(UsageError, match=r"0.weight was changed in place between two shards"):
        replica.begin_shard(1)
