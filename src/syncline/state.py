"""Optimizer state, gathered from the ranks' strips into one whole per parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from syncline.bucket import Bucket, Slot
from syncline.comm.base import Communicator, exchange_bytes
from syncline.update import flatten_like


class _Entry(msgspec.Struct):
    """What one owner holds of one state value of one piece."""

    name: str
    start: int
    stop: int
    key: str
    dtype: str = ""
    is_spread: bool = False
    """Whether the value has a number for each element; otherwise it is the parameter's own."""
    plain: Any = None
    shape: list[int] = []


def _held(bucket: Bucket) -> list[tuple[_Entry, torch.Tensor | None]]:
    """List what this rank's strip of a bucket holds, in a fixed order."""
    found: list[tuple[_Entry, torch.Tensor | None]] = []
    for slot in bucket.slots:
        for first, last, state in bucket.update.held_of(slot):
            start, stop = first - slot.offset, last - slot.offset
            for key, value in sorted(state.items()):
                entry = _Entry(slot.name, start, stop, key)
                if not isinstance(value, torch.Tensor):
                    entry.plain = value
                    found.append((entry, None))
                    continue
                entry.dtype = str(value.dtype).removeprefix("torch.")
                entry.shape = list(value.shape)
                entry.is_spread = value.dim() > 0 and value.numel() == stop - start
                is_whole = value.shape == slot.parameter.shape
                flat = flatten_like(slot.parameter, value) if is_whole else value.reshape(-1)
                found.append((entry, flat.contiguous()))
    return found


def gather_optimizer_state(
    slots: Sequence[Slot], buckets: Sequence[Bucket], comm: Communicator
) -> dict[str, dict[str, Any]]:
    """Put the whole state together on every rank, shaped as each parameter. A collective."""
    shapes = {slot.name: slot.parameter for slot in slots}
    mine = [held for bucket in buckets for held in _held(bucket)]
    listed = exchange_bytes(comm, msgspec.json.encode([entry for entry, _ in mine]))
    whole: dict[str, dict[str, Any]] = {}
    for root, text in enumerate(listed):
        for number, entry in enumerate(msgspec.json.decode(text, type=list[_Entry])):
            state = whole.setdefault(entry.name, {})
            if not entry.dtype:
                state[entry.key] = entry.plain
                continue
            dtype: torch.dtype = getattr(torch, entry.dtype)
            size = entry.stop - entry.start if entry.is_spread else max(1, _product(entry.shape))
            value = mine[number][1] if root == comm.position else torch.empty(size, dtype=dtype)
            assert value is not None
            comm.broadcast(value, root)
            if not entry.is_spread:
                state[entry.key] = value.view(entry.shape).clone()
                continue
            parameter = shapes[entry.name]
            if entry.key not in state:
                state[entry.key] = torch.zeros_like(parameter, dtype=dtype).detach()
            target = state[entry.key]
            target.as_strided((target.numel(),), (1,))[entry.start : entry.stop] = value
    return whole


def _product(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
