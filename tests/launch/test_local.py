"""The launcher, with tiny children: who lives, who dies, what is said, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from syncline.errors import ConfigError
from syncline.launch.local import launch
from syncline.launch.outcome import Outcome, describe_end

pytestmark = pytest.mark.processes

# Every child leaves a file with its pid when it is up: <folder>/<name>.<rank>.
PRELUDE = """
import json, os, pathlib, signal, sys, time
folder, rank = pathlib.Path(os.environ["FOLDER"]), os.environ["RANK"]
def write_pid(name):
    part = folder / f".{name}.{rank}"
    part.write_text(str(os.getpid()))
    part.rename(folder / f"{name}.{rank}")
"""


@pytest.fixture(params=["started", "forked"])
def kind(request: pytest.FixtureRequest) -> str:
    """Every promise holds for programs that are started and for functions that are forked."""
    return str(request.param)


@pytest.fixture
def run(kind: str, tmp_path: Path) -> Callable[..., Outcome]:
    def run(code: str, ranks: int, **settings: object) -> Outcome:
        return launch(work(kind, code), ranks, extra_env={"FOLDER": str(tmp_path)}, **settings)  # type: ignore[arg-type]

    return run


def work(kind: str, code: str) -> list[str] | Callable[[], None]:
    if kind == "started":
        return [sys.executable, "-c", PRELUDE + code]
    return lambda: exec(PRELUDE + code, {})


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)


def pids(folder: Path, name: str, count: int) -> list[int]:
    """Wait until so many ranks are up and give their pids in rank order."""
    wait_for(lambda: len(list(folder.glob(f"{name}.*"))) == count)
    return [int(path.read_text()) for path in sorted(folder.glob(f"{name}.*"))]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def launcher(tmp_path: Path, kind: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a launcher in a process of its own: signals are for it alone."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, ranks: int, settings: str = "") -> subprocess.Popen[str]:
        program = (
            "import signal, sys\n"
            "from syncline.launch.local import launch\n"
            # Who runs the tests under nohup, or in the background of a script, hands signals that
            # are ignored down to every child.
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"code = {PRELUDE + code!r}\n"
            f"works = dict(started=[sys.executable, '-c', code], forked=lambda: exec(code, {{}}))\n"
            f"sys.exit(launch(works[{kind!r}], {ranks}, {settings}).exit_code)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"FOLDER": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_ranks_get_their_place_a_key_and_their_threads(run, tmp_path):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    names += ["SYNCLINE_KEY", "SYNCLINE_JOB", "OMP_NUM_THREADS"]
    code = f"(folder / rank).write_text(json.dumps({{n: os.environ[n] for n in {names}}}))"
    assert run(code, 2, threads=3) == Outcome((0, 0))
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert (first.pop("RANK"), second.pop("RANK")) == ("0", "1")
    assert (first.pop("LOCAL_RANK"), second.pop("LOCAL_RANK")) == ("0", "1")
    assert first == second
    assert len(bytes.fromhex(first["SYNCLINE_KEY"])) == 32
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"] == "127.0.0.1"
    assert first["OMP_NUM_THREADS"] == "3"


def test_two_launches_share_neither_key_nor_job(run, tmp_path):
    code = "(folder / 'x').open('a').write(os.environ['SYNCLINE_KEY'] + os.environ['SYNCLINE_JOB'])"
    run(code, 1)
    first = (tmp_path / "x").read_text()
    run(code, 1)
    second = (tmp_path / "x").read_text()[len(first) :]
    assert first[:64] != second[:64]
    assert first[64:] != second[64:]


def test_ranks_have_no_stdin(run):
    assert run("sys.exit(os.read(0, 1) != b'')", 1) == Outcome((0,))


def test_stdout_can_be_sent_elsewhere(run, tmp_path):
    with (tmp_path / "out").open("w") as file:
        run("os.write(1, f'hello {rank}\\n'.encode())", 2, stdout=file.fileno())
    assert sorted((tmp_path / "out").read_text().split("\n")) == ["", "hello 0", "hello 1"]


@pytest.mark.parametrize(
    ("statuses", "exit_code"),
    [((0, 0), 0), ((0, 1), 1), ((0, -9), 1), ((7, 0), 1), ((1, 2), 2), ((-15, 2), 2)],
)
def test_the_exit_code_tells_bad_input_from_other_failures(statuses, exit_code):
    assert Outcome(statuses).exit_code == exit_code


def test_the_exit_code_tells_ctrl_c():
    assert Outcome((0, -15), signal.SIGINT).exit_code == 130


def test_the_end_of_a_rank_in_words():
    assert describe_end(2, -9) == "rank 2 was killed by SIGKILL (exit status -9)"
    assert describe_end(2, 1) == "rank 2 ended with status 1"
    assert describe_end(0, -99) == "rank 0 was killed by signal 99 (exit status -99)"


def test_a_failing_rank_gets_one_line_and_the_others_none(run, capfd):
    assert run("sys.exit(3 if rank == '1' else 0)", 3) == Outcome((0, 3, 0))
    assert capfd.readouterr().err == "syncline: rank 1 ended with status 3\n"


def test_bad_input_was_said_by_the_rank_itself(run, capfd):
    assert run("sys.exit(2 if rank == '1' else 0)", 3) == Outcome((0, 2, 0))
    assert capfd.readouterr().err == ""


def test_when_one_rank_is_killed_the_others_live_on(run, tmp_path, capfd):
    code = """
