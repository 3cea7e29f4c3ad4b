"""One run folder, one run: the lock, and who holds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from syncline.errors import ConfigError
from syncline.run_lock import LOCK, locked
from training import start_training

pytestmark = pytest.mark.processes

DIGITS = Path(__file__).parent.parent / "examples" / "digits.toml"

HOLD = """
import os, sys, time
from pathlib import Path
from syncline.run_lock import locked
with locked(Path(sys.argv[1]), "--out"):
    if float(sys.argv[2]) and os.fork() == 0:
        time.sleep(float(sys.argv[2]))
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def hold(folder, child_s=0.0):
    """A process that holds the lock, with a child that has inherited it."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(child_s)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    holder.stdout.close()
    return holder


def test_a_second_run_is_refused_and_told_who_has_the_folder(tmp_path):
    holder = hold(tmp_path)
    with pytest.raises(ConfigError) as caught, locked(tmp_path, "--resume"):
        pass
    assert str(caught.value).startswith(f"--resume: {tmp_path} is in use by process {holder.pid} ")
    holder.kill()
    holder.wait()
    with locked(tmp_path, "--resume"):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / LOCK).exists()


def test_the_lock_lives_as_long_as_any_process_of_the_run(tmp_path):
    holder = hold(tmp_path, child_s=4.0)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with pytest.raises(ConfigError, match="is in use"), locked(tmp_path, "--out"):
        pass
    deadline = time.monotonic() + 20
    while True:
        try:
            with locked(tmp_path, "--out"):
                return
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_lock_that_its_holder_has_just_removed_is_not_taken_for_held(tmp_path, monkeypatch):
    """Between opening and locking the file, the run before may end and remove it."""
    import fcntl

    original, turns = fcntl.flock, []

    def flock(file, how):
        if not turns:
            os.unlink(tmp_path / LOCK)
        turns.append(how)
        original(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path, "--out"):
        assert len(turns) == 2
        with pytest.raises(ConfigError), locked(tmp_path, "--out"):
            pass


@pytest.mark.timeout(180)
def test_two_runs_cannot_resume_one_folder(tmp_path):
    out = tmp_path / "run"
    sets = ["run.steps=100000", "run.checkpoint_every=5", "optimizer.schedule=constant"]
    first = start_training(DIGITS, out, *sets, ranks=2)
    deadline = time.monotonic() + 60
    while not list(out.glob("checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = start_training(DIGITS, out, *sets, ranks=1, more=["--resume"])
    printed, said = second.communicate(60)
    assert (second.returncode, printed) == (2, "")
    assert said == (
        f"syncline: --resume: {out} is in use by process {first.pid} on {os.uname().nodename}, but"
        " one run at a time writes into a folder. Wait for its end, or name another folder.\n"
    )
    assert first.poll() is None
    first.kill()
    # Killed: the file is still there, the lock is not.
    assert (out / LOCK).exists()
    newest = max(int(path.stem.removeprefix("step-")) for path in out.glob("checkpoints/step-*"))
    sets[0] = f"run.steps={newest + 9}"
    third = start_training(DIGITS, out, *sets, ranks=1, more=["--resume"])
    _, said = third.communicate(60)
    assert third.returncode == 0, said
    assert not (out / LOCK).exists()
