"""Gossip and elastic averaging exactly as Jin et al. published them, against their rules.

The reference is written down from the first author's code: parameters x and velocity v; gradients
are taken at x + m v, then v <- m v - lr g and x <- x + v; x is what ranks mix.
"""

from __future__ import annotations

import random

import pytest
import torch

from small_job import SMALL, refusal, small
from strategies.toys import LATENCY_S, play
from syncline.contract import Saved, World
from syncline.errors import ConfigError, UsageError
from syncline.sizes import InOne, Size
from syncline.strategies import Elastic, ElasticSettings, Gossip, GossipSettings

LR, MOMENTUM, STEPS = 0.1, 0.9, 9
TARGETS = [[4.0, -1.0], [0.0, 2.0], [-3.0, 5.0]]
STARTS = [[1.0, 1.0]] * 3
DELAYS = [0.0, 0.1, 0.2]


def nesterov(**settings):
    return lambda lr: (
        lambda parameters: torch.optim.SGD(
            parameters, lr=lr, momentum=MOMENTUM, nesterov=True, **settings
        )
    )


def slope(rank):
    """The gradient of |x - target|^2 / 2, with a target for each rank."""
    return lambda values: values - torch.tensor(TARGETS[rank])


SLOPES = [[slope(rank)] * STEPS for rank in range(3)]


def follow(make, **options):
    options = {"lr": LR, "optimizer": nesterov(), "delays": DELAYS} | options
    rounds, strategies = play(make, STARTS, SLOPES, **options)
    looked_ahead = [
        torch.tensor([v for v in values if v is not None]).double() for values in rounds
    ]
    return looked_ahead, strategies[0].last[0]


class Reference:
    """Parameters and velocities of all ranks."""

    def __init__(self, size=3):
        self.x = torch.tensor(STARTS[:size], dtype=torch.float64)
        self.v = torch.zeros_like(self.x)

    @property
    def ahead(self):
        return self.x + MOMENTUM * self.v

    def accelerate(self, rank):
        gradient = self.ahead[rank] - torch.tensor(TARGETS[rank], dtype=torch.float64)
        self.v[rank] = MOMENTUM * self.v[rank] - LR * gradient


class Around(Gossip):
    """Rank r draws r + 1 in even steps, itself in odd ones."""

    def partner(self, step):
        return self.comm.position if step % 2 else (self.comm.position + 1) % self.comm.size


def close(found, wanted):
    return torch.allclose(found.double(), wanted, atol=1e-5)


def pulls(as_published):
    return lambda: Around(GossipSettings(as_published=as_published, early=False))


def test_pulls_mix_parameters_and_not_the_points_that_momentum_looks_ahead_to():
    reference, wanted = Reference(), []
    for step in range(STEPS):
        for rank in range(3):
            reference.accelerate(rank)
        published = reference.x + reference.v
        reference.x = published.clone()
        if step % 2 == 0:
            reference.x = (published + published.roll(-1, dims=0)) / 2
        wanted.append(reference.ahead)
    found, whole = follow(pulls(True), delays=None)
    assert all(map(close, found, wanted))
    assert close(whole[0], reference.x.mean(dim=0)), "the mean of parameters is exported"
    assert not close(follow(pulls(False), delays=None)[0][-1], wanted[-1])


def test_pushes_mix_parameters_too():
    reference, wanted = Reference(), []
    arrived = torch.zeros_like(reference.x)
    count = 0
    for step in range(STEPS):
        for rank in range(3):
            reference.accelerate(rank)
        sent = reference.x + reference.v
        weight = 2 if step % 2 else 1
        # All have drawn alike, so all that was sent in the step before has arrived.
        reference.x = (weight * sent + arrived) / (weight + count)
        arrived, count = torch.zeros_like(sent), 0
        if step % 2 == 0:
            arrived, count = sent.roll(1, dims=0), 1
        wanted.append(reference.ahead)
    make = lambda: Around(GossipSettings(rule="push", as_published=True))  # noqa: E731
    found, whole = follow(make, delays=None)
    assert all(map(close, found, wanted))
    assert close(whole[0], ((reference.x + arrived) / (1 + count)).mean(dim=0))


