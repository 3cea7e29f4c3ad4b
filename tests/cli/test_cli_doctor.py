"""`syncline doctor`: what it tries is real, and what does not work is said."""

from __future__ import annotations

import json
import os
import resource

import pytest

from command import Started
from syncline import machine_limits
from syncline.cli.doctor import in_words
from syncline.machine_limits import interface_towards, limits_here

pytestmark = [pytest.mark.processes]


def run(*arguments, first=None, env=None):
    started = Started("doctor", *arguments, traced=False, first=first, env=env)
    out, said = started.communicate(100)
    return started.returncode, out, said


def test_ranks_meet_in_every_way_and_all_of_it_is_said():
    status, out, said = run("--json")
    assert (status, said) == (0, "")
    found = json.loads(out)
    ways = {one["kind"]: one for one in found["meetings"]}
    assert {*ways} == {"shared_memory", "network", "torch"}
    for one in ways.values():
        assert one["is_well"]
        assert 0 < one["barrier_s"] < one["meet_s"] < 20
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert (found["launcher"], found["ranks"], found["missing"]) == ("alone", 1, [])
    assert found["data"]["digits"]
    words = in_words(found)
    assert len(words.splitlines()) == 15
    assert "2 ranks through shared memory" in words
    assert words.endswith("nothing is missing")


def test_what_does_not_work_is_said_and_the_status_tells():
    def limit():
        few = len(os.listdir("/proc/self/fd")) + 18
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    status, out, _ = run(first=limit)
    assert status == 1
    assert "missing: descriptors: ulimit -n" in out
    assert "2 ranks over TCP                            DO NOT MEET: too many open files" in out
    assert "missing: ranks do not meet over TCP\n" in out


def test_an_environment_that_contradicts_itself_is_named():
    status, out, _ = run(env={**os.environ, "RANK": "0"})
    assert status == 0
    assert "missing: WORLD_SIZE: not set though RANK is" in out


def test_the_limits_of_a_container_are_read(tmp_path, monkeypatch):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "memory.max").write_text("4000000000\n")
    real = machine_limits._read
    monkeypatch.setattr(machine_limits, "_GROUPS", tmp_path)
    monkeypatch.setattr(
        machine_limits,
        "_read",
        lambda path: "0::/a/b\n" if str(path) == "/proc/self/cgroup" else real(path),
    )
    found = limits_here()
    assert (found.group_cores, found.group_memory_bytes) == (1.5, 4_000_000_000)
    assert found.usable_cores == 1


def test_limits_of_version_1_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_limits, "_GROUPS", tmp_path)
    for folder, name, text in (
        ("cpu", "cpu.cfs_quota_us", "-1"),
        ("cpu", "cpu.cfs_period_us", "100000"),
        ("memory", "memory.limit_in_bytes", str(0x7FFFFFFFFFFFF000)),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    found = limits_here()
    assert (found.group_cores, found.group_memory_bytes) == (None, None)
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("250000")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000000")
    found = limits_here()
    assert (found.group_cores, found.group_memory_bytes) == (2.5, 1_000_000)


def test_the_loopback_device_leads_to_this_machine():
    assert interface_towards("127.0.0.1") == ("lo", "127.0.0.1")
