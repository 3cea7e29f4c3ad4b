"""Messages over TCP: the urgent overtake the patient, and nothing is lost on the way."""

from __future__ import annotations

import pytest
import torch

import syncline
from ranks import run_ranks
from syncline.comm.base import Memory, Strips, even_cuts
from syncline.comm.group_numbers import GroupNumbers
from syncline.comm.hub import PATIENT
from syncline.comm.streams import _Peer
from syncline.session import current_session

pytestmark = pytest.mark.processes


def strips_of(num_elements, comm):
    memory = torch.full((num_elements,), -1.0)
    strips = Strips(Memory(memory, owner=comm), even_cuts(num_elements, comm.size))
    first = strips.cuts[comm.position]
    mine = strips.mine(comm.position)
    mine.copy_(torch.arange(first, first + mine.numel()))
    return strips


@pytest.mark.parametrize("size", [2, 3])
def test_an_urgent_message_overtakes_a_large_patient_one(size):
    def work():
        syncline.init(comm="network")
        session = current_session()
        lane, comm, overtook = session.lane, session.comm, []

        def is_under_way():
            return bool((large.memory.mine == -1.0).any())

        def gather_small():
            # If this rank was late, the large one may have come before anybody asked for it.
            is_too_late = not is_under_way()
            comm.all_gather(small)
            overtook.append(is_too_late or is_under_way())

        lane.start_thread()
        large, small = strips_of(8_000_000, comm), strips_of(300, comm)
        # Both are handed over in one go, the large one first.
        lane.submit(
            lambda: [
                lane.submit(comm.all_gather, large, channel=1, urgency=PATIENT),
                lane.submit(gather_small, channel=2, urgency=0),
            ]
        )
        lane.drain()
        lane.drain()
        for strips in (large, small):
            whole = strips.memory.mine
            assert torch.equal(whole, torch.arange(whole.numel(), dtype=torch.float32))
        return overtook

    assert run_ranks(size, work) == [[True]] * size


def test_no_link_carries_a_broadcast_more_than_twice():
    size, num_bytes = 4, 4 * 300_000

    def work():
        rank = syncline.init(comm="network")
        sent = []
        send = _Peer.send
        _Peer.send = lambda self, what, message, *args: (
            sent.append(len(message)) or send(self, what, message, *args)
        )
        whole = torch.arange(num_bytes // 4, dtype=torch.float32) * (rank == 1)
        current_session().comm.broadcast(whole, 1)
        assert torch.equal(whole, torch.arange(num_bytes // 4, dtype=torch.float32))
        return sum(sent)

    least = num_bytes * (size - 1) // size  # what every rank passes on
    assert run_ranks(size, work) == [least, 2 * least, least, least]


def test_groups_of_other_ranks_have_other_numbers_and_all_members_find_them():
    one, other = GroupNumbers(), GroupNumbers()
    groups = [(0, 1), (1, 0), (0, 2), (0, 1, 2), (0, 1)]
    found = [one.take(ranks) for ranks in groups]
    assert len(set(found)) == len(groups)
    # A rank that is in fewer groups finds the same numbers for those.
    assert [other.take(groups[k]) for k in (0, 1, 4)] == [found[k] for k in (0, 1, 4)]
