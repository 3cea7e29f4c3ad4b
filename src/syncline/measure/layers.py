"""Measures a workload on this machine: seconds of each layer, of reading and of an update.

Hooks tell when a layer begins and ends (`moments.py`), in steps of their own; the layers' times are
then scaled so that their sum is the time of a plain loop without hooks, measured in turn with them.
How far the two were apart is reported.

Whole steps are means over the middle half of all rounds, by their time. A layer's share of them is
that of its median: the medians' sum itself would be too small on a busy machine, since what
disturbs a step disturbs another layer each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from syncline.config import Job
from syncline.errors import ConfigError
from syncline.measure.count import Counted
from syncline.measure.derive import layer_of, workload_of
from syncline.measure.machine import machine_facts
from syncline.measure.trials import Times, Together, Trials
from syncline.workload import Layer, LayerTimes, Reading, Workload

Table = np.ndarray[Any, Any]


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """A whole step without hooks, of so many samples."""

    samples: int
    forward_s: float
    backward_s: float
    spread: float
    """Standard deviation of forward and backward together, relative."""
    read_s: float
    difference: float
    """How much longer the layers' sum was than forward and backward, before it was scaled."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and how well."""

    workload: Workload
    totals: tuple[Total, ...]
    """By number of samples."""
    rounds: int
    left_out: tuple[str, ...] = ()
    """Numbers of samples with which the model cannot compute, and why."""


def measure_layers(
    job: Job,
    samples: Sequence[int] | None = None,
    seconds: float = 20.0,
    *,
    together: Together | None = None,
    gather: Callable[[dict[int, Times]], None] = lambda times: None,
    on_round: Callable[[int, float], None] = lambda rounds, spent_s: None,
) -> Measured:
    """Measure a resolved job's layers; `samples` are other numbers than a shard's, None for powers
    of 2 below it.

    It takes `seconds`, or longer for a few rounds. `together` keeps ranks in step that measure at
    the same time, and `gather` adds what the others have measured.
    """
    trials = Trials(job, samples, together)
    sizes, left_out = _that_work(trials, wanted=samples is not None)
    counted = trials.counted()
    found = trials.run(sizes, [layer.name for layer in counted.layers], seconds, on_round)
    rounds = len(found[trials.samples].read_s)
    gather(found)
    ranks = len(found[trials.samples].read_s) // rounds
    totals = {size: _total_of(times) for size, times in found.items()}
    update_s, update_spread = _middle(found[trials.samples].update_s)
    workload = workload_of(
        trials.model,
        counted,
        _layers_of(counted, found, totals, trials.samples),
        name=job.model.name,
        samples=trials.samples,
        update_s=update_s,
        update_spread=update_spread,
        reads=tuple(Reading(size, *_middle(times.read_s)) for size, times in sorted(found.items())),
        spread=totals[trials.samples].spread,
        made_by="measured",
        machine=machine_facts(job.run.threads, ranks),
    )
    by_size = tuple(total for _, total in sorted(totals.items()))
    return Measured(workload=workload, totals=by_size, rounds=rounds, left_out=tuple(left_out))


def _that_work(trials: Trials, *, wanted: bool) -> tuple[list[int], list[str]]:
    """Return the numbers of samples with which a step works, and lines about the others.

    A number that was asked for must work, and so must a shard's.
    """
    found, left_out = [], []
    for size in trials.sizes:
        why = trials.fails_with(size)
        if not why:
            found.append(size)
        elif wanted or size == trials.samples:
            key = "data.batch" if size == trials.samples else "--samples"
            rule = "the model must be able to train with them"
            raise ConfigError(key, f"a step of {size} samples fails ({why})", rule, "Use others.")
        else:
            left_out.append(f"{size}: {why}")
    return found, left_out


def _total_of(times: Times) -> Total:
    plain = np.array([times.forward_s, times.backward_s]).T
    forward_s, backward_s = _central(plain)
    return Total(
        samples=times.samples,
        forward_s=forward_s,
        backward_s=backward_s,
        spread=_middle(plain.sum(axis=1).tolist())[1],
        read_s=_middle(times.read_s)[0],
        difference=sum(_central(_hooked(times))) / (forward_s + backward_s) - 1.0,
    )


def _hooked(times: Times) -> Table:
    """Return a row for each round with hooks: forward of all layers, then backward of all."""
    return np.hstack((np.array(times.layers_forward_s), np.array(times.layers_backward_s)))


def _central(rounds: Table) -> list[float]:
    """Return the mean of each column over the rounds whose sums are in the middle half."""
    sums = rounds.sum(axis=1)
    low, high = np.percentile(sums, (25, 75))
    found: list[float] = rounds[(sums >= low) & (sums <= high)].mean(axis=0).tolist()
    return found


def _layers_of(
    counted: Counted, found: dict[int, Times], totals: dict[int, Total], samples: int
) -> list[Layer]:
    """Return the layers with the times of a shard, and those of other numbers of samples."""
    by_size = {size: _times_of(times, totals[size]) for size, times in found.items()}
    layers = []
    for number, one in enumerate(counted.layers):
        here = by_size[samples][number]
        others = (by_size[size][number] for size in sorted(by_size) if size != samples)
        layer = layer_of(one, here.forward_s, here.backward_s)
        layers.append(msgspec.structs.replace(layer, spread=here.spread, times=tuple(others)))
    return layers


def _times_of(times: Times, total: Total) -> list[LayerTimes]:
    """Return each layer's times, whose sums are those of the plain loop."""
    hooked = _hooked(times)
    found, layers = np.median(hooked, axis=0).tolist(), hooked.shape[1] // 2
    forward_s = _scaled_to(total.forward_s, found[:layers])
    backward_s = _scaled_to(total.backward_s, found[layers:])
    both = hooked[:, :layers] + hooked[:, layers:]
    spreads = [_middle(column)[1] for column in both.T.tolist()]
    return [
        LayerTimes(times.samples, *one) for one in zip(forward_s, backward_s, spreads, strict=True)
    ]


def _scaled_to(total_s: float, seconds: Sequence[float]) -> list[float]:
    factor = total_s / sum(seconds) if sum(seconds) else 0.0
    return [one * factor for one in seconds]


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation relative to it.

    The deviation is half the way from the 16th to the 84th percentile: the same for a normal
    distribution, and a few rounds that something else disturbed do not change it.
    """
    low, middle, high = np.percentile(values, (16, 50, 84)).tolist()
    return middle, (high - low) / 2 / middle if middle else 0.0
