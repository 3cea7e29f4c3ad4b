"""However two ranks are started, they are one world, with the weights of one rank."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import syncline
from one_world import train
from ranks import _child, collect, free_port, run_ranks
from syncline.errors import ConfigError, SynclineError, UsageError
from syncline.session import current_session
from worlds import untraced

pytestmark = pytest.mark.processes

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "SYNCLINE_", "OMPI_")
LAUNCHERS += ("PMI", "FLUX_", "MPI_", "NODE_RANK")


@functools.cache
def weights_of_one_rank():
    return run_ranks(1, train)[0][-1]


def check_one_world(answers):
    assert [answer[:3] for answer in answers] == [[0, 2, 1], [1, 2, 1]]
    assert {answer[3] for answer in answers} == {weights_of_one_rank()}


def run_with(environments, work=train):
    """Fork a rank for each environment, with nothing else of a launcher's set; collect results."""
    pids, pipes = [], []
    for environ in environments:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
                del os.environ[name]
            _child(work, environ, write)
        os.close(write)
        pids.append(pid)
        pipes.append(read)
    answers = collect(pids, pipes)
    assert all(answer is not None and "result" in answer for answer in answers), answers
    return [answer["result"] for answer in answers]


def where():
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def test_the_four_variables_of_env():
    common = where() | {"WORLD_SIZE": "2"}
    check_one_world(run_with([common | {"RANK": str(rank)} for rank in range(2)]))


def test_the_variables_of_lightning():
    common = where() | {"WORLD_SIZE": "2", "NODE_RANK": "0"}
    check_one_world(run_with([common | {"LOCAL_RANK": str(rank)} for rank in range(2)]))


def test_the_variables_of_mpirun_without_an_address():
    common = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    check_one_world(run_with([common | {"PMI_RANK": str(rank)} for rank in range(2)]))


def test_a_network_under_mpirun_without_an_address_is_refused():
    def work():
        with pytest.raises(ConfigError) as caught:
            syncline.init(comm="network")
        return str(caught.value)

    common = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    said = run_with([common | {"PMI_RANK": str(rank)} for rank in range(2)], work)
    assert said[1] == (
        "MASTER_ADDR, MASTER_PORT: not set under mpirun, but a network needs to know where rank 0"
        " listens. Export both, the same for every rank, or use comm = 'auto' on one machine."
    )


def join_group(rank, port, work):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    answer = work()
    dist.barrier()  # the group is still the user's, and works
    syncline.session.close_session()
    dist.destroy_process_group()
    return answer


def with_group(work):
    """Run two ranks that share nothing but a process group which they have made themselves."""
    port = free_port()
    numbers = [{"NUMBER": str(rank)} for rank in range(2)]
    return run_with(numbers, lambda: join_group(int(os.environ["NUMBER"]), port, work))


def test_a_process_group_of_the_users():
    check_one_world(with_group(train))


@pytest.mark.parametrize("comm", ["network", "torch"])
def test_a_process_group_of_the_users_over_a_network(comm):
    def work():
        rank = syncline.init(comm=comm)
        values = torch.full((3,), rank + 1.0)
        current_session().comm.broadcast(values, 1)
        return [syncline.world_size(), values.tolist()]

    assert with_group(work) == [[2, [2.0, 2.0, 2.0]]] * 2


def test_a_session_in_the_users_group_can_be_opened_again():
    def work():
        first = train()
        syncline.session.close_session()
        dist.barrier()
        return [first, train()]

    answers = with_group(work)
    check_one_world([first for first, _ in answers])
    check_one_world([second for _, second in answers])


SPAWNED = """
    import sys
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import json, os
    sys.path.insert(0, {tests!r})
    from one_world import train

    def work(rank, port):
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2
        )
        answer = train()
        os.write(1, (json.dumps(answer) + "\\n").encode())
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(work, args=({port},), nprocs=2)
"""
TRAINED = """
    import json, os, sys
    sys.path.insert(0, {tests!r})
    from one_world import train

    os.write(1, (json.dumps(train()) + "\\n").encode())
"""


def run_script(text, folder, *launcher):
    script = folder / "script.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(textwrap.dedent(text).format(tests=tests, port=free_port()))
    command = [*launcher, sys.executable, str(script)]
    environ = untraced(*LAUNCHERS) | {"OMP_NUM_THREADS": "1"}
    # Open MPI asks twice where tests run as root.
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.slow
def test_mp_spawn_with_a_process_group(tmp_path):
    check_one_world(run_script(SPAWNED, tmp_path))


