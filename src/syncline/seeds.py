"""The published seed function: seeds depend on what is computed, never on which rank computes it.

Dropout masks, data order and initial weights depend on (seed, step, shard, ...) alone, so a run
draws the same numbers on any number of ranks. A plain PyTorch loop that calls the same functions
gets the same bits.
"""

from __future__ import annotations

import hashlib


def seed_for(seed: int, *place: int | str) -> int:
    """Derive a 63-bit seed from the job's seed and a place such as (step, shard).

    It is SHA-256 of the place as text: independent of platform, process and Python version.

    >>> seed_for(0, "dropout", 3, 1) == seed_for(0, "dropout", 3, 1)
    True
    >>> seed_for(0, "dropout", 3, 1) == seed_for(0, "dropout", 3, 2)
    False
    """
    text = "/".join(str(part) for part in (seed, *place))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
