"""Training in groups of ranks beside one process on the whole batch: shared by tests."""

from __future__ import annotations

import torch
from benchmarks.gpt import Gpt
from torch import nn
from torch.nn import functional

import syncline
from syncline import models

STEPS = {"vgg-a": 2, "alexnet": 3, "gpt": 4}
"""Of each network that computes for seconds; 20 of the others, and the bounds hold with 20 of each.
In float64 an error of 1e-13 shows in any step."""
SHARDS = 4
PER_SHARD = 2


class Uneven(nn.Module):
    """A chain of three layers with 3 dimensions, a layer by itself, and no even number."""

    def __init__(self):
        super().__init__()
        self.chain = nn.Sequential(
            nn.Linear(5, 11), nn.ReLU(inplace=True), nn.Linear(11, 13, bias=False), nn.Tanh()
        )
        self.norm = nn.LayerNorm(13)
        self.last = nn.Linear(13, 7)

    def forward(self, x):
        return self.last(self.norm(self.chain(x))).mean(dim=1)


NETWORKS = {
    "uneven": (Uneven, (3, 5)),
    "cd-dnn": (lambda: models.build("cd-dnn", (429,), 7, hidden=[96] * 4), (429,)),
    "vgg-a": (lambda: models.build("vgg-a", (3, 32, 32), 7, hidden=[64, 64], dropout=0.0), None),
    "alexnet": (
        lambda: models.build("alexnet", (3, 64, 64), 7, hidden=[64, 64], dropout=0.0),
        None,
    ),
    "gpt": (lambda: Gpt(40, 6), "tokens"),
}


def make(name, dtype=torch.float32, seed=5):
    """Return a network and the samples and targets of all steps."""
    torch.manual_seed(seed)
    build, shape = NETWORKS[name]
    model = build().to(dtype)
    shape = {"vgg-a": (3, 32, 32), "alexnet": (3, 64, 64)}.get(name, shape)
    size = (STEPS.get(name, 20), SHARDS * PER_SHARD)
    if shape == "tokens":
        samples = torch.randint(0, 40, (*size, 6))
        return model, samples, torch.randint(0, 40, (*size, 6))
    return model, torch.randn(*size, *shape, dtype=dtype), torch.randint(0, 7, size)


def loss_of(output, targets):
    return functional.cross_entropy(output.reshape(-1, output.shape[-1]), targets.reshape(-1))


def train_plain(
    name, dtype=torch.float32, optimizer=torch.optim.SGD, clip=None, seed=5, **settings
):
    """Train one process on the whole batch; return the parameters by name."""
    model, samples, targets = make(name, dtype, seed)
    optimizer = optimizer(model.parameters(), **({"lr": 0.01} | settings))
    for x, y in zip(samples, targets, strict=True):
        loss_of(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train_in_groups(
    name,
    strategy,
    dtype=torch.float32,
    optimizer=torch.optim.SGD,
    clip=None,
    comm="auto",
    seed=5,
    **settings,
):
    """Train on this rank, as one of several; return the whole parameters by name."""
    syncline.init(comm=comm, threads=1)
    model, samples, targets = make(name, dtype, seed)
    optimizer = optimizer(model.parameters(), **({"lr": 0.01} | settings))
    replica = syncline.distribute(model, optimizer, strategy, shards=SHARDS)
    for x, y in zip(samples, targets, strict=True):
        for shard in replica.my_shards:
            part = slice(shard * PER_SHARD, (shard + 1) * PER_SHARD)
            replica.begin_shard(shard)
            loss_of(model(x[part]), y[part]).backward()
        if clip is not None:
            replica.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    with replica.whole():
        return {name: value.clone() for name, value in model.state_dict().items()}


def distance(found, expected):
    """Return the distance of all parameters together, relative to their norm."""
    names = [name for name, value in expected.items() if value.is_floating_point()]
    apart = sum(float((found[name] - expected[name]).double().square().sum()) for name in names)
    norm = sum(float(expected[name].double().square().sum()) for name in names)
    return (apart / norm) ** 0.5
