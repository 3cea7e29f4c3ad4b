"""Measured layers: known times come back, hooks cost nothing, sums are those of a plain loop."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional

from sleeping_job import LAYERS, READ_S, FakeClock, sleeping_job
from syncline import workload
from syncline.cluster import cluster_of
from syncline.errors import ConfigError
from syncline.measure import trials
from syncline.measure.layers import measure_layers
from syncline.measure.moments import LayerClock, backward_of, forward_of
from syncline.sim.job import find_workload, simulate_job

NAMES = ["first", "middle", "last", "unused"]


def fake_clock(monkeypatch, tick_s=0.0):
    clock = FakeClock(tick_s)
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


@pytest.mark.parametrize("tick_s", [0.0, 2**-10])
def test_layers_that_sleep_known_times_are_measured_to_take_these(monkeypatch, tick_s):
    # With a tick each hook costs one. So does the start of a sleep, a part of its layer, and the
    # look at the clock after the last layer.
    fake_clock(monkeypatch, tick_s)
    found = measure_layers(sleeping_job(), seconds=1.0)
    layers = found.workload.layers
    assert [layer.name for layer in layers] == NAMES
    for layer, (size_bytes, forward_s, backward_s) in zip(layers, LAYERS, strict=False):
        assert layer.size_bytes == size_bytes
        assert layer.forward_s == pytest.approx(forward_s, abs=2.01 * tick_s)
        assert layer.backward_s == pytest.approx(backward_s, abs=2.01 * tick_s)
        assert layer.spread == pytest.approx(0.0, abs=1e-9)
    assert (layers[3].forward_s, layers[3].backward_s) == (0.0, 0.0)
    assert [one.difference for one in found.totals] == pytest.approx([0.0] * 3, abs=1e-9)


def test_sums_are_those_of_a_plain_loop_and_the_difference_is_told(monkeypatch):
    fake_clock(monkeypatch, 2**-6)
    monkeypatch.setattr(trials, "hook_costs", lambda: (0.0, 0.0))  # as if nobody took them off
    found = measure_layers(sleeping_job(), seconds=1.0)
    of_shard = next(one for one in found.totals if one.samples == 4)
    assert found.workload.forward_s == pytest.approx(of_shard.forward_s)
    assert found.workload.backward_s == pytest.approx(of_shard.backward_s)
    # Three hooks in forward and three in backward, a tick each.
    plain_s = of_shard.forward_s + of_shard.backward_s
    assert of_shard.difference == pytest.approx(6 * 2**-6 / plain_s)


def test_a_measured_workload_says_everything_and_is_simulated(monkeypatch, tmp_path):
    fake_clock(monkeypatch)
    job = sleeping_job()
    found = measure_layers(job, [1, 2, 16], seconds=1.0).workload
    monkeypatch.undo()
    assert (found.samples, found.made_by) == (4, "measured")
    assert [one.samples for one in found.layers[0].times] == [1, 2, 16]
    assert [(one.samples, one.read_s) for one in found.reads] == [
        (size, pytest.approx(size * READ_S)) for size in (1, 2, 4, 16)
    ]
    assert (found.update_s, found.update_spread, found.spread) == (0.0, 0.0, 0.0)
    assert found.machine["threads"] == 1
    assert found.machine["ranks"] == 1
    workload.write(found, tmp_path / "net.json")
    cluster = cluster_of(job.cluster, 1)
    again = find_workload(job, cluster, tmp_path / "net.json")
    assert again == found
    # A rank with both shards reads and computes each, and its updates take no time.
    a_shard_s = 4 * READ_S + sum(one.forward_s + one.backward_s for one in LAYERS)
    outcome = simulate_job(job, cluster, workload=again, steps=3)
    assert outcome.step_s == pytest.approx(2 * a_shard_s, rel=1e-6)
    assert outcome.alone_s == pytest.approx(2 * a_shard_s, rel=1e-6)


def test_in_real_time_layers_take_what_they_sleep():
    sets = {"model__options__factor": "0.02", "data__options__factor": "0.02"}
    found = measure_layers(sleeping_job(**sets), [4], seconds=0.0)
    of_shard = found.totals[-1]
    assert found.workload.forward_s + found.workload.backward_s == pytest.approx(
        of_shard.forward_s + of_shard.backward_s
    )
    for layer, (_, forward_s, backward_s) in zip(found.workload.layers, LAYERS, strict=False):
        both_s = layer.forward_s + layer.backward_s
        # A busy machine may sleep longer, by milliseconds, and never shorter.
        assert both_s > 0.7 * 0.02 * (forward_s + backward_s)
        assert both_s < 0.02 * (forward_s + backward_s) + 0.05


def test_updates_leave_the_weights_alone_and_no_hook_stays(monkeypatch):
    fake_clock(monkeypatch)
    monkeypatch.setattr(trials, "build_model", lambda job, data: nn.Linear(2, 2))
    made = trials.Trials(sleeping_job(optimizer__clip_norm="1.0"))
    before = [one.detach().clone() for one in made.model.parameters()]
    made.run([4], [""], 0.0)
    assert all(one.grad.any() for one in made.model.parameters())
    assert all(map(torch.equal, before, made.model.parameters()))
    assert not any(one._forward_pre_hooks for one in made.model.modules())
    assert not any(one._post_accumulate_grad_hooks for one in made.model.parameters())


def test_numbers_of_samples_that_cannot_be_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^--samples: got 64, but .* has 32 samples\."):
        measure_layers(sleeping_job(), [64], seconds=0.0)


class NoSingle(nn.Module):
    """A network that cannot train on one sample, as batch norm cannot on one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise ValueError("expected more than 1 value")
        return self.only(x) if x.sum().item() else x  # it also looks at values


