"""In which order a rank begins its messages."""

from __future__ import annotations

import pytest
import torch

from syncline.comm.network import Network

RANKS = (3, 5, 6, 9)


def network(position: int) -> Network:
    """Return what knows the ranks of a group, without any connection."""
    found = object.__new__(Network)
    found.ranks, found.size, found.position = RANKS, len(RANKS), position
    return found


@pytest.mark.parametrize("position", range(4))
def test_a_rank_begins_with_the_position_after_its_own(position):
    strips = [(peer, torch.ones(4)) for peer in range(4) if peer != position]
    turns = [rank for rank, _ in network(position)._in_turn(strips)]
    assert turns == [RANKS[(position + k) % 4] for k in (1, 2, 3)]


def test_empty_strips_are_not_sent():
    strips = [(0, torch.ones(4)), (1, torch.empty(0)), (3, torch.ones(4))]
    assert [rank for rank, _ in network(2)._in_turn(strips)] == [9, 3]
