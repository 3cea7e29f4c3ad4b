"""How many bytes to hand to the kernel ahead of time, from the measured rate of a link."""

from __future__ import annotations

import time
from collections import deque

# Unless marked as measured (docs/decisions/0007 and 0008), these limits are reasoned for 1 Gbit/s,
# which carries 125 kB in a millisecond.
PIECE_BYTES = 128 << 10
"""An urgent message waits until the current piece is written: one millisecond."""
_PATIENT_S = 0.003
"""Patient messages fill the link for this long ahead. Measured: without such a limit the kernel
takes megabytes, and reduces that came after them took 50 ms instead of 16."""
_LEAST_PATIENT_BYTES = 16 << 10
"""On a slow link a patient piece still has about ten packets, enough to be worth a system call."""
_UNSENT_BYTES = 128 << 10
"""The kernel buffers what the link carries during one pause of the hub, a millisecond."""
_MOST_BYTES = 1 << 20
"""Fast links get larger pieces, but none that takes much longer than 0.1 ms to copy."""
_WINDOW_S = 0.01
"""A rate is measured over ten pauses of the hub: one pause brings too few bytes to measure."""


class Pace:
    """Measures the link's rate, and from it how many bytes to hand to the kernel ahead of time.

    Too few leave the link idle while the hub pauses; too many delay urgent messages.
    """

    def __init__(self, num_peers: int, pause_s: float, piece_bytes: int) -> None:
        self.piece_bytes = self._least_piece_bytes = piece_bytes
        self.patient_bytes = PIECE_BYTES
        """Patient messages are sent only while at most this much is on its way to the peer."""
        self.unsent_bytes = _UNSENT_BYTES
        """How much the kernel buffers for a peer beyond what is on its way, to bridge pauses."""
        self._num_peers = num_peers
        self._pause_s = pause_s
        self._rates: deque[float] = deque(maxlen=16)
        self._num_bytes = 0
        self._since_s = time.monotonic()

    def count(self, num_bytes: int) -> None:
        """Count bytes that have arrived."""
        self._num_bytes += num_bytes
        now = time.monotonic()
        if now - self._since_s > _WINDOW_S:
            self._learn(self._num_bytes / (now - self._since_s))
            self._num_bytes, self._since_s = 0, now

    def _learn(self, rate_bytes_per_s: float) -> None:
        self._rates.append(rate_bytes_per_s)
        each = max(self._rates) / self._num_peers
        self.patient_bytes = _between(_LEAST_PATIENT_BYTES, each * _PATIENT_S, _MOST_BYTES)
        self.unsent_bytes = _between(_UNSENT_BYTES, 2 * each * self._pause_s, 4 * _MOST_BYTES)
        self.piece_bytes = _between(self._least_piece_bytes, each * self._pause_s, _MOST_BYTES)


def _between(least: int, wanted: float, most: int) -> int:
    return min(max(least, int(wanted)), most)
