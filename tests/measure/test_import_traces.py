"""Imports of torch.profiler's traces: of a real one, and of events worked out by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from fuzz_imports import BACKWARD, _event, make_trace
from syncline.errors import ConfigError
from syncline.measure.imports import import_workload
from syncline.sim.run import simulate
from syncline.workload import Layer
from worlds import cluster


def imported(folder, data):
    path = folder / "trace.json"
    path.write_bytes(data)
    return import_workload(path, samples=8)[1]


def refusal(folder, data):
    with pytest.raises(ConfigError) as caught:
        imported(folder, data)
    said = str(caught.value)
    assert said.isprintable()
    return said.removeprefix(f"{folder / 'trace.json'}, ")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.tied = nn.Linear(144, 144, bias=False)
        self.head = nn.Linear(144, 10).to(torch.float64)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(1)
        x = self.tied(self.tied(x)).relu()
        return self.head(x.double())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Traces of three steps, by their options; a slow loader is read each time."""
    model, found = Net(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(torch.ones(32, 3, 8, 8), batch_size=8)
    for name, options in {
        "stack": {"record_shapes": True, "with_stack": True},
        "plain": {"record_shapes": True},
        "no shapes": {},
        "no steps": {"record_shapes": True, "schedule": None},
    }.items():
        options = {"schedule": schedule(wait=0, warmup=1, active=3, repeat=1)} | options
        with profile(activities=[ProfilerActivity.CPU], acc_events=True, **options) as recording:
            for batch in batches:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                recording.step()
        found[name] = tmp_path_factory.getbasetemp() / f"{name}.json"
        recording.export_chrome_trace(str(found[name]))
    return found


SIZES = {"Conv2d_0": 448, "BatchNorm2d_0": 32, "Linear_0": 82944, "Linear_1": 11600}


def test_a_recorded_trace_has_the_layers_of_the_model(recorded):
    _, found = import_workload(recorded["stack"], samples=8)
    made = found.workload
    # The second use of the tied layer counts for it, its gradient appears once.
    assert {layer.name: layer.size_bytes for layer in made.layers} == SIZES
    assert [size.dtype for size in made.parameters] == ["float32"] * 5 + ["float64"] * 2
    assert [size.num_elements for size in made.parameters][:2] == [108, 4]
    assert all(0 < layer.forward_s < 1 and 0 < layer.backward_s < 1 for layer in made.layers)
    assert 0 < made.input_s < 1
    assert found.notes[0] == "times are medians of 3 steps"
    assert simulate(made, cluster(2, rate=1e9), steps=2).step_s > made.forward_s


def test_without_stacks_layers_have_the_names_of_operations(recorded):
    _, found = import_workload(recorded["plain"])
    sizes = {layer.name: layer.size_bytes for layer in found.workload.layers}
    assert list(sizes.values()) == list(SIZES.values())
    assert list(sizes) == ["conv2d-1", "batch_norm-1", "linear-1", "linear-2"]


def test_the_times_of_layers_are_those_of_their_operations(recorded, tmp_path):
    """One step, counted once more without nesting: operations by name, functions of backward."""
    events = [
        one for one in json.loads(recorded["plain"].read_text())["traceEvents"] if "ts" in one
    ]
    step = next(one for one in events if one["name"].startswith("ProfilerStep#"))
    inside = [one for one in events if step["ts"] <= one["ts"] < step["ts"] + step["dur"]]
    backward = [one for one in inside if one["name"].startswith(BACKWARD)]
    begin, waits = min(one["ts"] for one in backward), []
    made = imported(tmp_path, json.dumps(inside).encode()).workload
    for one in inside:
        if one["name"].startswith("enumerate(DataLoader)"):
            waits.append(one)
    names = [f"aten::{name}" for name in ("conv2d", "batch_norm", "relu", "flatten", "linear")]
    forward = [one for one in inside if one["name"] in names and one["ts"] < begin]
    most = begin - waits[-1]["ts"] - waits[-1]["dur"]
    assert made.backward_s * 1e6 == pytest.approx(sum(one["dur"] for one in backward))
    assert sum(one["dur"] for one in forward) < made.forward_s * 1e6 < most
    assert made.input_s * 1e6 == pytest.approx(sum(one["dur"] for one in waits))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no shapes", "a gradient's shape is not in the trace, but the sizes of parameters come"),
        ("no steps", "4 steps of an optimizer, and none of the profiler, but several steps are"),
    ],
)
def test_a_trace_that_lacks_something_is_refused_with_what_to_do(recorded, name, said):
    with pytest.raises(ConfigError, match=said):
        import_workload(recorded[name])


# -- by hand ---------------------------------------------------------------------------------------


def test_events_by_hand(tmp_path):
    made = imported(tmp_path, make_trace()).workload
    # relu has no parameters: it counts for the linear layer before it, forward and backward.
    assert made.layers == (
        Layer(
            "Linear_0", 4 * 80, pytest.approx(120e-6), pytest.approx((15 + 80 + 5 + 7 + 6) / 1e6)
        ),
        Layer("conv2d-1", 4 * 150, pytest.approx(30e-6), pytest.approx(80e-6)),
    )
    assert made.input_s == pytest.approx(50e-6)
    assert [size.num_elements for size in made.parameters] == [16, 64, 150]


