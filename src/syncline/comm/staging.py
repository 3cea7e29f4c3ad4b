"""Memory through which ranks of one machine exchange blocks (`SharedMemory.all_to_all`).

Activations are torch's own memory, which peers cannot map. So each rank copies what it sends into
its staging memory; after a meeting its peers copy from there what is for them: each byte is copied
once in and once out. What goes to all peers alike is copied in once.

There are two staging memories, used in turn, so that one meeting for each exchange is enough. A
rank comes to the meeting of exchange k + 1 only after it has copied out what was staged for
exchange k. Each rank has seen that meeting before it stages for exchange k + 2, which goes to the
memory of exchange k.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from syncline.comm.blocks import Blocks, Tensors, a_peer_s, is_one_tensor
from syncline.comm.hub import NUM_CHANNELS
from syncline.comm.machine import Star, as_tensor, round_up

_LINE_BYTES = 64
"""Blocks begin at cache lines, as aligned as any dtype needs. The first line has a rank's note."""
_MOST_VIEWS = 256
"""For so many different blocks views are kept: more than a network has layers."""


class _Views(NamedTuple):
    """Where blocks lie in one of the two memories. Empty ones are left out."""

    puts: tuple[tuple[int, torch.Tensor], ...]
    """By position that gets it: this rank's block."""
    gets: tuple[tuple[int, torch.Tensor, torch.Tensor], ...]
    """By position that gave it: the block for this rank, and where it is if it is for all alike."""


@lru_cache(maxsize=256)
def staged_bytes(blocks: Blocks) -> int:
    """Return how much memory each position needs: the same number on every rank."""
    size = len(blocks.gives)
    return round_up(block_start(0, size, 0) + max(map(blocks.sent_by, range(size))) + _LINE_BYTES)


def block_start(given: int, number: int, before: int) -> int:
    """Return where a position's `number`-th block begins, in bytes.

    The blocks before it go to peers that take `before` together. A line for each of them is room
    enough for rounding up, so no sum over rounded sizes is needed.
    """
    return _LINE_BYTES * (1 + number) + round_up(given * before, _LINE_BYTES)


class Staging:
    """The staging memories of the ranks of a communicator, for one channel."""

    def __init__(self, star: Star, position: int, size: int, each_bytes: int, channel: int) -> None:
        """Every rank calls it, with the same `each_bytes`, from `staged_bytes`."""
        self.each_bytes = each_bytes
        self._position = position
        self._size = size
        self._channel = channel
        segment = star.segment(2 * size * each_bytes)
        self._bytes = as_tensor(segment, 0, 2 * size * each_bytes, torch.uint8)
        self._words = memoryview(segment).cast("q")
        self._num_exchanges = 0
        self._views: dict[tuple[Blocks, torch.dtype], tuple[_Views, _Views]] = {}

    def put(self, sends: Tensors, blocks: Blocks) -> _Views:
        """Copy in what this rank sends; return what `get` needs after the meeting."""
        self._num_exchanges += 1
        half = self._num_exchanges % 2
        is_for_all = is_one_tensor(sends, self._position)
        self._words[self._word_of(half, self._position)] = 2 * self._number() + is_for_all
        views = self._views_of(blocks, a_peer_s(sends, self._position).dtype)[half]
        with torch.no_grad():
            for position, block in views.puts[:1] if is_for_all else views.puts:
                block.copy_(sends[position].view(-1))
        return views

    def get(self, receives: Tensors, views: _Views) -> None:
        """Copy out what peers have put there for this rank."""
        half, number = self._num_exchanges % 2, self._number()
        with torch.no_grad():
            for position, block, first in views.gets:
                found, is_for_all = divmod(self._words[self._word_of(half, position)], 2)
                assert found == number, f"position {position} staged {found}, not {number}"
                receives[position].view(-1).copy_(first if is_for_all else block)

    def _number(self) -> int:
        """Return the number of the exchange, which differs between channels."""
        return self._num_exchanges * NUM_CHANNELS + self._channel

    def _start_of(self, half: int, position: int) -> int:
        return (half * self._size + position) * self.each_bytes

    def _word_of(self, half: int, position: int) -> int:
        return self._start_of(half, position) // 8

    def _views_of(self, blocks: Blocks, dtype: torch.dtype) -> tuple[_Views, _Views]:
        views = self._views.get((blocks, dtype))
        if views is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            views = self._make_views(blocks, dtype, 0), self._make_views(blocks, dtype, 1)
            self._views[blocks, dtype] = views
        return views

    def _make_views(self, blocks: Blocks, dtype: torch.dtype, half: int) -> _Views:
        gives, takes, me = blocks.gives, blocks.takes, self._position
        puts, gets, before_me, before = [], [], sum(takes[:me]), 0
        for peer in range(self._size):
            if peer != me:
                # A position stages nothing for itself.
                number = peer - (peer > me)
                start = block_start(gives[me], number, before - (takes[me] if peer > me else 0))
                block = self._view(half, me, start, gives[me] * takes[peer], dtype)
                if block.numel():
                    puts.append((peer, block))
                number = me - (me > peer)
                taken = before_me - (takes[peer] if me > peer else 0)
                start, num_bytes = block_start(gives[peer], number, taken), gives[peer] * takes[me]
                block = self._view(half, peer, start, num_bytes, dtype)
                first = self._view(half, peer, block_start(0, 0, 0), num_bytes, dtype)
                if block.numel():
                    gets.append((peer, block, first))
            before += takes[peer]
        return _Views(tuple(puts), tuple(gets))

    def _view(
        self, half: int, position: int, start: int, num_bytes: int, dtype: torch.dtype
    ) -> torch.Tensor:
        start += self._start_of(half, position)
        return self._bytes[start : start + num_bytes].view(dtype)
