"""`syncline key`: a fresh secret for a job on several machines."""

from __future__ import annotations

import secrets


def key() -> None:
    """Print a fresh key for a job on several machines.

    Generate it once and export it on every machine before the ranks are started there:

      export SYNCLINE_KEY=$(syncline key)

    Ranks prove to each other that they hold it. On a single machine it is not needed.
    """
    print(secrets.token_hex(32))
