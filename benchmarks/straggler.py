"""What one slow rank costs the others: `python -m benchmarks.straggler [--json]`.

Four real ranks of one machine train a network that sleeps instead of computing. First all are
alike; then one takes five times as long. Each rank's rate in the second part is compared with its
own in the first. Where ranks wait for each other all fall to the slow one's rate; where they do
not, the others should not notice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STRATEGIES = ("synchronous", "gossip", "elastic", "server")
RANKS = 4
SLOW = RANKS - 1
FACTOR = 5
LEAST_SHARE = 0.9
LAYERS = 10
PARAMETER_BYTES = 4_000_000
COMPUTE_S = 0.06
WARM_UP_STEPS = 5


def work(strategy: str, steps: int, folder: Path) -> None:
    """Be one rank: take steps alike, then with one rank slow; write both times."""
    import torch

    import syncline
    from syncline.models.sleeping import SleepingLayer, sleeping

    rank = syncline.init(threads=1)
    layer = SleepingLayer(
        PARAMETER_BYTES // LAYERS, COMPUTE_S / 3 / LAYERS, COMPUTE_S * 2 / 3 / LAYERS
    )
    model = sleeping([layer] * LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    replica = syncline.distribute(model, optimizer, strategy, overlap=True)

    def take(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            model(torch.zeros(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        replica.synchronize()
        return (time.perf_counter() - started) / count

    take(WARM_UP_STEPS)
    alike_s = take(steps)
    mine = steps
    if rank == SLOW:
        for sleeper in model:
            sleeper.layer = SleepingLayer(  # type: ignore[union-attr]
                layer.parameter_bytes, FACTOR * layer.forward_s, FACTOR * layer.backward_s
            )
        # Those that do not wait for it are done after a fifth of its steps.
        mine = steps // FACTOR if replica.strategy.is_apart else steps
    slow_s = take(mine)
    with replica.whole(is_wanted=False):  # nobody leaves before all are done
        pass
    (folder / f"{rank}.json").write_text(json.dumps({"alike_s": alike_s, "slow_s": slow_s}))


def measure(strategy: str, steps: int) -> dict[str, Any]:
    """Run all ranks of one strategy; return each one's rate with a slow rank by its own before."""
    from syncline.launch.local import launch

    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "benchmarks.straggler"]
        command += ["--rank-of", strategy, "--steps", str(steps), "--folder", name]
        outcome = launch(command, RANKS, threads=1)
        if outcome.exit_code:
            raise SystemExit(outcome.exit_code)
        times = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    shares = [one["alike_s"] / one["slow_s"] for one in times]
    others = [share for rank, share in enumerate(shares) if rank != SLOW]
    return {
        "strategy": strategy,
        "step_ms": 1e3 * statistics.median(one["alike_s"] for one in times),
        "shares": shares,
        "least_of_others": min(others),
    }


def check(result: dict[str, Any]) -> bool:
    """Say whether a strategy does what it promises."""
    if result["strategy"] == "synchronous":
        return bool(result["least_of_others"] < 1.2 / FACTOR)
    return bool(result["least_of_others"] >= LEAST_SHARE)


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"{RANKS} ranks, rank {SLOW} takes {FACTOR} times as long")
    shown.add_column("strategy")
    shown.add_column("step before, ms", justify="right")
    for rank in range(RANKS):
        name = f"rank {rank}" + (" (slow)" if rank == SLOW else "")
        shown.add_column(f"{name}: rate by before", justify="right")
    shown.add_column("as promised")
    for result in results:
        shares = [f"{share:.2f}" for share in result["shares"]]
        promised = "yes" if check(result) else "NO"
        shown.add_row(result["strategy"], f"{result['step_ms']:.1f}", *shares, promised)
    return shown


def main() -> int:
    """Measure, print, and return 1 if a strategy does not keep its promise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.straggler")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print one object on stdout")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    job = parser.parse_args()
    if job.rank_of is not None:
        work(job.rank_of, job.steps, job.folder)
        return 0
    results = [measure(strategy, job.steps) for strategy in STRATEGIES]
    if job.json:
        print(json.dumps(results, indent=2))
    Console(stderr=job.json, width=130).print(table(results))
    return 0 if all(check(result) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
