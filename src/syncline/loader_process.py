"""A process that reads batches for a rank: a fork of it, which ends with it.

The rank asks for places (step, shard) and gets the batches back in the order it asked. A batch
comes in memory of its own (memfd), with the strides it was made with, and is not copied again.
"""

from __future__ import annotations

import builtins
import gc
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import torch

from syncline.errors import SynclineError
from syncline.launch.forked import dying_with_parent, reset_handlers
from syncline.launch.outcome import describe_status

Batch = tuple[torch.Tensor, torch.Tensor]
Reader = Callable[[int, int], Batch]
"""Returns the batch of a step and a shard."""

_PLACE = struct.Struct("<qq")
_MESSAGE_BYTES = 1 << 17
_TRACEBACK_CHARACTERS = 10_000
_ALIGNED_BYTES = 64
"""As torch aligns its own memory: kernels may give other bits for another alignment."""


class _Piece(msgspec.Struct, array_like=True):
    """A tensor in a batch's memory."""

    dtype: str
    shape: list[int]
    strides: list[int]
    start: int
    end: int


class _Answer(msgspec.Struct, omit_defaults=True):
    """What the process tells the rank: a batch, what it has loaded, or why it cannot."""

    pieces: list[_Piece] = []
    digest: str = ""
    kind: str = ""
    """The type of the exception that reading raised; `text` and `trace` are its own."""
    text: str = ""
    trace: str = ""
    is_ours: bool = False


class InLoaderProcess(Exception):
    """The traceback of an exception in a loader process: the cause of the one that is raised."""


class LoaderProcess:
    """A process that reads batches for this one."""

    def __init__(
        self, name: str, load: Callable[[], tuple[Reader, str]], before: Sequence[LoaderProcess]
    ) -> None:
        """Fork. The process calls `load` for what reads batches, and for the digest of its data.

        `name` names it in errors; `before` are those that were started before it.
        """
        self._name = name
        self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        die_with_parent = dying_with_parent()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._pid = os.fork()
            if self._pid == 0:
                others = [self._ends[0], *(other._ends[0] for other in before)]
                _run(self._ends[1], load, die_with_parent, others, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._ends[1].close()

    def digest(self) -> str:
        """Return the digest of the data that it has loaded. Call it once, before `answer`."""
        return self._receive("loaded the data")[0].digest

    def ask(self, step: int, shard: int) -> None:
        """Ask for a batch; does not wait for it."""
        try:
            self._ends[0].send(_PLACE.pack(step, shard))
        except OSError:
            raise self._died(f"read step {step}, shard {shard}") from None

    def answer(self, step: int, shard: int) -> Batch:
        """Return the batch that was asked for first of those not returned yet."""
        found, memory = self._receive(f"read step {step}, shard {shard}")
        if found.kind:
            raise _rebuilt(found) from InLoaderProcess(f"\n{found.trace}")
        assert memory is not None
        samples, labels = (_view(memory, piece) for piece in found.pieces)
        return samples, labels

    def close(self) -> None:
        """End the process, whatever it does."""
        self._ends[0].close()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _receive(self, doing: str) -> tuple[_Answer, torch.Tensor | None]:
        try:
            text, files, _, _ = socket.recv_fds(self._ends[0], _MESSAGE_BYTES, 1)
        except OSError:
            text, files = b"", []
        if not text:
            raise self._died(doing)
        memory = None
        for file in files:
            memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
            os.close(file)
        return msgspec.json.decode(text, type=_Answer), memory

    def _died(self, doing: str) -> SynclineError:
        pid, self._pid = self._pid, 0
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 0
        return SynclineError(
            f"data.workers: loader process {self._name} {describe_status(status)} while it "
            f"{doing}. If memory ran out, use fewer workers or a smaller data.prefetch; with "
            "data.workers = 0 the rank reads by itself."
        )


def _rebuilt(found: _Answer) -> Exception:
    """Return an exception like the one in the process; types of the user's own become a text."""
    if found.is_ours:
        return SynclineError(found.text)
    kind = getattr(builtins, found.kind, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(found.text)
        except TypeError:  # UnicodeError and the like need more than a text
            pass
    return RuntimeError(f"{found.kind}: {found.text}")


# In the process.


def _run(
    end: socket.socket,
    load: Callable[[], tuple[Reader, str]],
    die_with_parent: Callable[[], None],
    others: Sequence[socket.socket],
    mask: set[int],
) -> NoReturn:
    """Answer until the rank is gone. Never returns: the callers on the stack are the rank's."""
    try:
        die_with_parent()
        gc.freeze()  # a collection would write to every object, and so copy its page
        for other in others:
            other.close()
        reset_handlers()
        # Whoever ends the rank ends this process: on its own it would look like a failure.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _serve(end, load)
    except (BrokenPipeError, ConnectionError):
        os._exit(0)  # the rank is gone
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _serve(end: socket.socket, load: Callable[[], tuple[Reader, str]]) -> None:
    failed, read, digest = _Answer(), None, ""
    try:
        read, digest = load()
    except Exception as error:
        failed = _failure(error)
    _send(end, _Answer(digest=digest))
    while asked := end.recv(_PLACE.size):
        if read is None:
            _send(end, failed)
            continue
        try:
            answer, file = _pack(read(*_PLACE.unpack(asked)))
        except Exception as error:
            _send(end, _failure(error))
            continue
        _send(end, answer, [file])
        os.close(file)


def _send(end: socket.socket, answer: _Answer, files: Sequence[int] = ()) -> None:
    socket.send_fds(end, [msgspec.json.encode(answer)], files)


def _failure(error: Exception) -> _Answer:
    return _Answer(
        kind=type(error).__name__,
        text=str(error)[:_TRACEBACK_CHARACTERS],
        trace=traceback.format_exc()[-_TRACEBACK_CHARACTERS:],
        is_ours=isinstance(error, SynclineError),
    )


def _pack(batch: Batch) -> tuple[_Answer, int]:
    """Write a batch into new memory; return what is where, and the memory's file."""
    pieces, end = [], 0
    for tensor in batch:
        start = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES
        end = start + tensor.numel() * tensor.element_size()
        strides = torch.empty_like(tensor, device="meta").stride()
        dtype = str(tensor.dtype).removeprefix("torch.")
        pieces.append(_Piece(dtype, list(tensor.shape), list(strides), start, end))
    file = os.memfd_create("syncline-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, max(end, 1))
        memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        for tensor, piece in zip(batch, pieces, strict=True):
            _view(memory, piece).copy_(tensor.detach())
    except BaseException:
        os.close(file)
        raise
    return _Answer(pieces), file


def _view(memory: torch.Tensor, piece: _Piece) -> torch.Tensor:
    flat = memory[piece.start : piece.end].view(getattr(torch, piece.dtype))
    return flat.as_strided(piece.shape, piece.strides)
