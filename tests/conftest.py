"""Common ground of all tests: one thread, and nothing left behind."""

from __future__ import annotations

import os

import pytest
import torch

from syncline import session

# Threads of OpenMP do not survive the fork that starts ranks, and bits depend on their number.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _leave_no_session():
    yield
    session.close_session()


@pytest.fixture
def alone(monkeypatch):
    """A world of one, whatever started the tests."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