def follow_center(num_workers, period):
    """Return where ranks look ahead to after each step, and the center at last."""
    reference, wanted = Reference(num_workers), []
    center = reference.x[0].clone()
    for step in range(STEPS):
        for rank in range(num_workers):
            reference.accelerate(rank)
            if (step + 1) % period == 0:
                move = 0.75 / num_workers * (reference.x[rank] - center)
                center += move
                reference.x[rank] -= move
            reference.x[rank] += reference.v[rank]
        wanted.append(reference.ahead)
    return wanted, center


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize(("servers", "split"), [(0, None), (1, None), (1, [1, 1])])
def test_elastic_averaging_ties_parameters_to_the_center(period, servers, split):
    published, ours = (
        ElasticSettings(
            beta=0.75, period=period, servers=servers, early=False, as_published=as_published
        )
        for as_published in (True, False)
    )
    wanted, center = follow_center(3 - servers, period)
    found, whole = follow(lambda: Elastic(published), split=split)
    assert all(map(close, found, wanted))
    assert close(torch.cat(whole), center)
    assert not close(follow(lambda: Elastic(ours), split=split)[0][-1], wanted[-1])


@pytest.mark.parametrize(
    "make",
    [
        pulls(True),
        lambda: Around(GossipSettings(rule="push", as_published=True)),
        lambda: Elastic(ElasticSettings(as_published=True, servers=1)),
    ],
)
def test_a_run_that_is_resumed_knows_how_far_it_looks_ahead(make):
    options = {"lr": LR, "optimizer": nesterov(), "split": [1, 1]}
    through, _ = play(make, STARTS, SLOPES, **options)
    first, rest = ([of_rank[part] for of_rank in SLOPES] for part in (slice(4), slice(4, STEPS)))
    half, before = play(make, STARTS, first, keeps_state=True, **options)
    exported = [one.tolist() for one in before[0].last[0]]
    run = {f"x{at}": part for at, part in enumerate(before[0].last[0])}
    saved = [Saved(one.whole.state(), run) for one in before]
    states = [one.last_state for one in before]
    own = [values or STARTS[0] for values in half[-1]]
    options |= {"saved": saved, "states": states, "first": 4}
    after, _ = play(make, own, rest, **options)
    assert half + after == through
    _, ended = play(make, own, [[]] * 3, **options)
    assert [one.tolist() for one in ended[0].last[0]] == exported


EQUAL = [[[-1.0 - rank] * 4] * 12 for rank in range(3)]


def differences(make, seed):
    """Return how many ranks have different numbers, though all are treated alike."""
    draw = random.Random(seed)
    rounds, strategies = play(
        make,
        [[0.0] * 4] * 3,
        EQUAL,
        split=[1, 3],  # so that the second takes longer on the wire
        delays=[draw.uniform(0, 4 * LATENCY_S) for _ in range(3)],
        round_s=draw.uniform(LATENCY_S, 4 * LATENCY_S),
        rate=draw.choice([1e9, 4e3]),
    )
    whole = torch.cat(strategies[0].last[0]).tolist()
    return sum(one is not None and len({*one}) > 1 for one in [*rounds[-1], whole])


@pytest.mark.parametrize(
    "chosen",
    [
        GossipSettings(as_published=True),
        GossipSettings(as_published=True, rule="push"),
        ElasticSettings(as_published=True, servers=1),
    ],
)
def test_all_parameters_are_exchanged_in_one_version(chosen):
    kind = Gossip if isinstance(chosen, GossipSettings) else Elastic
    found = [differences(lambda: kind(chosen, seed), seed) for seed in range(20)]  # noqa: B023
    assert found == [0] * 20


@pytest.mark.parametrize("chosen", [GossipSettings(early=False), GossipSettings(rule="push")])
def test_by_default_each_bucket_is_exchanged_by_itself(chosen):
    """So the test above can fail."""
    assert any(differences(lambda: Gossip(chosen, seed), seed) for seed in range(20))  # noqa: B023


