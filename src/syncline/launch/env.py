"""Which rank is this process? The only module that reads the environment.

It knows the variables of torchrun, of our own launcher (torchrun's plus SYNCLINE_KEY and
SYNCLINE_JOB) and of Slurm; without any of them the world has one rank. Variables that contradict
each other are refused by name. `rank_environment` makes the variables that our launcher sets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from syncline.errors import ConfigError

Launcher = Literal["alone", "torchrun", "syncline", "slurm"]
KEY_BYTES_LEAST = 16


@dataclass(frozen=True)
class World:
    """A rank's place among all ranks, and how it finds the others.

    `address` and `port` are where rank 0 listens; None in a world of one. `key` is the job's
    secret: None is allowed on a single machine only. `job_id` is equal on all ranks of a job and
    differs between jobs on a machine: names of sockets are made from it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    machine: int
    num_machines: int
    address: str | None
    port: int | None
    key: bytes | None = field(repr=False)
    launcher: Launcher
    job_id: str


def read_world(environ: Mapping[str, str] | None = None) -> World:
    """Read the world from a launcher's variables: `environ`, or os.environ if that is None."""
    environ = os.environ if environ is None else environ
    key = _key(environ)
    if "RANK" in environ:
        world = _from_torchrun(environ, key)
    elif "SLURM_PROCID" in environ and _integer(environ, "SLURM_NTASKS", "0") >= 1:
        world = _from_slurm(environ, key)
    else:
        job_id = _digest("alone", os.getpid())
        return World(0, 1, 0, 1, 0, 1, None, None, key, "alone", job_id)
    if world.num_machines > 1 and world.key is None:
        raise ConfigError(
            "SYNCLINE_KEY",
            f"not set in a world of {world.num_machines} machines",
            "ranks on other machines prove themselves with the job's key",
            "Generate one with `syncline key` and export it on every machine.",
        )
    return world


def rank_environment(
    rank: int, *, ranks: int, port: int, key: str, job: str, threads: int
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
        "MASTER_ADDR": "127.0.0.1",
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


def _from_torchrun(environ: Mapping[str, str], key: bytes | None) -> World:
    ours = "SYNCLINE_JOB" in environ
    size = _integer(environ, "WORLD_SIZE")
    _at_least("WORLD_SIZE", size, 1)
    rank = _below(environ, "RANK", "WORLD_SIZE", size)
    local_size = _integer(environ, "LOCAL_WORLD_SIZE")
    _at_least("LOCAL_WORLD_SIZE", local_size, 1)
    _at_most("LOCAL_WORLD_SIZE", local_size, "WORLD_SIZE", size)
    local_rank = _below(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", local_size)
    num_machines = _integer(environ, "GROUP_WORLD_SIZE", "1")
    _at_least("GROUP_WORLD_SIZE", num_machines, 1)
    _at_most("GROUP_WORLD_SIZE", num_machines, "WORLD_SIZE", size)
    machine = _below(environ, "GROUP_RANK", "GROUP_WORLD_SIZE", num_machines, default="0")
    if num_machines == 1 and local_size != size:
        raise _contradiction(
            "LOCAL_WORLD_SIZE",
            f"got {local_size} with WORLD_SIZE = {size} and one machine",
            "all ranks of a single machine are local",
        )
    address = _text(environ, "MASTER_ADDR")
    port = _port(environ)
    run_id = environ.get("SYNCLINE_JOB") or environ.get("TORCHELASTIC_RUN_ID", "none")
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        machine=machine,
        num_machines=num_machines,
        address=address,
        port=port,
        key=key,
        launcher="syncline" if ours else "torchrun",
        job_id=_digest(run_id, address, port, restarts),
    )


def _from_slurm(environ: Mapping[str, str], key: bytes | None) -> World:
    size = _integer(environ, "SLURM_NTASKS")
    rank = _below(environ, "SLURM_PROCID", "SLURM_NTASKS", size)
    num_machines = _integer(environ, "SLURM_NNODES", "1")
    _at_least("SLURM_NNODES", num_machines, 1)
    machine = _below(environ, "SLURM_NODEID", "SLURM_NNODES", num_machines, default="0")
    per_machine = _tasks_per_machine(environ, size, num_machines)
    local_size = per_machine[machine]
    local_rank = _below(
        environ, "SLURM_LOCALID", f"machine {machine}'s share of SLURM_TASKS_PER_NODE", local_size
    )
    job = _text(environ, "SLURM_JOB_ID")
    step = environ.get("SLURM_STEP_ID", "0")
    address = environ.get("MASTER_ADDR") or _first_host(_text(environ, "SLURM_JOB_NODELIST"))
    if "MASTER_PORT" in environ:
        port = _port(environ)
    else:
        # Below Linux's ephemeral ports (from 32768), and equal on all ranks.
        port = 12000 + _integer(environ, "SLURM_JOB_ID") % 20000
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        machine=machine,
        num_machines=num_machines,
        address=address,
        port=port,
        key=key,
        launcher="slurm",
        job_id=_digest(f"{job}.{step}", address, port, environ.get("SLURM_RESTART_COUNT", "0")),
    )


