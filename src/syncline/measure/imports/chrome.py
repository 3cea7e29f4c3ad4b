"""Chrome traces of torch.profiler: layers from what autograd did with their parameters.

A layer is an operation in whose backward gradients of parameters appear, with the operations after
it that have none. What is needed: record_shapes=True, for the sizes of parameters, and whole steps
of forward and backward. with_stack=True names layers after their modules. With a schedule and
profiler.step() times are medians over the recorded steps; without, the trace must hold one step.

A layer's time is that of its operations, or of what they started on a device, if the trace has
that. Time between operations, which is mostly Python's, is left out, and so is the optimizer's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from syncline.measure.imports.assemble import Imported, ImportedLayer, Parameter, assemble
from syncline.measure.imports.chrome_events import Event, Events, innermost, read_events
from syncline.measure.imports.source import MOST_BYTES, Source

_BACKWARD = "autograd::engine::evaluate_function: "
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
}


@dataclass
class _Step:
    """One step: operations of forward in order, backward functions in order."""

    mark: Event | None
    forward: list[Event]
    backward: list[Event]
    input_s: float
    """Time in which the loop waited for its batch."""


@dataclass
class _Work:
    """What an operation of forward does in its step."""

    forward_s: float
    backward_s: float = 0.0
    parameters: list[Parameter] = field(default_factory=list)


def is_trace(text: str) -> bool:
    """Tell whether a file may be a trace: it is JSON."""
    return text.lstrip()[:1] in ("{", "[")


def read_trace(source: Source, samples: int | None) -> Imported:
    """Return the workload of a trace."""
    events = read_events(source)
    started = _device_seconds(events)
    steps = _steps(events)
    found = [_layers_of(events, step, started) for step in steps]
    for step, layers in zip(steps[1:], found[1:], strict=True):
        if _shape_of(layers) != _shape_of(found[0]):
            assert step.mark is not None
            rule = "all steps have the same layers"
            raise events.error(step.mark, f"{step.mark.name} has other layers", rule)
    layers = [_median_of(list(same)) for same in zip(*found, strict=True)]
    input_s = statistics.median(step.input_s for step in steps)
    notes = _notes(steps, layers, has_device=bool(started))
    return assemble(source, "profile", layers, samples, input_s=input_s, notes=notes)


def _notes(steps: list[_Step], layers: list[ImportedLayer], *, has_device: bool) -> list[str]:
    notes = [f"times are medians of {len(steps)} steps" if len(steps) > 1 else "one step"]
    marks = [step.mark.duration_s for step in steps if step.mark is not None]
    if marks and not has_device:
        counted_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        share = counted_s / statistics.median(marks)
        notes.append(f"the layers' operations take {share:.0%} of a step; the rest is left out")
    if has_device:
        notes.append("times are those of the device")
    return notes


def _device_seconds(events: Events) -> dict[int, float]:
    """Return how long the device worked, by the operation that started it."""
    found: dict[int, float] = {}
    for event in events.on_device:
        if event.external is not None:
            found[event.external] = found.get(event.external, 0.0) + event.duration_s
    if events.on_device and not found:
        found_text = f"{events.on_device[0].name} has no External id"
        rule = "it says which operation started it"
        raise events.error(events.on_device[0], found_text, rule)
    return found


def _steps(events: Events) -> list[_Step]:
    """Cut a trace into steps; raise ConfigError if one has no backward, or two."""
    marks = [mark for mark in events.marks if mark.name.startswith("ProfilerStep#")]
    updates = [mark for mark in events.marks if mark.name.startswith("Optimizer.step#")]
    if not marks and len(updates) > 1:
        found = f"{len(updates)} steps of an optimizer, and none of the profiler"
        fix = "Give the profiler a schedule and call its step() after each step."
        raise events.error(updates[1], found, "several steps are told apart by ProfilerStep", fix)
    steps = [_step(events, mark) for mark in marks] or [_step(events, None)]
    for step in steps:
        if not step.backward:
            rule = "a step has forward and backward"
            if step.mark is not None:
                raise events.error(step.mark, f"{step.mark.name} has no backward", rule)
            raise events.source.error(0, "no operation is one of backward", rule)
    return steps


def _step(events: Events, mark: Event | None) -> _Step:
    """Return what lies in one step of the profiler, or in the whole trace."""

    def lies_in(event: Event, outer: Event | None) -> bool:
        return outer is None or outer.start_s <= event.start_s < outer.end_s

    inside = [one for one in events.operations if lies_in(one, mark)]
    apart = [
        one
        for one in events.marks
        if not one.name.startswith("ProfilerStep#") and lies_in(one, mark)
    ]
    backward = [one for one in inside if one.name.startswith(_BACKWARD)]
    begin_s = backward[0].start_s if backward else 0.0
    forward = [
        one
        for one in inside
        if one.start_s < begin_s
        and not any(lies_in(one, other) and one.thread == other.thread for other in apart)
    ]
    loads = [one.duration_s for one in apart if one.name.startswith("enumerate(DataLoader)")]
    _check_one_pass(events, inside, backward)
    return _Step(mark, forward, backward, sum(loads))


def _check_one_pass(events: Events, inside: Sequence[Event], backward: Sequence[Event]) -> None:
    """Refuse a step in which forward begins again after backward."""
    wanted = {one.sequence for one in backward} - {None}
    for one in inside:
        if not backward or one.start_s < backward[0].start_s or one.name.startswith(_BACKWARD):
            continue
        if one.sequence in wanted and one.end_s <= backward[-1].start_s:
            later = [other for other in backward if other.sequence == one.sequence]
            if later[-1].start_s > one.start_s:
                found, rule = f"{one.name} comes after backward", "a step has one forward"
                fix = "Record one step, or give the profiler a schedule and call its step()."
                raise events.error(one, found, rule, fix)


def _layers_of(events: Events, step: _Step, started: dict[int, float]) -> list[ImportedLayer]:
    """Return a step's layers in the order of their forward."""

    def time_s(event: Event) -> float:
        if not started:
            return event.duration_s
        numbers = (one.external for one in event.everything())
        return sum(started.get(number, 0.0) for number in numbers if number is not None)

    works = {one.number: _Work(time_s(one)) for one in step.forward}
    owner: dict[int, Event] = {}
    for one in step.forward:
        for called in one.everything():
            if called.sequence is not None:
                owner[called.sequence] = one  # the last operation with a number has made it
    current: Event | None = None
    is_known = False
    for function in step.backward:
        if function.sequence is not None:
            is_known = function.sequence in owner
            current = owner.get(function.sequence, current)
        if not is_known and function.name.endswith(_ACCUMULATE):
            rule = "a parameter's operation in forward comes before its gradient"
            raise events.error(function, "its forward is not in the trace", rule)
        if current is not None:
            work = works[current.number]
            work.backward_s += time_s(function)
            if function.name.endswith(_ACCUMULATE):
                name = f"parameter{len(work.parameters)}"
                work.parameters.append(_parameter(events, function, name))
    return _gather(events, step, works)


