"""What `syncline doctor` tries: two ranks that meet, and a namespace of a network.

Each trial is real: processes start, connect and add up memory, as in training.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec

from syncline.config.session import SessionSettings
from syncline.config.words import brief
from syncline.errors import SynclineError
from syncline.launch.env import read_world, thread_environment
from syncline.launch.local import BAD_INPUT, launch
from syncline.launch.signals import end_promptly, leave
from syncline.resources import explain

KINDS = {
    "shared_memory": "through shared memory",
    "network": "over TCP",
    "torch": "with messages of torch.distributed",
}
_MEET_S, _ROUNDS, _ELEMENTS = 10.0, 20, 1 << 18
_NAMESPACE_S = 10.0
_SHAPE = (
    *("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root"),
    *("tbf", "rate", "1gbit", "burst", "64kb", "latency", "50ms"),
)


class Meeting(msgspec.Struct, frozen=True):
    """How two ranks met: what it took, or why they did not."""

    kind: str
    is_well: bool
    meet_s: float = 0.0
    """From the start of the processes until they are connected."""
    barrier_s: float = 0.0
    sum_s: float = 0.0
    """To add up 1 MiB."""
    why_not: str = ""


def meet(kind: str) -> Meeting:
    """Let two ranks meet on this machine."""
    # Ranks are forks: what they all need is loaded here, once.
    os.environ |= thread_environment(1)
    import syncline.session  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="syncline-doctor-") as folder:
        path, said = Path(folder) / "found", Path(folder) / "said"
        with said.open("wb") as log:
            work = functools.partial(_as_rank, kind, path, said, time.time())
            outcome = launch(work, 2, stdout=log.fileno())
        if outcome.exit_code or not path.exists():
            lines = said.read_text().splitlines()
            why_not = lines[0] if lines else f"a rank ended with status {outcome.exit_code}"
            return Meeting(kind, False, why_not=why_not)
        return msgspec.json.decode(path.read_bytes(), type=Meeting)


def _as_rank(kind: str, path: Path, said: Path, started_s: float) -> None:
    """Meet, add up, and leave what was found in a file."""
    end_promptly()
    try:
        found = _found(kind, started_s)
    except (SynclineError, MemoryError, OSError, RuntimeError) as error:
        with said.open("a") as log:
            log.write(f"{explain(error) or brief(error)}\n")
        leave(BAD_INPUT)  # the launcher need not say more
    if read_world().rank == 0:
        path.write_bytes(msgspec.json.encode(found))


def _found(kind: str, started_s: float) -> Meeting:
    import torch

    from syncline.comm.base import small_sum
    from syncline.session import close_session, open_session

    session = open_session(SessionSettings(comm=kind, meet_s=_MEET_S, threads=1))
    meet_s = time.time() - started_s
    comm, call = session.comm, session.lane.call
    sums = call(lambda: small_sum(comm, _ELEMENTS, torch.float32))
    barriers, times = [], []
    for _ in range(_ROUNDS):
        sums.sums[0].mine.fill_(session.world.rank + 1.0)
        began_s = time.perf_counter()
        call(comm.barrier)
        met_s = time.perf_counter()
        call(lambda: comm.all_reduce(sums))
        barriers.append(met_s - began_s)
        times.append(time.perf_counter() - met_s)
        is_right = bool((sums.sums[0].mine == 3.0).all())
        call(comm.end_lending)
        if not is_right:
            break
    close_session()
    why_not = "" if is_right else "the sum of 1 and 2 is not 3: memory or messages are damaged"
    spent = statistics.median(barriers), statistics.median(times)
    return Meeting(kind, is_right, meet_s, *spent, why_not)


def why_no_lab() -> str:
    """Say why no lab (docs/lab.md) can be made here; empty if one can.

    A network namespace is made, its loopback device is shaped, and it vanishes with the process.
    """
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian: iproute2, util-linux)"
    try:
        done = subprocess.run(_SHAPE, capture_output=True, text=True, timeout=_NAMESPACE_S)
    except subprocess.TimeoutExpired:
        return f"making a network namespace took more than {_NAMESPACE_S:g} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["refused"])[0]
