"""`syncline measure links`: times collectives on real ranks, and writes a cluster file."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from syncline.cli.output import debug_option, report, say
from syncline.cluster_facts import ClusterFacts, Measured
from syncline.cluster_file import THIS_MACHINE, write_cluster
from syncline.config.session import SessionSettings
from syncline.config.words import shown
from syncline.errors import ConfigError, SynclineError
from syncline.files import check_can_be_written, explained
from syncline.launch.env import LaunchedRank, read_world, thread_environment
from syncline.launch.local import launch
from syncline.launch.signals import end_promptly, leave
from syncline.report.clusters import print_measured
from syncline.run_folder import finite

if TYPE_CHECKING:
    from syncline.measure.sweep import Plan

ROUNDS = 15
_FOR_MESSAGES = 3
"""So many ranks tell a message's processor time from a collective's."""
_DISTURBED = 0.5
"""A spread of rounds, relative to their median, that another program must have caused."""

Table = list[Measured]


def links(
    ranks: int = typer.Option(2, "--ranks", "-n", help="How many ranks, on this machine."),
    out: Path = typer.Option(
        Path(f"{THIS_MACHINE}.toml"), "--out", metavar="FILE", help="The cluster file to write."
    ),
    rounds: int = typer.Option(ROUNDS, "--rounds", help="How often each collective is timed."),
    sizes: str = typer.Option(
        "", "--sizes", metavar="BYTES,...", help="Sizes to time.", show_default="64 to 16777216"
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
    debug: bool = debug_option,
) -> None:
    """Measure the links between ranks, and write a cluster file.

    [bold]Examples[/bold]

      syncline measure links

      syncline simulate examples/digits.toml --ranks 4 --machines 1 --cluster this-machine

      torchrun --nnodes 2 --node-rank 0 ... -m syncline measure links --out ours.toml

    Ranks call the collectives that training calls, of many sizes, round after round;
    latency, rates by size, and the costs of a message and of a collective are fitted to
    the medians. On one machine they are measured twice: through shared memory, and over
    TCP streams of the loopback device, which stand for a network. Under a launcher its
    ranks are measured, on all its machines. The file holds every time, its quartiles, and
    how far off the fit is. Measure on a quiet machine: it takes about half a minute.
    """
    world = read_world()
    chosen = _checked_sizes(sizes)
    if rounds < 3:
        rule = "quartiles need three rounds at least"
        raise ConfigError("--rounds", f"got {rounds}", rule, f"Use {ROUNDS}.")
    if world.size == 1 and ranks < 2:
        fix = "Use 2, or as many as there are cores."
        raise ConfigError("--ranks", f"got {ranks}", "a link is between two ranks", fix)
    if world.rank == 0:
        check_can_be_written("--out", out)
    if world.size > 1:
        facts = _as_launched(world, chosen, rounds)
    else:
        facts = _start_ranks(ranks, chosen, rounds)
    if facts is not None:
        _give(facts, out, as_json=as_json)


def _give(facts: ClusterFacts, out: Path, *, as_json: bool) -> None:
    with explained(out):
        write_cluster(facts, out)
    spread = sorted((one.high_s - one.low_s) / one.median_s for one in facts.measured)
    if spread[len(spread) // 2] > _DISTURBED:
        say(
            "times differ much from round to round: something else runs on this machine. "
            "Measure again when it is quiet."
        )
    if as_json:
        print(json.dumps(finite(msgspec.to_builtins(facts)), allow_nan=False))
    else:
        print_measured(facts, out, Console(highlight=False))


def _checked_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes that were asked for, in ascending order; none for the usual ones."""
    words = [word.strip() for word in text.split(",")] if text else []
    for word in words:
        if not word.isdecimal() or not 64 <= int(word) <= 1 << 30 or int(word) % 64:
            rule = (
                "sizes are multiples of 64 bytes, from 64 to 1073741824, with commas between them"
            )
            fix = "Write for example --sizes 64,65536,1048576."
            raise ConfigError("--sizes", f"got {shown(word)}", rule, fix)
    return tuple(sorted({int(word) for word in words}))


def _plan(sizes: tuple[int, ...], rounds: int, most_ranks: int | None, bar: Progress) -> Plan:
    from syncline.measure import sweep

    task = bar.add_task("measuring", total=rounds)
    return sweep.Plan(
        sizes=sizes or sweep.SIZES,
        rounds=rounds,
        most_ranks=most_ranks,
        on_round=lambda number: _show(bar, task, number),
    )


