"""Which rank am I: the variables of each launcher, and each way they can be wrong."""

from __future__ import annotations

import pytest

from syncline.errors import ConfigError
from syncline.launch.env import LaunchedRank, rank_environment, read_world

KEY = "00112233445566778899aabbccddeeff"

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "SYNCLINE_KEY": KEY,
}

SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_NODELIST": "node[03-05,9],gpu1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SYNCLINE_KEY": KEY,
}


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_world(environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_with_nothing_set_it_is_a_world_of_one():
    world = read_world({})
    assert world == LaunchedRank(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        machine=0,
        num_machines=1,
        address=None,
        port=None,
        key=None,
        launcher="alone",
        job_id=world.job_id,
    )


def test_the_variables_of_torchrun_are_read():
    world = read_world(TORCHRUN)
    assert world == LaunchedRank(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        machine=1,
        num_machines=2,
        address="10.0.0.1",
        port=29500,
        key=bytes.fromhex(KEY),
        launcher="torchrun",
        job_id=world.job_id,
    )


def test_machines_may_have_different_numbers_of_ranks():
    assert read_world(TORCHRUN | {"WORLD_SIZE": "5"}).local_size == 2


def test_what_our_launcher_sets_is_what_a_rank_reads(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    environ = rank_environment(1, ranks=2, port=4000, key=KEY, job="j", threads=3)
    world = read_world(environ)
    assert world == LaunchedRank(
        rank=1,
        size=2,
        local_rank=1,
        local_size=2,
        machine=0,
        num_machines=1,
        address="127.0.0.1",
        port=4000,
        key=bytes.fromhex(KEY),
        launcher="syncline",
        job_id=world.job_id,
    )
    assert environ["OMP_NUM_THREADS"] == "3"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environ


def test_the_variables_of_slurm_are_read():
    world = read_world(SLURM)
    assert world == LaunchedRank(
        rank=9,
        size=11,
        local_rank=1,
        local_size=3,
        machine=2,
        num_machines=3,
        address="node03",
        port=12000 + 123456 % 20000,
        key=bytes.fromhex(KEY),
        launcher="slurm",
        job_id=world.job_id,
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[03-05,9],gpu1", "node03"),
        ("gpu1,node[1-2]", "gpu1"),
        ("alone", "alone"),
        ("a[7]", "a7"),
        ("rack1-n[001-100]-ib", "rack1-n001-ib"),
    ],
)
def test_the_first_machine_of_slurms_list_is_where_rank_0_listens(nodes, first):
    assert read_world(SLURM | {"SLURM_JOB_NODELIST": nodes}).address == first


def test_an_address_and_a_port_that_are_set_win_over_slurms():
    world = read_world(SLURM | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "1234"})
    assert (world.address, world.port) == ("10.1.1.1", 1234)


def test_slurm_does_not_count_outside_a_step_nor_below_torchrun():
    assert read_world(SLURM | TORCHRUN).launcher == "torchrun"
    assert read_world({"SLURM_PROCID": "0"}).launcher == "alone"
    # As in an sbatch script: srun has started nothing yet.
    outside = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    world = read_world(outside | {"SLURM_PROCID": "0"})
    assert (world.launcher, world.size) == ("alone", 1)
    assert world.remark == (
        "SLURM_NTASKS is 11, but srun did not start this process: it trains alone. Start the ranks"
        " with srun, or with `syncline run`."
    )
    assert read_world(outside | {"SLURM_NTASKS": "1"}).remark == ""


def test_a_steps_own_numbers_win_over_the_allocations():
    # As in the shell of an interactive allocation: a step of one task in a job of eleven.
    step = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    world = read_world(SLURM | step | {"SLURM_STEP_ID": "4294967290"})
    assert (world.launcher, world.size, world.num_machines) == ("slurm", 1, 1)
    assert read_world(SLURM | {"SLURM_STEP_NODELIST": "other[7-9]"}).address == "other7"


def test_a_single_machine_needs_no_key_and_several_do():
    single = TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    del single["SYNCLINE_KEY"]
    assert read_world(single).key is None
    several = {name: value for name, value in TORCHRUN.items() if name != "SYNCLINE_KEY"}
    assert refusal(several) == (
        "SYNCLINE_KEY: not set in a world of 2 machines, but ranks on other machines prove"
        " themselves with the job's key. Generate one with `syncline key` and export it on every"
        " machine."
    )


