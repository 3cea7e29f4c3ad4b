"""What the death or the sleep of one rank costs the others in a window."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import syncline
from ranks import collect, run_ranks, start_ranks
from syncline.session import current_session

pytestmark = pytest.mark.processes

kinds = pytest.mark.parametrize("kind", ["auto", "network"])

LARGE = 1_000_000


def freeze(folder):
    """Stop this process and let others know which it was."""
    (folder / "part").write_text(str(os.getpid()))
    (folder / "part").rename(folder / "pid")
    os.kill(os.getpid(), signal.SIGSTOP)


def frozen(folder):
    """Wait until somebody is frozen; return the process."""
    while not (folder / "pid").exists():
        time.sleep(0.001)
    pid = int((folder / "pid").read_text())
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.001)
    return pid


@kinds
def test_an_updater_that_is_killed_in_the_middle_leaves_the_old_or_the_new_version(kind):
    """Five ranks update one strip as fast as they can, each until it is killed."""
    total = torch.zeros(LARGE)

    def work():
        rank = syncline.init(comm=kind)
        session = current_session()
        session.comm.barrier()
        session.control.tolerate(range(1, 6))
        served = []

        def add(call):
            total.add_(call.values)
            served.append(call.sender)
            return len(served)

        window = session.comm.window(0, torch.float32, {"add": add})
        values = session.comm.allocate(LARGE, torch.float32)
        values.mine.fill_(1.0)
        session.comm.barrier()
        if rank == 0:
            window.until(lambda: len(window.gone()) == 5, lambda: "waits for their ends")
            return [total.unique().tolist(), len(served), len(set(served))]
        window.call(0, "add", values).wait()  # each is served once, however slow the machine
        end = random.Random(rank).uniform(0.0, 0.4)
        threading.Timer(end, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            window.call(0, "add", values).wait()

    first, *others = collect(*start_ranks(6, work))
    assert others == [None] * 5, "all of them were killed"
    found, served, callers = first["result"]
    assert found == [float(served)], "every element has every update that was served, once"
    assert callers == 5


@kinds
def test_a_frozen_peer_costs_only_what_is_done_with_it(kind, tmp_path):
    def work():
        rank = syncline.init(comm=kind)
        comm = current_session().comm
        told = []
        functions = {
            "add": lambda call: int(call.note) + 1,
            "tell": lambda call: told.append(1) or 0,
        }
        window = comm.window(8, torch.float32, functions)
        window.publish(torch.full((8,), float(rank)))
        comm.barrier()
        if rank == 2:
            freeze(tmp_path)
            comm.barrier()
            return None
        pid = frozen(tmp_path)
        to_frozen = window.call(2, "add", note=b"41")
        answers = [window.call(1 - rank, "add", note=b"%d" % turn).wait() for turn in range(50)]
        reading = window.get(1 - rank)
        reading.wait()
        seen = reading.values.tolist()
        reading.release()
        was_over = to_frozen.is_over()
        window.call(0, "tell").wait()
        if rank == 0:  # both are through before the third wakes up
            window.until(lambda: len(told) == 2, lambda: "waits for the other")
            os.kill(pid, signal.SIGCONT)
        answer = to_frozen.wait()
        comm.barrier()
        return [answers == list(range(1, 51)), seen, was_over, answer]

    first, second, _ = run_ranks(3, work)
    assert first == [True, [1.0] * 8, False, 42]
    assert second == [True, [0.0] * 8, False, 42]


def test_what_a_frozen_rank_published_can_be_read_in_shared_memory(tmp_path):
    def work():
        rank = syncline.init()
        comm = current_session().comm
        window = comm.window(8, torch.float32, {})
        window.publish(torch.full((8,), 7.0 + rank))
        comm.barrier()
        if rank == 1:
            freeze(tmp_path)
            comm.barrier()
            return None
        pid = frozen(tmp_path)
        reading = window.get(1)
        found = [reading.wait(), reading.values.tolist()]
        reading.release()
        os.kill(pid, signal.SIGCONT)
        comm.barrier()
        return found

    assert run_ranks(2, work)[0] == [1, [8.0] * 8]


def test_a_reader_that_falls_asleep_costs_the_publisher_one_short_wait(tmp_path):
    """The version before stays for all readers, and the publisher goes on with its work."""

    def work():
        rank = syncline.init()
        comm = current_session().comm
        window = comm.window(8, torch.float32, {})
        window.publish(torch.full((8,), 1.0))
        comm.barrier()
        if rank == 1:
            reading = window.get(0)
            reading.wait()
            freeze(tmp_path)
            found = reading.values.tolist()
            reading.release()
            comm.barrier()
            comm.barrier()
            again = window.get(0)
            after = [found, again.wait(), again.values.tolist()]
            again.release()
            comm.barrier()
            return after
        pid = frozen(tmp_path)
        started = time.monotonic()
        told = [window.publish(torch.full((8,), float(version))) for version in range(2, 52)]
        took_s = time.monotonic() - started
        os.kill(pid, signal.SIGCONT)
        comm.barrier()
        window.publish(torch.full((8,), 100.0))
        comm.barrier()
        comm.barrier()
        return took_s, told

    (took_s, told), found = run_ranks(2, work)
    # The other buffer was free once; the 49 publications after it find theirs taken, and say so.
    assert took_s < 1.0
    assert told == [True] + [False] * 49
    assert found == [[1.0] * 8, 3, [100.0] * 8]
