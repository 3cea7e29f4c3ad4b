"""What ties ranks together: collectives, in which all meet, and calls, which one rank serves.

A rank leaves a collective when the last has come, and after its own costs. A call travels to its
owner, waits for its turn there, is served, and travels back. Where a caller looked for an answer
only after it had come, its way back is not in the trace: it is taken to be as long as the others'.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from syncline.perf.drafts import Asked, Call, Draft
from syncline.perf.moments import NUMBER
from syncline.perf.trace import Part

_TICK_S = 1e-9
_OF_PARTS = {name: NUMBER[name] for name in ("wire", "latency")}


def tie_collectives(draft: Draft) -> None:
    """Let ranks leave a collective after those that they wait for have come."""
    builder = draft.builder
    for exchange in draft.exchanges.values():
        met: dict[tuple[int, ...], int] = {}
        for moment, peers in exchange.waits:
            if peers not in met:
                others = [
                    exchange.came[one] for one in peers or exchange.came if one in exchange.came
                ]
                last_s = max((builder.time_s[one] for one in others), default=builder.time_s[0])
                met[peers] = builder.add(last_s, before=others)
            builder.before[moment].append(met[peers])


def groups_share_links(draft: Draft) -> bool:
    """Say whether exchanges of different groups were on a machine's link at the same time."""
    spans: defaultdict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for task in draft.tasks:
        for part, start_s in task.spans():
            if part.kind == "wire" and part.exchange and part.end_s > start_s:
                group = part.exchange.rpartition(".")[0]
                machine = draft.machine_of.get(task.rank, -1)
                spans[machine].append((start_s, part.end_s, group))
    return any(_overlap(sorted(found)) for found in spans.values())


def _overlap(spans: Sequence[tuple[float, float, str]]) -> bool:
    """Say whether any two spans of different groups overlap; they are sorted by their start."""
    ends: dict[str, float] = {}
    for start_s, end_s, group in spans:
        if any(other != group and end > start_s + _TICK_S for other, end in ends.items()):
            return True
        ends[group] = max(end_s, ends.get(group, end_s))
    return False


