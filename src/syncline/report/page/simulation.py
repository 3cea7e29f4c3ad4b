"""A simulation that has just ended, as a run of the page: what `simulate --report` shows."""

from __future__ import annotations

from typing import Any

from syncline.config import job_to_toml
from syncline.report.page.run import Run, run_of
from syncline.report.simulated import Simulation
from syncline.run_folder import finite

_FIGURES = (
    "ranks",
    "steps",
    "step_s",
    "samples_per_s",
    "speed_up",
    "efficiency",
    "alone_s",
    "loss",
    "test_loss",
    "accuracy",
    "strategy",
)


def run_of_simulation(simulation: Simulation) -> Run:
    """Return the run; its numbers are those of `syncline explain --json`, and its figures."""
    job, outcome = simulation.job, simulation.outcome
    summary: dict[str, Any] = {name: getattr(outcome, name) for name in _FIGURES}
    summary["gone"] = {str(rank): how for rank, how in outcome.gone.items()}
    curve = [
        {
            "step": point.step,
            "time_s": point.time_s,
            "samples": point.samples,
            "sent_bytes": point.total_sent_bytes,
            "loss": point.loss,
            "test_loss": point.test_loss,
            "accuracy": point.accuracy,
        }
        for point in outcome.curve
    ]
    known = finite({"summary": summary, "curve": curve})
    name = f"{job.model.name}, {job.strategy.name}, {outcome.ranks} ranks"
    return run_of(name, outcome.trace, known, job_to_toml(job))
