"""Damaged files of every kind that is read, for about a minute in all: see `fuzz_files.py`."""

from __future__ import annotations

import pytest

from fuzz_files import KINDS, fuzz

pytestmark = pytest.mark.slow

FILES = {"trace": 1500, "cluster": 6000, "workload": 8000, "data set": 1000, "import": 12000}
"""Some 15 seconds each on one core."""
SEED = 20261119


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_in_one_line_or_gives_sane_numbers(kind):
    tried, refused = fuzz(kind, SEED, files=FILES[kind])
    assert tried == FILES[kind]
    assert 0 < refused < tried
