"""Windows across machines: messages for which no receive was posted.

A request goes out on the connection with the owner. The owner's comm lane, which sleeps in the hub,
serves it. A published buffer is not written again while it is being sent. The answer's values are
received directly into the caller's `out`.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

import torch

from syncline.comm.base import Memory
from syncline.comm.context import Context
from syncline.comm.window import (
    Call,
    Done,
    Functions,
    Lost,
    Pending,
    ServedWindow,
    bytes_moved,
)
from syncline.errors import CommError

if TYPE_CHECKING:
    from syncline.comm.streams import Exchange, Streams

_REQUEST = struct.Struct("<iqqqi")  # function, number, bytes of values, bytes of answer, of note
_ANSWER = struct.Struct("<qq")  # number, result
_GET = -1
_REQUESTS, _ANSWERS, _BULK = 0, 1, 2


class _Pool:
    """Reused tensors of one dtype. A tensor that is being sent is free when its exchanges end."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._free: list[torch.Tensor] = []
        self._leaving: list[tuple[torch.Tensor, list[Exchange]]] = []

    def take(self, num_elements: int) -> torch.Tensor:
        still = []
        for tensor, exchanges in self._leaving:
            if all(exchange.is_over() for exchange in exchanges):
                self._free.append(tensor)
            else:
                still.append((tensor, exchanges))
        self._leaving = still
        for at, tensor in enumerate(self._free):
            if tensor.numel() == num_elements:
                return self._free.pop(at)
        return torch.empty(num_elements, dtype=self._dtype)

    def give(self, tensor: torch.Tensor, exchanges: list[Exchange] | None = None) -> None:
        """Return a tensor to the pool, to be reused once all exchanges that send it are over."""
        self._leaving.append((tensor, exchanges or []))


class NetworkWindow(ServedWindow):
    """One rank's end of a window over TCP."""

    def __init__(
        self,
        streams: Streams,
        context: Context,
        ranks: tuple[int, ...],
        num_elements: int,
        dtype: torch.dtype,
        functions: Functions,
    ) -> None:
        """`streams` carry this window's messages and nothing else."""
        super().__init__(ranks, context, functions)
        self.name = "calls " + context.names.take(ranks)
        self._streams = streams
        self._dtype = dtype
        self._num_elements = num_elements
        self._pool = _Pool(dtype)
        self._published = torch.zeros(num_elements, dtype=dtype)
        self._sends: list[Exchange] = []
        self._version = 0
        self._asked = dict.fromkeys(ranks, 0)
        self._pending: dict[tuple[int, int], _Request] = {}
        self._requests: dict[int, tuple[int, int, int, int, bytes]] = {}
        """Headers of requests whose values have not arrived yet, by rank."""
        streams.listen(_REQUESTS, self._on_request)
        streams.listen(_ANSWERS, self._on_answer)

    def publish(self, values: torch.Tensor) -> bool:
        spare = self._pool.take(self._num_elements)
        spare.copy_(values)
        self._pool.give(self._published, self._sends)
        self._published, self._sends = spare, []
        self._version += 1
        return True

    def get(self, position: int) -> Pending:
        if position == self._position:
            return Done(self._version, self._published)
        rank = self._ranks[position]
        if self._waits.is_gone(rank):
            return Lost(rank)
        buffer = Memory(self._pool.take(self._num_elements))
        self._count("get", bytes_moved(buffer))
        return self._ask(rank, _GET, None, buffer, b"", buffer.mine)

    def _send(
        self, position: int, function: int, values: Memory | None, out: Memory | None, note: bytes
    ) -> Pending:
        return self._ask(self._ranks[position], function, values, out, note, None)

    def _ask(
        self,
        rank: int,
        function: int,
        values: Memory | None,
        out: Memory | None,
        note: bytes,
        buffer: torch.Tensor | None,
    ) -> _Request:
        number = self._asked[rank] = self._asked[rank] + 1
        num_out = bytes_moved(out)
        if out is not None and num_out:
            self._streams.receive(rank, _BULK, out.mine)
        header = _REQUEST.pack(function, number, bytes_moved(values), num_out, len(note)) + note
        self._streams.send_bytes(rank, _REQUESTS, header)
        if values is not None and values.mine.numel():
            self._streams.send(rank, _REQUESTS, values.mine)
        self._waits.note_sent(rank, self.name, number)
        sent = self._pending[rank, number] = _Request(self, rank, buffer, number)
        return sent

    def _on_request(self, rank: int, message: bytearray) -> None:
        if rank not in self._requests:
            function, number, num_values, num_out, num_note = _REQUEST.unpack_from(message)
            note = bytes(message[_REQUEST.size :])
            if len(note) != num_note or not _GET <= function < len(self._in_order):
                raise CommError(f"rank {rank} sent a request that is not one of ours")
            self._requests[rank] = (function, number, num_values, num_out, note)
            if num_values:
                return  # they are the next message
            values = None
        else:
            values = torch.frombuffer(message, dtype=self._dtype)
        function, number, num_values, num_out, note = self._requests.pop(rank)
        if values is not None and values.numel() * values.itemsize != num_values:
            raise CommError(f"rank {rank} sent other values than it announced")
        if function == _GET:
            publish = functools.partial(self._send_published, rank, num_out)
            result = self.record_served(publish, rank, self.name, number)
        else:
            out = self._pool.take(num_out // self._dtype.itemsize) if num_out else None
            result = self.serve(function, Call(rank, values, out, note), self.name, number)
            if out is not None:
                self._pool.give(out, [self._streams.send(rank, _BULK, out)])
        self._streams.send_bytes(rank, _ANSWERS, _ANSWER.pack(number, result))

    def _send_published(self, rank: int, num_out: int) -> int:
        """Send a rank what is published; return its version."""
        if num_out:
            self._sends.append(self._streams.send(rank, _BULK, self._published))
        return self._version

    def _on_answer(self, rank: int, message: bytearray) -> None:
        number, result = _ANSWER.unpack(message)
        sent = self._pending.pop((rank, number), None)
        if sent is None:
            raise CommError(f"rank {rank} answered what was not asked")
        sent.result = result


class _Request:
    """A request that has been sent."""

    def __init__(
        self, window: NetworkWindow, rank: int, buffer: torch.Tensor | None, number: int
    ) -> None:
        self._window = window
        self._rank = rank
        self._number = number
        self._buffer = buffer
        self.result: int | None = None

    def is_over(self) -> bool:
        return self.result is not None

    def wait(self) -> int:
        window = self._window
        window._waits.wait(self._rank, self.is_over, window.name, self._number)
        assert self.result is not None
        return self.result

    @property
    def values(self) -> torch.Tensor:
        assert self._buffer is not None
        return self._buffer

    def release(self) -> None:
        if self._buffer is not None and self.is_over():
            self._window._pool.give(self._buffer)
        self._buffer = None
