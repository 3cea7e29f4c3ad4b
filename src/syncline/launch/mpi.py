"""The world of ranks that mpirun or Flux started: Open MPI, whatever speaks PMI, and Flux.

These launchers give no address. Ranks that share one machine need none: they meet under a name made
from the job. Ranks on several machines need MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import ConfigError
from syncline.launch.world import NOWHERE, LaunchedRank, Launcher, Variables, digest


@dataclass(frozen=True)
class Engine:
    """The variables of an engine. Of several names for a thing, the first that is set counts."""

    launcher: Launcher
    rank: str
    size: str
    local_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    num_machines: tuple[str, ...]
    job: tuple[str, ...]


ENGINES = (
    Engine(
        "mpirun",  # Open MPI
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        num_machines=(),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Engine(
        "mpirun",  # MPICH and Intel MPI; the names with PMI_LOCAL are Cray's
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        num_machines=(),
        job=("PMI_JOBID",),
    ),
    Engine(
        "flux",
        rank="FLUX_TASK_RANK",
        size="FLUX_JOB_SIZE",
        local_size=(),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        num_machines=("FLUX_JOB_NNODES",),
        job=("FLUX_JOB_ID",),
    ),
)


def from_mpi(environ: Mapping[str, str], key: bytes | None) -> Iterator[LaunchedRank]:
    """Yield the world of each engine that has left its variables."""
    for engine in ENGINES:
        if engine.rank in environ or engine.size in environ:
            yield _read(engine, environ, key)


def sizes_of_engines(environ: Mapping[str, str]) -> dict[str, int]:
    """Return how many ranks each engine says there are, by variable, as far as it can be read."""
    texts = {engine.size: environ.get(engine.size, "").strip() for engine in ENGINES}
    return {name: int(text) for name, text in texts.items() if text.isascii() and text.isdigit()}


def check_agreement(world: LaunchedRank, environ: Mapping[str, str]) -> None:
    """Refuse engines that say another rank, or another number of ranks, than `world`."""
    for engine in ENGINES:
        if engine.rank in environ and engine.size in environ:
            rank, size = _rank_and_size(engine, Variables(environ, engine.rank))
            if size > 1 and (rank, size) != (world.rank, world.size):
                raise two_launchers(engine.rank, rank, size, world)


def two_launchers(name: str, rank: int, size: int, world: LaunchedRank) -> ConfigError:
    """Return the error for a variable that gives a process another rank than `world` does."""
    return ConfigError(
        name,
        f"got {rank} of {size}, while {world.launcher} says {world.rank} of {world.size}",
        "a rank has one launcher",
        "Export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank: they win over both.",
    )


def _rank_and_size(engine: Engine, variables: Variables) -> tuple[int, int]:
    size = variables.size(engine.size)
    return variables.below(engine.rank, (engine.size, size)), size


def _read(engine: Engine, environ: Mapping[str, str], key: bytes | None) -> LaunchedRank:
    variables = Variables(environ, engine.rank if engine.rank in environ else engine.size)
    rank, size = _rank_and_size(engine, variables)
    job = _first(environ, engine.job)
    name = environ[job] if job else ""
    address, port = variables.where(is_needed=False)
    if _is_on_one_machine(engine, variables, environ, size):
        local_rank = _first(environ, engine.local_rank)
        if local_rank:
            variables.below(local_rank, (engine.size, size))
        # The launcher's process makes the name unique: Open MPI 4 counts its jobs up to 65536.
        job_id = digest(engine.launcher, name, _launcher_process(engine.rank))
        return LaunchedRank(
            rank, size, rank, size, 0, 1, address, port, key, engine.launcher, job_id
        )
    if address is None:
        raise ConfigError(
            "MASTER_ADDR, MASTER_PORT",
            f"not set under {engine.launcher} in a world of {size} ranks that may be on several "
            "machines",
            "ranks meet where rank 0 listens",
            "Export both, the same on every machine: a name or address of rank 0's machine and a "
            "free port.",
        )
    job_id = digest(engine.launcher, name, address, port)
    return LaunchedRank(rank, size, *NOWHERE, address, port, key, engine.launcher, job_id)


def _is_on_one_machine(
    engine: Engine, variables: Variables, environ: Mapping[str, str], size: int
) -> bool:
    local_size = _first(environ, engine.local_size)
    if local_size:
        return variables.size(local_size, (engine.size, size)) == size
    num_machines = _first(environ, engine.num_machines)
    return size == 1 or bool(num_machines and variables.size(num_machines) == 1)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environ), None)


def _launcher_process(variable: str) -> str:
    """Return the process that started the ranks of this machine: its pid and when it started.

    It is the nearest ancestor without the variable that holds the rank; between it and the rank
    there may be shells and other wrappers. All ranks of the machine find the same.
    """
    pid = os.getppid()
    while pid > 1:
        folder = Path(f"/proc/{pid}")
        try:
            # The fields after the name, which may contain anything: state, parent, ...
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parent, started = int(fields[1]), fields[19]
        except (OSError, ValueError, IndexError):
            break
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # a process of another user
            entries = []
        if not any(entry.startswith(f"{variable}=".encode()) for entry in entries):
            return f"{pid} {started}"
        pid = parent
    return str(pid)
