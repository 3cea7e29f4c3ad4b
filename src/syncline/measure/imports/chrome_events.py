"""The events of a Chrome trace that torch.profiler exported: checked, and in order of time."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.measure.imports.source import MOST_S, Source

_PER_S = 1e6
_MOST = 1e18
"""Microseconds since any epoch; also false for what is not finite."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Event:
    """Something that took time; times are in seconds."""

    number: int
    """Its place among the file's events."""
    name: str
    thread: tuple[Any, Any]
    start_s: float
    duration_s: float
    about: Mapping[str, Any]
    inside: list[Event] = field(default_factory=list)
    """For an operation: those that it calls."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s

    @property
    def sequence(self) -> int | None:
        """The number that ties a backward function to its operation in forward."""
        found = self.about.get("Sequence number")
        return found if type(found) is int and found >= 0 else None

    @property
    def external(self) -> int | None:
        """The number by which a device's work names the operation that started it."""
        found = self.about.get("External id")
        return found if type(found) is int else None

    def everything(self) -> Iterator[Event]:
        """Yield the event and all inside it, in order of their start."""
        left = [self]  # no recursion: a damaged trace may nest thousands
        while left:
            one = left.pop()
            yield one
            left += reversed(one.inside)


@dataclass(frozen=True)
class Events:
    """The events of a trace, by kind."""

    source: Source
    operations: tuple[Event, ...]
    """Those that no other operation calls, in order of their start."""
    modules: tuple[Event, ...]
    """Calls of modules, recorded with with_stack=True."""
    marks: tuple[Event, ...]
    """Steps of the profiler and of optimizers, loading of batches."""
    on_device: tuple[Event, ...]

    def error(self, event: Event, found: str, rule: str, fix: str = "") -> Exception:
        at = _place_of(self.source, event.number)
        return self.source.error(at, found, rule, fix or RECORD_AGAIN)


RECORD_AGAIN = "Record it as docs/measure.md says."


def read_events(source: Source) -> Events:
    """Parse a trace; raise ConfigError for what is damaged."""
    found = _list_of_events(source)
    by_kind: dict[str, list[Event]] = {"operation": [], "module": [], "mark": [], "device": []}
    for number, one in enumerate(found):
        kind = _kind_of(one) if isinstance(one, dict) else "broken"
        if kind == "broken":
            raise _broken(source, number, "got no event", "each event is an object with a name")
        if kind:
            by_kind[kind].append(_event(source, number, one))
    for events in by_kind.values():
        events.sort(key=lambda event: (event.start_s, -event.duration_s, event.number))
    return Events(
        source,
        tuple(_nest(by_kind["operation"])),
        tuple(by_kind["module"]),
        tuple(by_kind["mark"]),
        tuple(by_kind["device"]),
    )


def _list_of_events(source: Source) -> list[Any]:
    """Return the trace's events as they stand in the file."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number")

    try:
        found = json.loads(source.text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        rule = "a trace of torch.profiler is JSON"
        raise source.error(error.pos, _reason(error.msg), rule) from None
    except (ValueError, RecursionError) as error:
        why = str(error)[:80] if isinstance(error, ValueError) else "nested too deep"
        raise source.error(0, why, "a trace of torch.profiler is JSON") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise source.error(0, "there is no list traceEvents", "a trace of torch.profiler has one")
    return events


def _reason(words: str) -> str:
    """Return why the JSON is broken as words for a message."""
    words = words.removesuffix(" starting at").removesuffix(" at")
    return f"{words[:1].lower()}{words[1:80]}"


def _kind_of(one: dict[str, Any]) -> str:
    """Return what an event is for us; "" for what does not matter."""
    if one.get("ph") != "X":
        return ""
    name, category = one.get("name"), one.get("cat", "")
    if not isinstance(name, str) or not isinstance(category, str):
        return "broken"
    if category.lower() in _ON_DEVICE:
        return "device"
    if name.startswith("nn.Module: "):
        return "module"
    if re.match(r"ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)", name):
        return "mark"
    return "operation" if category.lower() in ("cpu_op", "operator") else ""


def _event(source: Source, number: int, one: dict[str, Any]) -> Event:
    start_s = _seconds(source, number, "ts", one.get("ts"))
    duration_s = _seconds(source, number, "dur", one.get("dur", 0))
    if not 0 <= duration_s <= MOST_S:
        raise _broken(source, number, f"its dur is {duration_s:g} s", "it is at most a day")
    about = one.get("args", {})
    if not isinstance(about, dict):
        raise _broken(source, number, "its args are no object", "args describe an event")
    thread = (str(one.get("pid")), str(one.get("tid")))
    return Event(number, one["name"], thread, start_s, duration_s, about)


def _seconds(source: Source, number: int, key: str, value: object) -> float:
    """Return a time of an event, which is given in microseconds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MOST:
        found = f"its {key} is {str(value)[:40]!r}"
        raise _broken(source, number, found, f"{key} is a number of microseconds")
    return value / _PER_S


def _broken(source: Source, number: int, found: str, rule: str) -> Exception:
    return source.error(_place_of(source, number), found, rule)


def _place_of(source: Source, number: int) -> int:
    """Return where in the text an event begins: only errors need it, so it is looked for then."""
    begin = re.search(r'"traceEvents"\s*:\s*\[', source.text) or re.search(r"\[", source.text)
    assert begin is not None
    at, decoder = begin.end(), json.JSONDecoder()
    blank = re.compile(r"[\s,]*")
    for left in range(number, -1, -1):
        between = blank.match(source.text, at)
        at = between.end() if between is not None else at
        if not left:
            break
        try:
            at = decoder.raw_decode(source.text, at)[1]
        except ValueError:  # a second "traceEvents": the last one counts
            return begin.start()
    return at


def _nest(events: Sequence[Event]) -> list[Event]:
    """Put operations inside those that call them; return the others. They are in order of time."""
    outer: list[Event] = []
    open_in: dict[tuple[Any, Any], list[Event]] = {}
    for event in events:
        stack = open_in.setdefault(event.thread, [])
        while stack and stack[-1].end_s <= event.start_s:
            stack.pop()
        (stack[-1].inside if stack else outer).append(event)
        stack.append(event)
    return outer


def innermost(modules: Sequence[Event], starts_s: Sequence[float], event: Event) -> Event | None:
    """Return the last module called before an event in whose call the event lies.

    `modules` are in order of their start; `starts_s` are these starts.
    """
    for at in range(bisect.bisect_right(starts_s, event.start_s) - 1, -1, -1):
        module = modules[at]
        if module.thread == event.thread and module.end_s >= event.end_s:
            return module
    return None
