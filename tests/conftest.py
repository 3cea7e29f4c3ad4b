"""Common ground of all tests: one thread, and nothing left behind."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

from own_code import own  # noqa: F401
from syncline import session

# Threads of OpenMP do not survive the fork that starts ranks, and bits depend on their number.
torch.set_num_threads(1)

# Without a GPU torch keeps the seed for each kind of GPU, with the formatted stack of who set it:
# milliseconds a call, as stacks of tests are deep and a fork reads all their files again.
if not torch.accelerator.is_available():
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.manual_seed_all = lambda seed: None

# How long an example takes depends on what else the machine does; pytest's own limit is enough.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("long", deadline=None)  # see engine/test_random_loops.py
hypothesis.settings.load_profile("here")


@pytest.fixture(autouse=True)
def _leave_no_session():
    yield
    session.close_session()
    # On the virtual clock a mode that is on while a rank waits applies to whatever runs meanwhile.
    assert torch.is_grad_enabled(), "the test left gradients switched off"


@pytest.fixture
def alone(monkeypatch):
    """A world of one, whatever started the tests."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "OMPI_", "PMI", "FLUX_")
    for name in list(os.environ):
        if name.startswith(launchers):
            monkeypatch.delenv(name)


def pytest_terminal_summary(terminalreporter):
    """List the commands of the pages that no test runs, each with the reason."""
    reports = [one for found in terminalreporter.stats.values() for one in found]
    lines = [
        value
        for report in reports
        for key, value in getattr(report, "user_properties", ())
        if key == "not run" and report.when == "call"
    ]
    if lines:
        terminalreporter.section("commands of the pages that are parsed, not run")
        for line in lines:
            terminalreporter.write_line(line)
