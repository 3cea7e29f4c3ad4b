"""Who lives and who is gone: real processes, killed, frozen, stuck and impostors."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time

import pytest
import torch
from torch import nn

import syncline
from ranks import collect, run_ranks, start_ranks
from syncline.comm.handshake import Frames, answer, knock, pack
from syncline.comm.rendezvous import Place, read_address
from syncline.errors import CommError, KeyRefused
from syncline.session import current_session

pytestmark = pytest.mark.processes


def train_forever(comm="auto", silent_s=20.0, hung_s=600.0, stuck_rank=None, bell=None):
    """Train until a peer is gone; return what was said of it and when. Rings when under way."""
    rank = syncline.init(comm=comm, silent_s=silent_s, hung_s=hung_s)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    syncline.distribute(model, optimizer, overlap=True)
    try:
        for step in range(100_000):
            if rank == stuck_rank and step == 5:
                time.sleep(60)
            if bell is not None and step == 3:
                os.eventfd_write(bell, 1)
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
    except syncline.errors.RankFailed as error:
        return [type(error).__name__, error.rank, str(error), time.time()]


def fail_one(size, victim, number, *, machines=1, **settings):
    """Send a signal to one rank of a running world; return the others' answers and the time."""
    bell = os.eventfd(0, os.EFD_SEMAPHORE)
    pids, pipes = start_ranks(size, lambda: train_forever(bell=bell, **settings), machines=machines)
    for _ in range(size):
        os.eventfd_read(bell)
    os.close(bell)
    time.sleep(0.2)
    os.kill(pids[victim], number)
    when = time.time()
    if number == signal.SIGSTOP:
        threading.Timer(7.0, os.kill, (pids[victim], signal.SIGKILL)).start()
    answers = collect(pids, pipes, 40.0)
    others = [answers[rank] for rank in range(size) if rank != victim]
    assert all(answer and "result" in answer for answer in others), others
    return [answer["result"] for answer in others], when


@pytest.mark.parametrize(
    ("comm", "machines", "victim"),
    [("auto", 1, 0), ("auto", 1, 3), ("network", 1, 0), ("network", 1, 2), ("auto", 2, 3)],
)
def test_a_killed_rank_is_named_by_all_others_within_five_seconds(comm, machines, victim):
    answers, when = fail_one(4, victim, signal.SIGKILL, comm=comm, machines=machines)
    assert len(answers) == 3
    for kind, rank, text, named_at in answers:
        assert (kind, rank) == ("RankDied", victim)
        assert text.startswith(f"rank {victim} died at step ")
        assert named_at - when < 5.0


@pytest.mark.parametrize("comm", ["auto", "network"])
def test_a_frozen_rank_is_named_after_the_limit(comm):
    answers, when = fail_one(3, 1, signal.SIGSTOP, silent_s=2.0, comm=comm)
    for kind, rank, text, named_at in answers:
        assert (kind, rank) == ("RankSilent", 1)
        assert "rank 1 is silent" in text
        assert 1.0 < named_at - when < 6.5


def test_a_whole_job_that_was_stopped_goes_on():
    """As after Ctrl-Z and fg: everybody was silent, and nobody is to blame."""
    bell = os.eventfd(0, os.EFD_SEMAPHORE)

    def work():
        syncline.init(silent_s=1.5)
        comm = current_session().comm
        comm.barrier()
        os.eventfd_write(bell, 1)
        for _ in range(40):
            comm.barrier()
            time.sleep(0.05)
        return "well"

    pids, pipes = start_ranks(3, work)
    for _ in range(3):
        os.eventfd_read(bell)
    os.close(bell)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert [answer["result"] for answer in collect(pids, pipes, 30.0)] == ["well"] * 3


@pytest.mark.parametrize("comm", ["auto", "network"])
def test_a_rank_that_gets_nowhere_is_named_after_the_limit(comm):
    bell = os.eventfd(0, os.EFD_SEMAPHORE)
    settings = {"comm": comm, "hung_s": 2.0, "stuck_rank": 2, "bell": bell}
    pids, pipes = start_ranks(3, lambda: train_forever(**settings))
    for _ in range(3):
        os.eventfd_read(bell)
    os.close(bell)
    started = time.time()
    threading.Timer(8.0, os.kill, (pids[2], signal.SIGKILL)).start()
    answers = collect(pids, pipes, 30.0)
    for rank in (0, 1):
        kind, named, text, when = answers[rank]["result"]
        assert (kind, named) == ("RankHung", 2)
        # Or the last phase of the step before, if the comm lane had ended it before step() did.
        assert re.search(r"rank 2 hangs at step (5|4 \()", text)
        assert 1.0 < when - started < 7.5


