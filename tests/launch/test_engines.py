"""The variables of each engine that starts ranks: which world they are, or why they are refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from syncline.errors import ConfigError
from syncline.launch.env import read_world, read_world_of_group

KEY = {"SYNCLINE_KEY": "00112233445566778899aabbccddeeff"}
WHERE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
CRAY = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "1",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_ID": "ƒ3ETxsR9H",
}
LIGHTNING = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "4"} | WHERE
RAY_TRAIN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
} | WHERE
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
    "SLURM_TASKS_PER_NODE": "4",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
}
SLURM_OF_ONE = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
SLURM_OF_ONE |= {"SLURM_LOCALID": "0"}

ONE_MACHINE = (1, 4, 0, 1)
"""Local rank, local size, machine, number of machines."""
UNSAID = (None, None, None, None)

WORLDS = {
    # name: (variables, launcher, rank, size, place)
    "the four variables of env://": (
        {"RANK": "1", "WORLD_SIZE": "4"} | WHERE,
        *("torchrun", 1, 4, UNSAID),
    ),
    "env:// with a local rank": (
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"} | WHERE,
        *("torchrun", 1, 4, UNSAID),
    ),
    "env:// for one rank": ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", 0, 1, (0, 1, 0, 1)),
    "Ray Train on two machines": (RAY_TRAIN, "torchrun", 3, 4, UNSAID),
    "Ray Train on one machine": (
        RAY_TRAIN | {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "NODE_RANK": "0"},
        *("torchrun", 3, 4, (3, 4, 0, 1)),
    ),
    "Lightning, first machine": (LIGHTNING, "lightning", 1, 4, UNSAID),
    "Lightning, first rank": (LIGHTNING | {"LOCAL_RANK": "0"}, "lightning", 0, 4, UNSAID),
    "Lightning, second machine of two": (
        LIGHTNING | {"NODE_RANK": "1"},
        *("lightning", 3, 4, UNSAID),
    ),
    "Lightning, second of two ranks": (
        LIGHTNING | {"LOCAL_RANK": "0", "NODE_RANK": "1", "WORLD_SIZE": "2"},
        *("lightning", 1, 2, UNSAID),
    ),
    "Lightning with the number of local ranks": (
        LIGHTNING | {"LOCAL_RANK": "0", "NODE_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        *("lightning", 2, 4, UNSAID),
    ),
    "Lightning below torchrun": (
        LIGHTNING | {"RANK": "2", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"},
        *("torchrun", 2, 4, (2, 4, 0, 1)),
    ),
    "srun": (SLURM, "slurm", 1, 4, ONE_MACHINE),
    "srun for one task, with PMIx": (
        SLURM_OF_ONE | {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.17.0"},
        *("slurm", 0, 1, (0, 1, 0, 1)),
    ),
    "srun with PMI-2": (
        SLURM | {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_JOBID": "17.0"},
        *("slurm", 1, 4, ONE_MACHINE),
    ),
    "srun, with WORLD_SIZE exported in the script": (
        SLURM | {"WORLD_SIZE": "4", "LOCAL_RANK": "1"},
        *("slurm", 1, 4, ONE_MACHINE),
    ),
    "mpirun of Open MPI": (OMPI, "mpirun", 1, 4, ONE_MACHINE),
    "mpirun of Open MPI on two machines": (
        OMPI | WHERE | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        *("mpirun", 1, 4, UNSAID),
    ),
    "mpirun of Open MPI in the shell of an allocation": (
        OMPI | SLURM_OF_ONE | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"},
        *("mpirun", 1, 4, ONE_MACHINE),
    ),
    "mpirun of MPICH": (MPICH, "mpirun", 1, 4, ONE_MACHINE),
    "mpirun of MPICH on two machines": (
        MPICH | WHERE | {"MPI_LOCALNRANKS": "2"},
        *("mpirun", 1, 4, UNSAID),
    ),
    "Cray's PMI": (CRAY, "mpirun", 1, 4, ONE_MACHINE),
    "PMI that says nothing of machines": (
        {"PMI_RANK": "1", "PMI_SIZE": "4"} | WHERE,
        *("mpirun", 1, 4, UNSAID),
    ),
    "Flux": (FLUX, "flux", 1, 4, ONE_MACHINE),
    "Flux on two machines": (
        FLUX | WHERE | {"FLUX_JOB_NNODES": "2"},
        *("flux", 1, 4, UNSAID),
    ),
    "mpirun for one rank": (
        OMPI
        | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
        # mpirun -n 1
        | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "0"},
        *("mpirun", 0, 1, (0, 1, 0, 1)),
    ),
    "an sbatch script": (
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},
        *("alone", 0, 1, (0, 1, 0, 1)),
    ),
    "a pod with an address and a number": (
        WHERE | {"NODE_RANK": "1"},
        *("alone", 0, 1, (0, 1, 0, 1)),
    ),
}


@pytest.mark.parametrize("engine", WORLDS)
def test_the_variables_of_an_engine_are_a_world(engine):
    environ, launcher, rank, size, place = WORLDS[engine]
    world = read_world(environ | KEY)
    assert (world.launcher, world.rank, world.size) == (launcher, rank, size)
    found = (world.local_rank, world.local_size, world.machine, world.num_machines)
    assert found == place


NOT_BOTH = "but {} not say both which rank this is and how many there are. Export RANK, WORLD_SIZE,"

REFUSALS = {
    # name: (variables, how the line starts)
    "PMIx alone": (
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"},
        f"PMIX_RANK: set as a launcher of several ranks does, {NOT_BOTH.format('it does')}",
    ),
    "PMIx below a step of one task": (
        SLURM_OF_ONE | {"PMIX_RANK": "2"},
        f"PMIX_RANK: set as a launcher of several ranks does, {NOT_BOTH.format('it does')}",
    ),
    "a local rank alone": ({"LOCAL_RANK": "0"}, "LOCAL_RANK: set as a launcher of several ranks"),
    "what Lightning leaves behind": (
        {"LOCAL_RANK": "0", "NODE_RANK": "0"} | WHERE,
        "LOCAL_RANK: set as a launcher of several ranks does",
    ),
    "Lightning on machines of an unknown size": (
        LIGHTNING | {"LOCAL_RANK": "0", "NODE_RANK": "1"},
        "LOCAL_RANK, WORLD_SIZE: set as a launcher of several ranks does, "
        + NOT_BOTH.format("they do"),
    ),
    "a number of ranks alone": (
        {"WORLD_SIZE": "4"},
        "WORLD_SIZE: set as a launcher of several ranks does",
    ),
    "MVAPICH": (
        {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4"},
        "MV2_COMM_WORLD_SIZE: set as a launcher of several ranks does",
    ),
    "Lightning without an address": (
        {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"},
        "MASTER_ADDR: not set though LOCAL_RANK is, but a launcher sets both.",
    ),
    "Open MPI without a rank": (
        {"OMPI_COMM_WORLD_SIZE": "4"},
        "OMPI_COMM_WORLD_RANK: not set though OMPI_COMM_WORLD_SIZE is, but a launcher sets both.",
    ),
    "PMI without a size": ({"PMI_RANK": "1"}, "PMI_SIZE: not set though PMI_RANK is, but"),
    "Flux without a size": ({"FLUX_TASK_RANK": "1"}, "FLUX_JOB_SIZE: not set though FLUX_TASK"),
    "mpirun with a rank too high": (
        MPICH | {"PMI_RANK": "4"},
        "PMI_RANK: got 4 with PMI_SIZE = 4, but it counts from 0 to 3.",
    ),
    "mpirun on two machines without an address": (
        OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "MASTER_ADDR, MASTER_PORT: not set under mpirun in a world of 4 ranks that may be on"
        " several machines, but ranks meet where rank 0 listens. Export both,",
    ),
    "Flux on two machines without an address": (
        FLUX | {"FLUX_JOB_NNODES": "2"},
        "MASTER_ADDR, MASTER_PORT: not set under flux in a world of 4 ranks",
    ),
    "mpirun below srun": (
        SLURM | OMPI | {"OMPI_COMM_WORLD_RANK": "2"},
        "OMPI_COMM_WORLD_RANK: got 2 of 4, while slurm says 1 of 4, but a rank has one launcher.",
    ),
    "Lightning's variables, exported for all tasks of srun": (
        SLURM | LIGHTNING | {"LOCAL_RANK": "0"},
        "SLURM_PROCID: got 1 of 4, while lightning says 0 of 4, but a rank has one launcher.",
    ),
    "WORLD_SIZE in a step of one task": (
        SLURM_OF_ONE | {"WORLD_SIZE": "4"},
        "WORLD_SIZE: set as a launcher of several ranks does",
    ),
    "horovodrun": (
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"},
        "HOROVOD_SIZE: set as a launcher of several ranks does",
    ),
    "a step without a task": (
        {name: value for name, value in SLURM.items() if name != "SLURM_PROCID"},
        "SLURM_PROCID: not set though SLURM_STEP_ID is, but a launcher sets both.",
    ),
}


@pytest.mark.parametrize("engine", REFUSALS)
def test_variables_that_name_no_rank_are_refused_by_name(engine):
    environ, start = REFUSALS[engine]
    with pytest.raises(ConfigError) as caught:
        read_world(environ)
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


def test_ranks_of_one_mpirun_agree_on_the_job_and_two_mpiruns_do_not():
    def job_id(wrapper, **changes):
        """Read the job's id as a rank would, started by this process through a wrapper."""
        code = "from syncline.launch.env import read_world; print(read_world().job_id)"
        command = [*wrapper, sys.executable, "-c", code]
        environ = os.environ | MPICH | changes
        found = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return found.stdout

    by_bash = ["bash", "-c", '"$0" "$@"; true']
    one = job_id([])
    assert job_id(by_bash, PMI_RANK="2", MPI_LOCALRANKID="2") == one
    assert job_id([], PMI_JOBID="other") != one
    # Another launcher: a process without PMI_RANK that starts ranks.
    assert job_id(["env", "-u", "PMI_RANK", "bash", "-c", 'PMI_RANK=1 "$0" "$@"; true']) != one


