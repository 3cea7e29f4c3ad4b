"""Messages between ranks over torch.distributed: NCCL for GPUs, which is untested, or Gloo.

One exchange at a time: Gloo's messages cannot be polled. Neither backend authenticates its peers:
only tensor data is sent here.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncline.comm.context import Context
from syncline.comm.control import Control
from syncline.comm.network import Addressed, Transport
from syncline.comm.window import Functions, Window
from syncline.errors import CommError, ConfigError

Operation = tuple[Any, int, torch.Tensor]
"""isend or irecv, the peer's rank and the message."""


class ProcessGroup:
    """Point-to-point messages in a torch.distributed group."""

    num_channels = 1

    def __init__(
        self,
        group: dist.ProcessGroup,
        control: Control,
        device: torch.device,
        *,
        is_part: bool = False,
    ) -> None:
        """`close` destroys `group` only if `is_part`: `part` made it."""
        self.name: str = dist.get_backend(group)
        self.device = device
        self._group = group
        self._control = control
        self._is_part = is_part

    def part(self, ranks: Sequence[int]) -> Transport:
        timeout = datetime.timedelta(seconds=self._control.hung_s)
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        return ProcessGroup(group, self._control, self.device, is_part=True)

    def prepare(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], about: int
    ) -> Callable[[str], None]:
        calls: list[Operation] = []
        calls += [(dist.irecv, rank, tensor) for rank, tensor in receives]
        calls += [(dist.isend, rank, tensor) for rank, tensor in sends]
        return lambda what: self._exchange(calls, what)

    def _exchange(self, calls: Sequence[Operation], what: str) -> None:
        try:
            if self.name == "nccl":
                ops = [dist.P2POp(call, tensor, rank, self._group) for call, rank, tensor in calls]
                works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
            else:
                works = [call(tensor, rank, group=self._group) for call, rank, tensor in calls]
        except RuntimeError as error:
            raise self._failure(what, error) from None
        for work, (_, rank, _) in zip(works, calls, strict=False):
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
        if self._is_part:
            dist.destroy_process_group(self._group)
