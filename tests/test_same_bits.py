"""The strongest test there is: the SHA-256 of the weights, for any number of ranks.

Real processes, shared memory and Gloo, overlapped or not, against a loop in plain PyTorch where
there is one shard.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import syncline
from ranks import run_ranks
from syncline import models
from syncline.checkpoint import digest_of
from syncline.loader import epoch_order, reseed

pytestmark = pytest.mark.processes

STEPS = 4
SEED = 3


class Small(nn.Module):
    """Batch norm, dropout, a convolution, an odd number of elements everywhere."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(5 * 64, 33),
            nn.Tanh(),
            nn.Linear(33, 7),
        )

    def forward(self, x):
        return self.body(x)


class Words(nn.Module):
    """An embedding and a transformer layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 33, dropout=0.1, batch_first=True)
        self.out = nn.Linear(16, 7)

    def forward(self, x):
        return self.out(self.layer(self.embed(x)).mean(dim=1))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def make(name, optimizer):
    torch.manual_seed(SEED)
    if name == "small":
        model, shape = Small(), (1, 8, 8)
    elif name == "words":
        model, shape = Words(), None
    else:
        size = {"alexnet": 63, "overfeat-fast": 71, "vgg-a": 32, "googlenet": 32}.get(name, 16)
        shape = (3, size, size) if name != "cd-dnn" else (429,)
        options = {"alexnet": {"hidden": [64, 64]}, "vgg-a": {"hidden": [64, 64]}}.get(name, {})
        options |= {"overfeat-fast": {"hidden": [64, 64]}, "cd-dnn": {"hidden": [96] * 3}}.get(
            name, {}
        )
        model = models.build(name, shape, 7, **options)
    generator = torch.Generator().manual_seed(1)
    if shape is None:
        x = torch.randint(0, 50, (96, 6), generator=generator)
    else:
        x = torch.randn(96, *shape, generator=generator)
    y = torch.randint(0, 7, (96,), generator=generator)
    return model, OPTIMIZERS[optimizer](model.parameters()), torch.utils.data.TensorDataset(x, y)


def train(
    name="small",
    optimizer="sgd",
    shards=1,
    *,
    per_shard=4,
    clip=None,
    clip_value=None,
    comm="auto",
    steps=STEPS,
    **settings,
):
    """The user's loop over shards, on one rank of a world; returns the hash and the losses."""
    syncline.init(comm=comm)
    model, chosen, data = make(name, optimizer)
    loader = torch.utils.data.DataLoader(data, batch_size=per_shard, shuffle=True)
    syncline.distribute(model, chosen, shards=shards, **settings)
    for number, step in enumerate(syncline.shards(loader, seed=SEED)):
        if number == steps:
            break
        for x, y in step:
            functional.cross_entropy(model(x), y).backward()
        if clip is not None:
            syncline.clip_grad_norm_(model, clip)
        if clip_value is not None:
            syncline.clip_grad_value_(model, clip_value)
        chosen.step()
        chosen.zero_grad()
    return digest_of(model.state_dict())


def plain(name="small", optimizer="sgd", batch=8):
    """A loop in plain PyTorch that takes its seeds from the same published functions."""
    model, chosen, data = make(name, optimizer)
    order = epoch_order(len(data), SEED, 0)
    for step in range(STEPS):
        x, y = data[order[step * batch : (step + 1) * batch]]
        reseed(SEED, step, 0)
        functional.cross_entropy(model(x), y).backward()
        chosen.step()
        chosen.zero_grad()
    return digest_of(model.state_dict())


def hashes(size, machines=1, **settings):
    found = run_ranks(size, lambda: train(**settings), machines=machines)
    assert len(set(found)) == 1, "ranks differ"
    return found[0]


@functools.cache
def hash_of_one(**settings):
    """Return the hash of one rank: what others are compared with, in many tests."""
    return hashes(1, **settings)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("name", ["small", "words"])
def test_one_shard_on_one_rank_is_a_plain_loop(name, optimizer):
    # Plain PyTorch here first: in the same process, as the rank is a copy of it.
    expected = plain(name, optimizer)
    settings = {"name": name, "optimizer": optimizer, "per_shard": 8, "bucket_bytes": 4096}
    assert hashes(1, overlap=True, **settings) == expected
    assert hashes(1, overlap=False, **settings) == expected


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("name", ["small", "words"])
def test_any_number_of_ranks_gives_the_same_bits(name, optimizer):
    settings = {"name": name, "optimizer": optimizer, "shards": 8, "bucket_bytes": 4096}
    reference = hash_of_one(**settings)
    for size, overlap in ((2, True), (3, False), (3, True), (4, False), (8, True)):
        assert hashes(size, overlap=overlap, **settings) == reference, (size, overlap)


def test_six_shards_on_up_to_six_ranks():
    reference = hash_of_one(shards=6)
    for size in (2, 3, 4, 5, 6):
        assert hashes(size, shards=6) == reference, size


def test_the_number_of_shards_does_change_bits():
    assert hash_of_one(shards=8, per_shard=2) != hash_of_one(shards=4, per_shard=4)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gloo_gives_the_bits_of_shared_memory(size):
    reference = hash_of_one(shards=4)
    assert hashes(size, shards=4, comm="network", overlap=True) == reference
    assert hashes(size, shards=4, comm="network", overlap=False) == reference


@pytest.mark.parametrize(("size", "machines"), [(4, 2), (4, 4), (6, 2)])
def test_several_machines_give_the_bits_of_one(size, machines):
    assert hashes(size, machines, shards=6, overlap=True) == hash_of_one(shards=6)


@pytest.mark.parametrize("comm", ["auto", "network"])
def test_clipping_is_equal_for_any_number_of_ranks(comm):
    reference = hash_of_one(shards=4, clip=0.5)
    assert reference != hash_of_one(shards=4)
    for size in (2, 3, 4):
        assert hashes(size, shards=4, clip=0.5, comm=comm) == reference, size


def test_clipping_by_value_is_equal_for_any_number_of_ranks():
    reference = hash_of_one(shards=4, clip_value=0.01)
    assert reference != hash_of_one(shards=4)
    for size, overlap in ((2, True), (3, False), (4, True)):
        assert hashes(size, shards=4, clip_value=0.01, overlap=overlap) == reference, size


def test_private_parameters_give_the_same_bits():
    assert hashes(3, shards=4, private_parameters=True) == hash_of_one(shards=4)


def test_bfloat16_gives_the_same_bits():
    def work():
        syncline.init()
        torch.manual_seed(0)
        model = nn.Linear(37, 41).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = syncline.distribute(model, optimizer, shards=4)
        for step in range(4):
            for shard in replica.my_shards:
                replica.begin_shard(shard)
                generator = torch.Generator().manual_seed(10 * step + shard)
                x = torch.randn(5, 37, generator=generator).to(torch.bfloat16)
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest_of(model.state_dict())

    found = {digest for size in (1, 2, 3, 4) for digest in run_ranks(size, work)}
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", models.names())
def test_overlapped_and_not_overlapped_give_the_same_bits_on_every_model(name):
    settings = {"name": name, "shards": 2, "per_shard": 2, "steps": 3}
    reference = hashes(2, overlap=False, **settings)
    assert hashes(2, overlap=True, bucket_bytes=65536, **settings) == reference
