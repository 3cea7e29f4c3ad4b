"""Samples of files to import, and how to damage them, for `fuzz_files.py` and tests.

A damaged file gives one clear line or a sane workload, never a traceback: `check_damaged`.
"""

from __future__ import annotations

import gzip
import math
import random
from collections.abc import Mapping
from pathlib import Path

from syncline import workload
from syncline.errors import ConfigError
from syncline.measure.imports import import_workload

TABLE = (Path(__file__).parents[1] / "examples" / "layers.txt").read_bytes()
LOG = b"""\
I0214 23:25:18.918774 37167 solver.cpp:60] Solver scaffolding done.
I0214 23:25:18.918774 37167 distributed.cpp:112] [0, 9408, 0, 0]
I0214 23:25:18.918795 37167 distributed.cpp:112] [1, 64, 0, 0]
I0214 23:25:18.918802 37167 distributed.cpp:112] [2, 4096, 0, 0]
I0214 23:25:29.142319 37187 distributed.cpp:112] [0, 9408, 14690.2, 404]
I0214 23:25:29.142325 37187 distributed.cpp:112] [1, 64, 14690.2, 132]
I0214 23:25:29.142325 37187 distributed.cpp:112] [2, 4096, 4008.8, 323]
"""
LOG_OF_MERGED = b"""\
I0215 13:53:13.350095 35781 distributed.cpp:112] [0, 9408, 14893.2, 15315, 641]
I0215 13:53:13.350116 35781 distributed.cpp:112] [1, 64, 14893.2, 0, 0]
I0215 13:53:13.350126 35781 distributed.cpp:112] [2, 4096, 4029.5, 3594, 0]
"""
PROFILE = b"""\
node1 -- Input -- forward_compute_time=18.962, backward_compute_time=0.000, \
activation_size=1024.000, parameter_size=0.000
node3 -- ReLU(inplace) -- forward_compute_time=0.361, backward_compute_time=0.214, \
activation_size=4096.000, parameter_size=0.000
node2 -- Linear(in_features=4, out_features=16, bias=True) -- forward_compute_time=1.5, \
backward_compute_time=2.5, activation_size=4096.000, parameter_size=320.000
node4 -- Add(inplace) -- forward_compute_time=0.250, backward_compute_time=0.000, \
activation_size=4096.000, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode2 -- node4"""


def _event(name, start, duration, category="cpu_op", thread=7, **args):
    fields = f'"name":"{name}","cat":"{category}","pid":1,"tid":{thread},"ts":{start}'
    about = ",".join(f'"{key.replace("_", " ")}":{value}' for key, value in args.items())
    return f'{{"ph":"X",{fields},"dur":{duration},"args":{{{about}}}}}'


BACKWARD = "autograd::engine::evaluate_function: "
GRADIENT = "torch::autograd::AccumulateGrad"


def _gradient(start, duration, shape, **args):
    """Return both events of a gradient that is added up."""
    types = {"Input_Dims": f"[{shape}]", "Input_type": '["float"]'}
    return [
        _event(f"{BACKWARD}{GRADIENT}", start, duration, **args),
        _event(GRADIENT, start + 0.5, duration - 1, **types),
    ]


def make_trace(*more: str, extra=0) -> bytes:
    """Return a trace of one step of two layers; `extra` shifts the sequence numbers."""
    events = [
        '{"ph":"M","name":"process_name","pid":1,"tid":7,"args":{"name":"python"}}',
        _event("enumerate(DataLoader)#_Iter.__next__", 1000, 50, "user_annotation"),
        _event("nn.Module: Linear_0", 1095, 120, "python_function"),
        _event("aten::linear", 1100, 100, Sequence_number=extra, External_id=1),
        _event("aten::t", 1110, 10, Sequence_number=extra),
        _event("aten::addmm", 1130, 60, Sequence_number=extra + 1, External_id=2),
        _event("aten::relu", 1300, 20, Sequence_number=extra + 2, External_id=3),
        _event("aten::conv2d", 1400, 30, Sequence_number=extra + 3, External_id=4),
        _event(f"{BACKWARD}ConvolutionBackward0", 2000, 70, Sequence_number=extra + 3, Fwd=1),
        *_gradient(2080, 10, "[2, 3, 5, 5]"),
        _event(f"{BACKWARD}ReluBackward0", 2100, 15, Sequence_number=extra + 2),
        _event(f"{BACKWARD}AddmmBackward0", 2200, 80, Sequence_number=extra + 1, External_id=5),
        *_gradient(2290, 5, "[16]"),
        _event(f"{BACKWARD}TBackward0", 2300, 7, Sequence_number=extra),
        *_gradient(2310, 6, "[16, 4]"),
        _event("Optimizer.step#SGD.step", 2400, 99, "user_annotation"),
        _event("aten::add_", 2410, 9),
        *more,
    ]
    lines = ",\n".join(events)
    return f'{{"schemaVersion": 1,\n"traceEvents": [\n{lines}\n]}}'.encode()


SAMPLES: Mapping[str, tuple[str, bytes]] = {
    "table": ("layer-table", TABLE),
    "log": ("bcaffe", LOG),
    "log of merged exchanges": ("bcaffe", LOG_OF_MERGED),
    "profile": ("pipedream", PROFILE),
    "trace": ("torch-profiler", make_trace()),
    "compressed trace": ("torch-profiler", gzip.compress(make_trace(), mtime=0)),
}
PIECES = [
    *(b"", b" ", b"\n", b"-", b"-1", b"nan", b"inf", b"1e999", b"9" * 400, b"1e-999", b"\x00"),
    *(
        b"\xff",
        b"\xe2\x82\xac",
        b"[",
        b"]",
        b"{",
        b'"',
        b",",
        b"#",
        b"\t",
        b"null",
        b"true",
        b"1_0",
    ),
]


def damage(sample: bytes, draw: random.Random) -> bytes:
    """Return a sample with one to three changes: cut, bytes changed, pieces moved or put in."""
    data = bytearray(sample)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        to = min(len(data), at + draw.choice((0, 1, 1, 2, 5, 40)))
        match draw.randrange(5):
            case 0:
                del data[at:]
            case 1:
                data[at:to] = bytes(draw.randrange(256) for _ in range(to - at))
            case 2:
                data[at:to] = draw.choice(PIECES)
            case 3:
                data[at:at] = data[draw.randrange(len(data) + 1) :][: draw.randint(1, 200)]
            case _:
                data[at:to] = b""
    return bytes(data)


def check_damaged(path: Path, data: bytes, format: str | None) -> bool:
    """Import bytes from a file; return whether it was refused, in one line that names it."""
    path.write_bytes(data)
    try:
        _, found = import_workload(path, format=format, samples=8)
    except ConfigError as error:
        said = str(error)
        assert said.startswith(str(path)), said
        assert said.isprintable(), said
        assert len(said) < 600, said
        return True
    check_sane(found.workload, path.with_suffix(".json"))
    return False


def check_sane(found: workload.Workload, path: Path) -> None:
    """Assert that a workload can be simulated: it is written, and read as it was."""
    total_s = found.forward_s + found.backward_s + found.input_s
    assert math.isfinite(total_s)
    assert total_s > 0
    assert all(one.forward_s >= 0 <= one.backward_s for one in found.layers)
    assert found.size_bytes == sum(size.size_bytes for size in found.parameters) > 0
    names = {one.name for one in found.layers}
    assert len(names) == len(found.layers)
    assert {size.layer for size in found.parameters} <= names
    workload.write(found, path)
    assert workload.read(path) == found