def test_what_a_network_cannot_train_on_is_left_out_or_refused(monkeypatch):
    monkeypatch.setattr(trials, "build_model", lambda job, data: NoSingle())
    job = sleeping_job(data__options__factor="0")
    found = measure_layers(job, seconds=0.0)
    assert [one.samples for one in found.totals] == [2, 4]
    assert found.left_out == ("1: expected more than 1 value",)
    (layer,) = found.workload.layers
    assert (layer.name, layer.kind, layer.flops) == ("only", "linear", 8.0)
    refused = r"^--samples: a step of 1 samples fails \(expected more than 1 value\), but the model"
    with pytest.raises(ConfigError, match=refused):
        measure_layers(job, [1], seconds=0.0)


def test_a_second_use_of_a_layer_belongs_to_the_newest():
    begun = [(1, 10.0), (0, 12.0), (1, 13.0), (2, 15.0), (0, 16.0)]
    assert forward_of(begun, 9.0, 20.0, 3) == [3.0, 3.0, 5.0]
    # Each hook took half a second, the last one before the end included.
    assert forward_of(begun, 9.0, 20.0, 3, hook_s=0.5) == [2.0, 2.0, 4.5]
    assert forward_of([], 9.0, 20.0, 2) == [11.0, 0.0]


def test_backward_belongs_to_the_layer_whose_gradient_comes_next():
    ready = [(2, 3.0), (2, 4.0), (0, 6.0)]
    assert backward_of(ready, 1.0, 10.0, 3) == [6.0, 0.0, 3.0]
    assert backward_of(ready, 1.0, 10.0, 3, hook_s=0.5) == [5.5, 0.0, 2.0]
    assert backward_of([], 1.0, 10.0, 2) == [0.0, 9.0]


class Tied(nn.Module):
    """Uses the parameters of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.borrowed = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.called(x), self.borrowed.weight)


def test_layers_that_are_used_without_being_called_are_noticed():
    model = Tied()
    clock, seen = LayerClock(model, ["called", "borrowed"]), []
    for _ in range(3):
        with clock.listening():
            model(torch.ones(3, 2)).sum().backward()
        clock.watch_unseen()
        seen.append(([one[0] for one in clock.begun], [one[0] for one in clock.ready]))
    assert seen[0] == ([0], [1, 0, 0])
    assert seen[1] == seen[2] == ([0, 1], [1, 0, 0])
