"""Tells waiting from exchanging, once the tasks of all ranks are on one clock.

While it runs, a rank knows when it came to an exchange and when it left it, not when the others
came. So it records the whole as one part; here that is divided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from syncline.perf.trace import Part, Task

_WITH_OTHERS = ("meet", "exchange")
"""Parts in which a rank waits until others have come: in shared memory, and over a network."""


def of_steps(tasks: Iterable[Task]) -> list[Task]:
    """Leave out calls that were served for no task: those of set-up and of the end."""
    tasks = list(tasks)
    known = {part.exchange for task in tasks if task.kind != "serve" for part in task.parts}
    known.discard("")
    ranks = {task.rank for task in tasks}

    def is_known(task: Task) -> bool:
        answer = task.parts[-1]
        assert answer.kind == "answer", task
        return answer.exchange in known or answer.peers[0] not in ranks

    return [task for task in tasks if task.kind != "serve" or is_known(task)]


def divide(
    tasks: Iterable[Task], machines: Sequence[Sequence[int]], latency_s: float
) -> list[Task]:
    """Return the tasks with their exchanges divided into waiting, latency and wire.

    `latency_s` is that of a message between machines.
    """
    tasks = of_steps(tasks)
    machine_of = {rank: at for at, ranks in enumerate(machines) for rank in ranks}
    came_s: dict[str, dict[int, float]] = defaultdict(dict)
    served: dict[str, Task] = {}
    for task in tasks:
        for part, start_s in task.spans():
            if part.kind in (*_WITH_OTHERS, "send") and part.exchange:
                came_s[part.exchange][task.rank] = start_s
            elif part.kind == "answer":
                served[part.exchange] = task

    def divided(task: Task) -> Iterator[Part]:
        for part, start_s in task.spans():
            if part.kind in _WITH_OTHERS:
                others = came_s[part.exchange]
                came = [others[rank] for rank in part.peers or others if rank in others]
                met_s = max(came, default=start_s)  # a peer that is gone has told nothing
                yield from _cut(part, start_s, ("wait", met_s))
                yield from _rest(part, max(start_s, met_s), part.kind == "meet", latency_s)
            elif part.kind == "call":
                is_near = machine_of[task.rank] == machine_of[part.peers[0]]
                serving = served.get(part.exchange)
                if serving is None:  # the owner is gone, or was asked before recording began
                    yield msgspec.structs.replace(part, kind="wait")
                    continue
                there = ("wait" if is_near else "wire", serving.start_s)
                yield from _cut(part, start_s, there, ("serve", serving.end_s))
                yield from _rest(part, max(start_s, serving.end_s), is_near, latency_s)
            else:
                yield part

    return [msgspec.structs.replace(task, parts=tuple(divided(task))) for task in tasks]


def _cut(part: Part, start_s: float, *ends: tuple[str, float]) -> Iterator[Part]:
    """Yield what a part was spent on until each of these times, without bytes."""
    for kind, end_s in ends:
        end_s = min(end_s, part.end_s)
        if end_s > start_s:
            yield msgspec.structs.replace(part, kind=kind, end_s=end_s, num_bytes=0)
            start_s = end_s


def _rest(part: Part, start_s: float, is_near: bool, latency_s: float) -> Iterator[Part]:
    """Yield what is left of a part: nothing but latency between ranks of one machine."""
    if is_near:
        yield msgspec.structs.replace(part, kind="latency")
        return
    yield from _cut(part, start_s, ("latency", start_s + latency_s))
    yield msgspec.structs.replace(part, kind="wire")
