"""Ranks of one machine: buckets live in shared memory, where peers read them in place.

In a collective every rank writes a word on a board: how many collectives it has come to, and which
one this is. The last rank to come rings the doorbell, on which the others sleep. The order of
collectives is the same on every rank, so one word is enough; if it is not the same, the words at
one count differ, and every rank raises.

Publishing a number after the data relies on stores becoming visible in order, which x86-64
guarantees; `is_supported` says no elsewhere.
"""

from __future__ import annotations

import platform
import socket
import threading
import time
from collections.abc import Sequence

import torch

from syncline.comm.alone import Alone
from syncline.comm.base import Communicator, Memory, Partials, Strips, check_owner, prepare_peer_sum
from syncline.comm.blocks import Blocks, Tensors
from syncline.comm.context import Context
from syncline.comm.hub import NUM_CHANNELS
from syncline.comm.limits import SCRATCH_BYTES
from syncline.comm.machine import Bell, Star, as_tensor, round_up
from syncline.comm.operations import (
    ANNOUNCES,
    BITS,
    KIND,
    about,
    about_blocks,
    about_size,
    refuse_mismatch,
)
from syncline.comm.real import Prepared, RealCommunicator, join_plans
from syncline.comm.shape import shape_of
from syncline.comm.shared_window import SharedCalls, SharedWindow
from syncline.comm.staging import Staging, staged_bytes
from syncline.comm.volume import Volume, sent_bytes, stages, volume_of_partials, volume_of_strips
from syncline.comm.window import Functions, Window

_LINE_BYTES = 64
"""A cache line of every x86-64 processor."""
_ONE = 1 << BITS
"""One collective: a word on the board has the count above the collective's own number."""


def is_supported() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