@pytest.mark.parametrize("key", ["00" * 15, "", "not hex", KEY + "0"])
def test_a_key_that_is_short_or_not_hex_is_refused_without_being_printed(key):
    line = refusal({"SYNCLINE_KEY": key})
    assert line.startswith("SYNCLINE_KEY: ")
    assert not key or key not in line


def test_a_world_does_not_show_its_key():
    assert KEY not in repr(read_world(TORCHRUN))
    assert str(bytes.fromhex(KEY)) not in repr(read_world(TORCHRUN))


def test_all_ranks_of_a_job_agree_on_its_id():
    other = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    assert read_world(TORCHRUN).job_id == read_world(other).job_id


@pytest.mark.parametrize(
    "change",
    [
        {"TORCHELASTIC_RUN_ID": "other"},
        {"MASTER_PORT": "29501"},
        {"MASTER_ADDR": "10.0.0.2"},
        {"TORCHELASTIC_RESTART_COUNT": "1"},
        {"SYNCLINE_JOB": "ours"},
    ],
)
def test_another_job_or_another_attempt_has_another_id(change):
    assert read_world(TORCHRUN).job_id != read_world(TORCHRUN | change).job_id


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"RANK": "four"}, "RANK: got 'four', but it is a whole number."),
        ({"RANK": ""}, "RANK: got '', but it is a whole number."),
        ({"RANK": "4"}, "RANK: got 4 with WORLD_SIZE = 4, but it counts from 0 to 3."),
        ({"RANK": "-1"}, "RANK: got -1 with WORLD_SIZE = 4, but it counts from 0 to 3."),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: got 0, but it is at least 1."),
        ({"WORLD_SIZE": "9" * 30}, "WORLD_SIZE: got '999"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK: got 2 with LOCAL_WORLD_SIZE = 2, but it counts"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: got 0, but it is at least 1."),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE: got 5 with WORLD_SIZE = 4, but"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK: got 2 with GROUP_WORLD_SIZE = 2, but it counts"),
        ({"GROUP_WORLD_SIZE": "5"}, "GROUP_WORLD_SIZE: got 5 with WORLD_SIZE = 4, but"),
        (
            {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
            "LOCAL_WORLD_SIZE: got 2 with WORLD_SIZE = 4 and one machine, but all ranks",
        ),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: got 70000, but a port lies between"),
        ({"MASTER_PORT": "x\ny"}, "MASTER_PORT: got 'x\\ny', but it is a whole number."),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR: not set though RANK is, but a launcher sets both."),
    ],
)
def test_variables_of_torchrun_that_contradict_are_refused_by_name(change, start):
    assert refusal(TORCHRUN | change).startswith(start)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_of_torchrun_that_is_missing_is_named(name):
    environ = {key: value for key, value in TORCHRUN.items() if key != name}
    assert refusal(environ).startswith(f"{name}: not set though RANK is, but a launcher sets both.")


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"SLURM_PROCID": "11"}, "SLURM_PROCID: got 11 with SLURM_NTASKS = 11, but"),
        ({"SLURM_NTASKS": "x"}, "SLURM_NTASKS: got 'x', but it is a whole number."),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID: got 3 with SLURM_NNODES = 3, but"),
        ({"SLURM_NNODES": "0"}, "SLURM_NNODES: got 0, but it is at least 1."),
        ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID: got 3 with machine 2's share of"),
        (
            {"SLURM_TASKS_PER_NODE": "4(x2)"},
            'SLURM_TASKS_PER_NODE: got "4(x2)" with SLURM_NNODES = 3 and SLURM_NTASKS = 11, but',
        ),
        ({"SLURM_TASKS_PER_NODE": "4x2"}, 'SLURM_TASKS_PER_NODE: got "4x2", but it looks like'),
        ({"SLURM_JOB_NODELIST": "[1-2]"}, 'SLURM_JOB_NODELIST: got "[1-2]", but it looks like'),
        ({"SLURM_JOB_NODELIST": "node[1"}, 'SLURM_JOB_NODELIST: got "node[1", but it looks like'),
    ],
)
def test_variables_of_slurm_that_contradict_are_refused_by_name(change, start):
    assert refusal(SLURM | change).startswith(start)


@pytest.mark.parametrize(
    "name", ["SLURM_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"]
)
def test_a_variable_of_slurm_that_is_missing_is_named(name):
    environ = {key: value for key, value in SLURM.items() if key != name}
    assert refusal(environ).startswith(f"{name}: not set though SLURM_PROCID is")
