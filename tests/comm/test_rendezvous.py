"""Ranks that come together: late ones, strangers, and the store that tells who shares a machine."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time

import pytest
import torch

import syncline
from ranks import collect, run_ranks, start_ranks
from syncline.comm import machine
from syncline.comm.handshake import Hello, answer, knock, pack, receive_frame
from syncline.comm.rendezvous import Place, accept_all, connect_to
from syncline.comm.store import JobStore, find_machines, machine_id
from syncline.errors import CommError, KeyRefused
from syncline.launch.env import read_world
from syncline.session import current_session

KEY = b"k" * 16


# -- late ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_comes_late_is_waited_for(late):
    def work():
        if int(os.environ["RANK"]) == late:
            time.sleep(12.0)  # longer than any limit of a single message
        rank = syncline.init(meet_s=30.0)
        current_session().comm.barrier()
        return rank

    assert run_ranks(3, work) == [0, 1, 2]


@pytest.mark.processes
def test_who_never_comes_is_named_after_meet_s():
    def work():
        if int(os.environ["RANK"]) == 2:
            return None
        syncline.init(meet_s=1.5)

    started = time.monotonic()
    answers = collect(*start_ranks(3, work), 30.0)
    assert time.monotonic() - started < 15
    assert answers[0]["kind"] == answers[1]["kind"] == "CommError"
    assert answers[0]["text"] == (
        "rank 0 waited 1.5 s for rank 2, which never came. Look at the logs; does everybody have "
        "the same SYNCLINE_KEY? If ranks start slowly, raise meet_s."
    )
    assert answers[1]["text"] == (
        "rank 1 has met rank 0, which then did not meet all others of its machine. Look at the log "
        "of rank 0 first."
    )


@pytest.mark.processes
def test_a_leader_that_is_slow_to_make_memory_is_waited_for():
    """After the meeting there is no limit but `hung_s`: rank 0 may load its data for minutes."""

    def work():
        machine._CHECK_S = 0.2
        if syncline.init() == 0:
            time.sleep(1.0)
        return len(current_session().comm.allocate(10, torch.float32).mine)

    assert run_ranks(2, work) == [10, 10]


@pytest.mark.processes
def test_a_rank_0_that_never_listens_is_named_in_one_line(capfd):
    def work():
        if int(os.environ["RANK"]) == 1:
            syncline.init(comm="network", meet_s=1.0)

    answers = collect(*start_ranks(2, work), 30.0)
    assert answers[1]["kind"] == "CommError"
    assert re.fullmatch(
        r"rank 1 could not reach rank 0 at 127\.0\.0\.1:\d+ within 1 s \(.*refused\)\. Is rank 0 "
        r"running\? Look at its log first\. If ranks start slowly, raise meet_s\.",
        answers[1]["text"],
    )
    assert "frame #" not in capfd.readouterr().err


@pytest.mark.processes
def test_an_address_that_leads_nowhere_is_refused_at_once():
    def work():
        os.environ["MASTER_ADDR"] = "no.such.host.invalid"
        syncline.init(comm="network")

    answers = collect(*start_ranks(2, work), 30.0)
    for answer_ in answers:
        assert answer_["kind"] == "ConfigError"
        assert answer_["text"].startswith("MASTER_ADDR: got 'no.such.host.invalid' (")


# -- strangers -------------------------------------------------------------------------------------


def leader_and_listener():
    place = Place(0, 2, 0, (0, 1), 0, (0,), secrets.token_hex(4), KEY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0syncline-test/{place.job}")
    listener.listen(8)
    return place, listener


def as_caller(sock, place, proof):
    """Introduce ourselves as rank 1 up to the proof, which is made up."""
    sock.sendall(pack(Hello(place.job, 1, "control", "00" * 16)))
    receive_frame(sock)
    sock.sendall(pack({"proof": proof}))


BAD_FRAMES = {
    "a proof outside ASCII": lambda sock, place: as_caller(sock, place, "prüfung ☃"),
    "a proof of another key": lambda sock, place: as_caller(sock, place, "ab" * 32),
    "an empty proof": lambda sock, place: as_caller(sock, place, ""),
    "no JSON": lambda sock, place: sock.sendall(b"\x05\0\0\0nonse"),
    "JSON of another kind": lambda sock, place: sock.sendall(pack([1, 2, 3])),
    "a hello with a key too many": lambda sock, place: sock.sendall(pack({"job": "x", "evil": 1})),
    "bytes that are no UTF-8": lambda sock, place: sock.sendall(b'\x04\0\0\0"\xff\xfe"'),
    "brackets without end": lambda sock, place: sock.sendall(
        (100_000).to_bytes(4, "little") + b"[" * 100_000
    ),
    "a nonce outside ASCII": lambda sock, place: sock.sendall(
        pack(Hello(place.job, 1, "control", "ü☃"))
    ),
    "a frame that is too long": lambda sock, place: sock.sendall(b"\xff\xff\xff\xff"),
    "nothing": lambda sock, place: None,
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_a_stranger_is_refused_and_the_meeting_goes_on(what):
    place, listener = leader_and_listener()

    def call():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(5.0)
            stranger.connect(listener.getsockname())
            BAD_FRAMES[what](stranger, place)
        member = Place(1, 2, 1, (0, 1), 0, (0,), place.job, KEY)
        where = listener.getsockname()
        came.append(connect_to(socket.AF_UNIX, where, member, "control", 0, 10.0))

    came: list[socket.socket] = []
    thread = threading.Thread(target=call)
    thread.start()
    with listener:
        found = accept_all(listener, place, {(1, "control")}, 10.0)
    thread.join()
    assert list(found) == [(1, "control")]
    for sock in (*came, *found.values()):
        sock.close()


@pytest.mark.parametrize("proof", ["ü" * 64, "☃"])
def test_a_bad_proof_is_refused_at_both_ends(proof):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        place = Place(0, 2, 0, (0, 1), 0, (0,), "j", KEY)
        thread = threading.Thread(target=as_caller, args=(ours, place, proof))
        thread.start()
        with pytest.raises(KeyRefused, match="rank 0 refused process 7, which claims rank 1"):
            answer(theirs, KEY, "j", 0, "process 7")
        thread.join()
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def answer_badly():
            receive_frame(theirs)
            theirs.sendall(pack({"rank": 0, "nonce": "n", "proof": proof}))

        thread = threading.Thread(target=answer_badly)
        thread.start()
        with pytest.raises(KeyRefused, match="rank 1 refused the process that answered as rank 0"):
            knock(ours, KEY, "j", 1, "control")
        thread.join()


def test_strangers_do_not_prolong_the_meeting():
    place, listener = leader_and_listener()
    is_over = threading.Event()

    def pester():
        while not is_over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger,
            ):
                stranger.connect(where)
                stranger.sendall(pack([]))
            time.sleep(0.05)

    where = listener.getsockname()
    thread = threading.Thread(target=pester, daemon=True)
    thread.start()
    started = time.monotonic()
    with listener, pytest.raises(CommError, match=r"rank 0 waited 0\.6 s for rank 1"):
        accept_all(listener, place, {(1, "control")}, 0.6)
    is_over.set()
    thread.join()
    assert time.monotonic() - started < 5.0


# -- the store -------------------------------------------------------------------------------------


class FakeStore:
    """A table that has every entry already, or none."""

    def __init__(self, entries):
        self.entries = entries

    def set(self, key, value):
        self.entries[key] = value.encode()

    def wait(self, keys, timeout):
        if keys[0] not in self.entries:
            raise RuntimeError(f"wait timeout after {timeout.total_seconds():g} s\nstack")

    def get(self, key):
        return self.entries[key]


def machines_of(ids, rank, **environ):
    where = {"MASTER_ADDR": "h", "MASTER_PORT": "1", "WORLD_SIZE": str(len(ids))}
    world = read_world(where | {"RANK": str(rank)} | environ)
    prefix = f"syncline/{world.job_id}/machine"
    entries = {f"{prefix}/{other}": one for other, one in enumerate(ids) if one is not None}
    return find_machines(world, JobStore(FakeStore(entries), rank, 9.0))


def test_machines_are_in_the_order_of_their_lowest_rank():
    mine = machine_id().encode()
    assert machines_of([mine, None, mine, b"aa"], 1) == ((0, 1, 2), (3,))
    assert machines_of([b"bb", b"aa", b"bb", None], 3) == ((0, 2), (1,), (3,))


def test_a_rank_that_left_no_entry_is_waited_for_and_missed():
    with pytest.raises(CommError) as caught:
        machines_of([None, None], 0)
    assert "rank 0 waited 9 s (meet_s) for " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("nonsense", [b"", b"\xff", b"a b", b"g", b"a" * 33])
def test_what_the_store_says_of_machines_is_checked(nonsense):
    with pytest.raises(CommError, match="another program writes there"):
        machines_of([nonsense, None], 1)


def test_a_machine_is_its_name_its_boot_and_its_namespaces():
    here = machine_id("a", {"net": 1, "pid": 2})
    assert here == machine_id("a", {"pid": 2, "net": 1})
    others = [("b", {"net": 1, "pid": 2}), ("a", {"net": 3, "pid": 2}), ("a", {"net": 1, "pid": 3})]
    assert len({here, *(machine_id(*other) for other in others)}) == 4
    assert machine_id() == machine_id()


def test_frames_of_the_handshake_are_read_strictly():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack({"job": 1, "rank": "x", "purpose": "p", "nonce": "n"}))
        with pytest.raises(CommError, match="not one of ours"):
            answer(theirs, KEY, "j", 0, "process 7")
