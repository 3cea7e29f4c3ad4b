"""Devices: times by hand, presets with sources and ranges, jobs that name one."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from small_job import SYNTHETIC, refusal, small
from syncline.cluster import cluster_of
from syncline.cluster_facts import Fact
from syncline.config import parse_job
from syncline.device import DEVICES, Device, Work, names, seconds_of, update_s
from syncline.errors import ConfigError
from syncline.measure.derive import derive
from syncline.sim.job import find_workload, simulate_job
from syncline.workload import write


def sure(value):
    return Fact(value, source="by hand")


BY_HAND = Device(
    name="by hand",
    conv_peak_flops_per_s=sure(1000.0),
    peak_flops_per_s=sure(400.0),
    conv_efficiency=sure(0.5),
    linear_efficiency=sure(0.25),
    conv_half_samples=sure(2.0),
    linear_half_rows=sure(12.0),
    memory_bytes_per_s=sure(100.0),
    launch_s=sure(3.0),
)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        # 2 samples fill half: 1000 * 0.5 / 2 = 250 FLOP/s.
        (Work("conv", 1000.0, 100.0, samples=2, rows=99.0), 4.0 + 3.0),
        # 36 rows fill three quarters: 400 * 0.25 * 0.75 = 75 FLOP/s.
        (Work("linear", 750.0, 100.0, samples=2, rows=36.0), 10.0 + 3.0),
        (Work("other", 750.0, 100.0, samples=2, rows=36.0), 10.0 + 3.0),
        # Memory takes longer than the arithmetic.
        (Work("linear", 75.0, 700.0, samples=2, rows=36.0), 7.0 + 3.0),
        (Work("norm", 0.0, 500.0, samples=2, rows=2.0), 5.0 + 3.0),
        (Work("norm", 0.0, 0.0, samples=2, rows=2.0), 0.0),
    ],
)
def test_a_layer_s_time_by_hand(work, seconds):
    assert seconds_of(work, BY_HAND) == pytest.approx(seconds)


def test_an_update_reads_and_writes_what_the_optimizer_keeps():
    # Parameters twice, gradients once, and each number that is kept twice.
    assert update_s(100, 0, BY_HAND) == 3.0 + 3.0
    assert update_s(100, 2, BY_HAND) == 7.0 + 3.0


@given(
    name=st.sampled_from(sorted(DEVICES)),
    kind=st.sampled_from(["conv", "linear", "norm", "embedding", "attention", "other"]),
    flops=st.floats(0, 1e15),
    moved=st.floats(0, 1e12),
    samples=st.integers(1, 4096),
)
def test_more_samples_take_longer_and_each_less_time(name, kind, flops, moved, samples):
    def seconds(count):
        work = Work(kind, count * flops, count * moved, count, float(count))
        return seconds_of(work, DEVICES[name])

    one, two = seconds(samples), seconds(2 * samples)
    assert one <= two * (1 + 1e-9)
    assert two <= 2 * one * (1 + 1e-9)


def test_every_constant_of_every_device_has_a_source_and_a_range():
    for name, device in DEVICES.items():
        assert device.name == name
        for key, one in msgspec.structs.asdict(device).items():
            if key == "name":
                continue
            low, high = one.bounds
            assert 0 <= low <= one.value <= high, (name, key)
            assert (low == high) == ("peak" in key), (name, key)
            assert one.source.startswith("assumed") == (low < high), (name, key)
        for key in ("conv_efficiency", "linear_efficiency"):
            assert getattr(device, key).bounds[1] < 1
    assert names()[0] == "core"


def test_layers_of_a_network_on_a_device_by_hand():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(256, 5)
    )
    found = derive(model, (3, 10, 10), 2, 1e99, device=BY_HAND, state_copies=1)
    conv, norm, linear = found.layers
    flops, sizes = 2 * (2 * 64) * 4 * 27, (4 * 108, 4 * 8, 4 * 256 * 5 + 20)
    assert [one.size_bytes for one in found.layers] == [*sizes]
    assert [one.kind for one in found.layers] == ["conv", "norm", "linear"]
    # Two samples fill half of 1000 * 0.5; there is no gradient of the input.
    assert conv.forward_s == conv.backward_s == flops / 250 + 3.0
    # 256 numbers a sample come in and go out, and 4 means and deviations; twice that in backward.
    moved = 4 * 2 * (256 + 256) + 4 * (4 + 4)
    assert norm.forward_s == (moved + 32) / 100 + 3.0
    assert norm.backward_s == (2 * moved + 2 * 32) / 100 + 3.0
    # Two rows fill a seventh of 400 * 0.25.
    assert linear.forward_s == pytest.approx(2 * 2 * 256 * 5 * 7 / 100 + 3.0)
    assert linear.backward_s == pytest.approx(2 * linear.forward_s - 3.0)
    assert found.update_s == sum(sizes) * 5 / 100 + 3.0
    assert found.machine == {"device": "by hand"}


class Words(nn.Module):
    """A network of the user's own: embedding, attention, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.unused = nn.LayerNorm(8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        return (self.norm(self.attend(x, x, x)[0]) * self.scale).mean(1)


