"""`syncline doctor`: what this machine is, which ways ranks take here, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
from dataclasses import asdict
from typing import Any

import msgspec
import typer

from syncline import data
from syncline.cli.doctor_trials import KINDS, Meeting, meet, why_no_lab
from syncline.cli.output import debug_option
from syncline.errors import ConfigError, SynclineError
from syncline.launch.env import read_world
from syncline.launch.world import LaunchedRank
from syncline.loggers.names import LOGGERS
from syncline.machine_limits import Limits, interface_towards, limits_here, rate_of

_LEAST_DESCRIPTORS = 1024
_LEAST_SHM_BYTES = 1 << 28
_PACKAGES = {"scikit-learn": "sklearn", "pillow": "PIL", **{name: name for name in LOGGERS}}
"""What extras install, by the name that is imported."""
_STARTERS = ("torchrun", "srun", "mpirun")


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print what was found as one JSON object."),
    debug: bool = debug_option,
) -> None:
    """Say what this machine is, which ways ranks would take here, and what is missing.

    Everything is tried: two ranks start, meet and add up memory through shared memory,
    over TCP and with torch.distributed. Nothing is left behind. Takes about five seconds.
    The exit status is 1 if ranks do not meet.
    """
    world, problem = _world()
    if world is not None and world.rank:
        return  # one rank speaks for its job
    found = _look(world)
    if problem:
        found["missing"].insert(0, problem)
    if as_json:
        print(json.dumps(found, allow_nan=False))
    else:
        print(in_words(found))
    if not all(one["is_well"] for one in found["meetings"]):
        raise typer.Exit(1)


def _world() -> tuple[LaunchedRank | None, str]:
    """Return what a launcher says in the environment, and what is wrong with it."""
    try:
        return read_world(), ""
    except SynclineError as error:
        return None, str(error)


def _look(world: LaunchedRank | None) -> dict[str, Any]:
    threads = _threads()
    limits, address = limits_here(), world.address if world is not None else None
    interface = interface_towards(address)
    meetings = [meet(kind) for kind in KINDS]
    no_lab = why_no_lab()
    packages = {name: _is_there(module) for name, module in _PACKAGES.items()}
    sets = {name: _why_no_data(name) for name in data.names() if name != "folder"}
    return {
        "versions": _versions(),
        "machine": {"processor": _processor(), "system": _system(), **asdict(limits)},
        "usable_cores": limits.usable_cores,
        "torch_threads": threads,
        "launcher": world.launcher if world is not None else None,
        "ranks": world.size if world is not None else None,
        "has_key": world is not None and world.key is not None,
        "starters": [name for name in _STARTERS if shutil.which(name)],
        "interface": _interface(interface),
        "meetings": [msgspec.to_builtins(one) for one in meetings],
        "lab": {"works": not no_lab, "why_not": no_lab},
        "data": {name: not why_not for name, why_not in sets.items()},
        "packages": packages,
        "missing": [*_missing(limits, meetings), *filter(None, sets.values())],
    }


def in_words(found: dict[str, Any]) -> str:
    """Return a report of about a dozen lines."""
    versions, machine, interface = found["versions"], found["machine"], found["interface"]
    rows = {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "machine": f"{machine['processor']}, {machine['system']}",
        "cores": _cores_in_words(machine, found["torch_threads"]),
        "memory": _memory_in_words(machine),
        "descriptors": f"a process may open {machine['descriptors']:,}",
        "launcher": _launcher_in_words(found),
        "network": _network_in_words(interface, found["has_key"]),
    }
    for one in found["meetings"]:
        rows[f"2 ranks {KINDS[one['kind']]}"] = _meeting_in_words(one)
    lab = found["lab"]
    rows["lab (docs/lab.md)"] = "works" if lab["works"] else f"cannot be made: {lab['why_not']}"
    rows["data sets"] = _there(found["data"])
    rows["packages"] = _there(found["packages"])
    width = max(map(len, rows)) + 2
    lines = [f"{name:{width}}{text}" for name, text in rows.items()]
    missing = [f"missing: {one}" for one in found["missing"]] or ["nothing is missing"]
    return "\n".join([*lines, "", *missing])


def _versions() -> dict[str, str]:
    torch = importlib.metadata.version("torch")
    return {"syncline": _own_version(), "Python": platform.python_version(), "torch": torch}


def _own_version() -> str:
    try:
        return importlib.metadata.version("syncline")
    except importlib.metadata.PackageNotFoundError:
        return "from its sources"


def _processor() -> str:
    from syncline.measure.machine import processor  # it loads torch

    return processor()


def _threads() -> int:
    """Return how many threads torch takes by itself; leave it one, since ranks will be forks."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads


