"""Whether there is a git history to compare with: a copy of the sources has none."""

from __future__ import annotations

import pytest
from benchmarks.versions import VersionError, git


def _is_checkout():
    try:
        return bool(git("rev-parse", "HEAD"))
    except VersionError:
        return False


needs_git = pytest.mark.skipif(not _is_checkout(), reason="needs a git checkout")
