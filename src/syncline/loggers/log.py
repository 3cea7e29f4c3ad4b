"""`Log`: numbers of a run to loggers, without the run waiting for them or ending with them.

Each logger has a thread of its own, in which it is imported, opened, written to and closed. What it
does there may take long or raise: that is said once, and the others go on.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from syncline.config.words import brief, printable
from syncline.files import write_atomically
from syncline.loggers.base import Line, Logger, Opening
from syncline.loggers.names import check_installed, parts_of

_CLASSES = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow"}
_MOST_WAITING = 100_000
"""A logger that is further behind gets no more."""
_AT_ONCE = 200
_END_S, _FAILED_END_S = 30.0, 2.0
"""How long the end of a run waits for its loggers; a run that fails has no time."""


class Log:
    """Writes numbers to loggers. Every method returns at once, except `close`.

        with Log("tensorboard:runs/mine", "wandb:my-project", enabled=rank == 0) as log:
            for step in range(1000):
                ...
                log.write(step, loss=loss, lr=0.1)

    A target is NAME or NAME:WHERE (`syncline.loggers.LOGGERS`). A logger that is not installed is
    refused at once. `enabled` is for the one rank that writes; on the others nothing happens.
    """

    def __init__(
        self,
        *targets: str,
        enabled: bool = True,
        config: Mapping[str, object] | None = None,
        title: str | None = None,
        folder: str | Path | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`folder` is a run folder: a run that is resumed there goes on at the same loggers.

        `say` gets a line if a logger fails; without it the line goes to stderr.
        """
        check_installed(targets, "log")
        self._targets = targets if enabled else ()
        self._say = say or _say_on_stderr
        self._opening = Opening("", Path(folder) if folder else None, title, config or {})
        self._threads: list[_Thread] | None = None

    def write(self, step: int, /, **values: float | None) -> None:
        """Write the values of a step; None is left out."""
        if not self._targets:
            return
        if self._threads is None:
            opening = replace(self._opening, first_step=step)
            self._threads = [_Thread(target, opening) for target in self._targets]
        line = step, {name: float(one) for name, one in values.items() if one is not None}
        for thread in self._threads:
            thread.put(line)
        self._tell()

    def close(self, *, failed: bool = False) -> None:
        """Let the loggers finish, for 30 s at most; for 2 s if the run has failed."""
        wait_s = _FAILED_END_S if failed else _END_S
        end_s = time.monotonic() + wait_s
        for thread in self._threads or ():
            thread.end(failed=failed)
        for thread in self._threads or ():
            if not thread.is_done.wait(max(0.0, end_s - time.monotonic())):
                thread.failure = f"not done after {wait_s:g} s: what it has not written is lost"
        self._tell()
        self._threads, self._targets = None, ()

    def _tell(self) -> None:
        for thread in self._threads or ():
            if thread.failure and not thread.is_told:
                thread.is_told = True
                self._say(f"logger {thread.target}: {thread.failure}; the run goes on without it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


@dataclass(frozen=True)
class _End:
    failed: bool


class _Thread:
    """One logger and its thread."""

    def __init__(self, target: str, opening: Opening) -> None:
        self.target = target
        self.failure = ""
        self.is_told = False
        self.is_done = threading.Event()
        self._name, where = parts_of(target)
        self._opening = replace(opening, where=where)
        self._lines: queue.Queue[Line | _End] = queue.Queue(_MOST_WAITING)
        threading.Thread(target=self._run, name=f"log to {self._name}", daemon=True).start()

    def put(self, line: Line) -> None:
        if not self.failure:
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self.failure = f"it is {_MOST_WAITING:,} steps behind"

    def end(self, *, failed: bool) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(_End(failed))

    def _run(self) -> None:
        try:
            logger = self._open()
            end = None
            while end is None:
                lines, end = self._take()
                if lines:
                    logger.write(lines)
            logger.close(failed=end.failed)
        except (Exception, SystemExit) as error:
            self.failure = self.failure or brief(f"{type(error).__name__}: {error}")
        finally:
            self.is_done.set()

    def _take(self) -> tuple[Sequence[Line], _End | None]:
        """Return what there is to write, as soon as there is anything, and whether it is all."""
        lines: list[Line] = []
        found = self._lines.get()
        while not isinstance(found, _End):
            lines.append(found)
            if len(lines) == _AT_ONCE or self._lines.empty():
                return lines, None
            found = self._lines.get()
        return lines, found

    def _open(self) -> Logger:
        """Open the logger; where the folder holds the run's name there, as the same run."""
        module = importlib.import_module(f"syncline.loggers.{self._name}")
        opening, path = self._opening, None
        if opening.folder is not None:
            path = opening.folder / f"{self._name}.json"
            opening = replace(opening, identity=_known(path, self.target))
        logger: Logger = getattr(module, _CLASSES[self._name])(opening)
        if path is not None and logger.identity not in (None, opening.identity):
            known = {"target": self.target, "run": logger.identity}
            write_atomically(path, msgspec.json.encode(known) + b"\n")
        return logger


def _known(path: Path, target: str) -> str | None:
    """Return the name of a run at its logger, from a run folder; None if it is not there."""
    try:
        found: Any = msgspec.json.decode(path.read_bytes())
        return str(found["run"]) if found["target"] == target else None
    except (OSError, msgspec.DecodeError, TypeError, KeyError):
        return None


def _say_on_stderr(line: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"syncline: {printable(line)}\n")
