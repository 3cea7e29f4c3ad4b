"""One cell run on the virtual clock, with real arithmetic."""

from __future__ import annotations

import time
from typing import Any

from syncline.compare.cell import Found, Point, known
from syncline.compare.grid import Cell
from syncline.config.words import brief
from syncline.errors import ConfigError, SynclineError
from syncline.result import RunResult
from syncline.sim.job import simulate_job

FIGURES = ("step_s", "samples_per_s", "exposed_communication", "exposed_input")
"""Figures of a run that a comparison keeps."""


def simulate_cell(cell: Cell) -> Found:
    """Run a cell on the virtual clock. Ranks go at their own pace; no evaluation lets them wait."""
    began_s = time.perf_counter()
    try:
        outcome = simulate_job(cell.job, cell.cluster, learns=True, at_own_pace=True)
    except ConfigError:
        raise  # a mistake in the study: nothing that a run has found
    except SynclineError as error:
        return Found(failed=brief(error), wall_s=time.perf_counter() - began_s)
    points = tuple(
        Point(
            step=one.samples // cell.job.data.batch,
            samples=one.samples,
            time_s=one.time_s,
            sent_bytes=one.total_sent_bytes,
            loss=known(one.loss),
            test_loss=known(one.test_loss),
            accuracy=known(one.accuracy),
        )
        for one in outcome.curve
    )
    return Found(
        points=points,
        figures=figures_of(outcome),
        rank_samples=outcome.rank_samples,
        weights_sha256=outcome.weights_sha256,
        wall_s=time.perf_counter() - began_s,
    )


def figures_of(result: RunResult) -> dict[str, float | None]:
    """Return the figures of a run and of its strategy that are plain numbers."""
    found: dict[str, Any] = {name: getattr(result, name) for name in FIGURES}
    own = {name: one for name, one in result.strategy.items() if isinstance(one, float)}
    return {name: known(one) for name, one in (found | own).items()}
