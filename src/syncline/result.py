"""The result of a run: what real and simulated runs have in common. No torch here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """What had been done and sent when the parameters that represent a run were evaluated."""

    step: int
    samples: int
    """Samples that all ranks together had computed on."""
    time_s: float
    total_sent_bytes: int
    """Payload that all ranks together had handed to their peers in steps."""
    loss: float
    """Mean training loss of the step, over all ranks."""
    test_loss: float | None
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The figures of a run on either clock.

    With a synchronous strategy losses, accuracy and weights do not depend on the number of ranks.
    What was not computed is None.
    """

    ranks: int
    shards: int
    steps: int
    step_s: float
    """Median time of a step."""
    samples_per_s: float
    """Samples per second of all ranks together."""
    exposed_communication: float
    """Share of time that compute lanes waited for communication."""
    layout: dict[str, bool | int]
    """Whether the exchange is overlapped, and how many buckets of which size there are."""
    sent_bytes: float
    """Payload that a rank hands to its peers in a step, mean over ranks."""
    exposed_input: float | None = None
    """Share of time that compute lanes waited for input: in line, the whole time of reading."""
    input_wait_s: float | None = None
    """Seconds of this in a step, mean over steps."""
    peak_memory_bytes: float | None = None
    """The most memory that a rank used at any time: that of the rank which used most."""
    mean_peak_memory_bytes: float | None = None
    """The same, mean over ranks."""
    memory_share_bytes: float | None = None
    """Memory of a rank, mean over ranks; what ranks of a machine share counts once in all."""
    loss: float | None = None
    """Mean training loss of the last step."""
    test_loss: float | None = None
    accuracy: float | None = None
    weights_sha256: str | None = None
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The strategy's own figures, from rank 0."""
    gone: dict[int, str] = dataclasses.field(default_factory=dict)
    """Ranks that were lost during the run, and how."""
