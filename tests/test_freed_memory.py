"""Memory that a step frees stays with the process."""

from __future__ import annotations

import ctypes
import logging
import resource

import pytest
import torch

import syncline
from ranks import run_ranks
from syncline.freed_memory import keep_freed_memory

MB = 1 << 20
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Of mallopt(3); glibc's own values are 128 kB at first."""


def faults_of_a_step() -> int:
    """Return how many pages the kernel hands out in a step that uses 96 MB and frees them."""
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(12 * MB // 4) for _ in range(8)]
        del held
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return found


def test_the_next_step_gets_it_without_a_page_fault():
    def work() -> list[int]:
        for setting in (TRIM_THRESHOLD, MMAP_THRESHOLD):  # tests before this one may have set them
            ctypes.CDLL(None).mallopt(setting, 128 << 10)
        before = faults_of_a_step()
        syncline.init(threads=1)
        return [before, faults_of_a_step()]

    ((before, after),) = run_ranks(1, work)
    assert before > 1000
    assert after < 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_users_own_stay(name, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="syncline")
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=1000")
    assert not keep_freed_memory()
    assert f"freed memory is kept or not as {name} says" in caplog.text
