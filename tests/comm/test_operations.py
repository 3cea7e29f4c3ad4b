"""Ranks that call different collectives notice it, all of them, and say which two."""

from __future__ import annotations

import pytest
import torch

import syncline
from ranks import collect, run_ranks, start_ranks
from syncline.comm.base import Strips, even_cuts, small_sum
from syncline.comm.operations import KIND, about, describe
from syncline.session import current_session

pytestmark = pytest.mark.processes

WORLDS = {
    "shared memory, 2 ranks": (2, 1, "auto"),
    "shared memory, 3 ranks": (3, 1, "auto"),
    "network, 2 ranks": (2, 1, "network"),
    "2 machines with 2 ranks": (4, 2, "auto"),
}


def said_in(world, work):
    """Run work(comm, rank) in a world whose ranks all fail; return what each said."""
    size, machines, kind = WORLDS[world]

    def on_rank():
        rank = syncline.init(comm=kind)
        work(current_session().comm, rank)

    answers = collect(*start_ranks(size, on_rank, machines=machines), timeout_s=30.0)
    return [answer["text"] for answer in answers]


@pytest.mark.parametrize("world", WORLDS)
def test_two_kinds_of_collectives_at_the_same_place_are_named_on_every_rank(world):
    def work(comm, rank):
        sums = small_sum(comm, 64, torch.float32)
        strips = Strips(comm.allocate(64, torch.float32), even_cuts(64, comm.size))
        comm.barrier()
        if rank == 0:
            comm.all_gather(strips)
        else:
            comm.reduce_scatter(sums)
        comm.barrier()

    for text in said_in(world, work):
        assert "all_gather" in text
        assert "reduce_scatter" in text


@pytest.mark.parametrize("world", WORLDS)
def test_two_memories_of_one_size_are_told_apart(world):
    """As two buckets that one rank exchanges in another order."""

    def work(comm, rank):
        pair = [
            Strips(comm.allocate(64, torch.float32), even_cuts(64, comm.size)) for _ in range(2)
        ]
        comm.barrier()
        for strips in pair if rank else reversed(pair):
            comm.all_gather(strips)
        comm.barrier()

    for text in said_in(world, work):
        assert "same calls in the same order" in text


@pytest.mark.parametrize("world", WORLDS)
def test_broadcasts_of_different_sizes_are_noticed(world):
    def work(comm, rank):
        comm.broadcast(torch.zeros(100 + rank), 0)
        comm.barrier()

    for text in said_in(world, work):
        assert "broadcast" in text


@pytest.mark.parametrize("kind", ["auto", "network"])
def test_a_call_that_only_one_rank_makes_is_named(kind):
    """Rank 0 alone clips, which is a collective; the others enter their step."""

    def work():
        rank = syncline.init(comm=kind)
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        syncline.distribute(model, optimizer)
        for step in range(3):
            model(torch.ones(2, 8)).sum().backward()
            syncline.clip_grad_norm_(model, 1.0) if rank == 0 or step == 0 else None
            optimizer.step()
            optimizer.zero_grad()

    answers = collect(*start_ranks(2, work), timeout_s=30.0)
    for answer in answers:
        assert "clip_grad_norm_()" in answer["text"], answer


def test_shared_memory_of_different_sizes_is_refused():
    """As when ranks have models of different sizes."""

    def work(comm, rank):
        comm.allocate(1000 + 10_000 * rank, torch.float32)
        comm.barrier()

    assert "was handed" in said_in("shared memory, 2 ranks", work)[1]


def test_the_number_of_a_collective_tells_its_kind_its_memory_and_its_size():
    def work():
        syncline.init()
        comm = current_session().comm
        memories = [
            comm.allocate(8, torch.float32),
            comm.allocate_common(8, torch.float32),
            comm.allocate(9, torch.float32),
        ]
        return [KIND["all_gather"] | about(memory) for memory in memories]

    first, second = run_ranks(2, work)
    assert first == second
    assert len(set(first)) == 3
    assert describe(first[2]).startswith("all_gather (memory ")
    assert describe(first[2]).endswith(", size 9)")
