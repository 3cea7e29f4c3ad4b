"""Rules that only show with several ranks: when memory may be written, who has a gradient."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

import syncline
from ranks import RankError, run_ranks
from syncline.checkpoint import digest_of
from syncline.comm import base
from syncline.contract import Family, Plan, deal
from syncline.perf.recorder import Recorder
from syncline.strategies import Synchronous

pytestmark = pytest.mark.processes


def make(hidden=64, **settings):
    rank = syncline.init()
    torch.manual_seed(rank)  # ranks start differently: distribute must make them equal
    model = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return rank, model, optimizer, syncline.distribute(model, optimizer, **settings)


def backward(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(5, 8, generator=generator)).square().mean().backward()


@pytest.mark.parametrize("overlap", [True, False])
def test_shared_parameters_stay_until_every_rank_has_entered_the_step(overlap):
    def work():
        rank, model, optimizer, replica = make(overlap=overlap)
        backward(model, rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        replica.synchronize()
        backward(model, rank, 1)
        before = [p.detach().clone() for p in model.parameters()]
        if rank == 1:
            time.sleep(0.3)  # rank 0 is in its step by now; this rank may still read parameters
            unchanged = all(
                torch.equal(p.detach(), old)
                for p, old in zip(model.parameters(), before, strict=True)
            )
        optimizer.step()
        optimizer.zero_grad()
        replica.synchronize()
        return unchanged if rank == 1 else None

    assert run_ranks(2, work)[1] is True


def test_a_job_fixes_the_number_of_threads():
    def work():
        torch.set_num_threads(2)  # as one rank alone would start, where several start with one
        syncline.init(threads=1)
        return torch.get_num_threads()

    assert run_ranks(2, work) == [1, 1]


def test_ranks_start_from_rank_0_s_parameters_and_buffers():
    def work():
        rank = syncline.init()
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].running_mean += rank
        model[0].bias.requires_grad_(False)
        syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return digest_of(model.state_dict())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert run_ranks(3, work) == [digest_of(model.state_dict())] * 3


def test_a_gradient_on_any_rank_counts_and_none_on_all_leaves_a_parameter_alone():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x, branch):
            return self.branches[branch](x)

    def work():
        rank = syncline.init()
        torch.manual_seed(0)
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        syncline.distribute(model, optimizer, overlap=True)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        for step in range(3):
            # Rank 0 always uses branch 0; rank 1 uses 0, then 1; nobody uses 2.
            model(torch.ones(2, 4), rank if step else 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        end = model.state_dict()
        changed = {name: not torch.equal(start[name], end[name]) for name in start}
        return changed, digest_of(end)

    (changed, digest), (_, other) = run_ranks(2, work)
    assert digest == other
    assert changed == {
        "branches.0.weight": True,
        "branches.0.bias": True,
        "branches.1.weight": True,
        "branches.1.bias": True,
        "branches.2.weight": False,
        "branches.2.bias": False,
    }


@pytest.mark.parametrize("overlap", [True, False])
def test_running_statistics_are_the_mean_over_shards(overlap):
    def work():
        rank = syncline.init()
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        syncline.distribute(model, optimizer, overlap=overlap)
        for _ in range(2):
            model(torch.tensor([[0.0], [4.0 * (rank + 1)]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        return [state["0.running_mean"].item(), state["0.running_var"].item()]

    # Batch means are 2 and 4, variances 8 and 32: on average 3 and 20, half of it a step.
    assert run_ranks(2, work) == [[2.25, 0.25 * 1 + 0.75 * 20]] * 2


def test_other_buffers_are_those_of_shard_0():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("constant", torch.arange(3))

        def forward(self, x):
            if self.training:
                self.seen += x.mean()
            return self.layer(x)

    def work():
        rank = syncline.init()
        torch.manual_seed(0)
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        syncline.distribute(model, optimizer)
        for _ in range(3):
            model(torch.full((2, 4), float(rank + 1))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()["seen"].item()

    assert run_ranks(2, work) == [3.0, 3.0]


def test_overlap_is_real_reduces_in_backward_and_gathers_in_forward():
    """From a recorded trace: reduces run inside backward, gathers inside the next forward."""

    def work():
        rank = syncline.init()
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        replica = syncline.distribute(model, optimizer, overlap=True, bucket_bytes=1 << 20)
        x = torch.randn(256, 512)
        spans = []
        for step in range(6):
            if step == 1:
                replica.recorder = Recorder(rank)
            begin = time.perf_counter()
            loss = model(x).square().mean()
            turn = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            spans.append((begin, turn, end))
        replica.synchronize()
        tasks = replica.recorder.tasks
        reduces = sum(
            any(turn < task.start_s and task.end_s < end for _, turn, end in spans)
            for task in tasks
            if task.kind == "reduce"
        )
        gathers = sum(
            any(begin < task.end_s < turn for begin, turn, _ in spans)
            for task in tasks
            if task.kind == "gather"
        )
        order = [task.bucket for task in tasks if task.kind == "reduce" and task.step == 2]
        return reduces, gathers, order, len(replica.buckets)

    for reduces, gathers, order, num_buckets in run_ranks(2, work):
        assert order == list(reversed(range(num_buckets)))
        assert reduces >= 5, "reduces should run inside backward"
        assert gathers >= 5, "gathers should run inside the next forward"


def test_without_overlap_nothing_runs_beside_forward_and_backward():
    def work():
        rank, model, optimizer, replica = make(overlap=False)
        replica.recorder = Recorder(rank)
        spans = []
        for step in range(3):
            begin = time.perf_counter()
            backward(model, rank, step)
            spans.append((begin, time.perf_counter()))
            optimizer.step()
            optimizer.zero_grad()
        return sum(
            begin < task.end_s and task.start_s < end
            for task in replica.recorder.tasks
            if task.lane == "comm"
            for begin, end in spans
        )

    assert run_ranks(2, work) == [0, 0]


@pytest.mark.parametrize("overlap", [True, False])
def test_each_rank_holds_its_share_of_the_optimizer_state(overlap):
    def work():
        rank, model, optimizer, replica = make(hidden=4096, overlap=overlap)
        backward(model, rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        replica.synchronize()
        return sum(
            value.numel()
            for bucket in replica.buckets
            for slot in bucket.slots
            for _, _, state in bucket.optimizer.held_of(slot)
            for value in state.values()
        )

    held = run_ranks(4, work)
    total = 8 * 4096 + 4096 + 4096 * 4 + 4
    assert sum(held) == total
    # Inline, strips are few and small: no more of them than there are cores.
    owners = 4 if overlap else min(4, os.cpu_count())
    assert sum(1 for each in held if each) == owners
    assert max(held) < 1.2 / owners * total


def test_the_whole_optimizer_state_is_the_same_on_every_rank():
    def work():
        rank, model, optimizer, _ = make()
        for step in range(2):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        state = syncline.optimizer_state(model)
        shapes = {name: list(values["momentum_buffer"].shape) for name, values in state.items()}
        return digest_of({n: v["momentum_buffer"] for n, v in state.items()}), shapes

    answers = run_ranks(3, work)
    assert len({digest for digest, _ in answers}) == 1
    assert answers[0][1] == {
        "0.weight": [64, 8],
        "0.bias": [64],
        "2.weight": [4, 64],
        "2.bias": [4],
    }


@pytest.mark.parametrize("small", [0, 1 << 16])
def test_the_norm_of_one_step_leaves_nothing_to_the_next(small):
    def work():
        # Sums of many elements are left in the very memory that the next norm is added up in.
        base.SMALL_BYTES = small
        rank = syncline.init()
        model = nn.Linear(3000, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        syncline.distribute(model, optimizer)
        norms = []
        for value in (3.0, 4.0):
            model(torch.full((1, 3000), value * rank)).sum().backward()
            norms.append(syncline.clip_grad_norm_(model, 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    expected = [value / 2 * 3000**0.5 for value in (3.0, 4.0)]  # rank 0's gradient is 0
    assert run_ranks(2, work) == [pytest.approx(expected, rel=1e-6)] * 2


def test_uneven_numbers_of_steps_are_named_not_waited_for():
    def work():
        rank, model, optimizer, _ = make()
        for step in range(3 if rank == 0 else 2):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RankError, match="rank 1 ended its run in good order"):
        run_ranks(2, work)


def test_a_rank_that_raises_tells_the_others_why():
    def work():
        rank, model, optimizer, _ = make()
        try:
            for step in range(100):
                if rank == 1 and step == 1:
                    raise ValueError("no such file: cats.png")
                backward(model, rank, step)
                optimizer.step()
                optimizer.zero_grad()
        except syncline.errors.RankDied as error:
            return str(error)

    from ranks import collect, start_ranks

    answers = collect(*start_ranks(3, work))
    for rank in (0, 2):
        text = answers[rank]["result"]
        assert text.startswith("rank 1 failed at step")
        assert "ValueError: no such file: cats.png" in text


def test_more_ranks_than_shards_is_refused_before_anything_starts():
    def work():
        syncline.init()
        model = nn.Linear(2, 2)
        with pytest.raises(syncline.errors.ConfigError) as caught:
            syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
        return str(caught.value)

    assert (
        run_ranks(3, work)
        == [
            "strategy.shards: got 2 with 3 ranks, but each rank needs a shard. "
            "Use at least 3 shards, or at most 2 ranks."
        ]
        * 3
    )


def test_a_step_before_a_rank_s_last_shard_ends_the_shard_only():
    def work():
        rank, model, optimizer, replica = make(shards=4)
        taken = []
        for shard in range(4):
            backward(model, rank, shard)
            optimizer.step()
            taken.append([replica.step_number, syncline.step_ended(model)])
            optimizer.zero_grad()
        return taken

    assert run_ranks(2, work) == [[[0, False], [1, True], [1, False], [2, True]]] * 2


def test_every_strategy_is_a_new_file_not_a_change():
    """A strategy made up here, registered by one line, trains."""

    class Alone(Synchronous):
        """No exchange of gradients at all: each rank its own model."""

        def plan(self, world, sizes, shards):
            return Plan((Family(world.each_alone, memory="private"),), deal(shards, 2, 2))

    def work():
        rank, model, optimizer, _ = make(strategy=Alone())
        for step in range(3):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        return digest_of(model.state_dict())

    first, second = run_ranks(2, work)
    assert first != second


def train_and_sample(overlap, samples_on):
    """Run forward in training mode between two steps, as for sample images, on some ranks."""
    rank = syncline.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.distribute(model, optimizer, overlap=overlap, shards=2)
    data = torch.utils.data.TensorDataset(torch.arange(24.0).view(24, 1))
    batches = syncline.shard(torch.utils.data.DataLoader(data, batch_size=4))
    for (x,) in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if batches.ends_step and batches.step == 1 and rank in samples_on:
            with torch.no_grad():
                model(torch.ones(3, 1))
    return digest_of(model.state_dict())


@pytest.mark.parametrize("overlap", [True, False])
def test_statistics_that_one_rank_alone_has_changed_are_refused(overlap):
    with pytest.raises(RankError, match="changed buffers"):
        run_ranks(2, lambda: train_and_sample(overlap, samples_on=[0]))


@pytest.mark.parametrize("overlap", [True, False])
def test_statistics_that_all_ranks_have_changed_alike_are_taken(overlap):
    found = [run_ranks(size, lambda: train_and_sample(overlap, [0, 1])) for size in (1, 2)]
    assert found[1] == found[0] * 2


@pytest.mark.parametrize("overlap", [True, False])
def test_micro_batches_left_over_at_the_end_do_not_make_statistics_differ(overlap):
    def work():
        rank = syncline.init()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        syncline.distribute(model, optimizer, overlap=overlap, accumulate=3)
        data = torch.utils.data.TensorDataset(torch.arange(60.0).view(60, 1))
        batches = syncline.shard(torch.utils.data.DataLoader(data, batch_size=6))
        digests = []
        for _ in range(3):
            for number, (x,) in enumerate(batches):  # five batches: one is left over
                model(x).square().mean().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            digests.append(digest_of(model.state_dict()))
        optimizer.step()  # with the statistics of what was left over
        digests.append(digest_of(model.state_dict()))
        return digests, rank, model[1].num_batches_tracked.item()

    one, other = run_ranks(2, work)
    assert one[0] == other[0]
    assert len(set(one[0])) == 4


def test_a_sampler_that_gives_ranks_different_orders_is_refused_at_the_next_step():
    class Own(torch.utils.data.Sampler):
        def __len__(self):
            return 12

        def __iter__(self):
            return iter(range(12) if syncline.rank() == 0 else range(11, -1, -1))

    def work():
        rank, model, optimizer, replica = make()
        data = torch.utils.data.TensorDataset(torch.ones(12, 8))
        loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=Own())
        model(next(iter(syncline.shard(loader)))[0]).square().mean().backward()

        def take_step():
            optimizer.step()
            replica.synchronize()

        with pytest.raises(syncline.errors.UsageError, match="another order of data from a sampl"):
            take_step()
        return rank

    assert run_ranks(2, work) == [0, 1]


def test_random_augmentation_has_one_hash_on_any_number_of_ranks():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, index):
            return torch.full((8,), index / 48) + torch.rand(8)

    def work():
        syncline.init()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        syncline.distribute(model, optimizer, shards=4)
        loader = torch.utils.data.DataLoader(Noisy(), batch_size=3, shuffle=True)
        for _ in range(2):
            for step in syncline.shards(loader):  # inside the loop, as people write it
                for x in step:
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return digest_of(model.state_dict())

    found = {digest for size in (1, 2, 3, 4) for digest in run_ranks(size, work)}
    assert len(found) == 1


def train_beside_a_fork():
    syncline.init()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.distribute(model, optimizer, overlap=True)
    for step in range(4):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        child = os.fork() if step == 1 else None
        if child == 0:
            try:
                syncline.session.fail_session(ValueError("in the fork"))
                syncline.session._leave()  # what the interpreter calls at its end
            finally:
                os._exit(0)
        if child is not None:
            deadline = time.monotonic() + 10
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.01)
            assert time.monotonic() < deadline, "the fork hangs at its end"
    return model.weight.tolist()


def test_a_fork_of_a_rank_ends_without_ending_the_rank():
    first, second = run_ranks(2, train_beside_a_fork)
    assert first == second
