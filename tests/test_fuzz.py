"""Damaged files of every kind that is read, for a minute in all: see `fuzz_files.py`."""

from __future__ import annotations

import pytest

from fuzz_files import KINDS, fuzz

SECONDS = 15.0
SEED = 20261119


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_in_one_line_or_gives_sane_numbers(kind):
    tried, refused = fuzz(kind, SECONDS, SEED)
    assert tried >= 20
    assert 0 < refused <= tried
