"""The cases of `benchmarks.prediction`: places, networks and strategies, and each one's job."""

from __future__ import annotations

from typing import NamedTuple

from lab.network import rate_bytes_per_s

from syncline import dataset
from syncline.sim.run import Outcome

STRATEGIES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "all_reduce": (),
    "wait_free": (),
    "merged": (),
    "sync_server": (),
    "layered": (),
    "server": (),
    "elastic": (),
    "gossip": (),
    "local": ("strategy.local.period=5",),
    "hybrid": ("strategy.hybrid.groups=1",),
}
"""Settings besides the name. Hybrid needs a real network with linear layers."""


CALIBRATED_ON = 2
"""Ranks."""
SHORT = ("mlp",)
"""Networks whose steps take some milliseconds."""


class Network(NamedTuple):
    """A network, and its job."""

    name: str
    is_real: bool
    samples: int
    """Of a rank in a step."""
    job: str


SLEEPING = """
[model]
name = "benchmarks.clock_job:make"

[model.options]
sizes = {sizes}
compute_s = {compute_s}

[data]
name = "benchmarks.clock_job:samples"
batch = 4
prefetch = 0

[data.options]
sample_s = 0.0

[optimizer]
lr = 1e-4

[run]
steps = 10
"""
CNN = """
[model]
name = "cnn"

[data]
name = "synthetic"
sample_shape = [3, 32, 32]
classes = 10
samples = 2048
batch = 64

[optimizer]
lr = 0.01
momentum = 0.9

[run]
steps = 10
"""
MLP = """
[model]
name = "mlp"
options = { hidden = [512, 512] }

[data]
name = "synthetic"
sample_shape = [256]
classes = 10
samples = 2048
batch = 128

[optimizer]
lr = 0.01
momentum = 0.9

[run]
steps = 10
"""


def _sleeping(sizes_mb: list[float], compute_s: float, share: float) -> str:
    sizes = [int(1e6 * share * one) // 4 * 4 for one in sizes_mb]
    return SLEEPING.format(sizes=sizes, compute_s=compute_s)


def network(name: str, rate: str) -> Network:
    """Return a network; those that sleep are sized so that the wire matters at this rate."""
    share = rate_bytes_per_s(rate or "1gbit") / rate_bytes_per_s("1gbit")
    match name:
        case "even":
            return Network(name, False, 4, _sleeping([1.25] * 10, 0.15, share))
        case "heavy":
            # As in old convolutional networks: most bytes at the end, most compute before.
            return Network(name, False, 4, _sleeping([0.1] * 8 + [8.0, 4.0], 0.1, share))
        case "cnn":
            return Network(name, True, 64, CNN)
        case "mlp":
            return Network(name, True, 128, MLP)
    raise ValueError(name)


UNEVEN = ("server", "elastic", "gossip", "local")
"""Strategies whose steps differ, since ranks do not meet in each: their mean is compared, which is
what counts for throughput. A median would say nothing of the long ones."""


class Case(dataset.Case):
    """One measured run, several times."""

    __slots__ = ()

    @property
    def group(self) -> str:
        """Cases whose strategies are compared with one another."""
        return self.key.rpartition("/")[0]

    @property
    def is_crowded(self) -> bool:
        """Whether ranks compute on fewer cores than there are ranks."""
        return network(self.network, self.rate).is_real and self.ranks > 2

    @property
    def is_short(self) -> bool:
        """Whether a step takes some milliseconds only: shown apart, since no goal is set for it."""
        return self.network in SHORT

    def step_of(self, run: dataset.Run | Outcome) -> float:
        """Return the step that is compared, of a run or a simulation."""
        if self.strategy not in UNEVEN:
            return run.step_s
        return network(self.network, self.rate).samples * self.ranks / run.samples_per_s

    def sets(self, steps: int) -> list[str]:
        own = network(self.network, self.rate)
        return [
            f"strategy.name={self.strategy}",
            *STRATEGIES[self.strategy],
            f"data.batch={own.samples * self.ranks}",
            f"run.steps={steps}",
        ]


def calibration_of(network: str, rate: str = "") -> Case:
    """Return the case whose runs say how long a real network computes beside an exchange, and how
    much processor time the exchange takes at this rate.

    It is no prediction, then.
    """
    return Case(rate, network, CALIBRATED_ON, "synchronous")


def all_cases() -> list[Case]:
    """Return all cases: of this machine, then of the lab by the rate of its links."""
    found = [
        Case("", name, ranks, strategy)
        for name in ("cnn", *SHORT)
        for ranks in (2, 4)
        for strategy in STRATEGIES
    ]
    return found + [
        Case(rate, name, ranks, strategy)
        for rate in ("1gbit", "100mbit")
        for name in ("even", "heavy", "cnn")
        for ranks in (2, 4, 8)
        for strategy in STRATEGIES
        if name == "cnn" or strategy != "hybrid"
    ]
