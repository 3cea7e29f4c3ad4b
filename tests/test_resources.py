"""What a machine refuses, for real: a full disk, no descriptors, no memory, no address."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import subprocess
import time
from pathlib import Path

import pytest

from command import Started
from ranks import RankError, run_ranks
from syncline.checkpoint import load
from syncline.resources import explain
from training import MLP_ON_DIGITS
from worlds import untraced

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts and name spaces need root"),
]

JOB = f"""\
{MLP_ON_DIGITS}
[run]
steps = 100000
checkpoint_every = 10
"""
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000


def unshare(flags):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of a megabyte: three checkpoints of the small network fit."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)])
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def start(tmp_path, out, *arguments, ranks=2, first=None):
    (tmp_path / "job.toml").write_text(JOB)
    where = ("--ranks", str(ranks), "--out", str(out))
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "SYNCLINE_")
    return Started(
        *("train", "job.toml", *where, *arguments),
        cwd=tmp_path,
        env=untraced(*launchers),
        traced=False,
        first=first,
    )


def said(err):
    assert "Traceback" not in err, err
    return [line for line in err.splitlines() if re.match(r"(syncline|rank \d+): ", line)]


def wait_for_checkpoint(out, deadline_s=40):
    deadline = time.monotonic() + deadline_s
    while not list(out.glob("checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_saved(out):
    """What was saved is whole, and nothing half written is left."""
    found = list((out / "checkpoints").iterdir())
    assert found
    for path in found:
        assert load(path).step > 0


def test_a_disk_that_is_full_ends_the_run_in_one_line_and_what_was_saved_stays(
    tmp_path, small_disk
):
    out = small_disk / "run"
    started = start(tmp_path, out)
    wait_for_checkpoint(out)
    other = os.open(small_disk / "other", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(other, b"x" * 4096)
    os.close(other)
    _, err = started.communicate(60)
    assert started.returncode == 1
    lines = said(err)
    own = [line for line in lines if line.startswith("syncline: rank 0: ")]
    assert len(own) == 1, err
    assert re.fullmatch(
        rf"syncline: rank 0: {out}/\S+: cannot be written \(no space left on device\)."
        " Free some space; what was written before stays.",
        own[0],
    )
    assert lines[-1].startswith("syncline: to go on from the last checkpoint: syncline train ")
    assert lines[-1].endswith(f" --out {out} --resume")
    check_saved(out)
    (small_disk / "other").unlink()
    resumed_at = max(load(path).step for path in (out / "checkpoints").iterdir())
    again = start(tmp_path, out, "--resume", "--set", f"run.steps={resumed_at + 20}", "--json")
    text, err = again.communicate(60)
    assert again.returncode == 0, err
    assert json.loads(text)["resumed_at"] == resumed_at


def test_a_disk_that_becomes_read_only_ends_the_run_in_one_line(tmp_path, small_disk):
    out = small_disk / "run"
    started = start(tmp_path, out)
    wait_for_checkpoint(out)
    # What a failing disk does to its files: the paths lead to something that is read-only.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(out)], check=True)
    _, err = started.communicate(60)
    subprocess.run(["umount", "-l", str(out)], check=True)
    assert started.returncode == 1
    (line,) = (one for one in said(err) if one.startswith("syncline: rank 0: "))
    assert "cannot be written (read-only file system). Make the file system writable" in line
    check_saved(out)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    again = start(tmp_path, out, "--resume")
    _, err = again.communicate(60)
    assert again.returncode == 2
    (line,) = said(err)
    assert line.startswith(f"syncline: --out: {out} cannot be written (read-only file system), but")


def test_a_limit_on_the_size_of_files_is_said(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    started = start(tmp_path, tmp_path / "run", ranks=1, first=limit)
    _, err = started.communicate(60)
    assert started.returncode == 1
    (line,) = (one for one in said(err) if "cannot be written" in one)
    assert "(file too large). Raise the limit on the size of files (ulimit -f)" in line


@pytest.mark.parametrize("limit", range(12, 40, 3))
def test_too_few_descriptors_are_said_in_one_line_by_each_rank(tmp_path, limit):
    def lower():
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    started = start(tmp_path, tmp_path / "run", "--set", "run.steps=3", ranks=3, first=lower)
    _, err = started.communicate(60)
    lines = said(err)
    if started.returncode:
        assert any("too many open files" in line for line in lines), err


def test_memory_that_is_refused_is_said_in_one_line(tmp_path):
    def lower():
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, used + 300_000_000))

    wide = ("--set", "model.options.hidden=[20000, 20000]", "--set", "run.steps=3")
    started = start(tmp_path, tmp_path / "run", *wide, ranks=1, first=lower)
    _, err = started.communicate(60)
    assert started.returncode == 1, err
    (line,) = (one for one in said(err) if one.startswith("syncline: rank 0: "))
    assert line.startswith("syncline: rank 0: memory was refused")
    assert line.endswith("Use fewer ranks on a machine, a smaller batch or a smaller model.")


def without_ipv4():
    """Enter a network with IPv6 only."""
    unshare(CLONE_NEWNET)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "-4", "addr", "flush", "dev", "lo"], check=True)


@pytest.mark.parametrize("network", [without_ipv4, lambda: unshare(CLONE_NEWNET)])
def test_ranks_that_share_memory_need_no_network(tmp_path, network):
    started = start(tmp_path, tmp_path / "run", "--set", "run.steps=3", "--json", first=network)
    text, err = started.communicate(60)
    assert started.returncode == 0, err
    assert json.loads(text)["communicator"] == "shared memory"


def test_streams_work_where_there_is_ipv6_only(tmp_path):
    sets = ("--set", "run.steps=3", "--set", "strategy.comm=network", "--json")
    started = start(tmp_path, tmp_path / "run", *sets, first=without_ipv4)
    text, err = started.communicate(60)
    assert started.returncode == 0, err
    assert json.loads(text)["communicator"] == "network (tcp)"


@pytest.mark.parametrize("address", ["no-such-host.invalid", "a..b", "192.0.2.1"])
def test_an_address_that_leads_nowhere_is_said_in_one_line(address):
    """No way leads out of the name space, so 192.0.2.1 cannot be reached."""

    def work():
        import syncline

        unshare(CLONE_NEWNET)
        os.environ["MASTER_ADDR"] = address
        syncline.init(comm="network")

    with pytest.raises(RankError) as caught:
        run_ranks(2, work)
    line = str(caught.value).splitlines()[-1]
    assert line.startswith(f"syncline.errors.ConfigError: MASTER_ADDR: got '{address}' (")
    assert line.endswith(
        "Use a name or an address of rank 0's machine that this machine can reach."
    )


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path):
    def to_full_disk():
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 2)

    sets = ("--set", "run.steps=5", "--json")
    started = start(tmp_path, tmp_path / "run", *sets, first=to_full_disk)
    text, _ = started.communicate(60)
    assert started.returncode == 0
    assert json.loads(text)["steps"] == 5


def test_a_result_that_cannot_be_printed_is_said(tmp_path):
    def to_full_disk():
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)

    sets = ("--set", "run.steps=5", "--json")
    started = start(tmp_path, tmp_path / "run", *sets, first=to_full_disk)
    _, err = started.communicate(60)
    assert started.returncode == 1
    assert said(err) == [
        "syncline: cannot be written (no space left on device). Free some space; what was written"
        " before stays."
    ]
    assert Path(tmp_path / "run" / "summary.json").exists()


def test_other_errors_are_not_explained():
    assert explain(ValueError("no")) is None
    assert explain(FileNotFoundError(2, "No such file or directory", "x")) is None
    assert explain(MemoryError()) is not None