class SharedMemory(RealCommunicator):
    """Collectives among some or all ranks of one machine."""

    name = "shared memory"
    num_machines = 1
    num_channels = 1  # a meeting takes microseconds: several at once would gain nothing

    def __init__(self, context: Context, ranks: Sequence[int], star: Star) -> None:
        """`star` connects just these ranks; it is closed with the communicator."""
        super().__init__(context)
        self.star = star
        self.ranks = tuple(ranks)
        self.machines = (self.ranks,)
        self._shape = shape_of(self.machines)
        self.size = len(self.ranks)
        self.position = self.ranks.index(context.rank)
        self._group = context.names.take(self.ranks)
        self._bell = Bell(star, context.hub)
        # A word for each channel. One cache line per rank, so that no two ranks write to one line.
        board = memoryview(star.segment(self.size * _LINE_BYTES))[: self.size * _LINE_BYTES]
        words = board.cast("q")
        self._columns = [words[channel :: _LINE_BYTES // 8] for channel in range(NUM_CHANNELS)]
        self._counts = [0] * NUM_CHANNELS
        """By channel: the count's part of this rank's word."""
        self._fence = threading.Lock()
        self._scratch: Memory | None = None
        self._stagings: list[Staging | None] = [None] * NUM_CHANNELS
        self.allocations: list[tuple[torch.Tensor, ...]] = []
        """All ranks' memory of each `allocate`, in which a window call finds its values."""
        self._num_allocated = 0
        self._announcing = 0
        """`ANNOUNCES` if the next collective tells peers that small sums are ready."""
        self._calls: SharedCalls | None = None

    @classmethod
    def of_machine(cls, context: Context, memory_links: dict[int, socket.socket]) -> SharedMemory:
        """Make the communicator of all ranks of a machine. Every rank calls it."""
        place = context.control.place
        star = Star(context.control, memory_links, leads=place.local_rank == 0)
        return cls(context, place.local_ranks, star)

    def meet(self, what: str, about: int = 0) -> None:
        """Wait until every rank has called it as often as this one; the last wakes the others.

        `about` tells collectives of the same kind apart (`operations.py`).
        """
        channel, recorder = self.hub.channel, self.traffic.recorder
        if recorder is not None:
            recorder.end_part("work")
            exchange = recorder.next_id(f"{self._group}.{channel}")
        self._counts[channel] = count = self._counts[channel] + _ONE
        column = self._columns[channel]
        column[self.position] = word = count | KIND[what] | about | self._announcing
        self._announcing = 0
        # Taking a lock is a full memory barrier: of two ranks that come at the same time, at least
        # one sees the other's count, so at least one sees that all have come.
        with self._fence:
            pass
        if (least := min(column)) >= count:
            self._bell.ring()
            if least != word or max(column) != word:
                self._compare(channel, word)
            if recorder is not None:
                recorder.end_part("meet", exchange)
            return
        started = time.monotonic()
        while True:
            self.hub.sleep()
            if (least := min(column)) >= count:
                if least != word or max(column) != word:
                    self._compare(channel, word)
                if recorder is not None:
                    recorder.end_part("meet", exchange)
                return
            late = [rank for rank, come in zip(self.ranks, column, strict=True) if come < count]
            waited_s = time.monotonic() - started
            self.context.control.check_waiting_for(late, waited_s, what)

    def _compare(self, channel: int, word: int) -> None:
        """Raise if a rank has come to another collective than this rank at the same count.

        No rank goes on before it has compared, so all ranks see the difference. A rank that is
        further on has compared already.
        """
        for rank, other in zip(self.ranks, self._columns[channel], strict=True):
            if other >> BITS == word >> BITS and other != word:
                mine, theirs = word % _ONE, other % _ONE
                raise refuse_mismatch(self.context.control, mine, rank, theirs)

    def end_lending(self) -> None:
        self.meet("end_lending")

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        each_bytes = round_up(num_elements * dtype.itemsize)
        segment = self.star.segment(each_bytes * self.size)
        views = tuple(
            as_tensor(segment, position * each_bytes, num_elements, dtype)
            for position in range(self.size)
        )
        self.allocations.append(views)
        origin = (len(self.allocations) - 1, 0)
        number = self._count_allocation()
        return Memory(views[self.position], views, owner=self, origin=origin, number=number)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        segment = self.star.segment(num_elements * dtype.itemsize)
        mine, number = as_tensor(segment, 0, num_elements, dtype), self._count_allocation()
        return Memory(mine, is_common=True, owner=self, number=number)

    def _count_allocation(self) -> int:
        self._num_allocated += 1
        return self._num_allocated - 1

    def announce(self, partials: Partials) -> None:
        partials.announced_by = self._counts[self.hub.channel] + _ONE
        self._announcing = ANNOUNCES

    def plan_reduce_scatter(self, partials: Partials) -> Prepared:
        check_owner(partials.sums, self)
        start, stop = partials.cuts[self.position : self.position + 2]
        add_up = prepare_peer_sum(partials, start, stop, partials.strip(self.position))
        which = about(partials.sums[0])

        def run(what: str) -> None:
            self.meet(what, which)
            add_up()
            if self.traffic.recorder is not None:
                self.traffic.spent("sum")

        volume = volume_of_partials(partials, self._shape)
        return Prepared(run, self._sent_bytes("reduce_scatter", volume))

    def plan_all_gather(self, strips: Strips) -> Prepared:
        copies, which = self._copies(strips), about(strips.memory)

        def run(what: str) -> None:
            self.meet(what, which)
            for mine, peer in copies:
                mine.copy_(peer)
            if self.traffic.recorder is not None:
                self.traffic.spent("copy")

        return Prepared(run, self._sent_bytes("all_gather", volume_of_strips(strips)))

    def _copies(self, strips: Strips) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the strips that this rank copies, as pairs (own memory, peer's memory)."""
        check_owner([strips.memory], self)
        if strips.memory.is_common:
            return []
        assert strips.memory.peers is not None
        cuts = [(strips.cuts[at], strips.cuts[at + 1]) for at in range(self.size)]
        return [
            (strips.memory.mine[start:stop], peer[start:stop])
            for at, ((start, stop), peer) in enumerate(zip(cuts, strips.memory.peers, strict=True))
            if at != self.position and start < stop
        ]

    def plan_all_reduce(self, partials: Partials) -> Prepared:
        if not partials.is_small:
            gather = self.plan_all_gather(partials.gathered)
            return join_plans(self.plan_reduce_scatter(partials), gather)
        check_owner(partials.sums, self)
        add_up = prepare_peer_sum(partials, 0, partials.result.numel(), partials.result)
        which = about(partials.sums[0])

        def run(what: str) -> None:
            announced_by, partials.announced_by = partials.announced_by, None
            if announced_by is None or announced_by > self._counts[self.hub.channel]:
                self.meet(what, which)
            add_up()
            if self.traffic.recorder is not None:
                self.traffic.spent("sum")

        volume = volume_of_partials(partials, self._shape)
        return Prepared(run, self._sent_bytes("all_reduce", volume))

    def plan_reduce(self, partials: Partials, root: int) -> Prepared:
        sums, copies = self.plan_reduce_scatter(partials), self._copies(partials.gathered)

        def run(what: str) -> None:
            sums.run(what)
            self.meet(what, about(partials.sums[0]))
            for mine, peer in copies if self.position == root else ():
                mine.copy_(peer)
            if self.traffic.recorder is not None:
                self.traffic.spent("copy")

        volume = volume_of_partials(partials, self._shape, root)
        return Prepared(run, self._sent_bytes("reduce", volume))

    def _sent_bytes(self, what: str, volume: Volume) -> int:
        """Return how much of this rank's memory its peers read."""
        return sent_bytes(stages(what, self._shape, volume), self.position)

    def copy_from(self, tensor: torch.Tensor, root: int) -> int:
        """Copy piece by piece through a small common segment. For set-up: too slow for a step."""
        if self._scratch is None:
            self._scratch = self.allocate_common(SCRATCH_BYTES, torch.uint8)
        scratch = self._scratch.mine
        flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        which = about_size(flat.numel())
        for start in range(0, flat.numel(), SCRATCH_BYTES):
            piece = flat[start : start + SCRATCH_BYTES]
            if self.position == root:
                scratch[: piece.numel()].copy_(piece)
            self.meet("broadcast", which)
            if self.position != root:
                piece.copy_(scratch[: piece.numel()])
            self.meet("broadcast", which)
        return flat.numel() * (self.size - 1) if self.position == root else 0

    def exchange_blocks(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        which = about_blocks(blocks)
        staging = self._stagings[self.hub.channel]
        if staging is None or staging.each_bytes < staged_bytes(blocks):
            staging = self._grow_staging(blocks, which)
        staged = staging.put(sends, blocks)
        self.traffic.spent("copy")
        self.meet("all_to_all", which)
        staging.get(receives, staged)
        self.traffic.spent("copy")

    def _grow_staging(self, blocks: Blocks, which: int) -> Staging:
        """Replace this channel's staging memory. Peers may read the old one to the end.

        It is not numbered as an allocation: on other machines it may be large enough already.
        """
        # Taking memory blocks the lane: do it when all have come, and have agreed on the blocks.
        self.meet("all_to_all", which)
        channel, each_bytes = self.hub.channel, staged_bytes(blocks)
        staging = Staging(self.star, self.position, self.size, each_bytes, channel)
        self._stagings[channel] = staging
        return staging

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        return SharedWindow(self, num_elements, dtype, functions)

    @property
    def calls(self) -> SharedCalls:
        """The calls that all windows share, made by every rank with its first window."""
        if self._calls is None:
            self._calls = SharedCalls(self)
        return self._calls

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        wanted = [rank for rank in self.ranks if rank in ranks]
        if len(wanted) <= 1:
            return Alone.of(self.context.rank, wanted, self.traffic)
        star = self.star.connect(wanted)
        if star is None:
            return None
        group = SharedMemory(self.context, wanted, star)
        self.adopt(group)
        return group

    def release(self) -> None:
        if self._calls is not None:
            self._calls.close()
        self._bell.close()
        self.star.close()
        # A segment is unmapped when no tensor refers to it; tensors that are still used stay valid.
        self._calls, self._scratch, self._columns, self._stagings = None, None, [], []
        self.allocations.clear()