def test_who_waits_for_one_that_waits_blames_the_one_furthest_behind():
    def work():
        rank = syncline.init(comm="network", hung_s=2.0)
        session = current_session()
        near, far = session.comm.subgroup([0, 1]), session.comm.subgroup([1, 2])
        if rank == 2:
            time.sleep(7.0)
            return None
        session.control.progress.write("reduce")
        try:
            if rank == 1:
                time.sleep(2.5)  # so that rank 0 loses patience first
                far.barrier()
            near.barrier()
        except syncline.errors.RankHung as error:
            return [error.rank, str(error)]

    named, *_ = run_ranks(3, work)
    assert named[0] == 2
    assert re.search(r"rank 0 has waited [23] s for rank 1, which waits too", named[1])


def test_nothing_is_left_after_everybody_was_killed():
    def segments(processes):
        """Return the numbers of the memory files that are mapped somewhere."""
        found = set()
        for pid in processes:
            try:
                with open(f"/proc/{pid}/maps") as file:
                    found |= {line.split()[4] for line in file if "memfd:syncline" in line}
            except OSError:
                continue
        return found

    pids, pipes = start_ranks(2, train_forever)
    deadline = time.monotonic() + 20
    while not (used := segments(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert used, "the ranks should be using shared memory by now"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert collect(pids, pipes, 10.0) == [None, None]
    everybody = list(filter(str.isdigit, os.listdir("/proc")))
    assert not used & segments(everybody)
    assert not [name for name in os.listdir("/dev/shm") if "syncline" in name]


def test_a_rank_with_the_wrong_key_is_refused_by_name(caplog):
    def work():
        syncline.init(meet_s=4.0)

    keys = ["aa" * 16, "aa" * 16, "bb" * 16]
    answers = collect(*start_ranks(3, work, keys=keys), 30.0)
    assert answers[2]["kind"] == "KeyRefused"
    assert "does not hold this job's key" in answers[2]["text"]
    assert "which never came" in answers[0]["text"]
    assert "rank 2" in answers[0]["text"]


def conversation(one_key, other_key, job="j", other_job="j"):
    """Let a caller and a listener meet on a socket pair; return what each says."""
    ours, theirs = socket.socketpair()
    said = {}

    def listen():
        try:
            said["listener"] = answer(theirs, other_key, other_job, 0, "process 7").rank
        except CommError as error:
            said["listener"] = error
        theirs.close()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        said["caller"] = knock(ours, one_key, job, 3, "control")
    except (CommError, OSError) as error:
        said["caller"] = error
    ours.close()
    thread.join()
    return said


def test_both_ends_prove_the_key():
    assert conversation(b"k" * 16, b"k" * 16) == {"listener": 3, "caller": 0}


def test_a_wrong_key_is_refused_at_both_ends():
    said = conversation(b"k" * 16, b"x" * 16)
    assert isinstance(said["caller"], KeyRefused)
    assert isinstance(said["listener"], KeyRefused)
    assert "rank 0 refused process 7, which claims rank 3: wrong key" in str(said["listener"])


def test_a_caller_of_another_job_is_refused():
    said = conversation(b"k" * 16, b"k" * 16, job="a", other_job="b")
    assert "belongs to another job (a)" in str(said["listener"])


def test_frames_survive_any_cut_and_nonsense_is_refused():
    data = pack({"a": 1}) + pack({"b": [2] * 50})
    for size in (1, 3, 7, 1000):
        frames = Frames()
        found = [
            frame
            for start in range(0, len(data), size)
            for frame in frames.feed(data[start : start + size])
        ]
        assert found == [b'{"a":1}', pack({"b": [2] * 50})[4:]]
    with pytest.raises(CommError, match="not one of ours"):
        Frames().feed(b"\xff\xff\xff\xff")


class FakeStore:
    def __init__(self, value):
        self.value = value

    def set(self, key, value):
        self.value = value.encode()

    def get(self, key):
        return self.value


def test_what_the_store_says_is_checked_before_use():
    place = Place(1, 2, 0, (1,), 1, (0, 1), "job", b"")
    found = read_address(place, FakeStore(b"10.1.2.3 4567"), "control", 0)
    assert found == (socket.AF_INET, ("10.1.2.3", 4567))
    for nonsense in (b"10.1.2.3; rm -rf 1", b"evil.example.com 80", b"10.1.2.3 99999", b"\xff\xfe"):
        with pytest.raises(CommError, match="another program writes there"):
            read_address(place, FakeStore(nonsense), "control", 0)


def test_memory_that_is_not_there_is_refused_before_it_is_touched():
    def work():
        syncline.init()
        try:
            current_session().comm.allocate(10**12, torch.float32)
        except syncline.SynclineError as error:
            return str(error)

    texts = run_ranks(2, work)
    assert texts[0].startswith("shared memory: 8000.0 GB are needed on this machine, but ")
    assert "Use fewer ranks a machine" in texts[0]
