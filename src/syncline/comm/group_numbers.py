"""Numbers for groups of ranks that share connections."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

from syncline.errors import CommError


class GroupNumbers:
    """Numbers that tell the messages of one group from those of another.

    The ranks of a group find the same number without a message: it is a hash of their ranks and of
    how many groups they have made of just these ranks. If two groups get the same number, a rank
    that is in both raises an error.
    """

    def __init__(self) -> None:
        self._num_made: dict[tuple[int, ...], int] = defaultdict(int)
        self._names: dict[int, object] = {0: "all ranks"}

    def take(self, ranks: Sequence[int]) -> int:
        members = tuple(sorted(ranks))
        self._num_made[members] += 1
        name = (members, self._num_made[members])
        number = zlib.crc32(repr(name).encode())
        if number in self._names:
            raise CommError(
                f"the groups {name} and {self._names[number]} have the same number {number}. "
                "Make one of them twice, and close the first."
            )
        self._names[number] = name
        return number