def _system() -> str:
    return f"{platform.system()} {platform.release()}"


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _why_no_data(name: str) -> str:
    """Say why a data set cannot be read; empty if it can."""
    try:
        data.check(name)
    except ConfigError as error:
        return f"{name}: {error}"
    return ""


def _interface(found: tuple[str, str] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"name": found[0], "address": found[1], "rate_bytes_per_s": rate_of(found[0])}


def _missing(limits: Limits, meetings: list[Meeting]) -> list[str]:
    found = [f"ranks do not meet {KINDS[one.kind]}" for one in meetings if not one.is_well]
    if limits.descriptors < _LEAST_DESCRIPTORS:
        most = limits.most_descriptors
        found.append(f"descriptors: ulimit -n {min(4096, most)} raises their limit")
    if limits.dev_shm_bytes is not None and limits.dev_shm_bytes < _LEAST_SHM_BYTES:
        size = _gb(limits.dev_shm_bytes)
        found.append(f"/dev/shm has {size}, which workers of a DataLoader fill: --shm-size=2g")
    return found


def _cores_in_words(machine: dict[str, Any], threads: int) -> str:
    cores, group = machine["cores"], machine["group_cores"]
    limit = "" if group is None or group >= cores else f", of which the container may use {group:g}"
    return f"{cores}{limit}; torch takes {threads} threads in a process that is not a rank"


def _memory_in_words(machine: dict[str, Any]) -> str:
    group, shm = machine["group_memory_bytes"], machine["dev_shm_bytes"]
    text = f"{_gb(machine['memory_bytes'])}, {_gb(machine['free_memory_bytes'])} of it free"
    text += "" if group is None else f", the container may use {_gb(group)}"
    return text + ("; no /dev/shm" if shm is None else f"; /dev/shm {_gb(shm)}")


def _launcher_in_words(found: dict[str, Any]) -> str:
    if found["launcher"] is None:
        return "what the environment says contradicts itself"
    starters = ", ".join(["syncline run", *found["starters"]])
    if found["ranks"] == 1:
        return f"none started this process; here are {starters}"
    return f"{found['launcher']} started this process as one of {found['ranks']} ranks"


def _network_in_words(interface: dict[str, Any] | None, has_key: bool) -> str:
    if interface is None:
        return "no route to other machines"
    rate = interface["rate_bytes_per_s"]
    text = f"{interface['name']}, {interface['address']}"
    text += "" if rate is None else f", {rate * 8 / 1e9:g} Gbit/s"
    key = "is set" if has_key else "is not set (several machines need one: syncline key)"
    return f"{text}; SYNCLINE_KEY {key}"


def _meeting_in_words(one: dict[str, Any]) -> str:
    if not one["is_well"]:
        return f"DO NOT MEET: {one['why_not']}"
    barrier_us, sum_ms = one["barrier_s"] * 1e6, one["sum_s"] * 1e3
    return (
        f"met in {one['meet_s']:.2f} s; barrier {barrier_us:,.0f} us, sum of 1 MiB {sum_ms:.2f} ms"
    )


def _there(found: dict[str, bool]) -> str:
    here = ", ".join(name for name, is_here in found.items() if is_here) or "none"
    absent = ", ".join(name for name, is_here in found.items() if not is_here)
    return here + (f"; not here: {absent}" if absent else "")


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"
