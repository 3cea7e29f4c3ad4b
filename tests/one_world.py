"""A small training that says which world its rank was in: for ranks started in many ways."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline
from syncline.checkpoint import digest_of
from syncline.session import current_session


def train():
    """Train for a few steps; return rank, ranks, machines, and the weights' digest."""
    rank = syncline.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(64, 8, generator=generator)
    loader = DataLoader(TensorDataset(points, points[:, :4].square()), batch_size=8)
    replica = syncline.distribute(model, optimizer, shards=2)
    for step in syncline.shards(loader):
        for x, y in step:
            (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    replica.synchronize()
    world = current_session().world
    return [rank, world.size, world.num_machines, digest_of(model.state_dict())]