def test_a_network_of_one_s_own_is_derived_with_all_kinds_of_layers():
    found = derive(Words(), (16,), 4, 1.0, dtype=torch.int64, device=DEVICES["v100"])
    by_name = {one.name: one for one in found.layers}
    assert {name: one.kind for name, one in by_name.items()} == {
        "": "other",
        "embed": "embedding",
        "attend": "attention",
        "attend.out_proj": "linear",
        "norm": "norm",
        "unused": "linear",
    }
    v100 = DEVICES["v100"]
    # Looking up words does not read the whole table; its gradient is as large as that.
    moved = 4 * 16 * (8 + 8 * 4)
    assert by_name["embed"].forward_s == pytest.approx(
        moved / v100.memory_bytes_per_s.value + v100.launch_s.value
    )
    assert by_name["embed"].backward_s > by_name["embed"].forward_s
    assert (by_name["unused"].forward_s, by_name["unused"].backward_s) == (0.0, 0.0)


def of_device(name, *sets):
    where = ("data.sample_shape=[3, 32, 32]", f"cluster.device={name}", *sets)
    return parse_job(SYNTHETIC, sets=where).resolved(2)


def test_a_job_is_simulated_on_the_device_that_it_names():
    outcomes = {}
    for name in ("k80", "v100"):
        job = of_device(name, "optimizer.momentum=0.9")
        cluster = cluster_of(job.cluster, 2)
        found = find_workload(job, cluster)
        assert found.machine == {"device": name}
        assert found.update_s == update_s(found.size_bytes, 1, DEVICES[name])
        outcomes[name] = simulate_job(job, cluster, steps=3).alone_s
    assert outcomes["v100"] < outcomes["k80"]
    job = of_device("core")
    assert find_workload(job, cluster_of(job.cluster, 2)).update_s is None
    job = of_device("v100", "cluster.update_bytes_per_s=1e9")
    assert find_workload(job, cluster_of(job.cluster, 2)).update_s is None


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            ["cluster.device=v1000"],
            'cluster.device: got "v1000", but this is "core", "e5-2698v3", "e5-2666v3", "k80", '
            '"v100", "a100" or "h100". Did you mean "v100"?',
        ),
        (
            ["cluster.device=v100", "cluster.flops_per_s=1e12"],
            'cluster.flops_per_s: got 1e+12 with cluster.device = "v100", but a device has a rate '
            'for each kind of layer. Remove one of the two, or use cluster.device = "core".',
        ),
    ],
)
def test_devices_that_cannot_be_are_refused(sets, line):
    assert refusal(SYNTHETIC, *sets) == line


def test_a_device_beside_a_workload_file_is_refused(tmp_path):
    job = small().resolved(2)
    cluster = cluster_of(job.cluster, 2)
    write(find_workload(job, cluster), tmp_path / "x.json")
    job = small(cluster__device="v100").resolved(2)
    with pytest.raises(ConfigError, match=r'^cluster\.device: got "v100" with --workload, but the'):
        find_workload(job, cluster, tmp_path / "x.json")
