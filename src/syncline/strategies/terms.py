"""The terms of a push: what the server's optimizer needs to know besides the gradient.

They are the worker's: a schedule changes them there, and a rank that only serves has none. They
are told to an owner of strips when they have changed, in the note of the push; what is too long
for one note goes ahead of it in calls of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from syncline.comm.window import MAX_NOTE_BYTES, Call, Window
from syncline.contract import ParamGroups
from syncline.engine.told_settings import Numbers, numbers_of


class Terms(msgspec.Struct, array_like=True):
    """How a gradient is to be used: the step's settings by group, and parameters without one."""

    told: list[dict[str, Numbers]]
    without: list[int]

    @classmethod
    def encode(cls, settings: ParamGroups, without: Iterable[int]) -> bytes:
        return msgspec.json.encode(cls([numbers_of(group) for group in settings], list(without)))

    def settings(self, known: ParamGroups) -> ParamGroups:
        """Return known settings with the told ones in their place."""
        return [{**mine, **told} for mine, told in zip(known, self.told, strict=True)]


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
