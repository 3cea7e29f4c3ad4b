"""The lab: machines that are namespaces, links with a rate, faults, and nothing left behind."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.wire import ideal_step_s
from lab.network import PREFIX, Lab, LabError, lab_names, rate_bytes_per_s, why_not

from command import Started
from syncline import models
from training import train_forked
from worlds import untraced

TOP = Path(__file__).parents[2]
needs_lab = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

RECEIVE = """
import socket, sys
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("ready", flush=True)
    sock, _ = server.accept()
    total = 0
    while data := sock.recv(1 << 20):
        total += len(data)
    print(total, flush=True)
"""
SEND = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 5000))
started = time.monotonic()
sock.sendall(bytes(int(sys.argv[2])))
sock.shutdown(socket.SHUT_WR)
sock.recv(1)
print(time.monotonic() - started)
"""


def command_line(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "lab", *arguments],
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def namespaces(name):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"{PREFIX}{name}-")]


def is_over(pid):
    """Say whether a process has ended; nobody may have fetched its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def send(lab, size):
    """Send bytes from machine 0 to machine 1; return the seconds that it took."""
    receiver = lab.popen(1, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "ready\n"
    arguments = [sys.executable, "-c", SEND, lab.address(1), str(size)]
    sender = lab.popen(0, arguments, stdout=subprocess.PIPE, text=True)
    took_s = float(sender.communicate(timeout=60)[0])
    assert receiver.communicate(timeout=60)[0] == f"{size}\n"
    return took_s


@needs_lab
def test_a_link_has_its_rate_and_counts_its_bytes():
    size = 4_000_000
    with Lab(2, "100mbit") as lab:
        assert lab.congestion_control(0) == "reno"
        before = lab.traffic(0)
        slow_s = send(lab, size)
        sent = lab.traffic(0).since(before)
        lab.set_rate(0, "200mbit")
        assert lab.rate_of(0) == "200mbit"
        lab.set_rate(1, "200mbit")
        fast_s = send(lab, size)
    # 0.32 s on the wire and headers; the token bucket's first 128 kB are free.
    assert 0.95 * size / rate_bytes_per_s("100mbit") < slow_s < 2.0
    assert fast_s < 0.75 * slow_s
    assert size < sent.sent_bytes < 1.2 * size
    assert sent.received_packets > 0
    assert namespaces(lab.name) == []


@needs_lab
def test_faults_are_done_and_undone_while_something_runs():
    with Lab(2, "1gbit") as lab:
        sleeper = lab.popen(1, ["sleep", "100"])
        while not lab.processes(1):
            time.sleep(0.01)
        lab.freeze(1)
        state = Path(f"/proc/{sleeper.pid}/stat")
        deadline = time.monotonic() + 5
        while state.read_text().split()[2] != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state.read_text().split()[2] == "T"
        lab.thaw(1)
        lab.cut(1)
        assert lab.is_cut(1)
        assert not lab.is_cut(0)
        lab.restore(1)
        assert not lab.is_cut(1)
        lab.kill(1)
        assert sleeper.wait(timeout=5) == -signal.SIGKILL
        with pytest.raises(LabError, match="machine: got 2, this lab has 0 to 1"):
            lab.cut(2)


@needs_lab
def test_a_lab_goes_when_its_maker_is_killed_and_takes_its_processes_along():
    script = (
        "import time; from lab import Lab\n"
        "with Lab(2) as lab:\n"
        "    lab.popen(1, ['sleep', '1000'])\n"
        "    print(lab.name, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", script], cwd=TOP, stdout=subprocess.PIPE, text=True
    )
    name = maker.stdout.readline().strip()
    assert len(namespaces(name)) == 3
    inside = Lab.find(name)
    while not (running := inside.processes(1)):
        time.sleep(0.01)
    maker.kill()
    maker.wait()
    deadline = time.monotonic() + 20
    while namespaces(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert namespaces(name) == []
    maker.stdout.close()
    assert all(is_over(pid) for pid in running)


@needs_lab
def test_the_command_line_makes_shows_and_removes():
    name = f"cli{os.getpid()}"
    made = command_line("up", "--machines", "2", "--rate", "10mbit", "--name", name)
    assert made.stdout == f"lab {name}: 2 machines, 10mbit, reno\n"
    again = command_line("up", "--name", name)
    assert (again.returncode, again.stderr.splitlines()[0]) == (
        2,
        f"lab: there is a lab named {name} already. Take it down, or choose another.",
    )
    status = command_line("status", name).stdout.splitlines()
    assert len(status) == 3
    assert "10mbit" in status[1]
    assert command_line("exec", name, "1", "true").returncode == 0
    assert command_line("fault", name, "1", "cut").returncode == 0
    assert "cut" in command_line("status", name).stdout
    assert command_line("down", name).returncode == 0
    assert name not in lab_names()
    gone = command_line("down", name)
    assert gone.returncode == 2
    assert f"there is no lab named '{name}'" in gone.stderr


@pytest.mark.parametrize("rate", ["fast", "0mbit", "10", "1gbps"])
def test_a_wrong_rate_is_refused_before_anything_is_made(rate):
    with pytest.raises(LabError, match="write for example 100mbit"):
        Lab(2, rate)


JOB = """
[model]
name = "resnet-20"
[data]
name = "digits"
batch = 64
[optimizer]
lr = 0.05
[strategy]
name = "synchronous"
shards = 4
[run]
steps = 4
"""


KEY = {"SYNCLINE_KEY": "ab" * 16}


def torchrun(lab, job, folder, machines, ranks, *more):
    """Start `syncline train` under torchrun on the lab's first machines."""
    return lab.torchrun(
        ["-m", "syncline", "train", str(job), "--out", str(folder), "--json", *more],
        ranks=ranks,
        machines=range(machines),
        cwd=TOP,
        environment=KEY,
        inherit=untraced(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def srun(lab, job, folder, machines, ranks, *more):
    """Start `syncline train` on the lab's first machines as Slurm would."""
    common = {
        "SLURM_NTASKS": str(machines * ranks),
        "SLURM_NNODES": str(machines),
        "SLURM_TASKS_PER_NODE": f"{ranks}(x{machines})",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": lab.address(0),
    }
    started = []
    for rank in range(machines * ranks):
        machine, local = divmod(rank, ranks)
        place = {"SLURM_PROCID": rank, "SLURM_NODEID": machine, "SLURM_LOCALID": local}
        started.append(
            Started(
                *("train", str(job), "--out", str(folder), "--json", *more),
                env=os.environ | KEY | common | {key: str(value) for key, value in place.items()},
                traced=False,
                first=functools.partial(enter, lab.namespace(machine)),
            )
        )
    return started


def unplaced(names, lab, job, folder, machines, ranks, *more):
    """Start `syncline train` by an engine that does not say which ranks share a machine.

    Ranks go round the machines: 0 and 2 are on the first of two.
    """
    common = {"MASTER_ADDR": lab.address(0), "MASTER_PORT": "23456"}
    common |= {names[1]: str(machines * ranks)}
    return [
        Started(
            *("train", str(job), "--out", str(folder), "--json", *more),
            env=os.environ | KEY | common | {names[0]: str(rank)},
            traced=False,
            first=functools.partial(enter, lab.namespace(rank % machines)),
        )
        for rank in range(machines * ranks)
    ]


def enter(namespace):
    """Move this process to a machine of the lab."""
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def train(start, lab, job, folder, machines, ranks, *more):
    """Train to the end; return what rank 0 wrote."""
    for started in start(lab, job, folder, machines, ranks, *more):
        _, errors = started.communicate(timeout=100)
        assert started.returncode == 0, errors
    return json.loads((folder / "summary.json").read_text())


@needs_lab
@pytest.mark.slow
def test_torchrun_on_two_machines_gives_the_hash_of_one_rank(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    alone = train_forked(job, tmp_path / "alone")
    with Lab(2, "1gbit") as lab:
        spread = train(torchrun, lab, job, tmp_path / "run", 2, 2)
    assert spread["weights_sha256"] == alone["weights_sha256"]
    assert "tcp" in spread["communicator"]


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")])
def test_machines_that_nobody_names_are_found(names, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    alone = train_forked(job, tmp_path / "alone")
    with Lab(2, "1gbit") as lab:
        start = functools.partial(unplaced, names)
        spread = train(start, lab, job, tmp_path / "run", 2, 2)
    assert spread["weights_sha256"] == alone["weights_sha256"]
    assert spread["communicator"] == "shared memory inside machines, network (tcp) across"


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize(("machines", "ranks"), [(2, 2), (4, 1)])
def test_machines_give_the_hash_of_one_rank_and_send_the_least(machines, ranks, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    sent = []
    alone = train_forked(job, tmp_path / "alone")
    with Lab(machines, "1gbit") as lab:
        for steps in (4, 12):
            before = lab.all_traffic()
            folder = tmp_path / str(steps)
            more = ("--set", f"run.steps={steps}")
            spread = train(srun, lab, job, folder, machines, ranks, *more)
            pairs = zip(lab.all_traffic(), before, strict=True)
            sent.append([now.since(then).sent_bytes for now, then in pairs])
            if steps == 4:
                assert spread["weights_sha256"] == alone["weights_sha256"]
            assert "tcp" in spread["communicator"]
    # What eight more steps send; starting up and leaving cost the same in both runs.
    per_step = max(long - short for short, long in zip(*sent, strict=True)) / 8
    model = models.build("resnet-20", (1, 8, 8), 10)
    parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    least = 2 * (machines - 1) / machines * parameter_bytes
    assert least <= per_step <= 1.05 * least


LONG_JOB = """
[model]
name = "cnn"
[data]
name = "digits"
batch = 24
[optimizer]
lr = 0.05
[strategy]
name = "synchronous"
shards = 6
[run]
steps = 40
checkpoint_every = 10
silent_s = 3.0
"""


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_a_lost_machine_is_named_and_the_others_go_on_without_it(fault, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(LONG_JOB)
    folder = tmp_path / "run"
    with Lab(3, "1gbit") as lab:
        jobs = srun(lab, job, folder, 3, 1)
        metrics = folder / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") >= 25):
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.02)
        getattr(lab, fault)(2)
        lost_at = time.monotonic()
        for started in jobs[:2]:
            _, said = started.communicate(timeout=60)
            assert started.returncode != 0
            assert re.search(r"rank 2 is silent for \d s: frozen, or cut off", said), said
        assert time.monotonic() - lost_at < 20
        assert metrics.read_text().count("\n") < 40, "the run was over before the fault"
        lab.kill(2)
        jobs[2].communicate()
        resumed = train(srun, lab, job, folder, 2, 1, "--resume")
    alone = train_forked(job, tmp_path / "alone")
    assert resumed["weights_sha256"] == alone["weights_sha256"]


def test_the_ideal_of_two_lanes_by_hand():
    # Wire-bound: compute 0.15, ten layers; backward 0.1, last reduce, ten gathers, last forward.
    message_s = 0.03
    assert ideal_step_s(0.15, 20 * message_s, 10) == pytest.approx(20 * message_s + 0.01 + 0.005)
    # Nothing to send: compute alone.
    assert ideal_step_s(0.3, 0.0, 10) == pytest.approx(0.3)
