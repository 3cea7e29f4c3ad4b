"""The terms of a push: what the server's optimizer needs to know besides the gradient.

They are the worker's optimizer settings: a schedule changes them on the worker, not on a rank that
only serves. A worker sends them to an owner of strips when they have changed, in the note of the
push; if they are too long for one note, "tell" calls before the push carry the first parts.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from syncline.comm.window import MAX_NOTE_BYTES, Call, Window
from syncline.contract import ParamGroups
from syncline.engine.told_settings import Numbers, numbers_of


class Terms(msgspec.Struct, array_like=True):
    """The step's settings by parameter group, the parameters without a gradient, and from how many
    steps the gradients are."""

    told: list[dict[str, Numbers]]
    without: list[int]
    steps: int

    @classmethod
    def encode(cls, settings: ParamGroups, without: Iterable[int], steps: int) -> bytes:
        told = [numbers_of(group) for group in settings]
        return msgspec.json.encode(cls(told, list(without), steps))

    def settings(self, known: ParamGroups) -> ParamGroups:
        """Return `known` settings, with the worker's numbers in place of its own."""
        return [{**mine, **told} for mine, told in zip(known, self.told, strict=True)]


class TermsTold:
    """The last terms that this rank has sent to all owners, and has received from each worker."""

    def __init__(self) -> None:
        self._told: bytes | None = None
        self._parts: dict[int, bytes] = {}
        self._heard: dict[int, Terms] = {}

    def note(self, window: Window, positions: Iterable[int], text: bytes) -> bytes:
        """Return the note for a push; if it is too long, send its first parts in "tell" calls.

        `text` is the encoded terms; `positions` are the owners of strips, in every push the same.
        A window serves the calls of a rank in order.
        """
        if self._told == text:
            return b""
        self._told = text
        while len(text) > MAX_NOTE_BYTES:
            for position in positions:
                window.call(position, "tell", note=text[:MAX_NOTE_BYTES])
            text = text[MAX_NOTE_BYTES:]
        return text

    def serve_part(self, call: Call) -> int:
        self._parts[call.sender] = self._parts.get(call.sender, b"") + call.note
        return 0

    def terms_of(self, call: Call) -> Terms:
        """Return the terms of a push."""
        if call.note:
            text = self._parts.pop(call.sender, b"") + call.note
            self._heard[call.sender] = msgspec.json.decode(text, type=Terms)
        return self._heard[call.sender]
