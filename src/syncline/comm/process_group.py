"""Messages between ranks over a process group of torch.distributed (Gloo).

One exchange at a time: Gloo's messages cannot be polled. Gloo does not authenticate its peers: only
tensor data is sent here.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncline.comm.context import Context
from syncline.comm.control import Control
from syncline.comm.network import Addressed, Transport
from syncline.comm.rendezvous import local_address_towards
from syncline.comm.window import Functions, Window
from syncline.errors import CommError, ConfigError

_SIOCGIFADDR = 0x8915

Operation = tuple[Any, int, torch.Tensor]
"""isend or irecv, the peer's rank and the message."""


class ProcessGroup:
    """Point-to-point messages in a torch.distributed group."""

    num_channels = 1

    def __init__(
        self, group: dist.ProcessGroup, control: Control, *, is_ours: bool = False
    ) -> None:
        """`close` destroys `group` only if it `is_ours`, and not one that the user made."""
        self.name: str = dist.get_backend(group)
        if "gloo" not in self.name and "mpi" not in self.name:
            raise ConfigError(
                "comm",
                f"got 'torch' with a process group of {self.name}",
                "it has to carry tensors of the CPU",
                "Use comm = 'auto', or make the group with gloo.",
            )
        self._group = group
        self._control = control
        self._is_ours = is_ours

    def part(self, ranks: Sequence[int]) -> Transport:
        timeout = datetime.timedelta(seconds=self._control.hung_s)
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        return ProcessGroup(group, self._control, is_ours=True)

    def prepare(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], about: int
    ) -> Callable[[str], None]:
        calls = _operations(sends, receives)
        return lambda what: self._end(self._begin(calls, what), calls, what)

    def begin(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], what: str, about: int
    ) -> Callable[[], None]:
        calls = _operations(sends, receives)
        works = self._begin(calls, what)
        return lambda: self._end(works, calls, what)

    def _begin(self, calls: Sequence[Operation], what: str) -> list[Any]:
        try:
            return [call(tensor, rank, group=self._group) for call, rank, tensor in calls]
        except RuntimeError as error:
            raise self._failure(what, error) from None

    def _end(self, works: Sequence[Any], calls: Sequence[Operation], what: str) -> None:
        for work, (_, rank, _) in zip(works, calls, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(what, error, rank) from None

    def _failure(self, what: str, error: Exception, rank: int | None = None) -> CommError:
        if rank is not None and "imed out" in str(error):
            self._control.call_hung(rank, self._control.hung_s, what)
        return self._control.verdict() or CommError(
            f"rank {self._control.place.rank}: {what} failed on the network: {error}"
        )

    def window(
        self,
        context: Context,
        ranks: tuple[int, ...],
        num_elements: int,
        dtype: torch.dtype,
        functions: Functions,
    ) -> Window:
        raise ConfigError(
            "comm",
            f"messages go through {self.name}",
            "a strategy whose ranks do not wait for each other needs connections of our own",
            "Use comm = 'network'.",
        )

    def close(self) -> None:
        if self._is_ours:
            dist.destroy_process_group(self._group)


def _operations(sends: Sequence[Addressed], receives: Sequence[Addressed]) -> list[Operation]:
    into: list[Operation] = [(dist.irecv, rank, tensor.detach()) for rank, tensor in receives]
    return into + [(dist.isend, rank, tensor.detach()) for rank, tensor in sends]


def join_group(control: Control, store: Any, address: str, hung_s: float) -> ProcessGroup:
    """Return messages in the user's process group, or in one that this call makes."""
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        return ProcessGroup(dist.group.WORLD, control)
    place = control.place
    _choose_interface(address)
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=datetime.timedelta(seconds=hung_s),
        )
    except (RuntimeError, ValueError) as error:
        raise control.verdict() or CommError(
            f"rank {place.rank} could not make a process group: {str(error).splitlines()[0]}"
        ) from None
    assert dist.group.WORLD is not None
    return ProcessGroup(dist.group.WORLD, control, is_ours=True)


def _choose_interface(address: str) -> None:
    """Bind Gloo to the interface that leads to the job's address, unless the user chose one."""
    mine = local_address_towards(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == mine:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
