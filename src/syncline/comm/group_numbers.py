"""Numbers and names for groups of ranks: those of a group find the same without a message."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

from syncline.errors import CommError


class GroupNames:
    """Names that tell one group from another, also in a trace.

    The ranks of a group find the same name: it has their ranks, and how many groups they have made
    of just these ranks before.
    """

    def __init__(self) -> None:
        self._num_made: dict[str, int] = defaultdict(int)

    def take(self, ranks: Sequence[int]) -> str:
        name = in_ranges(ranks)
        self._num_made[name] += 1
        number = self._num_made[name]
        return name if number == 1 else f"{name}#{number}"


class GroupNumbers:
    """Numbers that tell the messages of one group from those of another.

    The ranks of a group find the same number without a message: it is a hash of the group's name.
    If two groups get the same number, a rank that is in both raises an error.
    """

    def __init__(self) -> None:
        self._made = GroupNames()
        self._names = {0: "all ranks"}

    def take(self, ranks: Sequence[int]) -> int:
        name = self._made.take(ranks)
        number = zlib.crc32(name.encode())
        if number in self._names:
            raise CommError(
                f"the groups {name} and {self._names[number]} have the same number {number}. "
                "Make one of them twice, and close the first."
            )
        self._names[number] = name
        return number


def in_ranges(ranks: Sequence[int]) -> str:
    """Return ranks as text.

    >>> in_ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][-1] + 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    return ",".join("-".join(map(str, ends)) for ends in found)
