"""The job of `benchmarks/clocks.py` on the virtual clock: its wire takes as long as its compute."""

from __future__ import annotations

import pytest
from benchmarks.clocks import (
    COMPUTE_S,
    PAYLOAD_SHARE,
    Costs,
    ranks_of,
    settings_of,
    simulate,
    write_job,
)

COSTS = Costs(8e-6, 17e-6, 7e-6, forward_s=COMPUTE_S / 3, backward_s=COMPUTE_S * 2 / 3)


@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
def test_compute_is_as_long_as_the_wire(tmp_path, rate):
    job, times = write_job(tmp_path, rate, COSTS)

    def step_s(arm):
        return simulate(job, times, ranks_of(arm), settings_of(arm, "none", 6), None).step_s

    wire_s = COMPUTE_S / PAYLOAD_SHARE
    assert step_s("alone") == pytest.approx(COMPUTE_S, rel=0.03)
    # All of the exchange comes after backward.
    assert step_s("all_reduce") == pytest.approx(COMPUTE_S + wire_s, rel=0.03)
    # The link of one server carries what each of three workers pushes.
    assert step_s("server, one dedicated") == pytest.approx(2 * wire_s, rel=0.03)
