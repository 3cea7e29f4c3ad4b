"""Promises of all strategies whose ranks hold different parameters, tried in real processes."""

from __future__ import annotations

import pytest
import torch

import syncline
from ranks import run_ranks
from syncline.checkpoint import digest_of

WORLDS = {
    "shared memory": (3, 1, "auto"),
    "network": (3, 1, "network"),
    "2 machines with 2 ranks": (4, 2, "auto"),
}
every_world = pytest.mark.parametrize("world", WORLDS)


def steps(model, optimizer, rank, count=6, schedule=None):
    """Train on samples of this rank's own."""
    scheduler = schedule and schedule(optimizer)
    for step in range(count):
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def check_alone(make, optimizer_of, strategy, schedule=None, **options):
    """Check that a rank alone has the bits of the same loop in plain PyTorch."""
    plain = make()
    steps(plain, optimizer_of(plain), 0, schedule=schedule)
    syncline.init()
    model = make()
    optimizer = optimizer_of(model)
    replica = syncline.distribute(model, optimizer, strategy, **options)
    steps(model, optimizer, 0, schedule=schedule)
    with replica.whole():
        found = digest_of(model.state_dict())
    assert found == digest_of(plain.state_dict())


def check_apart(world, make, optimizer_of, make_strategy, schedule=None, **options):
    """Check that ranks end with different parameters, and that one model represents the run.

    Returns, by rank, the number of buckets and the strategy's report.
    """
    size, machines, kind = WORLDS[world]

    def work():
        rank = syncline.init(comm=kind)
        model = make()
        optimizer = optimizer_of(model)
        replica = syncline.distribute(model, optimizer, make_strategy(), **options)
        steps(model, optimizer, rank, schedule=schedule)
        with replica.whole():
            whole = digest_of(model.state_dict())
        own = digest_of(model.state_dict())
        return whole, own, len(replica.buckets), replica.run.report()

    results = run_ranks(size, work, machines=machines)
    assert len({whole for whole, _, _, _ in results}) == 1
    assert len({own for _, own, _, _ in results}) == size
    return [(num_buckets, report) for _, _, num_buckets, report in results]
