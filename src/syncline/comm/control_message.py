"""The message on a control connection."""

from __future__ import annotations

import msgspec

from syncline.comm.progress import Record


class ControlMessage(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A message on a control connection: a heartbeat, a farewell or a failure."""

    records: dict[int, Record] = {}
    """Heartbeat: the progress of some ranks."""
    left: list[int] = []
    """Ranks that ended in good order."""
    gone: int | None = None
    how: str = ""
    why: str = ""
