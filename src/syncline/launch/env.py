"""Which rank is this process? The only module that reads the environment.

It reads, in this order: RANK and WORLD_SIZE (torchrun, our own launcher, env://); LOCAL_RANK,
NODE_RANK and WORLD_SIZE (Lightning); a Slurm step; Open MPI, PMI, Flux. Without any of them the
world has one rank. Variables that contradict each other are refused by name, and so are variables
of a launcher that do not say which rank this is: no rank trains alone by mistake.
`rank_environment` makes the variables that our launcher sets.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from syncline.errors import ConfigError
from syncline.launch.mpi import check_agreement, from_mpi, sizes_of_engines, two_launchers
from syncline.launch.slurm import from_slurm, remark_outside_a_step, size_of_step
from syncline.launch.world import (
    ALONE,
    NOWHERE,
    LaunchedRank,
    Launcher,
    MachinePlace,
    Variables,
    contradiction,
    digest,
)

__all__ = [
    "LaunchedRank",
    "malloc_settings",
    "rank_environment",
    "read_world",
    "read_world_of_group",
    "thread_environment",
]

KEY_BYTES_LEAST = 16
"""128 bits: too many keys to try them all."""

# Each of these is set for one of several ranks, or counts them.
_RANKS = ("LOCAL_RANK", "PMIX_RANK")
_SIZES = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    *("MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "HOROVOD_SIZE"),
)


def read_world(environ: Mapping[str, str] | None = None) -> LaunchedRank:
    """Read the world from a launcher's variables: `environ`, or os.environ if that is None."""
    environ = os.environ if environ is None else environ
    found: LaunchedRank | None = None
    for world in _worlds(environ, _key(environ)):
        # A world of one does not hide another: `mpirun -n 4` inside a Slurm step of one task.
        if found is None or world.size > 1:
            found = world
        if found.size > 1:
            break
    if found is None:
        _refuse_traces(environ, None)
        job_id = digest("alone", os.getpid())
        remark = remark_outside_a_step(environ)
        return LaunchedRank(0, 1, *ALONE, None, None, _key(environ), "alone", job_id, remark)
    if "RANK" in environ:
        found = dataclasses.replace(found, remark=_remark_beside(found, environ))
    else:
        if found.size == 1:
            _refuse_traces(environ, found)
        check_agreement(found, environ)
        _check_step(found, environ)
    found.check_key()
    return found


def read_world_of_group(
    rank: int, size: int, environ: Mapping[str, str] | None = None
) -> LaunchedRank:
    """Return the world of a process group that the user made, as far as it is known without it.

    Its job has no id yet: the session makes one.
    """
    environ = os.environ if environ is None else environ
    address = environ.get("MASTER_ADDR", "").strip() or None
    place = ALONE if size == 1 else NOWHERE
    world = LaunchedRank(rank, size, *place, address, None, _key(environ), "torch.distributed", "")
    if size == 1:
        said = read_world(environ)
        if said.size > 1:
            raise ConfigError(
                "torch.distributed",
                f"its process group has 1 rank while {said.launcher} started {said.size}",
                "the ranks of a job train together",
                "Give init_process_group the rank and the number of ranks, or do not call it.",
            )
    return world