class Calls:
    """Calls of one rank to another."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._is_virtual = draft.trace.header.clock == "virtual"
        self._idle = self._take_turns()
        self._there: defaultdict[str, list[float]] = defaultdict(list)
        self._back: defaultdict[str, list[float]] = defaultdict(list)
        """How long calls of a window were under way, where that is known."""

    def tie(self) -> None:
        """Add what calls, their service and their answers come after."""
        calls = self._draft.calls.items()
        for name, call in calls:
            self._learn(name, call)
        for name, call in calls:
            if call.served >= 0 and self._is_other(name):
                self._tie_served(name, call)
            elif call.asked is not None:
                self._tie_alone(call.asked)
        for moment, name in self._draft.until_served:
            if name in self._draft.calls and self._draft.calls[name].served >= 0:
                self._before(moment, self._draft.ends[self._draft.calls[name].served])

    def _before(self, moment: int, other: int) -> None:
        """Let a moment come after another that was recorded before it."""
        time_s = self._draft.builder.time_s
        if time_s[other] <= time_s[moment]:
            self._draft.builder.before[moment].append(other)

    def _is_other(self, name: str) -> bool:
        caller, owner = ends_of(name)
        return caller != owner

    def _take_turns(self) -> set[int]:
        """Let turns on each lane follow one another; return the served tasks that found it idle.

        On real lanes a call is served in the middle of other work.
        """
        draft, idle = self._draft, set[int]()
        at_start = {moment: at for at, moment in enumerate(draft.starts)}
        served = {
            draft.tasks[call.served].rank for call in draft.calls.values() if call.served >= 0
        }
        for rank in served if self._is_virtual else ():
            turns = [turn for turn in draft.turns[rank] if turn.end_s > turn.start_s]
            turns.sort(key=lambda turn: (turn.start_s, turn.end_s))
            for one, other in zip([None, *turns], turns, strict=False):
                if one is not None:
                    self._before_start(other.start, one.end, other.start_s)
                if other.start in at_start and (one is None or one.end_s < other.start_s):
                    idle.add(at_start[other.start])
        return idle

    def _before_start(self, moment: int, other: int, start_s: float) -> None:
        """Let a turn begin after another. An update's only moment is its end: tie what it follows.

        What an update follows has ended when it begins, so that is where the turn is waited for.
        """
        builder = self._draft.builder
        if builder.time_s[moment] > start_s:
            (moment,) = builder.before[moment][:1]
        if builder.time_s[other] <= builder.time_s[moment]:
            builder.before[moment].append(other)

    def _learn(self, name: str, call: Call) -> None:
        """Note how long a call travelled, if the trace says it."""
        window, asked = name.partition(":")[0], call.asked
        there_s = self._there_s(name, call)
        if there_s is not None:
            self._there[window].append(there_s)
        if asked is not None and call.served >= 0 and asked.parts[-1].end_s > asked.start_s:
            back_s = asked.parts[-1].end_s - self._draft.tasks[call.served].end_s
            if back_s >= 0.0:
                self._back[window].append(back_s)

    def _there_s(self, name: str, call: Call) -> float | None:
        """Return how long a call travelled to its owner; None if that is not known."""
        if call.served < 0 or call.sent < 0:
            return None
        sent_s = self._draft.builder.time_s[call.sent]
        served_s = self._draft.tasks[call.served].start_s
        asked = call.asked
        if asked is not None and self._is_virtual:
            came_s = next((part.end_s for part in asked.parts if part.kind == "wire"), sent_s)
            if came_s > asked.start_s and came_s <= served_s:
                return came_s - sent_s
        is_known = not self._is_virtual or call.served in self._idle
        return max(0.0, served_s - sent_s) if is_known else None

    def _tie_served(self, name: str, call: Call) -> None:
        draft, window = self._draft, name.partition(":")[0]
        task = draft.tasks[call.served]
        if call.sent >= 0:
            there_s = self._there_s(name, call)
            if there_s is None:
                longest_s = max(0.0, task.start_s - draft.builder.time_s[call.sent])
                there_s = min(longest_s, _median(self._there[window]))
            self._before(draft.starts[call.served], self._travel(name, call.sent, there_s))
        asked = call.asked
        if asked is None:
            return
        end_s = asked.parts[-1].end_s
        if end_s <= asked.start_s:
            back_s = min(max(0.0, end_s - task.end_s), _median(self._back[window]))
        else:
            back_s = max(0.0, end_s - task.end_s)
        draft.builder.before[asked.end].append(asked.start)
        arrived = self._travel(name, draft.ends[call.served], back_s, asked.end)
        draft.builder.before[asked.end].append(arrived)

    def _travel(self, name: str, moment: int, seconds: float, task_of: int = -1) -> int:
        """Add the way of a message that leaves at a moment; return the one of its arrival."""
        builder = self._draft.builder
        is_near = self._draft.is_near(*ends_of(name))
        latency_s, task = min(seconds, self._latency_s(is_near)), builder.tasks[moment]
        if task_of >= 0:
            task = builder.tasks[task_of]
        left_s = builder.time_s[moment]
        kinds = ("inside", "inside") if is_near else ("latency", "wire")
        moving = builder.add(left_s + latency_s, NUMBER[kinds[0]], task, [moment])
        return builder.add(left_s + seconds, NUMBER[kinds[1]], task, [moving])

    def _latency_s(self, is_near: bool) -> float:
        """Return the latency of a link. In a trace of another version it may be elsewhere: 0."""
        header = self._draft.trace.header
        if header.cluster is None:
            return 0.0 if is_near else header.clocks.latency_s
        link = header.cluster.get("inside" if is_near else "network")
        latency_s = link.get("latency_s") if isinstance(link, dict) else None
        return max(0.0, float(latency_s)) if isinstance(latency_s, int | float) else 0.0

    def _tie_alone(self, asked: Asked) -> None:
        """Keep the parts of a call that no other rank has served as they are."""
        builder, here = self._draft.builder, asked.start
        task = builder.tasks[asked.end]
        for part in asked.parts[:-1]:
            here = builder.add(part.end_s, _kind(part), task, [here])
        builder.classes[asked.end] = _kind(asked.parts[-1])
        builder.before[asked.end].append(here)


def _kind(part: Part) -> int:
    if part.kind == "wait":
        return NUMBER["between"]
    return _OF_PARTS.get(part.kind, NUMBER["work"])


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) if seconds else 0.0


def ends_of(name: str) -> tuple[int, int]:
    """Return caller and owner of a call; -1 and -2 if the name is no such id.

    >>> ends_of("calls 0-3.8:2>1:17")
    (2, 1)
    """
    pieces = name.split(":")
    caller, _, owner = (pieces[-2] if len(pieces) > 2 else "").partition(">")
    if caller.isdecimal() and owner.isdecimal():
        return int(caller), int(owner)
    return -1, -2