write_pid("up")
if rank == "1":
    while len(list(folder.glob("up.*"))) < 3: time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.7)
write_pid("lived")
"""
    assert run(code, 3) == Outcome((0, -9, 0))
    assert sorted(path.name for path in tmp_path.glob("lived.*")) == ["lived.0", "lived.2"]
    assert capfd.readouterr().err == ("syncline: rank 1 was killed by SIGKILL (exit status -9)\n")


def test_the_others_are_stopped_when_they_do_not_end_after_a_failure(run, capfd):
    code = "sys.exit(1) if rank == '1' else time.sleep(60)"
    began_s = time.monotonic()
    assert run(code, 3, after_failure_s=0.3) == Outcome((-15, 1, -15))
    assert time.monotonic() - began_s < 10
    assert capfd.readouterr().err == (
        "syncline: rank 1 ended with status 1\n"
        "syncline: stopping ranks 0, 2: still running 0.3 s after the first end\n"
    )


def test_a_strategy_that_survives_a_death_has_all_the_time_it_wants(run):
    code = "sys.exit(1) if rank == '1' else time.sleep(0.8)"
    assert run(code, 2, after_failure_s=None) == Outcome((0, 1))


FREEZE_RANK_1 = """
write_pid("up")
if rank == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
while len(list(folder.glob("up.*"))) < 2: time.sleep(0.01)
"""


@pytest.mark.parametrize(("status", "expected"), [(0, (0, -15)), (1, (1, -15))])
def test_a_frozen_rank_is_not_waited_for_after_all_others_have_ended(run, capfd, status, expected):
    began_s = time.monotonic()
    outcome = run(f"{FREEZE_RANK_1}sys.exit({status})", 2, go_on=True, frozen_s=1.0)
    assert outcome.statuses == expected
    assert time.monotonic() - began_s < 20
    assert "syncline: stopping rank 1: frozen for 1 s, and others ended\n" in capfd.readouterr().err


def test_a_rank_that_works_or_only_beats_is_waited_for(run):
    code = """
import threading
if rank == "1":
    sys.exit(1)
if rank == "2":  # computes, and is seldom switched
    end_s = time.monotonic() + 3
    while time.monotonic() < end_s: pass
