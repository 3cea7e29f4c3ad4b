"""The other commit's tree and the busy processes: there while needed, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.busy import busy
from benchmarks.versions import TOP_FOLDER, VersionError, git, version_of
from checkout import needs_git

from worlds import untraced

pytestmark = [pytest.mark.processes, needs_git]


def test_the_other_commit_is_checked_out_and_removed():
    with version_of("HEAD") as version:
        assert version.commit == git("rev-parse", "HEAD")
        assert (version.source / "syncline" / "__init__.py").exists()
        assert version.environment()["PYTHONPATH"] == str(version.source)
        folder = version.folder
        assert str(folder) in git("worktree", "list")
    assert not folder.exists()
    assert str(folder) not in git("worktree", "list")


def leave_by(error, seen):
    with version_of("HEAD") as version:
        seen.append(version.folder)
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_other_commit_is_removed_however_it_ends(error):
    seen: list[Path] = []
    with pytest.raises(error):
        leave_by(error, seen)
    assert not seen[0].exists()
    assert str(seen[0]) not in git("worktree", "list")


def test_what_names_no_commit_is_refused_with_a_way_out():
    message = "--against: got 'no-such-thing', but it names no commit here .* Give a commit"
    with pytest.raises(VersionError, match=message), version_of("no-such-thing"):
        pass


def test_busy_processes_spin_and_are_gone_at_the_end():
    with busy(2) as processes:
        deadline_s = time.monotonic() + 60
        while min(map(cpu_ticks, processes)) < 5:  # of 10 ms
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def cpu_ticks(process):
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return int(user) + int(system)


STAY_BUSY = """
import time
from benchmarks.busy import busy
with busy(1) as (process,):
    print(process.pid, flush=True)
    time.sleep(60)
"""


def test_busy_processes_do_not_outlive_a_parent_that_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", STAY_BUSY],
        cwd=TOP_FOLDER,
        env=untraced(),
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline_s = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline_s, "it still spins"
        time.sleep(0.05)
