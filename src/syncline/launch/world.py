"""A rank's place among all ranks, and the checks of the variables that say it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from syncline.comm.shape import Machines, by_machine
from syncline.errors import ConfigError

Launcher = Literal[
    "alone", "torch.distributed", "torchrun", "syncline", "lightning", "slurm", "mpirun", "flux"
]

MachinePlace = tuple[int | None, int | None, int | None, int | None]
"""Local rank, local size, machine, number of machines."""
ALONE: MachinePlace = (0, 1, 0, 1)
NOWHERE: MachinePlace = (None, None, None, None)
"""The launcher does not say which ranks share a machine."""


@dataclass(frozen=True)
class LaunchedRank:
    """A rank's place among all ranks, and how it finds the others.

    `local_rank`, `local_size`, `machine` and `num_machines` are None if the launcher does not say
    which ranks share a machine: the session finds out. `address` and `port` are where rank 0
    listens; None if nobody said, as in a world of one. `key` is the job's secret: None is allowed
    on a single machine only. `job_id` is equal on all ranks of a job and differs between jobs on a
    machine: names of sockets are made from it. `remark` is a line for the log.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    machine: int | None
    num_machines: int | None
    address: str | None
    port: int | None
    key: bytes | None = field(repr=False)
    launcher: Launcher
    job_id: str
    remark: str = ""

    @property
    def machines(self) -> Machines:
        """All ranks by machine, as far as the launcher says: one machine if it says nothing."""
        if not self.num_machines or self.size % self.num_machines:
            return (tuple(range(self.size)),)
        return by_machine(range(self.size), self.size // self.num_machines)

    @property
    def is_on_one_machine(self) -> bool:
        """Whether the launcher says that all ranks share one machine."""
        return self.num_machines == 1

    def on_machines(self, machines: Sequence[tuple[int, ...]]) -> LaunchedRank:
        """Return the world with the place that follows from all ranks by machine."""
        machine = next(at for at, ranks in enumerate(machines) if self.rank in ranks)
        world = dataclasses.replace(
            self,
            local_rank=machines[machine].index(self.rank),
            local_size=len(machines[machine]),
            machine=machine,
            num_machines=len(machines),
        )
        world.check_key()
        return world

    def check_key(self) -> None:
        """Refuse a world on several machines without a key."""
        if self.num_machines is not None and self.num_machines > 1 and self.key is None:
            raise ConfigError(
                "SYNCLINE_KEY",
                f"not set in a world of {self.num_machines} machines",
                "ranks on other machines prove themselves with the job's key",
                "Generate one with `syncline key` and export it on every machine.",
            )


def digest(*parts: object) -> str:
    """Return a short name made from the parts and this process's user."""
    text = "\0".join(str(part) for part in (*parts, os.getuid()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Variables:
    """An environment, read with checks. Errors name the variable; `anchor` is one that is set."""

    def __init__(self, environ: Mapping[str, str], anchor: str) -> None:
        self._environ = environ
        self._anchor = anchor

    def __contains__(self, name: str) -> bool:
        return name in self._environ

    def text(self, name: str) -> str:
        text = self._environ.get(name, "").strip()
        if not text:
            raise self._missing(name)
        return text

    def integer(self, name: str, default: str | None = None) -> int:
        text = self._environ.get(name, default)
        if text is None:
            raise self._missing(name)
        if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
            raise contradiction(name, f"got {text!r}", "it is a whole number")
        return int(text)

    def size(self, name: str, most: tuple[str, int] | None = None, default: str = "") -> int:
        """Return a number of ranks or machines, at least 1, at most that of another variable."""
        number = self.integer(name, default or None)
        if number < 1:
            raise contradiction(name, f"got {number}", "it is at least 1")
        if most is not None and number > most[1]:
            raise contradiction(
                name, f"got {number} with {most[0]} = {most[1]}", "a part is no larger"
            )
        return number

    def below(self, name: str, of: tuple[str, int], default: str | None = None) -> int:
        """Return a number that counts from 0 to one less than `of`, a name and its value."""
        number = self.integer(name, default)
        if not 0 <= number < of[1]:
            rule = f"it counts from 0 to {of[1] - 1}"
            raise contradiction(name, f"got {number} with {of[0]} = {of[1]}", rule)
        return number

    def port(self) -> int:
        port = self.integer("MASTER_PORT")
        if not 1 <= port <= 65535:
            raise contradiction("MASTER_PORT", f"got {port}", "a port lies between 1 and 65535")
        return port

    def where(self, *, is_needed: bool) -> tuple[str | None, int | None]:
        """Return MASTER_ADDR and MASTER_PORT; None for both if one is missing and not needed."""
        if not is_needed and not ("MASTER_ADDR" in self and "MASTER_PORT" in self):
            return None, None
        return self.text("MASTER_ADDR"), self.port()

    def _missing(self, name: str) -> ConfigError:
        return contradiction(name, f"not set though {self._anchor} is", "a launcher sets both")


def contradiction(name: str, found: str, rule: str) -> ConfigError:
    fix = "Start the ranks with `syncline run`, torchrun or srun, which set these variables."
    return ConfigError(name, found, rule, fix)
