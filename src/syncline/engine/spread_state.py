"""Stands in for `optimizer.state` while the ranks hold the state in strips.

The strips are not in the user's optimizer, so a script that empties, replaces or zeroes entries of
`optimizer.state` would change nothing, without a word. Looking into it or changing it is refused;
`state_dict()` and `load_state_dict()` are the way.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from syncline.errors import UsageError

_LOOKERS = frozenset(["torch", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate"])
"""Packages that move all entries to a device at the end, whatever there are: they find none."""

_WHY = (
    "optimizer.state cannot be read, changed or replaced after the first step: ranks hold the "
    "state in strips. optimizer.state_dict() returns the whole state, and "
    "optimizer.load_state_dict(), on every rank, sets it."
)


def refuse_state() -> UsageError:
    """Return the error for a script that reads, changes or replaces `optimizer.state`."""
    return UsageError(_WHY)


class SpreadState(defaultdict[Any, Any]):
    """An optimizer's state without that of the strips, which `state_dict()` adds for a moment."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.is_open = False
        """Whether the engine itself uses it."""

    def hold(self, others: dict[Any, Any]) -> None:
        """Hold the state of parameters that no rank updates."""
        self.is_open = True
        self.clear()
        self.update(others)
        self.is_open = False

    def plain(self) -> defaultdict[Any, Any]:
        """Return what it holds as torch's own kind of dictionary."""
        self.is_open = True
        found = defaultdict(dict, self)
        self.is_open = False
        return found

    def _refuse(self) -> None:
        caller = str(sys._getframe(2).f_globals.get("__name__"))
        if not self.is_open and caller.partition(".")[0] not in _LOOKERS:
            raise refuse_state()

    def __getitem__(self, key: Any) -> Any:
        self._refuse()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._refuse()
        super().__delitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._refuse()
        return super().__contains__(key)

    def __iter__(self) -> Any:
        self._refuse()
        return super().__iter__()

    def get(self, *args: Any) -> Any:
        self._refuse()
        return super().get(*args)

    def keys(self) -> Any:
        self._refuse()
        return super().keys()

    def values(self) -> Any:
        self._refuse()
        return super().values()

    def items(self) -> Any:
        self._refuse()
        return super().items()

    def pop(self, *args: Any) -> Any:
        self._refuse()
        return super().pop(*args)

    def setdefault(self, *args: Any) -> Any:
        self._refuse()
        return super().setdefault(*args)

    def update(self, *args: Any, **options: Any) -> None:
        self._refuse()
        super().update(*args, **options)

    def clear(self) -> None:
        self._refuse()
        super().clear()