def test_a_group_of_one_rank_in_a_world_of_several_is_refused():
    with pytest.raises(ConfigError) as caught:
        read_world_of_group(0, 1, MPICH)
    assert str(caught.value) == (
        "torch.distributed: its process group has 1 rank while mpirun started 4, but the ranks of a"
        " job train together. Give init_process_group the rank and the number of ranks, or do not"
        " call it."
    )
    assert read_world_of_group(1, 2, {}).num_machines is None
    assert read_world_of_group(0, 1, {}).num_machines == 1


TORCHRUN = {"LOCAL_RANK": "0", "GROUP_RANK": "0"} | WHERE
TORCHRUN_OF_ONE = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN_OF_TWO = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        (MPICH | {"RANK": "0", "WORLD_SIZE": "1"}, "PMI_SIZE is 4, but RANK and WORLD_SIZE are"),
        (OMPI | TORCHRUN_OF_ONE, "OMPI_COMM_WORLD_SIZE is 4, but RANK and WORLD_SIZE are those of"),
        (
            FLUX | TORCHRUN_OF_TWO,
            "FLUX_JOB_SIZE is 4, but RANK and WORLD_SIZE are those of a world",
        ),
        (
            SLURM | TORCHRUN_OF_TWO,
            "SLURM_NTASKS is 4, but RANK and WORLD_SIZE are those of a world of 2 on 1 machine(s): "
            "not all that was started is in it. Let one launcher start all ranks if they",
        ),
        # One torchrun on each of four machines.
        (SLURM | TORCHRUN_OF_TWO | {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "4"}, ""),
        (SLURM | {"RANK": "1", "WORLD_SIZE": "4"} | WHERE, ""),
        (SLURM_OF_ONE | TORCHRUN_OF_TWO, ""),
        (SLURM | TORCHRUN_OF_TWO | {"SYNCLINE_JOB": "x"}, ""),
    ],
)
def test_a_world_smaller_than_what_another_launcher_started_is_said(environ, start):
    remark = read_world(environ | KEY).remark
    assert remark.startswith(start)
    assert bool(remark) == bool(start)
