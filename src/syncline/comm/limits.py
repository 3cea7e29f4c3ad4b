"""Sizes at which communicators change their ways. The model of time reads them here too."""

from __future__ import annotations

SMALL_BYTES = 1 << 16
"""Up to here every rank adds up all of a sum by itself: one exchange instead of two.

Reasoned: in shared memory 64 KiB are read in about 10 us, half of what one more meeting takes. Over
10 Gbit/s they take 60 us a peer, about as long as one more round of messages.
"""

SCRATCH_BYTES = 1 << 20
"""A broadcast inside a machine goes through memory of this size, piece by piece.

Reasoned: a piece takes some 150 us to copy, so that its two meetings weigh little, and it fits
into the second-level cache of most processors.
"""

TOKEN_BYTES = 4
"""What a rank sends to each peer to say that it has come to a barrier: any number will do."""
