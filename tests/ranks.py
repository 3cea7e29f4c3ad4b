"""Real ranks for tests: forked processes with the environment that a launcher would give them.

`run_ranks(size, work)` runs `work()` on every rank and returns the results by rank. A rank that
raises fails the test with its own traceback, not with a peer's complaint. Forking a process that
has torch loaded takes milliseconds; starting a fresh one takes seconds.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

# What a rank would load by and by is loaded before the fork: once, not in every rank.
import torch._dynamo
import torch.distributed.rendezvous
import torch.profiler._cupti_monitor

import syncline.api
import syncline.replica
import syncline.verify.recording  # noqa: F401
from syncline.strategies import STRATEGIES, make_strategy

for _name in STRATEGIES:
    make_strategy(_name)
"".encode("idna")  # by the store

HANGS_S = 40.0
"""A rank that runs this long says where it is, for whoever reads the log."""


class RankError(AssertionError):
    """A rank raised, died or did not end in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(
    rank: int, local_size: int, machines: int, job: str, port: int, key: str
) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(local_size * machines),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(machines),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SYNCLINE_JOB": job,
        "SYNCLINE_KEY": key,
    }


def _child(work: Callable[[], Any], env: dict[str, str], out: int) -> None:
    status = 1
    gc.freeze()  # a collection would write to every object, and so copy its page
    try:
        os.environ.update(env)
        faulthandler.dump_traceback_later(HANGS_S, file=sys.__stderr__)
        torch.set_num_threads(1)
        result = {"result": work()}
        from syncline.session import close_session

        close_session()
        status = 0
    except BaseException as error:
        result = {"error": traceback.format_exc(), "kind": type(error).__name__, "text": str(error)}
        from syncline.session import close_session, fail_session

        fail_session(error)
        close_session()
    with os.fdopen(out, "w") as file:
        json.dump(result, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start_ranks(
    size: int, work: Callable[[], Any], *, machines: int = 1, keys: list[str] | None = None
) -> tuple[list[int], list[int]]:
    """Fork the ranks; return their processes and the pipes on which results will come."""
    job, port, key = secrets.token_hex(4), free_port(), secrets.token_hex(16)
    pids, pipes = [], []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(size):
        read, write = os.pipe()
        env = environment(rank, size // machines, machines, job, port, keys[rank] if keys else key)
        pid = os.fork()
        if pid == 0:
            for pipe in pipes:
                os.close(pipe)
            os.close(read)
            _child(work, env, write)
        os.close(write)
        pids.append(pid)
        pipes.append(read)
    return pids, pipes


def collect(
    pids: list[int], pipes: list[int], timeout_s: float = 50.0
) -> list[dict[str, Any] | None]:
    """Wait for all ranks; a rank's entry is None if it ended without a word."""
    deadline = time.monotonic() + timeout_s
    texts = {pipe: b"" for pipe in pipes}
    open_pipes = set(pipes)
    while open_pipes and time.monotonic() < deadline:
        ready, _, _ = select.select(list(open_pipes), [], [], 0.5)
        for pipe in ready:
            data = os.read(pipe, 1 << 16)
            texts[pipe] += data
            if not data:
                open_pipes.discard(pipe)
    for pid, pipe in zip(pids, pipes, strict=True):
        if pipe in open_pipes:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)
    return [json.loads(texts[pipe]) if texts[pipe] else None for pipe in pipes]


def run_ranks(
    size: int, work: Callable[[], Any], *, machines: int = 1, timeout_s: float = 50.0
) -> list[Any]:
    """Run `work` on every rank of a world; return the results in rank order."""
    answers = collect(*start_ranks(size, work, machines=machines), timeout_s)
    errors = [
        (answer or {}).get("error", "ended without a word: killed, or past the time limit")
        for answer in answers
        if answer is None or "error" in answer
    ]
    if errors:
        own = [e for e in errors if "RankFailed" not in e and "RankDied" not in e]
        raise RankError((own or errors)[0])
    return [answer["result"] for answer in answers if answer is not None]
