"""The terms of a push: what the server's optimizer needs to know besides the gradient.

They are the worker's: a schedule changes them there, and a rank that only serves has none. They
are told to an owner of strips when they have changed, in the note of the push; what is too long
for one note goes ahead of it in calls of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

import msgspec
import torch

from syncline.comm.window import MAX_NOTE_BYTES, Call, Window
from syncline.engine.update import Hyper

_Setting = float | tuple[float, ...]


class Terms(msgspec.Struct, array_like=True):
    """How a gradient is to be used: the step's settings by group, and who has no gradient."""

    hyper: list[dict[str, _Setting]]
    without: list[int]

    @classmethod
    def encode(cls, hyper: Hyper, without: Iterable[int]) -> bytes:
        return msgspec.json.encode(cls([_numbers(group) for group in hyper], list(without)))

    def settings(self, known: Hyper) -> Hyper:
        """Return known settings with the told ones in their place."""
        return [{**mine, **told} for mine, told in zip(known, self.hyper, strict=True)]


class TermsTold:
    """What this rank has told the owners of strips in a window, and what others have told it."""

    def __init__(self) -> None:
        self._told: dict[int, bytes] = {}
        self._parts: dict[int, bytes] = {}
        self._heard: dict[int, Terms] = {}

    def note(self, window: Window, position: int, text: bytes) -> bytes:
        """Return the note for a push; what does not fit is sent ahead. Calls are served in order.

        `text` is the encoded terms. The window offers `hear_part` as "tell".
        """
        if self._told.get(position) == text:
            return b""
        self._told[position] = text
        while len(text) > MAX_NOTE_BYTES:
            window.call(position, "tell", note=text[:MAX_NOTE_BYTES])
            text = text[MAX_NOTE_BYTES:]
        return text

    def hear_part(self, call: Call) -> int:
        self._parts[call.sender] = self._parts.get(call.sender, b"") + call.note
        return 0

    def hear(self, call: Call) -> Terms:
        """Return the terms of a push."""
        if call.note:
            text = self._parts.pop(call.sender, b"") + call.note
            self._heard[call.sender] = msgspec.json.decode(text, type=Terms)
        return self._heard[call.sender]


def _numbers(group: dict[str, object]) -> dict[str, _Setting]:
    """Return the settings that a schedule may change: numbers and tuples of them, not switches."""
    numbers: dict[str, _Setting] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            numbers[key] = float(value)
        elif isinstance(value, tuple) and all(isinstance(one, Real) for one in value):
            numbers[key] = tuple(map(float, value))
        elif isinstance(value, Real) and not isinstance(value, bool):  # numpy's numbers too
            numbers[key] = float(value)
    return numbers
