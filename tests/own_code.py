"""Modules of a user's own for tests: a language model, a regression, and what goes wrong."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

_numbers = itertools.count()

WORDS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width, words):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(width, words)

    def forward(self, x):
        so_far = self.embed(x).cumsum(dim=1)
        return self.out(self.drop(torch.relu(self.mix(so_far))))


def make(width=8, words=11):
    return Net(width, words)


def texts(samples=64, length=6, words=11):
    tokens = torch.randint(words, (samples + 16, length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return (inputs[:samples], targets[:samples]), (inputs[samples:], targets[samples:])
"""

POINTS = """
import random
import numpy as np
import torch
from torch import nn


class Points:
    # Noisy samples of a line: the noise is drawn each time a sample is read.
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        x = torch.full((3,), row / self.size)
        noise = torch.rand(3) + np.random.rand() + random.random()
        return x + 0.01 * noise.float(), np.array([2.0 * row / self.size], dtype=np.float32)


class Jumpy(nn.Tanh):
    def forward(self, x):
        return super().forward(x) * (1 + 0.1 * random.random() * self.training)


def make():
    return nn.Sequential(nn.Linear(3, 5), Jumpy(), nn.Linear(5, 1))


def points(size=64):
    return Points(size), Points(size // 2)


def loss(output, targets):
    return (output - targets).abs().mean()
"""

JOB = """
[model]
name = "{module}:make"

[data]
name = "{module}:{data}"
batch = 16

[optimizer]
lr = 0.1
momentum = 0.9

[strategy]
shards = 4

[run]
steps = 6
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a module into the current folder, a new one; return its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = []

    def write(text: str) -> str:
        name = f"own_{next(_numbers)}"
        Path(f"{name}.py").write_text(text)
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def write_job(module: str, data: str, *more: str) -> Path:
    """Write the job of an own module; `more` are lines at its end, in tables."""
    path = Path("job.toml")
    path.write_text(JOB.format(module=module, data=data) + "\n".join(more))
    return path