def test_what_operations_started_on_a_device_is_their_time(tmp_path):
    kernels = [
        _event("sgemm", 1500, 400, "kernel", thread=99, External_id=2),
        _event("relu_kernel", 1900, 30, "kernel", thread=99, External_id=3),
        _event("copy", 1950, 20, "gpu_memcpy", thread=99, External_id=4),
        _event("dgrad", 2600, 700, "kernel", thread=99, External_id=5),
        _event("sgd", 3500, 900, "kernel", thread=99, External_id=77),  # nobody's in a layer
    ]
    made = imported(tmp_path, make_trace(*kernels)).workload
    assert [(layer.forward_s, layer.backward_s) for layer in made.layers] == [
        (pytest.approx(430e-6), pytest.approx(700e-6)),
        (pytest.approx(20e-6), 0.0),
    ]


def test_what_the_loader_does_is_no_layer_s(tmp_path):
    loads = _event("aten::stack", 1010, 20)
    assert imported(tmp_path, make_trace(loads)) == imported(tmp_path, make_trace())


def test_operations_of_one_call_of_a_module_are_one_layer(tmp_path):
    call = _event("nn.Module: Block_0", 1090, 400, "python_function")
    whole = make_trace(call).replace(b"nn.Module: Linear_0", b"nn.Module")
    (layer,) = imported(tmp_path, whole).workload.layers
    assert (layer.name, layer.size_bytes) == ("Block_0", 4 * (80 + 150))
    assert layer.forward_s == pytest.approx(150e-6)


def test_a_step_is_cut_out_and_medians_are_taken(tmp_path):
    one = json.loads(make_trace())["traceEvents"]
    events = []
    for number, factor in enumerate((1, 9, 2)):
        move = 10_000 * number
        for event in one:
            if event["ph"] == "X":
                args = dict(event["args"])
                if "Sequence number" in args:
                    args["Sequence number"] += 10 * number
                is_long = event["name"] == "aten::conv2d"
                dur = event["dur"] * factor if is_long else event["dur"]
                events.append(event | {"ts": event["ts"] + move, "dur": dur, "args": args})
        name = f"ProfilerStep#{number}"
        events.append({"ph": "X", "name": name, "ts": 900 + move, "dur": 2000, "cat": "x"})
    found = imported(tmp_path, json.dumps(events).encode())
    assert found.workload.layers[1].forward_s == pytest.approx(60e-6)
    assert found.notes[0] == "times are medians of 3 steps"
    del events[5]["name"]
    assert "got no event, but each event is an object" in refusal(
        tmp_path, json.dumps(events).encode()
    )


TRACE = make_trace()
ARGS = b'{"Sequence number":0,"External id":1}'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (TRACE[:-40], "line 22, column"),
        (TRACE.replace(b'"dur":100', b'"dur":1e99'), "line 6, column 1: its dur is '1e+99', but"),
        (TRACE.replace(b'"dur":100', b'"dur":-3'), "line 6, column 1: its dur is -3e-06 s, but it"),
        (
            TRACE.replace(b'"dur":100', b'"dur":true'),
            "line 6, column 1: its dur is 'True', but dur",
        ),
        (TRACE.replace(b'"dur":100', b'"dur":NaN'), "line 1, column 1: NaN is no number, but a"),
        (
            TRACE.replace(ARGS, b"[1]"),
            "line 6, column 1: its args are no object, but args describe",
        ),
        (
            TRACE.replace(b"[16, 4]", b"[16, -4]"),
            "line 19, column 1: a gradient has shape [16, -4]",
        ),
        (
            TRACE.replace(b'"float"', b'"int"'),
            "type int, but it has elements of type float, double",
        ),
        (TRACE.replace(b"Input Dims", b"x"), "line 12, column 1: a gradient's shape is not in the"),
        (
            TRACE.replace(b"traceEvents", b"events"),
            "line 1, column 1: there is no list traceEvents",
        ),
        (TRACE.replace(b"evaluate_function", b"x"), "no operation is one of backward, but a step"),
        (TRACE.replace(b"Sequence", b"S"), "line 12, column 1: its forward is not in the trace"),
        (
            make_trace(
                _event("aten::mul", 2072, 1, Sequence_number=50),
                _event(f"{BACKWARD}MulBackward0", 2350, 3, Sequence_number=50),
            ),
            "line 23, column 1: aten::mul comes after backward, but a step has one forward",
        ),
        (
            TRACE.replace(b'"Sequence number":1,"External id":5', b'"Sequence number":91'),
            "line 16, column 1: its forward is not in the trace",
        ),
        (make_trace(_event("k", 1500, 4, "kernel")), "line 23, column 1: k has no External id"),
        (
            b"[" * 100_000,
            "line 1, column 1: nested too deep, but a trace of torch.profiler is JSON",
        ),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path, data, said):
    assert said in refusal(tmp_path, data)
