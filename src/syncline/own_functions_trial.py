"""A trial of a job's own functions: load the data, build the model and compute one gradient.

The launcher runs it in a process of its own before it starts ranks, so that what is wrong with a
user's function is one line, and nothing was started. Nothing of it is kept (decision 17).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from syncline.config import Job
from syncline.data import DataSet
from syncline.errors import ConfigError, SynclineError
from syncline.losses import loss_of, try_loss
from syncline.own_functions import failed
from syncline.recipe import Order, batch_of, build_model, load_data


def try_job(job: Job) -> None:
    """Raise ConfigError if the job's functions do not work together. `job` is resolved."""
    torch.set_num_threads(job.run.threads)
    loss = loss_of(job.model.loss)
    dataset = load_data(job)
    order = Order(job, dataset)
    model = build_model(job, dataset).train()
    samples, labels = _read(dataset, order)
    output = _forward(job, model, samples)
    value = try_loss(loss, output, labels)
    if not value.requires_grad:
        rule = "it must depend on the model's parameters"
        fix = "Compute it from the output, without detach() and no_grad()."
        raise ConfigError("model.loss", f"{loss.name} has no gradient", rule, fix)
    try:
        value.backward()
    except RuntimeError as error:
        rule = "its gradient is computed with backward()"
        raise failed("model.loss", loss.name, error, rule) from error


def _read(dataset: DataSet, order: Order) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first batch of a shard; read a test sample, too."""
    try:
        if dataset.test is not None:
            batch_of(dataset.test, np.zeros(1, dtype=np.int64))
        return order.batch_of_shard(dataset, 0, 0)
    except SynclineError:
        raise
    except Exception as error:
        rule = "samples are read by number and stacked to batches"
        raise failed("data.name", f"reading {dataset.name}", error, rule) from error


def _forward(job: Job, model: nn.Module, samples: torch.Tensor) -> Any:
    try:
        return model(samples)
    except SynclineError:
        raise
    except Exception as error:
        kind = str(samples.dtype).removeprefix("torch.")
        what = f"{job.model.name} on a batch of shape {tuple(samples.shape)}, {kind},"
        rule = f"the model takes what {job.data.name} gives"
        raise failed("model.name", what, error, rule) from error
