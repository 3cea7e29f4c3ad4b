"""Sizes at which communicators change their algorithm. `cost.py` and `volume.py` use them too."""

from __future__ import annotations

SMALL_BYTES = 1 << 16
"""Up to this size every rank adds up the whole sum by itself: one exchange instead of two.

Reasoned: in shared memory 64 KiB are read in about 10 us, half the time of one more meeting. Over
10 Gbit/s they take 60 us a peer, about as long as one more round of messages.
"""

SCRATCH_BYTES = 1 << 20
"""A broadcast inside a machine goes through memory of this size, piece by piece.

Reasoned: copying a piece takes about 150 us, much more than its two meetings, and the piece fits
into the second-level cache of most processors.
"""

TOKEN_BYTES = 4
"""What a rank sends to each peer to say that it has come to a barrier. Any size would do."""
