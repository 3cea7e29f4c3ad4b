"""What a job's run is made of: its data, model, optimizer, learning rates and order of samples.

The trainer and the simulator build a run with these functions, so both get the same weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

import numpy as np
import torch
from torch import nn

from syncline import data, models
from syncline.config import Job, OptimizerSettings
from syncline.config.settings import DECAY_FACTOR
from syncline.data import DataSet, Facts, Split
from syncline.errors import ConfigError
from syncline.loader import epoch_order, reseed
from syncline.own_functions import find, is_own
from syncline.samples import seed_generators
from syncline.seeds import seed_for

Batch = tuple[torch.Tensor, torch.Tensor]
"""Samples and labels of a shard."""


def build_model(job: Job, dataset: DataSet | Facts) -> nn.Module:
    """Build the job's network. Its initial weights depend on nothing but the job's seed."""
    settings, seed = job.model, seed_for(job.run.seed, "weights")
    torch.manual_seed(seed)
    if is_own(settings.name):
        models.check_own(settings.name, settings.image_size, settings.classes)
        find("model.name", settings.name)  # importing it may draw random numbers: seed afterwards
        seed_generators(seed)
        return models.build_own(settings.name, settings.options)
    classes = settings.classes or dataset.classes
    if classes is None:
        raise ConfigError(
            "model.classes",
            "it is not there",
            f"the classes of {dataset.name} are not known, and {settings.name} has one output each",
            "Write for example model.classes = 10.",
        )
    return models.build(settings.name, dataset.sample_shape, classes, **settings.options)


def load_data(job: Job) -> DataSet:
    """Load the job's data, at the image size the job asks for."""
    return data.load(job.data.name, **_data_settings(job))


def describe_data(job: Job) -> Facts:
    """Return what a model needs to know of the job's data, without loading it if it is not own."""
    return data.describe(job.data.name, **_data_settings(job))


def _data_settings(job: Job) -> dict[str, Any]:
    if is_own(job.data.name):
        # A split that is drawn at random, for example, must be the same on every rank.
        find("data.name", job.data.name)
        seed_generators(seed_for(job.run.seed, "data"))
    return {
        "path": job.data.path,
        "sample_shape": job.data.sample_shape,
        "options": job.data.options,
        "image_size": job.image_size,
        "classes": job.data.classes,
        "samples": job.data.samples,
        "seed": job.run.seed,
    }


def build_optimizer(settings: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer with a resolved job's settings."""
    chosen = settings.resolved()
    common: dict[str, Any] = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
    if chosen.name == "sgd":
        common |= {"momentum": chosen.momentum, "nesterov": chosen.nesterov}
        return torch.optim.SGD(model.parameters(), **common)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[chosen.name]
    return kind(model.parameters(), betas=chosen.betas, **common)


def learning_rate(settings: OptimizerSettings, step: int, total: int) -> float:
    """Return the learning rate of a step out of `total`. Checkpoints need not store it.

    >>> settings = OptimizerSettings(lr=0.4, warmup_steps=4)
    >>> [learning_rate(settings, step, 10) for step in (0, 1, 3, 9)]
    [0.1, 0.2, 0.4, 0.4]
    >>> settings = OptimizerSettings(
    ...     lr=0.5, schedule="milestones", milestones=(2, 5), decay_factor=0.5
    ... )
    >>> [learning_rate(settings, step, 10) for step in (0, 1, 2, 4, 5, 9)]
    [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "cosine":
        through = (step - settings.warmup_steps) / max(1, total - settings.warmup_steps)
        return settings.lr * 0.5 * (1 + math.cos(math.pi * through))
    if settings.schedule == "step" and settings.decay_steps:
        factor = settings.decay_factor or DECAY_FACTOR
        return float(settings.lr * factor ** (step // settings.decay_steps))
    if settings.schedule == "milestones" and settings.milestones:
        factor = settings.decay_factor or DECAY_FACTOR
        return float(settings.lr * factor ** bisect_right(settings.milestones, step))
    return settings.lr


def set_learning_rate(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, step: int, total: int
) -> None:
    """Set the learning rate of a step in all groups of the optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, step, total)


def batch_of(split: Split, indices: np.ndarray[Any, Any]) -> Batch:
    """Return samples and labels in newly allocated memory.

    Kernels may give other bits for another alignment of their input; new memory is always aligned.
    """
    samples, labels = split.batch(indices)
    if isinstance(samples, torch.Tensor) and isinstance(labels, torch.Tensor):
        return samples, labels  # of a user's own data, stacked in new memory
    assert isinstance(samples, np.ndarray)
    assert isinstance(labels, np.ndarray)
    images = torch.empty(samples.shape, dtype=torch.float32)
    # By numpy: a thread that reads ahead must not start intra-op threads of its own.
    np.copyto(images.numpy(), samples)
    return images, torch.from_numpy(labels)


class Order:
    """Which samples a shard of a step gets, and how many steps there are."""

    def __init__(self, job: Job, dataset: DataSet) -> None:
        """`job` is resolved."""
        assert job.strategy.shards is not None
        self.batch = job.data.batch
        self.shards = job.strategy.shards
        self.num_samples = len(dataset.train)
        self.per_epoch = self.num_samples // self.batch
        if self.per_epoch == 0:
            raise ConfigError(
                "data.batch",
                f"got {self.batch}",
                f"{dataset.name} has {self.num_samples} samples to train on",
                f"Use at most {self.num_samples}.",
            )
        self.total = job.run.steps or (job.run.epochs or 0) * self.per_epoch
        self._seed = job.run.seed
        own = (job.model.name, job.model.loss, job.data.name)
        self._may_draw_anywhere = any(is_own(name) for name in own)
        self._epoch = (-1, torch.empty(0, dtype=torch.int64))

    def indices(self, step: int, shard: int) -> np.ndarray[Any, Any]:
        """Return the samples of one shard of one step."""
        epoch, within = divmod(step, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, epoch_order(self.num_samples, self._seed, epoch))
        size = self.batch // self.shards
        first = within * self.batch + shard * size
        return self._epoch[1][first : first + size].numpy()

    def read(self, dataset: DataSet, step: int, shard: int) -> Batch:
        """Return samples and labels of a shard: the same wherever and whenever they are read."""
        if dataset.is_own:
            # What the user's data draws at random must not depend on the rank or the worker.
            seed_generators(seed_for(self._seed, "samples", step, shard))
        return batch_of(dataset.train, self.indices(step, shard))

    def seed_forward(self, step: int, shard: int) -> None:
        """Seed the generators for a shard's forward, wherever its samples were read."""
        reseed(self._seed, step, shard, everywhere=self._may_draw_anywhere)

    def batch_of_shard(self, dataset: DataSet, step: int, shard: int) -> Batch:
        """Read a shard in line, and seed the generators for its forward."""
        batch = self.read(dataset, step, shard)
        self.seed_forward(step, shard)
        return batch
