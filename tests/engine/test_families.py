"""A plan in families: parameters that are held and added up by different groups of ranks.

The reference is a loop in plain PyTorch with one copy of each set of parameters, whose gradients
are added up along the same tree.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline.comm.tree import split
from syncline.contract import Family, Plan, deal
from syncline.strategies import Synchronous

pytestmark = pytest.mark.processes

STEPS = 4


class Net(nn.Module):
    """Two layers of the world's and one of each group's."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.own = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.own(torch.tanh(self.first(x)))))


OWN = frozenset({2, 3})  # the numbers of own.weight and own.bias


class TwoFamilies(Synchronous):
    """`own` is held by groups, everything else by all ranks."""

    def __init__(self, groups, updates="strips"):
        super().__init__()
        self._groups = groups
        self._updates = updates

    def plan(self, world, sizes, shards):
        private = {"memory": "private", "updates": self._updates}
        own = Family(self._groups, parameters=OWN, **(private if self._updates == "each" else {}))
        dealt = deal(shards, world.size, world.size)
        return Plan((own, Family(world.everybody)), dealt)

    def gradient_ready(self, bucket):
        if bucket.family.updates == "each":
            bucket.comm.all_reduce(bucket.gradient)
        else:
            super().gradient_ready(bucket)

    def before_use(self, bucket, update):
        bucket.optimizer.run(update)
        if bucket.family.updates == "strips":
            bucket.comm.all_gather(bucket.parameters)


def make():
    torch.manual_seed(0)
    return Net()


def batch(step, shard):
    generator = torch.Generator().manual_seed(100 * step + shard)
    return torch.randn(5, 6, generator=generator)


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(strategy, shards, overlap):
    syncline.init()
    model = make()
    optimizer = optimizer_of(model.parameters())
    replica = syncline.distribute(model, optimizer, strategy, shards=shards, overlap=overlap)
    for step in range(STEPS):
        for shard in replica.my_shards:
            replica.begin_shard(shard)
            model(batch(step, shard)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def tree_sum(terms, node):
    if node[1] - node[0] == 1:
        return terms[node[0]]
    left, right = split(node)
    return tree_sum(terms, left) + tree_sum(terms, right)


def reference(groups, shards_of):
    """Return the values of each rank's parameters: one model for each group, `first` and `last` of
    all models kept equal."""
    models = [make() for _ in groups]
    optimizers = [optimizer_of(model.parameters()) for model in models]
    num_shards = sum(map(len, shards_of))
    for step in range(STEPS):
        found = {}
        for number, group in enumerate(groups):
            for shard in [shard for rank in sorted(group) for shard in shards_of[rank]]:
                model = models[number]
                model.zero_grad()
                model(batch(step, shard)).square().mean().backward()
                found[number, shard] = [p.grad.clone() for p in model.parameters()]
        for number, group in enumerate(groups):
            for index, parameter in enumerate(models[number].parameters()):
                if index in OWN:
                    mine = [shard for rank in sorted(group) for shard in shards_of[rank]]
                    terms = [found[number, shard][index] * (1 / len(mine)) for shard in mine]
                else:
                    everybody = {shard: grads for (_, shard), grads in found.items()}
                    terms = [everybody[shard][index] for shard in range(num_shards)]
                    terms = [term * (1 / num_shards) for term in terms]
                parameter.grad = tree_sum(terms, (0, len(terms)))
        for optimizer in optimizers:
            optimizer.step()
    by_rank = {}
    for number, group in enumerate(groups):
        values = {name: value.tolist() for name, value in models[number].state_dict().items()}
        by_rank.update(dict.fromkeys(group, values))
    return [by_rank[rank] for rank in sorted(by_rank)]


class SmallGroupsOnly(TwoFamilies):
    """No parameter is held by all ranks, which still take every step together."""

    def plan(self, world, sizes, shards):
        own = Family(((0, 2), (1, 3)), parameters=OWN)
        return Plan((own, Family(((0, 1), (2, 3)))), deal(shards, world.size, world.size))


def test_ranks_that_share_no_group_still_take_every_step_together():
    found = run_ranks(4, lambda: train(SmallGroupsOnly(()), 4, True))
    # Ranks 0 and 1 hold one `first`, 2 and 3 another; 0 and 2 hold one `own`, 1 and 3 another.
    assert found[0]["first.weight"] == found[1]["first.weight"] != found[2]["first.weight"]
    assert found[0]["own.weight"] == found[2]["own.weight"] != found[1]["own.weight"]
    assert found[2]["first.weight"] == found[3]["first.weight"]
    assert found[1]["own.weight"] == found[3]["own.weight"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("updates", ["strips", "each"])
@pytest.mark.parametrize(
    ("groups", "shards", "machines"),
    [
        (((0, 2), (1, 3)), 4, 1),
        (((0, 2), (1, 3)), 4, 2),
        (((0, 1), (2, 3)), 6, 2),
        (((0, 3), (1,), (2,)), 4, 1),
        (((0, 1, 2), (3,)), 8, 4),
    ],
)
def test_two_families_have_the_bits_of_the_reference(groups, shards, machines, updates, overlap):
    found = run_ranks(
        4, lambda: train(TwoFamilies(groups, updates), shards, overlap), machines=machines
    )
    assert found == reference(groups, deal(shards, 4, 4))