else:  # waits, and a thread sends heartbeats
    threading.Thread(target=lambda: [time.sleep(0.2) for _ in range(18)], daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.sigtimedwait([signal.SIGUSR1], 3.5)
"""
    assert run(code, 3, go_on=True, frozen_s=1.0).statuses == (0, 1, 0)


def test_a_frozen_rank_beside_one_that_works_is_left_to_the_library(run, tmp_path):
    code = (
        FREEZE_RANK_1
        + """
if rank == "2":
    sys.exit(0)
stop_s = time.monotonic() + 2.5
while time.monotonic() < stop_s: time.sleep(0.1)
os.kill(int((folder / "up.1").read_text()), signal.SIGCONT)
"""
    )
    assert run(code, 3, go_on=True, frozen_s=1.0).statuses == (0, 0, 0)


MEETS = """
import syncline
from syncline.session import current_session
def die_if(condition):
    if condition: os._exit(3)
"""


@pytest.mark.parametrize("victim", ["0", "1"])
def test_before_the_meeting_nobody_goes_on_without_a_rank(run, capfd, victim):
    code = MEETS + f"die_if(rank == '{victim}')\nsyncline.init()"
    began_s = time.monotonic()
    outcome = run(code, 2, go_on=True, meets=True, after_failure_s=0.5)
    assert time.monotonic() - began_s < 30
    assert outcome.statuses[int(victim)] == 3
    assert outcome.statuses[1 - int(victim)] != 0
    assert "still running 0.5 s after the first end" in capfd.readouterr().err


def test_after_the_meeting_the_others_go_on(run):
    code = (
        MEETS
        + """
syncline.init()
current_session().comm.barrier()
current_session().control.tolerate(range(2))
current_session().comm.barrier()
die_if(rank == "1")
time.sleep(2.0)
"""
    )
    outcome = run(code, 2, go_on=True, meets=True, after_failure_s=0.5)
    assert (outcome.statuses, outcome.exit_code) == ((0, 3), 0)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(run, capfd):
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
write_pid("up")
if rank == "1":
    while len(list(folder.glob("up.*"))) < 2: time.sleep(0.01)
    sys.exit(1)
time.sleep(60)
"""
    assert run(code, 2, after_failure_s=0.1, grace_s=0.3) == Outcome((-9, 1))
    assert "killing rank 0: no end within 0.3 s of SIGTERM" in capfd.readouterr().err


def test_what_a_killed_rank_started_goes_with_it(run, tmp_path):
    code = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(folder / "child").write_text(str(child.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(code, 1) == Outcome((-9,))
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: is_gone(child))


@pytest.mark.parametrize(
    ("sent", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_stops_every_rank(launcher, tmp_path, sent, exit_code):
    process = launcher("write_pid('up')\ntime.sleep(60)", 3)
    ranks = pids(tmp_path, "up", 3)
    process.send_signal(sent)
    assert process.wait(10) == exit_code
    assert all(is_gone(pid) for pid in ranks)
    assert process.stderr.read() == (
        f"syncline: stopping ranks 0, 1, 2: {sent.name} was received\n"
    )


def test_ctrl_c_twice_does_not_wait_for_the_grace(launcher, tmp_path):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwrite_pid('up')\ntime.sleep(60)"
    process = launcher(code, 2, "grace_s=60")
    ranks = pids(tmp_path, "up", 2)
    process.send_signal(signal.SIGINT)
    assert "stopping ranks 0, 1" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert all(is_gone(pid) for pid in ranks)


def test_a_frozen_rank_is_stopped_too(launcher, tmp_path):
    process = launcher("write_pid('up')\ntime.sleep(60)", 2, "grace_s=60")
    ranks = pids(tmp_path, "up", 2)
    os.kill(ranks[1], signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    assert all(is_gone(pid) for pid in ranks)


def test_no_rank_survives_a_launcher_that_is_killed(launcher, tmp_path):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwrite_pid('up')\ntime.sleep(60)"
    process = launcher(code, 3)
    ranks = pids(tmp_path, "up", 3)
    process.kill()
    wait_for(lambda: all(is_gone(pid) for pid in ranks))


def test_ctrl_z_puts_the_ranks_to_sleep_and_continuing_wakes_them(launcher, tmp_path):
    process = launcher("write_pid('up')\ntime.sleep(60)", 2)
    everybody = [psutil.Process(pid) for pid in (*pids(tmp_path, "up", 2), process.pid)]
    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: all(one.status() == psutil.STATUS_STOPPED for one in everybody))
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: all(one.status() != psutil.STATUS_STOPPED for one in everybody))
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from syncline.launch.local import launch\n"
        "code = 'import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.3)'\n"
        "sys.exit(launch([sys.executable, '-c', code], 1).exit_code)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=20).returncode == 0


def test_the_launcher_sleeps_while_it_waits(launcher, tmp_path):
    process = launcher("write_pid('up')\ntime.sleep(60)", 1)
    pids(tmp_path, "up", 1)
    watched = psutil.Process(process.pid)
    wait_for(lambda: watched.status() == psutil.STATUS_SLEEPING)
    before = watched.num_ctx_switches().voluntary
    time.sleep(1)
    assert watched.num_ctx_switches().voluntary - before < 10


def test_signals_are_as_before_after_a_launch(run):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run("", 1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_command_that_cannot_be_started_leaves_nothing_open(tmp_path):
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        launch([str(tmp_path / "nothing")], 2)
    assert psutil.Process().num_fds() == before


def test_no_descriptor_is_left_open_after_a_launch(run):
    run("", 1)
    before = psutil.Process().num_fds()
    run("", 3)
    assert psutil.Process().num_fds() == before


def test_a_port_in_use_is_refused(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            run("", 1, port=port)
    assert str(caught.value) == (
        f"port: got {port} (address already in use), but rank 0 listens on it."
        " Choose another port, or none: a free one is found."
    )


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(run, port):
    with pytest.raises(ConfigError, match=f"port: got {port}, but a port lies between 1 and 65535"):
        run("", 1, port=port)


def test_a_given_port_reaches_the_ranks(run):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"sys.exit(os.environ['MASTER_PORT'] != '{port}')"
    assert run(code, 1, port=port) == Outcome((0,))


def test_a_forked_rank_has_a_name_and_nothing_of_the_launcher_s(tmp_path):
    code = """
held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
name = pathlib.Path("/proc/self/comm").read_text().strip()
(folder / rank).write_text(json.dumps([name, held]))
"""
    extra_env = {"FOLDER": str(tmp_path)}
    before = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert launch(work("forked", code), 3, extra_env=extra_env) == Outcome((0, 0, 0))
    for rank in "012":
        name, held = json.loads((tmp_path / rank).read_text())
        assert name == f"syncline:{rank}"
        # The folder of descriptors is itself open while it is read, and its name is the process's.
        mine = {path.split("/fd/")[-1] for path in held} - {
            path.split("/fd/")[-1] for path in before
        }
        assert not [name for name in mine if ":" in name], "sockets, pidfds or an epoll"


def test_a_forked_rank_that_raises_says_where_and_ends_with_1(capfd):
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    assert launch(fail, 1) == Outcome((1,))
    said = capfd.readouterr().err
    assert "ZeroDivisionError: a bug" in said
    assert said.endswith("syncline: rank 0 ended with status 1\n")