def _show(bar: Progress, task: object, number: int) -> None:
    """Draw the bar. Not from a thread of its own: that would disturb what is measured."""
    bar.update(task, completed=number)  # type: ignore[arg-type]
    if not bar.disable:
        bar.refresh()


def measure_here(
    kind: str, sizes: tuple[int, ...], rounds: int, most_ranks: int | None = None
) -> tuple[Table, float]:
    """Measure as the rank that the environment names; return the table and the rate of copies."""
    from syncline.measure import sweep
    from syncline.session import close_session, open_session

    session = open_session(SessionSettings(comm=kind, threads=1))
    is_shown = session.world.rank == 0 and sys.stderr.isatty()
    console = Console(stderr=True)
    with Progress(console=console, disable=not is_shown, transient=True, auto_refresh=False) as bar:
        plan = _plan(sizes, rounds, most_ranks, bar)
        table = session.lane.call(sweep.sweep, session.comm, plan)
    close_session()
    return table, sweep.copy_rate()


# -- ranks that this command starts ----------------------------------------------------------------


def _start_ranks(ranks: int, sizes: tuple[int, ...], rounds: int) -> ClusterFacts:
    """Measure shared memory and streams with ranks of this machine; fit both together."""
    os.environ |= thread_environment(1)
    from syncline.measure.fit import Limit, fitted
    from syncline.session import open_session  # noqa: F401 ranks are forks: load it once

    rows: Table = []
    rate = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for kind, num_ranks in (("shared_memory", ranks), ("network", max(ranks, _FOR_MESSAGES))):
            path = Path(folder) / kind
            work = functools.partial(_work, path, kind, sizes, rounds, ranks)
            outcome = launch(work, num_ranks, threads=1, stdout=sys.stderr.fileno())
            if outcome.exit_code:
                raise typer.Exit(outcome.exit_code)
            found, copies = msgspec.json.decode(path.read_bytes(), type=tuple[Table, float])
            rows, rate = rows + found, max(rate, copies)
    limit = Limit(rate, "a copy of memory that is in the cache takes")
    facts = fitted(rows, {"inside": limit, "across": limit}, ranks)
    source = f"{ranks} ranks of one machine; between machines: TCP streams of its loopback device"
    return _described(facts, source)


def _work(path: Path, kind: str, sizes: tuple[int, ...], rounds: int, most_ranks: int) -> None:
    """Measure as a rank that this command started; rank 0 leaves the table in a file."""
    end_promptly()
    try:
        found = measure_here(kind, sizes, rounds, most_ranks)
    except SynclineError as error:
        leave(report(error, who=f"rank {read_world().rank}: "))
    if read_world().rank == 0:
        path.write_bytes(msgspec.json.encode(found))


# -- ranks of a launcher ---------------------------------------------------------------------------


def _as_launched(world: LaunchedRank, sizes: tuple[int, ...], rounds: int) -> ClusterFacts | None:
    """Measure among the ranks that a launcher started; None on all ranks but 0."""
    from syncline.measure.fit import Limit, fitted

    rows, rate = measure_here("auto", sizes, rounds)
    if world.rank:
        return None
    limits = {"inside": Limit(rate, "a copy of memory that is in the cache takes")}
    nominal = fastest_device()
    if nominal is not None:
        limits["across"] = Limit(*nominal)
    machines = max(one.machines for one in rows)
    facts = fitted(rows, limits)
    return _described(facts, f"{world.size} ranks on {machines} machine{'s' * (machines > 1)}")


def _described(facts: ClusterFacts, source: str) -> ClusterFacts:
    cores = len(os.sched_getaffinity(0))
    return msgspec.structs.replace(facts, name=THIS_MACHINE, source=source, cores=cores)


def fastest_device(folder: Path = Path("/sys/class/net")) -> tuple[float, str] | None:
    """Return the nominal rate of the fastest network device that says it, in bytes a second.

    The kernel has it in Mbit/s; -1, or an error, where it does not know.
    """
    found = [(speed, path.name) for path in sorted(folder.glob("*")) if (speed := _speed(path)) > 0]
    if not found:
        return None
    speed, name = max(found)
    return speed * 1e6 / 8, f"the fastest network device here ({name}) has"


def _speed(device: Path) -> int:
    try:
        return int((device / "speed").read_text())
    except (OSError, ValueError):
        return 0
