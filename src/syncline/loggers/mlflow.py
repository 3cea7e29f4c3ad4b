"""MLflow: a tracking server, or a database on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlflow
from mlflow.entities import Metric

from syncline.loggers.base import Line, Opening

_MOST_METRICS = 1000
"""MLflow takes no more at once."""
_MOST_CHARACTERS = 500
"""Of a setting's value."""


class MLflow:
    """A run of MLflow, in the experiment that MLflow's own settings name."""

    def __init__(self, opening: Opening) -> None:
        if opening.where:
            mlflow.set_tracking_uri(opening.where)
        run = mlflow.start_run(run_id=opening.identity, run_name=opening.title)
        self.identity: str | None = run.info.run_id
        if opening.identity is None:
            texts = {key: str(value)[:_MOST_CHARACTERS] for key, value in opening.config.items()}
            mlflow.log_params(texts)
        self._client = mlflow.MlflowClient()

    def write(self, lines: Sequence[Line]) -> None:
        now_ms = int(time.time() * 1000)
        found = [
            Metric(name, value, now_ms, step)
            for step, values in lines
            for name, value in values.items()
        ]
        for at in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self.identity, found[at : at + _MOST_METRICS])

    def close(self, *, failed: bool) -> None:
        mlflow.end_run("FAILED" if failed else "FINISHED")