def rank_environment(
    rank: int,
    *,
    ranks: int,
    port: int,
    key: str,
    job: str,
    threads: int,
    address: str = "127.0.0.1",
) -> dict[str, str]:
    """Return the environment for a rank of our launcher: the inherited one and the rank's place.

    torchrun's own variables are left out: TORCHELASTIC_USE_AGENT_STORE, for example, makes torch
    wait for a store that does not exist here.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    inherited |= thread_environment(threads)
    return inherited | {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "SYNCLINE_KEY": key,
        "SYNCLINE_JOB": job,
    }


@dataclass(frozen=True)
class Verification:
    """What `syncline verify` wants of a rank: where to record, how many steps, which overlap."""

    folder: str
    steps: int
    overlap: bool


def read_verification(environ: Mapping[str, str] | None = None) -> Verification | None:
    """Return what `syncline verify` wants of this rank; None if it did not start it."""
    text = (os.environ if environ is None else environ).get("SYNCLINE_VERIFY")
    return None if text is None else Verification(**json.loads(text))


def verification_environment(wanted: Verification) -> dict[str, str]:
    """Return the variable that tells a rank what `syncline verify` wants."""
    return {"SYNCLINE_VERIFY": json.dumps(dataclasses.asdict(wanted))}


def thread_environment(threads: int) -> dict[str, str]:
    """Return the variables that tell OpenMP and MKL, at loading, how many threads a rank has."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def malloc_settings() -> list[str]:
    """Return the names of variables by which the user has told glibc how to keep memory."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
    found = [name for name in names if name in os.environ]
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return [*found, "GLIBC_TUNABLES"] if tuned else found


def _worlds(environ: Mapping[str, str], key: bytes | None) -> Iterator[LaunchedRank]:
    """Yield what each launcher says. RANK is explicit: nothing else counts beside it."""
    if "RANK" in environ:
        yield _from_torchrun(environ, key)
        return
    for read in (_from_lightning, from_slurm):
        world = read(environ, key)
        if world is not None:
            yield world
    yield from from_mpi(environ, key)


def _from_torchrun(environ: Mapping[str, str], key: bytes | None) -> LaunchedRank:
    variables = Variables(environ, "RANK")
    size = variables.size("WORLD_SIZE")
    rank = variables.below("RANK", ("WORLD_SIZE", size))
    place = _place(variables, size)
    address, port = variables.where(is_needed=size > 1)
    run_id = environ.get("SYNCLINE_JOB") or environ.get("TORCHELASTIC_RUN_ID", "none")
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job_id = digest(run_id, address, port, restarts)
    launcher: Launcher = "syncline" if "SYNCLINE_JOB" in environ else "torchrun"
    return LaunchedRank(rank, size, *place, address, port, key, launcher, job_id)


def _place(variables: Variables, size: int) -> MachinePlace:
    """Return what LOCAL_* and GROUP_* say, or NOWHERE if they do not say it all."""
    world = "WORLD_SIZE", size
    local_rank: int | None = None
    local_size: int | None = None
    machine: int | None = None
    num_machines: int | None = None
    local, group = world, world
    if "LOCAL_WORLD_SIZE" in variables:
        local_size = variables.size("LOCAL_WORLD_SIZE", world)
        local = "LOCAL_WORLD_SIZE", local_size
    if "LOCAL_RANK" in variables:
        local_rank = variables.below("LOCAL_RANK", local)
    if "GROUP_WORLD_SIZE" in variables:
        num_machines = variables.size("GROUP_WORLD_SIZE", world)
        group = "GROUP_WORLD_SIZE", num_machines
    elif local_size == size:
        num_machines = 1
    if "GROUP_RANK" in variables:
        machine = variables.below("GROUP_RANK", group)
    elif num_machines == 1:
        machine = 0
    if num_machines == 1 and local_size is not None and local_size != size:
        raise contradiction(
            "LOCAL_WORLD_SIZE",
            f"got {local_size} with WORLD_SIZE = {size} and one machine",
            "all ranks of a single machine are local",
        )
    if size == 1:
        return ALONE
    if None in (local_rank, local_size, machine, num_machines):
        return NOWHERE
    return local_rank, local_size, machine, num_machines


def _from_lightning(environ: Mapping[str, str], key: bytes | None) -> LaunchedRank | None:
    """Return the world of Lightning's launcher; None if it cannot be this one's.

    Lightning starts equally many processes on every machine, and does not say how many. Often only
    one number fits; otherwise LOCAL_WORLD_SIZE has to say it.
    """
    if not all(name in environ for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")):
        return None
    variables = Variables(environ, "LOCAL_RANK")
    world = "WORLD_SIZE", variables.size("WORLD_SIZE")
    size = world[1]
    local_rank = variables.below("LOCAL_RANK", world)
    machine = variables.below("NODE_RANK", world)
    if "LOCAL_WORLD_SIZE" in variables:
        sizes = [variables.size("LOCAL_WORLD_SIZE", world)]
    else:
        sizes = [
            n for n in range(local_rank + 1, size + 1) if size % n == 0 and size // n > machine
        ]
    ranks = {machine * local_size + local_rank for local_size in sizes}
    if len(ranks) != 1 or max(ranks) >= size:
        return None
    (rank,) = ranks
    place = ALONE if size == 1 else NOWHERE
    address, port = variables.where(is_needed=size > 1)
    job_id = digest("lightning", address, port)
    return LaunchedRank(rank, size, *place, address, port, key, "lightning", job_id)


def _refuse_traces(environ: Mapping[str, str], found: LaunchedRank | None) -> None:
    """Refuse variables of a launcher of several ranks that do not say which rank this is."""
    traces = [name for name in _RANKS if _number(environ, name) > (-1 if found is None else 0)]
    traces += [name for name in _SIZES if _number(environ, name) > 1]
    if traces:
        they_do = "they do" if len(traces) > 1 else "it does"
        raise ConfigError(
            ", ".join(traces),
            "set as a launcher of several ranks does",
            f"{they_do} not say both which rank this is and how many there are",
            "Export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank, or unset what is "
            "set to train alone.",
        )


def _check_step(world: LaunchedRank, environ: Mapping[str, str]) -> None:
    """Refuse a rank of Lightning's variables in a Slurm step that gives it another."""
    for size in size_of_step(environ).values():
        rank = _number(environ, "SLURM_PROCID")
        if size > 1 and (rank, size) != (world.rank, world.size):
            raise two_launchers("SLURM_PROCID", rank, size, world)


def _remark_beside(world: LaunchedRank, environ: Mapping[str, str]) -> str:
    """Say that RANK's world has no place for all that another launcher started; "" if it has.

    srun may have started the ranks, or one torchrun for each machine.
    """
    if world.launcher == "syncline":
        return ""
    for name, size in {**size_of_step(environ), **sizes_of_engines(environ)}.items():
        is_other = size not in (1, world.size, world.num_machines)
        if is_other and (world.size < size or world.num_machines is not None):
            return (
                f"{name} is {size}, but RANK and WORLD_SIZE are those of a world of {world.size} "
                f"on {world.num_machines or 'some'} machine(s): not all that was started is in it. "
                "Let one launcher start all ranks if they are to train together."
            )
    return ""


def _number(environ: Mapping[str, str], name: str) -> int:
    """Return a variable's value, -1 if it is not set or no number."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else -1


def _key(environ: Mapping[str, str]) -> bytes | None:
    text = environ.get("SYNCLINE_KEY")
    if text is None:
        return None
    fix = "Generate one with `syncline key`."
    try:
        key = bytes.fromhex(text)
    except ValueError:
        # The value is a secret: it is not printed.
        found = f"{len(text)} characters that are not all hexadecimal"
        raise ConfigError("SYNCLINE_KEY", found, "a key is written in hex", fix) from None
    if len(key) < KEY_BYTES_LEAST:
        rule = f"a key has at least {KEY_BYTES_LEAST}"
        raise ConfigError("SYNCLINE_KEY", f"a key of {len(key)} bytes", rule, fix)
    return key
