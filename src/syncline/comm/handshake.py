"""Frames and the proof of the job's key, for every connection that Syncline opens itself.

A frame is four bytes of length and a JSON object. Both ends send a nonce and prove by HMAC-SHA256
that they hold the same key before either trusts the other. Nothing received is ever executed
or unpickled; everything is decoded into a fixed type.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from typing import Any, TypeVar

import msgspec

from syncline.errors import CommError, KeyRefused

MAX_FRAME_BYTES = 1 << 20
"""Heartbeats of a machine with thousands of ranks fit: reasoned, some 100 bytes for each."""
_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, forbid_unknown_fields=True):
    """The first frame of a connection: which rank connects, and for what purpose."""

    job: str
    rank: int
    purpose: str
    nonce: str


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    rank: int
    nonce: str
    proof: str


class _Proof(msgspec.Struct, forbid_unknown_fields=True):
    proof: str


class _Verdict(msgspec.Struct, forbid_unknown_fields=True):
    refused: str


_T = TypeVar("_T", Hello, _Answer, _Proof, _Verdict)


def pack(message: Any) -> bytes:
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the other end hung up")
        parts += part
    return parts


def receive_frame(sock: socket.socket) -> bytes:
    """Read one frame from a blocking socket."""
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise CommError(f"a frame of {length} bytes arrived, but {MAX_FRAME_BYTES} is the limit")
    return _receive_exactly(sock, length)


class Frames:
    """Cuts a byte stream into frames, for sockets that are read piece by piece."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._bytes += data
        frames = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise CommError(f"a frame of {length} bytes arrived: not one of ours")
            if len(self._bytes) < _LENGTH.size + length:
                break
            frames.append(bytes(self._bytes[_LENGTH.size : _LENGTH.size + length]))
            del self._bytes[: _LENGTH.size + length]
        return frames


def _receive(sock: socket.socket, kind: type[_T]) -> _T:
    """Read one frame and decode it. What a stranger sends raises CommError, and nothing else."""
    try:
        return msgspec.json.decode(receive_frame(sock), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CommError(f"a frame arrived that is not one of ours: {error}") from None


def _is_same(proof: str, expected: str) -> bool:
    # Bytes: compare_digest raises on a text with characters outside ASCII.
    return hmac.compare_digest(proof.encode("utf-8", "replace"), expected.encode())


def _proof(key: bytes, role: str, hello: Hello, rank: int, nonce: str) -> str:
    text = f"{role}|{hello.job}|{hello.rank}|{hello.purpose}|{hello.nonce}|{rank}|{nonce}"
    return hmac.new(key, text.encode("utf-8", "replace"), "sha256").hexdigest()


def knock(sock: socket.socket, key: bytes, job: str, rank: int, purpose: str) -> int:
    """Introduce ourselves on a fresh connection and return the rank of the other end.

    Raises KeyRefused if the other end does not hold our key, or says that we do not hold its.
    """
    hello = Hello(job, rank, purpose, os.urandom(16).hex())
    sock.sendall(pack(hello))
    answer = _receive(sock, _Answer)
    if not _is_same(answer.proof, _proof(key, "answer", hello, answer.rank, answer.nonce)):
        sock.sendall(pack(_Proof("")))
        raise KeyRefused(
            f"rank {rank} refused the process that answered as rank {answer.rank}: it does not "
            "hold this job's key. Give every machine the same SYNCLINE_KEY."
        )
    sock.sendall(pack(_Proof(_proof(key, "knock", hello, answer.rank, answer.nonce))))
    verdict = _receive(sock, _Verdict)
    if verdict.refused:
        raise KeyRefused(verdict.refused)
    return answer.rank


def answer(sock: socket.socket, key: bytes, job: str, rank: int, caller: str) -> Hello:
    """Answer a connection and return the caller's `Hello`, once the caller has proven the key.

    `caller` names the other end for the message (an address, or a process and user).
    """
    hello = _receive(sock, Hello)
    if hello.job != job:
        refusal = f"rank {rank} refused {caller}: it belongs to another job ({hello.job})"
        sock.sendall(pack(_Answer(rank, "", "")))
        raise KeyRefused(refusal)
    nonce = os.urandom(16).hex()
    sock.sendall(pack(_Answer(rank, nonce, _proof(key, "answer", hello, rank, nonce))))
    proof = _receive(sock, _Proof)
    if not _is_same(proof.proof, _proof(key, "knock", hello, rank, nonce)):
        refusal = f"rank {rank} refused {caller}, which claims rank {hello.rank}: wrong key"
        if proof.proof:
            sock.sendall(pack(_Verdict(refusal)))
        raise KeyRefused(refusal)
    sock.sendall(pack(_Verdict("")))
    return hello
