"""Imports of layer tables, logs and profiles: worked out by hand, and damaged files."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from fuzz_imports import LOG, LOG_OF_MERGED, PIECES, PROFILE, SAMPLES, TABLE, check_damaged
from syncline.errors import ConfigError
from syncline.measure.imports import import_workload
from syncline.measure.imports.bcaffe import LoggedLayer, read_logged_layers
from syncline.measure.imports.source import Source
from syncline.sim.run import simulate
from syncline.sizes import Size
from syncline.workload import Layer
from worlds import cluster

TRACES = Path(__file__).parents[3] / "shared" / "traces"
"""Measured by others; beside the checkout where they are at hand."""


def imported(folder, data, **options):
    path = folder / "file"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return import_workload(path, **options)


def refusal(folder, data, **options):
    with pytest.raises(ConfigError) as caught:
        imported(folder, data, **options)
    return str(caught.value).removeprefix(f"{folder / 'file'}, ")


def test_a_table_of_layers_by_hand(tmp_path):
    format, found = imported(tmp_path, TABLE, samples=64)
    made = found.workload
    assert format == "layer-table"
    assert made.layers == (
        Layer("conv1", 139776, 5120.5e-6, 9870.25e-6),
        Layer("pool1", 0, 410e-6, 655e-6),
        Layer("conv2", 1229824, 9.4e-3, 18310e-6),
        Layer("fc", 16388000, 880e-6, 1790e-6),
    )
    assert (made.input_s, made.samples) == (1200e-6, 64)
    assert [size.name for size in made.parameters] == [
        "conv1.parameters",
        "conv2.parameters",
        "fc.parameters",
    ]
    assert "data: its 1.2 ms are input, not a layer" in found.notes


def test_columns_stand_where_the_header_says_and_times_have_the_unit_that_is_asked_for(tmp_path):
    text = "Size Backward Name Forward\n8 2 a 1\n\n0 0.5 b .25\r\n"
    _, found = imported(tmp_path, text, unit="ms")
    assert found.workload.layers == (Layer("a", 8, 1e-3, 2e-3), Layer("b", 0, 0.25e-3, 0.5e-3))
    _, plain = imported(tmp_path, "0 a 1 2 3 8\n1 b .25 .5 0 0", unit="s")
    assert plain.workload.layers == (Layer("a", 8, 1.0, 2.0), Layer("b", 0, 0.25, 0.5))


def test_a_log_s_last_dump_counts_and_backward_of_weight_and_bias_counts_once(tmp_path):
    format, found = imported(tmp_path, LOG, samples=32)
    made = found.workload
    assert format == "bcaffe"
    assert [(one.size_bytes, one.backward_s) for one in made.layers] == [
        (4 * 9472, pytest.approx(14690.2e-6)),
        (4 * 4096, pytest.approx(4008.8e-6)),
    ]
    assert made.forward_s == made.backward_s / 2
    assert made.parameters == (
        Size("layer0.weight", 0, 9408),
        Size("layer0.bias", 1, 64),
        Size("layer1.weight", 2, 4096),
    )
    assert any("forward is assumed" in note for note in found.notes)


def test_exchanges_of_a_log_are_there_for_comparisons():
    found = read_logged_layers(Source("x", LOG_OF_MERGED.decode()))
    assert found == (
        LoggedLayer((9408, 64), 14893.2e-6, 15315e-6, 641e-6),
        LoggedLayer((4096,), 4029.5e-6, 3594e-6, 0.0),
    )
    assert found[0].size_bytes == 4 * 9472


def test_a_profile_is_put_into_an_order_of_use(tmp_path):
    format, found = imported(tmp_path, PROFILE, samples=8)
    made = found.workload
    assert format == "pipedream"
    assert made.layers == (
        Layer("node2.Linear", 320, 1.5e-3, 2.5e-3, input_bytes=128, output_bytes=512),
        Layer("node3.ReLU", 0, 0.361e-3, 0.214e-3, input_bytes=512, output_bytes=512),
        Layer("node4.Add", 0, 0.25e-3, 0.0, input_bytes=1024, output_bytes=512),
    )
    assert (made.input_s, made.samples) == (pytest.approx(18.962e-3), 8)
    assert made.parameters == (Size("node2.Linear.parameters", 0, 80),)


def test_layers_without_parameters_send_nothing(tmp_path):
    """A workload without a list of parameters has one for every layer, also for pool1."""
    _, found = imported(tmp_path, TABLE)
    run = simulate(found.workload, cluster(2, rate=1e9), "wait_free", steps=2)
    assert run.layout["num_buckets"] == 3


def test_a_compressed_file_is_read(tmp_path):
    data = gzip.compress(PROFILE)
    assert imported(tmp_path, data) == imported(tmp_path, PROFILE)
    assert "its compressed data is damaged" in refusal(tmp_path, data[:-20])


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (
            TABLE.replace(b"9870.25", b"98x"),
            'line 5, column 21: got "98x", but the column',
        ),
        (TABLE.replace(b"9870.25", b"-1"), 'line 5, column 21: got "-1", but a time in the column'),
        (TABLE.replace(b"9870.25", b"1e300"), "is a number from 0 to 8.64e+10"),
        (TABLE.replace(b"9870.25", b"nan"), 'line 5, column 21: got "nan"'),
        (TABLE.replace(b"139776", b"13.5"), 'line 5, column 38: got "13.5", but a Size in bytes'),
        (TABLE.replace(b"139776", b"139777"), "line 5, column 38: got 139777, but parameters are"),
        (TABLE.replace(b"139776", b""), "line 5, column 38: the line ends, but a Size in bytes"),
        (TABLE.replace(b"139776", b"139776 7"), 'line 5, column 45: got "7", but a line has 6'),
        (TABLE.replace(b"pool1", b"conv1"), 'line 6, column 5: got "conv1", but each layer has a'),
        (TABLE.replace(b"Backward", b"Bakward"), 'line 3, column 21: got "Bakward", but the'),
        (TABLE.replace(b"Size", b""), "line 3, column 38: the line ends, but there must be a"),
        (TABLE[: TABLE.index(b"1   conv1")], "line 1, column 1: no layer has parameters"),
        (b"0 a 1 2 3 0", "line 1, column 1: no layer has parameters"),
        (b"0 a 0 0 0 8", "line 1, column 1: all layers together take 0 s"),
        (b"0 data 5 1 0 0\n1 a 1 1 1 4", "input has neither backward nor an exchange"),
        (LOG.replace(b"14690.2, 404]", b"14690.2, 404"), "line 5, column 72: the line ends, but"),
        (LOG.replace(b"[1, 64, 14", b"[3, 64, 14"), "line 6, column 51: got parameter 3, but"),
        (LOG.replace(b"[1, 64, 14", b"1, 64, 14"), "a line of a dump ends with a list in"),
        (LOG.replace(b"64, 14", b"0, 14"), 'line 6, column 54: got "0,", but a parameter has'),
        (LOG[: LOG.rindex(b"I0214")], "line 5, column 51: the dump has 2 parameters, but another"),
        (LOG[:-30], "line 7, column 43: the file ends in the middle of a line, but the last"),
        (b"\n".join(LOG.split(b"\n")[:4]) + b"\n", "line 2, column 51: all times of the dump"),
        (PROFILE.replace(b"=1.5,", b"=,"), 'line 3, column 84: got ",", but forward_compute_time'),
        (PROFILE.replace(b"node3 -- node4", b"node3 -- node9"), "line 7, column 11: got node9"),
        (PROFILE.replace(b"\tnode1 -- node2\n", b""), "line 3, column 1: no edge leads to node2"),
        (PROFILE.replace(b"node2 -- node4", b"node4 -- node2"), "2 depends on itself, but edges"),
        (PROFILE.replace(b"node3 -- ReLU", b"node2 -- ReLU"), "line 3, column 1: got node2 again"),
        (PROFILE[:300], "line 3, column 10: got"),
        (b"", "line 1, column 1: it is empty, but no format that is known begins like this"),
        (b"hello\n", 'line 1, column 1: it begins with "hello", but no format that is known'),
        (TABLE.replace(b"conv1", b"c\xffnv1"), "line 5, column 6: byte 0xff is not UTF-8, but"),
    ],
)
def test_a_damaged_file_is_refused_in_a_line_that_names_line_and_column(tmp_path, data, found):
    said = refusal(tmp_path, data)
    assert found in said
    assert said.isprintable()


def test_options_that_do_not_fit_are_refused(tmp_path):
    assert 'Did you mean "pipedream"?' in refusal(tmp_path, PROFILE, format="pipdream")
    assert "Choose from bcaffe, layer-table" in refusal(tmp_path, PROFILE, format="x")
    said = refusal(tmp_path, PROFILE, unit="us")
    assert said == (
        '--unit: got "us" for a pipedream file, but that format has a unit of its own.'
        " Leave it away."
    )
    assert 'Use "us", "ms" or "s".' in refusal(tmp_path, TABLE, unit="h")
    ready = '{"format": "syncline-workload", "version": 1, "name": "x"}'
    assert "this is a workload already" in refusal(tmp_path, ready)
    with pytest.raises(ConfigError, match=r"cannot be read \(is a directory\)"):
        import_workload(tmp_path)


@settings(max_examples=150)
@given(data=some.data())
def test_no_damage_gives_a_traceback(data, tmp_path_factory):
    """`fuzz_files.py` tries more of them in longer time."""
    format, sample = SAMPLES[data.draw(some.sampled_from(sorted(SAMPLES)))]
    at = data.draw(some.integers(0, len(sample)))
    to = at + data.draw(some.sampled_from([0, 1, 2, 30, len(sample)]))
    put_in = data.draw(some.sampled_from(PIECES) | some.binary(max_size=4))
    given_format = data.draw(some.sampled_from([None, format]))
    path = tmp_path_factory.getbasetemp() / "damaged"
    check_damaged(path, sample[:at] + put_in + sample[to:], given_format)


def test_no_sample_is_refused_while_it_is_whole(tmp_path):
    for format, sample in SAMPLES.values():
        assert not check_damaged(tmp_path / "file", sample, None)
        assert imported(tmp_path, sample)[0] == format


def test_imports_need_no_torch():
    code = "import sys, syncline.measure.imports; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- files measured by others ----------------------------------------------------------------------

LOGS = TRACES / "bcaffe_googlenet"
PROFILES = TRACES / "pipedream_profiles"


@pytest.mark.skipif(not LOGS.is_dir(), reason="the logs of B-Caffe are not beside this checkout")
@pytest.mark.parametrize("name", ["tmp2comm", "tmp4comm", "tmp8comm", "tmp4ocomm", "tmp8ocomm"])
def test_logs_of_others_are_joined_to_layers(name):
    found = read_logged_layers(Source(name, (LOGS / f"{name}.log").read_text()))
    table = (LOGS / "derived" / f"{name}.layers.tsv").read_text().splitlines()[1:]
    assert len(found) == len(table) == 64
    for layer, line in zip(found, table, strict=True):
        _, _, elements, backward_us, exchange_us, merged_us = map(float, line.split("\t"))
        assert sum(layer.elements) == elements
        assert layer.backward_s == pytest.approx(backward_us * 1e-6)
        assert layer.exchange_s == pytest.approx(exchange_us * 1e-6)
        assert layer.merged_s == pytest.approx(merged_us * 1e-6)


@pytest.mark.skipif(
    not PROFILES.is_dir(), reason="PipeDream's profiles are not beside this checkout"
)
@pytest.mark.parametrize(
    ("name", "samples", "megabytes"),
    [("alexnet", 256, 244.4), ("resnet50", 128, 102.2), ("vgg16", 128, 553.4)],
)
def test_profiles_of_others_have_the_parameters_of_their_networks(name, samples, megabytes):
    _, found = import_workload(PROFILES / f"{name}.graph.txt", samples=samples)
    assert found.workload.size_bytes / 1e6 == pytest.approx(megabytes, abs=0.05)
    assert found.workload.forward_s < found.workload.backward_s * 1.2
