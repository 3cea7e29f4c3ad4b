"""What the ranks of one machine share: memory, doorbells and the sockets that hand them over.

The first rank of a group makes each segment as a memfd and passes it to the others over a Unix
socket. A memfd has no name, so it vanishes with the last process, also after kill -9.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import time
from collections.abc import Sequence

import torch

from syncline.comm.control import Control
from syncline.comm.hub import Hub
from syncline.errors import CommError

_GIVE_S = 60.0
"""Handing over blocks only if hundreds of descriptors wait to be taken."""
_CHECK_S = 1.0
"""How often a rank that waits for memory looks whether the leader is still there."""


def as_tensor(
    segment: mmap.mmap, offset: int, num_elements: int, dtype: torch.dtype
) -> torch.Tensor:
    if num_elements == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(segment, dtype=dtype, count=num_elements, offset=offset)


def round_up(size: int, multiple: int = mmap.PAGESIZE) -> int:
    return -(-size // multiple) * multiple


class Star:
    """Unix sockets from a leading rank to others of its machine, to pass file descriptors."""

    def __init__(self, control: Control, links: dict[int, socket.socket], *, leads: bool) -> None:
        self.control = control
        self.links = links
        self.leads = leads
        for sock in links.values():
            sock.settimeout(_GIVE_S if leads else _CHECK_S)

    def give(self, rank: int, files: Sequence[int]) -> None:
        # The kernel passes at most 253 descriptors in one message.
        for start in range(0, len(files), 250):
            try:
                socket.send_fds(self.links[rank], [b"m"], files[start : start + 250])
            except OSError as error:
                raise self.control.verdict() or CommError(
                    f"rank {self.control.place.rank} could not hand memory to rank {rank}: {error}"
                ) from None

    def take(self, num_files: int) -> list[int]:
        (leader, sock), *_ = self.links.items()
        files: list[int] = []
        started = time.monotonic()
        while len(files) < num_files:
            try:
                data, more, flags, _ = socket.recv_fds(sock, 1, min(250, num_files - len(files)))
            except TimeoutError:
                # The leader may be slow in coming here: wait as long as for a collective.
                waited_s = time.monotonic() - started
                self.control.check_waiting_for([leader], waited_s, "shared memory")
                continue
            except OSError:
                data, more, flags = b"", [], 0
            if flags & socket.MSG_CTRUNC:  # the kernel drops descriptors above the limit
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not data:
                raise self.control.verdict() or CommError(
                    f"rank {self.control.place.rank} was not handed shared memory by rank "
                    f"{leader}. Look at its log first."
                )
            files += more
        return files

    def segment(self, size_bytes: int) -> mmap.mmap:
        """Return memory that all ranks of the star map. Every rank calls it, in the same order."""
        size_bytes = max(round_up(size_bytes), mmap.PAGESIZE)
        if self.leads:
            _check_fits_in_memory(size_bytes)
            file = os.memfd_create("syncline", os.MFD_CLOEXEC)
            os.ftruncate(file, size_bytes)
            for rank in self.links:
                self.give(rank, [file])
        else:
            (file,) = self.take(1)
        try:
            if os.fstat(file).st_size != size_bytes:
                raise CommError(
                    f"rank {self.control.place.rank} asks for shared memory of {size_bytes} bytes, "
                    f"but was handed {os.fstat(file).st_size}: all ranks must make the same calls "
                    "in the same order, with models of the same size."
                )
            return mmap.mmap(file, size_bytes)
        finally:
            os.close(file)

    def share_eventfds(self, count: int) -> list[int]:
        """Return eventfds that all ranks of the star can write to. Every rank calls it."""
        if not self.leads:
            return self.take(count)
        files = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(count)]
        for rank in self.links:
            self.give(rank, files)
        return files

    def connect(self, ranks: Sequence[int]) -> Star | None:
        """Return a star of `ranks`, led by the first; None if this rank is not among them.

        Every rank of this star calls it; its leader makes the socket pairs and passes the ends.
        """
        leader, *members = ranks
        rank = self.control.place.rank
        mine: dict[int, int] = {}
        if self.leads:
            ends: dict[int, dict[int, int]] = {one: {} for one in ranks}
            pairs = {member: socket.socketpair() for member in members}
            for member, (one, other) in pairs.items():
                ends[leader][member] = one.fileno()
                ends[member][leader] = other.fileno()
            for to, files in ends.items():
                if to != rank and files:
                    self.give(to, list(files.values()))
            mine = {to: os.dup(file) for to, file in ends.get(rank, {}).items()}
            for one, other in pairs.values():
                one.close()
                other.close()
        elif rank in ranks:
            others = members if rank == leader else [leader]
            mine = dict(zip(others, self.take(len(others)), strict=True))
        if rank not in ranks:
            return None
        links = {to: socket.socket(fileno=file) for to, file in mine.items()}
        return Star(self.control, links, leads=rank == leader)

    def close(self) -> None:
        for sock in self.links.values():
            sock.close()


class Bell:
    """A doorbell that wakes every rank of a communicator in one call.

    All ranks share one eventfd. With one for each rank, the first rank to wake could take the core
    from the rank that rings, and the rest would sleep on (decision 4). No rank reads the eventfd:
    it is edge-triggered, so each rank's hub reports every ring once.
    """

    def __init__(self, star: Star, hub: Hub) -> None:
        (self._file,) = star.share_eventfds(1)
        self.hub = hub
        hub.watch(self._file, select.EPOLLIN | select.EPOLLET)

    def ring(self) -> None:
        os.eventfd_write(self._file, 1)

    def close(self) -> None:
        self.hub.forget(self._file)
        os.close(self._file)


def _check_fits_in_memory(size_bytes: int) -> None:
    """Refuse more than the free memory: otherwise the first write to it kills the process."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    if size_bytes > available_bytes:
        raise CommError(
            f"shared memory: {size_bytes / 1e9:.1f} GB are needed on this machine, but "
            f"{available_bytes / 1e9:.1f} GB are free. Use fewer ranks a machine, fewer shards a "
            "rank, or a smaller model."
        )
