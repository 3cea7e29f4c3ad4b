"""A fuzzer of traces, clusters, workloads and imports: `python tests/fuzz_files.py 60`.

A damaged file is refused in one line that names it, or read as something that gives sane numbers;
never a traceback, never an endless or negative time. `tests/test_fuzz.py` runs it, for about a
minute.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.dataset import pack

from fuzz_imports import SAMPLES, check_damaged, damage
from simulated import trace_of
from syncline import dataset, workload
from syncline.cluster import cluster_of
from syncline.cluster_file import cluster_to_toml, read_cluster
from syncline.config import ClusterSettings
from syncline.errors import ConfigError
from syncline.measure.imports import FORMATS, import_workload
from syncline.perf.breakdown import PARTS
from syncline.perf.explain import explain, in_words
from syncline.perf.numbers import to_json_dict
from syncline.perf.trace import Trace
from syncline.presets import PRESETS
from syncline.sim.run import simulate

Check = Callable[[Path, bytes], bool]
"""Reads a damaged file; returns whether it was refused, and fails if that was not done well."""

CLUSTER = b"""\
format = "syncline-cluster"
version = 1
name = "mine"
base = "10gbit"
ranks_per_machine = 2
cores = 8
[network]
latency_s = 30e-6
rate_bytes_per_s = {value = 1.15e9, low = 1.1e9, high = 1.17e9, source = "iperf3"}
nominal_bytes_per_s = 1.25e9
duplex = "half"
rates = [[65536, 0.6e9], [1048576, 1.1e9]]
[inside]
latency_s = 10e-6
rate_bytes_per_s = 11e9
[copies]
latency_s = 0
rate_bytes_per_s = 6e9
"""


def check_trace(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    with _refused(path) as refusal:
        found = explain(Trace.read(path), str(path))
    if refusal:
        return True
    numbers = to_json_dict(found)
    assert in_words(found)
    assert [*numbers["parts_s"]] == [*PARTS]
    _check_finite(numbers)
    return False


def check_cluster(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    with _refused(path) as refusal:
        facts = read_cluster(path)
    if refusal:
        return True
    cluster = cluster_of(ClusterSettings(), ranks=4, machines=2, facts=facts)
    _check_simulated(_small_workload(), cluster)
    return False


def check_workload(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    with _refused(path) as refusal:
        found = workload.read(path)
    if refusal:
        return True
    _check_simulated(found, cluster_of(ClusterSettings(), ranks=2))
    return False


def check_dataset(path: Path, data: bytes) -> bool:
    """Read every member of an archive, which is compressed here: its checksum is right."""
    path.write_bytes(gzip.compress(data, 1))
    with _refused(path) as refusal:
        found = dataset.load(path)
        for case in found.cases:
            _check_finite([found.steps_s(case), found.latency_s()])
            assert found.trace(case).tasks
            assert found.workload(case).layers
            assert found.links().network
            assert found.job(case)
    return bool(refusal)


def _packed(folder: Path) -> bytes:
    """Return a small data set, not compressed: damage then comes to its members, too."""
    case = dataset.Case("1gbit", "even", 2, "server")
    measured = folder / "measured"
    (measured / "traces").mkdir(parents=True, exist_ok=True)
    run = dataset.Run(case, 0.1, 10.0, 400.0, 0.1)
    (measured / dataset.RUNS).write_text(json.dumps(run) + "\n")
    (measured / dataset.LATENCY).write_text('{"latency_s": 5e-5}')
    (measured / dataset.LINKS).write_bytes(CLUSTER)
    workload.write(_small_workload(), measured / case.layers_names[1])
    (measured / case.job_name).write_text("[model]\n")
    trace_of(folder, "server", ranks=2, steps=2).write(measured / case.trace_name)
    return gzip.decompress(pack(measured))


def check_import(path: Path, data: bytes) -> bool:
    """Take the damaged bytes in some format, which they themselves choose."""
    is_whole = any(data == sample for _, sample in SAMPLES.values())
    wanted = (None, None, *FORMATS)[len(data) % (2 + len(FORMATS))]
    return check_damaged(path, data, None if is_whole else wanted)


@contextlib.contextmanager
def _refused(path: Path):
    """Give a list, which a ConfigError of the block is put into, if it says what it must."""
    found: list[str] = []
    try:
        yield found
    except ConfigError as error:
        found.append(str(error))
        assert found[0].startswith(str(path)), found[0]
        assert found[0].isprintable(), found[0]
        assert len(found[0]) < 800, found[0]


def _check_simulated(found: workload.Workload, cluster: Any) -> None:
    outcome = simulate(found, cluster, steps=2)
    assert 0 <= outcome.step_s < math.inf, outcome.step_s
    assert 0 <= outcome.alone_s < math.inf, outcome.alone_s
    assert 0 <= outcome.exposed_communication <= 1 + 1e-9, outcome.exposed_communication


def _check_finite(value: Any) -> None:
    if isinstance(value, float):
        assert math.isfinite(value), value
    elif isinstance(value, Mapping):
        for one in value.values():
            _check_finite(one)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            _check_finite(one)


def _small_workload() -> workload.Workload:
    layers = [workload.Layer(str(number), 40_000, 0.001, 0.002) for number in range(3)]
    return workload.Workload("small", tuple(layers), 0.001)


def _imported(folder: Path) -> bytes:
    path = folder / "table"
    path.write_bytes(SAMPLES["table"][1])
    workload.write(import_workload(path, samples=8)[1].workload, folder / "imported")
    return (folder / "imported").read_bytes()


def samples(folder: Path) -> dict[str, tuple[Check, list[bytes]]]:
    """Return, for each kind of file, what checks it and files that are whole."""
    traces = [
        trace_of(folder, "synchronous", ranks=2, steps=2).to_bytes(),
        trace_of(folder, "server", ranks=3, steps=2).to_bytes(),
    ]
    workload.write(_small_workload(), folder / "workload")
    workloads = [(folder / "workload").read_bytes(), _imported(folder)]
    clusters = [CLUSTER, cluster_to_toml(PRESETS["k80-10gbe"]).encode()]
    return {
        "trace": (check_trace, traces),
        "cluster": (check_cluster, clusters),
        "workload": (check_workload, workloads),
        "data set": (check_dataset, [_packed(folder)]),
        "import": (check_import, [sample for _, sample in SAMPLES.values()]),
    }


def fuzz(kind: str, seed: int, *, files: int = 1 << 60, seconds: float = 1e9) -> tuple[int, int]:
    """Damage so many files, or for some seconds; return how many were tried and refused."""
    draw, tried, refused = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check, whole = samples(folder)[kind]
        for sample in whole:
            assert not check(folder / "file", sample), f"{kind}: a whole file is refused"
        ends = time.monotonic() + seconds
        while tried < files and time.monotonic() < ends:
            data = damage(draw.choice(whole), draw)
            try:
                refused += check(folder / "file", data)
            except BaseException:
                print(f"{kind}, seed {seed}, file {tried}: {data!r}", file=sys.stderr)
                raise
            tried += 1
    return tried, refused


KINDS = ("trace", "cluster", "workload", "data set", "import")


if __name__ == "__main__":
    for kind in KINDS:
        seconds = float(sys.argv[1]) / len(KINDS)
        tried, refused = fuzz(kind, int(time.time()), seconds=seconds)
        print(f"{kind}: files tried: {tried}, refused: {refused}")
