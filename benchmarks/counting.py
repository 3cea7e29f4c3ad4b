"""What Python executes in a call: bytecodes and Python function calls, of the calling thread.

Counted, not timed, so it hardly depends on what else the machine does. What runs in C (torch's
operators, waits inside the kernel) and on other threads (the comm lane) is not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def counts_of(work: Callable[[], object]) -> tuple[int, int]:
    """Call `work`; return how many bytecodes and how many Python calls it took, itself included.

    >>> def add():
    ...     return 1 + 1
    >>> counts_of(add)[1]
    1
    """
    bytecodes = calls = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal bytecodes, calls
        if event == "call":
            calls += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            bytecodes += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return bytecodes, calls