MPIRUN = (
    shutil.which("mpiexec.hydra")
    or shutil.which("mpirun")
    or shutil.which("mpirun", path=str(Path(sys.executable).parent))
)


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun: pip install mpich")
def test_mpirun(tmp_path):
    assert MPIRUN is not None
    check_one_world(run_script(TRAINED, tmp_path, MPIRUN, "-n", "2"))


# -- where ranks that nobody has placed lie --------------------------------------------------------


def test_ranks_of_two_namespaces_are_on_two_machines_and_need_a_key():
    """What a launcher leaves unsaid is found by the machines' ids."""

    def work():
        rank = int(os.environ["RANK"])
        found = syncline.comm.store.machine_id()
        syncline.comm.store.machine_id = lambda: found[:-1] + "01"[rank]
        try:
            syncline.init()
        except SynclineError as error:
            return str(error)
        world = current_session().world
        return [world.machine, world.local_rank, world.local_size, world.num_machines]

    common = where() | {"WORLD_SIZE": "2"}
    said = run_with([common | {"RANK": str(rank)} for rank in range(2)], work)
    assert said[0].startswith("SYNCLINE_KEY: not set in a world of 2 machines, but ranks on other")
    common = where() | {"WORLD_SIZE": "2", "SYNCLINE_KEY": "ab" * 16}
    found = run_with([common | {"RANK": str(rank)} for rank in range(2)], work)
    assert found == [[0, 0, 1, 2], [1, 0, 1, 2]]


def test_outside_a_slurm_step_a_script_trains_alone_and_says_so(alone, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with caplog.at_level(logging.WARNING, logger="syncline"):
        syncline.init()
    assert syncline.world_size() == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("SLURM_NTASKS is 4, but srun did not start this process: it trains")


@pytest.mark.parametrize("who", ["group", "lightning"])
def test_ranks_that_turn_up_after_init_are_not_overlooked(who):
    def work():
        syncline.init()
        rank = os.environ.pop("NUMBER")
        if who == "group":
            method = f"tcp://127.0.0.1:{os.environ['PORT']}"
            dist.init_process_group("gloo", init_method=method, rank=int(rank), world_size=2)
            dist.barrier()  # rank 0 holds the store: it must not end while rank 1 still connects
        else:
            os.environ |= {"LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": "2"} | where()
        model = torch.nn.Linear(2, 2)
        with pytest.raises(UsageError) as caught:
            syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return str(caught.value)

    port = {"PORT": str(free_port())}
    said = run_with([port | {"NUMBER": str(rank)} for rank in range(2)], work)
    name = {"group": "torch.distributed", "lightning": "lightning"}[who]
    start = f"syncline.init() found no other ranks, but now {name} has 2: this one would train"
    assert [text.startswith(start) for text in said] == [True, True]
    assert said[0].endswith(
        "alone. Call init() after init_process_group(), and after a launcher inside the script "
        "(Lightning's) has started its processes."
    )


# -- init again ------------------------------------------------------------------------------------


def test_init_again_with_the_same_settings_returns_the_same_rank(alone):
    assert syncline.init(silent_s=7.0) == 0
    session = current_session()
    assert syncline.init(silent_s=7.0) == 0
    assert current_session() is session
    with pytest.raises(UsageError) as caught:
        syncline.init(silent_s=8.0, threads=1)
    assert str(caught.value) == (
        "syncline.init() was called twice, with other settings (silent_s was 7.0, now 8.0; threads"
        " was None, now 1), but a process joins its job once. Call it with the settings of before,"
        " or start the process again."
    )


def test_init_again_on_two_ranks_needs_no_agreement():
    def work():
        rank = syncline.init()
        if rank == 1:
            assert syncline.init() == 1
        current_session().comm.barrier()
        return [rank, syncline.init()]

    assert run_ranks(2, work) == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"threads": 0}, "threads: got 0, but a rank computes with at least one thread. Use 1."),
        ({"meet_s": 0}, "meet_s: got 0, but it is a number of seconds, above 0 and at most 1e+06."),
        ({"meet_s": float("inf")}, "meet_s: got inf, but it is a number of seconds, above 0"),
        ({"silent_s": -1.0}, "silent_s: got -1.0, but it is a number of seconds, above 0."),
        ({"hung_s": float("nan")}, "hung_s: got nan, but it is a number of seconds, above 0."),
    ],
)
def test_impossible_settings_are_refused(alone, settings, line):
    with pytest.raises(ConfigError) as caught:
        syncline.init(**settings)
    assert str(caught.value).startswith(line)
