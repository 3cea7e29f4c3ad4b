"""Memory that a step frees stays with the process, for the next step.

glibc gives the memory of large tensors back to the system when they are freed. The next step asks
for it again, and the kernel clears it page by page. That takes up to a third of a step on a
processor, and not alike in every run (decision 36).
"""

from __future__ import annotations

import ctypes
import logging

from syncline.launch.env import malloc_settings

log = logging.getLogger("syncline")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
KEPT_BYTES = 1 << 30
"""At most this much free memory is kept at the top of the heap."""
LARGEST_BYTES = 32 << 20
"""Larger tensors are given back all the same: glibc has no higher threshold."""


def keep_freed_memory() -> bool:
    """Tell malloc to keep what is freed; say whether it does.

    Settings of the user's own, by glibc's environment variables, stay as they are.
    """
    if own := malloc_settings():
        log.info("freed memory is kept or not as %s says", ", ".join(own))
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.info("freed memory goes back to the system: this C library has no mallopt")
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, LARGEST_BYTES))
