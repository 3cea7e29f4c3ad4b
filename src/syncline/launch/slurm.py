"""The world of a Slurm step: what `srun` started.

A process of an `sbatch` script or an allocation's shell has SLURM_* variables, too, but srun did
not start it as one of several tasks: only SLURM_STEP_ID says so. A step's own numbers
(SLURM_STEP_NUM_TASKS) win over those that may be the allocation's (SLURM_NTASKS).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from syncline.launch.world import LaunchedRank, Variables, contradiction, digest

_PAIRS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_NTASKS",
    "SLURM_STEP_NUM_NODES": "SLURM_NNODES",
    "SLURM_STEP_TASKS_PER_NODE": "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST": "SLURM_JOB_NODELIST",
}


def from_slurm(environ: Mapping[str, str], key: bytes | None) -> LaunchedRank | None:
    """Return the world of a Slurm step; None outside one."""
    if "SLURM_STEP_ID" not in environ:
        return None
    variables = Variables(environ, "SLURM_PROCID" if "SLURM_PROCID" in environ else "SLURM_STEP_ID")
    tasks, nodes, per_node, node_list = (
        step if step in environ else job for step, job in _PAIRS.items()
    )
    size = variables.size(tasks)
    rank = variables.below("SLURM_PROCID", (tasks, size), default="0" if size == 1 else None)
    num_machines = variables.size(nodes, default="1")
    machine = variables.below("SLURM_NODEID", (nodes, num_machines), default="0")
    text = environ.get(per_node, str(size) if num_machines == 1 else "")
    counts = _tasks_per_machine(per_node, text or variables.text(per_node))
    if len(counts) != num_machines or sum(counts) != size:
        raise contradiction(
            per_node,
            f'got "{text}" with {nodes} = {num_machines} and {tasks} = {size}',
            "it counts the tasks of every machine",
        )
    local_size = counts[machine]
    share = f"machine {machine}'s share of {per_node}"
    local_rank = variables.below("SLURM_LOCALID", (share, local_size))
    job = variables.text("SLURM_JOB_ID")
    step = environ["SLURM_STEP_ID"]
    address = environ.get("MASTER_ADDR") or _first_host(node_list, variables.text(node_list))
    if "MASTER_PORT" in environ:
        port = variables.port()
    else:
        # Below Linux's ephemeral ports (from 32768), and equal on all ranks.
        port = 12000 + variables.integer("SLURM_JOB_ID") % 20000
    return LaunchedRank(
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
        job_id=digest(f"{job}.{step}", address, port, environ.get("SLURM_RESTART_COUNT", "0")),
    )


def size_of_step(environ: Mapping[str, str]) -> dict[str, int]:
    """Return how many tasks this process's step has, by variable; nothing outside a step."""
    name = next((one for one in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if one in environ), "")
    text = environ.get(name, "").strip()
    is_step = "SLURM_STEP_ID" in environ and text.isascii() and text.isdigit()
    return {name: int(text)} if is_step else {}


def remark_outside_a_step(environ: Mapping[str, str]) -> str:
    """Say that a process of a Slurm job of several tasks is none of them; "" if it does not fit."""
    tasks = environ.get("SLURM_NTASKS", "")
    if "SLURM_STEP_ID" in environ or not tasks.isdigit() or int(tasks) < 2:
        return ""
    return (
        f"SLURM_NTASKS is {tasks}, but srun did not start this process: it trains alone. Start the "
        "ranks with srun, or with `syncline run`."
    )


def _tasks_per_machine(name: str, text: str) -> list[int]:
    """Expand "4(x2),3" to [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        read = re.fullmatch(r"\s*(\d{1,9})(?:\(x(\d{1,6})\))?\s*", part)
        if read is None:
            raise contradiction(name, f'got "{text}"', 'it looks like "4(x2),3"')
        counts += [int(read[1])] * int(read[2] or 1)
    return counts


def _first_host(name: str, nodes: str) -> str:
    """Take the first name out of Slurm's list: "node[03-05,9],gpu1" starts with node03."""
    read = re.match(r"([^\[\],\s]+)(?:\[(\d+)[^\]]*\]([^\[\],\s]*))?(?=,|$)", nodes)
    if read is None:
        raise contradiction(name, f'got "{nodes}"', 'it looks like "node[03-05,9],gpu1"')
    return "".join(part or "" for part in read.groups())
