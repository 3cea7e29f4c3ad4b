"""How rank 0 tells our launcher that all ranks have met.

Before that a rank that dies takes the others with it, whatever the strategy: they can never meet.
The launcher listens on a datagram socket in the abstract name space, named after the job. Anybody
may write to it: all it can change is how long the launcher waits after a death.
"""

from __future__ import annotations

import contextlib
import socket


def listen_for_meeting(job_id: str) -> socket.socket:
    """Return a socket that becomes readable when the ranks of the job have met."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.setblocking(False)
    listener.bind(_name(job_id))
    return listener


def tell_met(job_id: str) -> None:
    """Tell the launcher, if there is one, that all ranks have met."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(b"m", _name(job_id))


def _name(job_id: str) -> str:
    return f"\0syncline/{job_id}/launcher"
