"""This version and another commit's, side by side: two trees, one virtual environment.

The other commit is checked out into a temporary worktree, which is removed at the end, also after
Ctrl-C. A process gets a version by its PYTHONPATH alone; it runs the benchmark code of this tree.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOP_FOLDER = Path(__file__).resolve().parent.parent
_GIT_TIMEOUT_S = 60.0  # a checkout of a small repository, on a busy disk


class VersionError(Exception):
    """The other commit cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class Version:
    """One tree of the package: what it is called in tables, its commit and its folder."""

    name: str
    commit: str
    folder: Path

    @property
    def source(self) -> Path:
        return self.folder / "src"

    def environment(self) -> dict[str, str]:
        """Return this process's environment with this version's package first on the path."""
        return {**os.environ, "PYTHONPATH": str(self.source)}


THIS = Version("this", "the working tree", TOP_FOLDER)


@contextlib.contextmanager
def version_of(revision: str) -> Iterator[Version]:
    """Check out a commit into a temporary worktree for as long as the context lasts."""
    try:
        commit = git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    except VersionError as error:
        raise VersionError(
            f"--against: got {revision!r}, but it names no commit here ({error}). "
            "Give a commit, a tag or a branch of this repository."
        ) from None
    with tempfile.TemporaryDirectory(prefix="syncline-against-") as name:
        folder = Path(name) / "tree"
        try:
            git("worktree", "add", "--quiet", "--detach", str(folder), commit)
            yield Version("other", commit, folder)
        finally:
            # Twice --force: also one that git has locked because its checkout was interrupted.
            with contextlib.suppress(VersionError):
                git("worktree", "remove", "--force", "--force", str(folder))


def git(*arguments: str) -> str:
    """Run git on this repository and return what it prints, or raise VersionError."""
    command = ["git", "-C", str(TOP_FOLDER), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VersionError(str(error)) from None
    if ended.returncode:
        raise VersionError(ended.stderr.strip() or f"git ended with status {ended.returncode}")
    return ended.stdout.strip()