def _parameter(events: Events, function: Event, name: str) -> Parameter:
    """Return the parameter whose gradient a function adds, from the gradient's shape and type."""
    for one in function.everything():
        shapes, types = one.about.get("Input Dims"), one.about.get("Input type")
        if one.name != _ACCUMULATE or not shapes or not types:
            continue
        shape = shapes[0] if isinstance(shapes, list) else None
        kind = types[0] if isinstance(types, list) else None
        dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
        count = _count(shape)
        if count is None or dtype is None:
            found = f"a gradient has shape {str(shape)[:40]} and type {str(kind)[:20]}"
            rule = f"it has elements of type {', '.join(_DTYPES)}"
            raise events.error(function, found, rule)
        return Parameter(name, count, dtype)
    rule = "the sizes of parameters come from shapes"
    fix = "Record the trace with record_shapes=True."
    raise events.error(function, "a gradient's shape is not in the trace", rule, fix)


def _count(shape: object) -> int | None:
    """Return how many elements a shape has; None if it is no shape, or an empty one."""
    count = 1
    for size in shape if isinstance(shape, list) else [0]:
        if type(size) is not int or not 1 <= size <= MOST_BYTES:
            return None
        count *= size
    return count if count <= MOST_BYTES else None


def _gather(events: Events, step: _Step, works: dict[int, _Work]) -> list[ImportedLayer]:
    """Give operations without parameters to the layer before them, the first ones to the first."""
    starts_s = [module.start_s for module in events.modules]
    layers: list[ImportedLayer] = []
    module: Event | None = None
    names: dict[str, int] = {}
    waiting = _Work(0.0)
    for one in step.forward:
        work = works[one.number]
        if work.parameters:
            inside = innermost(events.modules, starts_s, one)
            if not layers or inside is None or inside is not module:
                name = one.name if inside is None else inside.name
                layers.append(ImportedLayer(_name(name, names), 0.0, 0.0))
            module = inside
        if not layers:
            waiting.forward_s += work.forward_s
            waiting.backward_s += work.backward_s
            continue
        layer = layers[-1]
        layer.forward_s += work.forward_s + waiting.forward_s
        layer.backward_s += work.backward_s + waiting.backward_s
        waiting = _Work(0.0)
        count = len(layer.parameters)
        for number, parameter in enumerate(work.parameters):
            size = (parameter.num_elements, parameter.dtype)
            layer.parameters.append(Parameter(f"parameter{count + number}", *size))
    return layers


def _name(name: str, names: dict[str, int]) -> str:
    """Return a layer's name: its module, or its operation and a number."""
    is_module = name.startswith("nn.Module: ")
    short = name.removeprefix("nn.Module: ").rpartition("::")[2] or "layer"
    names[short] = names.get(short, 0) + 1
    return short if is_module and names[short] == 1 else f"{short}-{names[short]}"


def _shape_of(layers: list[ImportedLayer]) -> list[tuple[str, list[Parameter]]]:
    return [(layer.name, layer.parameters) for layer in layers]


def _median_of(same: list[ImportedLayer]) -> ImportedLayer:
    """Return a layer with the medians of its times in several steps."""
    return ImportedLayer(
        same[0].name,
        statistics.median(layer.forward_s for layer in same),
        statistics.median(layer.backward_s for layer in same),
        same[0].parameters,
    )