def test_one_vector_is_planned_and_nothing_is_overlapped():
    sizes = [Size("a", 0, 10), Size("b", 1, 10)]
    for strategy in (
        Gossip(GossipSettings(as_published=True)),
        Elastic(ElasticSettings(as_published=True)),
    ):
        plan = strategy.plan(World(((0, 1),)), sizes, 2)
        assert plan.overlap is False
        assert isinstance(plan.families[0].buckets, InOne)
        with pytest.raises(ConfigError, match="one vector has one type"):
            strategy.plan(World(((0, 1),)), [*sizes, Size("c", 2, 10, 2, "bfloat16")], 2)


def adamw(lr):
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr)


class SignMomentum(torch.optim.SGD):
    """It has all of SGD's settings, and another rule."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["momentum_buffer"] = parameter.grad.clone()
                    parameter -= group["lr"] * parameter.grad.sign()


def sign_momentum(lr):
    return lambda parameters: SignMomentum(parameters, lr=lr)


@pytest.mark.parametrize("optimizer", [adamw, sign_momentum])
def test_other_optimizers_are_refused(optimizer):
    for make in (pulls(True), lambda: Elastic(ElasticSettings(as_published=True))):
        with pytest.raises(UsageError, match=r"mixes the parameters of torch\.optim\.SGD"):
            follow(make, optimizer=optimizer)


def two_rates(lr):
    def make(parameters):
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 2 * lr}]
        return torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True)

    return make


def test_groups_with_different_learning_rates_are_refused():
    with pytest.raises(UsageError, match="groups have different lr or momentum"):
        follow(pulls(True), optimizer=two_rates, split=[1, 1])


@pytest.mark.parametrize("name", ["gossip", "elastic"])
def test_a_job_with_another_optimizer_is_refused(name):
    sets = [f"strategy.name={name}", f"strategy.{name}.as_published=true"]
    assert refusal(SMALL, *sets, "optimizer.name=adamw", ranks=4) == (
        f'strategy.{name}.as_published: got true with optimizer.name = "adamw", but the published'
        " rule mixes the parameters of SGD, with or without momentum."
        ' Use optimizer.name = "sgd", or as_published = false.'
    )
    assert "says itself when ranks exchange" in refusal(SMALL, *sets, "strategy.overlap=true")
    assert "says itself where buckets end" in refusal(SMALL, *sets, "strategy.bucket_bytes=4096")
    name = {"strategy__name": name, f"strategy__{name}__as_published": "true"}
    assert small(**name).resolved(4).strategy.own.as_published


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            {"strategy__gossip__early": "true"},
            "strategy.gossip.early: got true with as_published = true, but Jin et al. fetch when"
            ' they mix. Use early = "auto", or as_published = false.',
        ),
        (
            {"strategy__gossip__push_sum": "true", "strategy__gossip__rule": "push"},
            "strategy.gossip.push_sum: got true with as_published = true, but Jin et al. push no"
            " weights. Use push_sum = false, or as_published = false.",
        ),
        (
            {"strategy__gossip__partners": "ring"},
            'strategy.gossip.partners: got "ring" with as_published = true, but Jin et al. draw'
            ' from all ranks. Use partners = "uniform", or as_published = false.',
        ),
        (
            {"strategy__elastic__early": "true"},
            "strategy.elastic.early: got true with as_published = true, but Jin et al. ask when a"
            ' gradient is there. Use early = "auto", or as_published = false.',
        ),
        (
            {"strategy__elastic__synchronous": "true"},
            "strategy.elastic.synchronous: got true with as_published = true, but Jin et al. let"
            " ranks come one by one. Use synchronous = false, or as_published = false.",
        ),
    ],
)
def test_what_is_not_published_cannot_be_set_beside_it(sets, line):
    name = next(iter(sets)).split("__")[1]
    chosen = {"strategy__name": name, f"strategy__{name}__as_published": "true"} | sets
    sets = [f"{key.replace('__', '.')}={value}" for key, value in chosen.items()]
    assert refusal(SMALL, *sets, ranks=4) == line