def _tasks_per_machine(environ: Mapping[str, str], size: int, num_machines: int) -> list[int]:
    """Expand "4(x2),3" to [4, 4, 3]."""
    name = "SLURM_TASKS_PER_NODE"
    text = environ.get(name, str(size) if num_machines == 1 else None)
    if text is None:
        raise _missing(name, "SLURM_PROCID")
    counts: list[int] = []
    for part in text.split(","):
        read = re.fullmatch(r"\s*(\d{1,9})(?:\(x(\d{1,6})\))?\s*", part)
        if read is None:
            raise _contradiction(name, f'got "{text}"', 'it looks like "4(x2),3"')
        counts += [int(read[1])] * int(read[2] or 1)
    if len(counts) != num_machines or sum(counts) != size:
        raise _contradiction(
            name,
            f'got "{text}" with SLURM_NNODES = {num_machines} and SLURM_NTASKS = {size}',
            "it counts the tasks of every machine",
        )
    return counts


def _first_host(nodes: str) -> str:
    """Take the first name out of Slurm's list: "node[03-05,9],gpu1" starts with node03."""
    read = re.match(r"([^\[\],\s]+)(?:\[(\d+)[^\]]*\]([^\[\],\s]*))?(?=,|$)", nodes)
    if read is None:
        raise _contradiction(
            "SLURM_JOB_NODELIST", f'got "{nodes}"', 'it looks like "node[03-05,9],gpu1"'
        )
    return "".join(part or "" for part in read.groups())


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


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        raise _missing(name, "RANK" if "RANK" in environ else "SLURM_PROCID")
    return text


def _integer(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise _missing(name, "RANK" if "RANK" in environ else "SLURM_PROCID")
    if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
        raise _contradiction(name, f"got {text!r}", "it is a whole number")
    return int(text)


def _port(environ: Mapping[str, str]) -> int:
    port = _integer(environ, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise _contradiction("MASTER_PORT", f"got {port}", "a port lies between 1 and 65535")
    return port


def _below(
    environ: Mapping[str, str], name: str, size_name: str, size: int, default: str | None = None
) -> int:
    number = _integer(environ, name, default)
    if not 0 <= number < size:
        rule = f"it counts from 0 to {size - 1}"
        raise _contradiction(name, f"got {number} with {size_name} = {size}", rule)
    return number


def _at_least(name: str, number: int, least: int) -> None:
    if number < least:
        raise _contradiction(name, f"got {number}", f"it is at least {least}")


def _at_most(name: str, number: int, size_name: str, size: int) -> None:
    if number > size:
        raise _contradiction(name, f"got {number} with {size_name} = {size}", "a part is no larger")


def _missing(name: str, present: str) -> ConfigError:
    return _contradiction(name, f"not set though {present} is", "a launcher sets both")


def _contradiction(name: str, found: str, rule: str) -> ConfigError:
    fix = "Start the ranks with `syncline run`, torchrun or srun, which set these variables."
    return ConfigError(name, found, rule, fix)


def _digest(*parts: object) -> str:
    text = "\0".join(str(part) for part in (*parts, os.getuid()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
