"""How far an optimizer looks, found by trying; state that survives being cut and joined."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.comm.alone import Alone
from syncline.engine.lane import Lane
from syncline.engine.optimizer import Reach
from syncline.engine.optimizer_trial import counts_in_groups, find_reach, leaves_gradients
from syncline.engine.replica import Replica
from syncline.errors import UsageError
from syncline.strategies import Synchronous

P = [torch.nn.Parameter(torch.zeros(4, 4))]

REACHES = {
    "sgd": (lambda: torch.optim.SGD(P, lr=0.1, momentum=0.9, nesterov=True), Reach.ELEMENT),
    "sgd, fused": (lambda: torch.optim.SGD(P, lr=0.1, momentum=0.9, fused=True), Reach.PIECE),
    "adamw": (lambda: torch.optim.AdamW(P, lr=0.1), Reach.ELEMENT),
    "adamw, fused": (lambda: torch.optim.AdamW(P, lr=0.1, fused=True), Reach.PIECE),
    "adagrad": (lambda: torch.optim.Adagrad(P, lr=0.1), Reach.ELEMENT),
    "radam": (lambda: torch.optim.RAdam(P, lr=0.1), Reach.ELEMENT),
    "rprop": (lambda: torch.optim.Rprop(P, lr=0.1), Reach.ELEMENT),
    "rmsprop": (lambda: torch.optim.RMSprop(P, lr=0.1), Reach.ELEMENT),
    "adafactor": (lambda: torch.optim.Adafactor(P, lr=0.1), Reach.PARAMETER),
    "muon": (lambda: torch.optim.Muon(P, lr=0.1), Reach.PARAMETER),
}


@pytest.mark.parametrize(("fused", "ends_with_parameters"), [(True, True), (None, False)])
def test_runs_stop_at_the_ends_of_parameters_where_a_cut_changes_bits(fused, ends_with_parameters):
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    replica = Replica(model, optimizer, Synchronous(), Alone(0), None, Lane())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    (bucket,) = replica.buckets
    lengths = [len(run.pieces) for run in bucket.optimizer.runs]
    assert lengths == ([1] * 4 if ends_with_parameters else [4])


class Lars(torch.optim.SGD):
    """Scales a parameter's gradient by the norms of both: needs it whole."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * float(p.norm() / (p.grad.norm() + 1e-9)))


class GlobalNorm(torch.optim.SGD):
    """Divides by the norm of all gradients together: cannot be spread."""

    @torch.no_grad()
    def step(self, closure=None):
        everything = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in everything]).norm()
        for p in everything:
            p.sub_(p.grad / norm)


@pytest.mark.parametrize("name", sorted(REACHES))
def test_the_reach_of_an_optimizer_is_found_by_trying(name):
    make, expected = REACHES[name]
    assert find_reach(make()) is expected


def test_layerwise_optimizers_are_found_out():
    assert find_reach(Lars(P, lr=0.1)) is Reach.PARAMETER


class OfSome(torch.optim.SGD):
    """Scales by norms where weights decay, and centers the gradients of convolutions."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                scale = float(p.norm()) if group["weight_decay"] else 1.0
                mean = p.grad.mean() if p.dim() > 3 else 0.0
                p.sub_(p.grad - mean, alpha=group["lr"] * scale)


def test_a_warm_up_from_zero_does_not_hide_how_far_an_optimizer_looks():
    for rate in (0.0, torch.tensor(0.0)):
        assert find_reach(Lars(P, lr=rate)) is Reach.PARAMETER
        assert find_reach(torch.optim.Adafactor(P, lr=rate)) is Reach.PARAMETER
    optimizer = torch.optim.Adafactor(P, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 10)
    assert find_reach(optimizer) is Reach.PARAMETER
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_every_group_and_every_number_of_dimensions_is_tried():
    flat, matrix, kernel = (nn.Parameter(torch.zeros([3] * dims)) for dims in (1, 2, 4))
    groups = [{"params": [flat]}, {"params": [matrix], "weight_decay": 0.1}]
    assert find_reach(OfSome(groups, lr=0.1)) is Reach.PARAMETER
    groups[1]["weight_decay"] = 0.0
    assert find_reach(OfSome(groups, lr=0.1)) is Reach.ELEMENT
    groups[1]["params"] = [kernel]
    assert find_reach(OfSome(groups, lr=0.1)) is Reach.PARAMETER


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_16_bits_and_complex_numbers_are_updated_parameter_by_parameter(dtype):
    parameters = [nn.Parameter(torch.zeros(4, 4, dtype=dtype))]
    assert find_reach(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) is Reach.PIECE
    assert find_reach(torch.optim.SGD([*parameters, *P], lr=0.1)) is Reach.PIECE


@pytest.mark.parametrize("is_cast_late", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_small_parameters_of_any_type_have_plain_s_bits(dtype, is_cast_late):
    found = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 27))
        model = model if is_cast_late else model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if not is_plain:
            replica = Replica(model, optimizer, Synchronous(), Alone(0), None, Lane())
        model.to(dtype)
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 5, generator=generator).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not is_plain:
            replica.synchronize()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


class Counts(torch.optim.SGD):
    """Counts steps in its groups: one number from the start, one from the first step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["k"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["taken"] = group.get("taken", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / (group["k"] + group["taken"]))


class CountsGradients(torch.optim.SGD):
    """Remembers in its group what the gradients were."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = sum(float(p.grad.norm()) for p in group["params"])
        super().step()


def test_what_an_optimizer_counts_in_its_groups_goes_on():
    assert not any(counts_in_groups(make()) for make, _ in REACHES.values())
    found = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(5, 7)
        optimizer = Counts(model.parameters(), lr=0.1)
        if not is_plain:
            replica = Replica(model, optimizer, Synchronous(), Alone(0), None, Lane())
        for step in range(4):
            model(torch.full((2, 5), float(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not is_plain:
            replica.synchronize()
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        assert groups[0]["k"] == groups[0]["taken"] == 4
        found.append((groups, model.weight.tolist()))
    assert found[0] == found[1]


def test_groups_that_change_by_gradients_are_refused():
    with pytest.raises(UsageError, match="CountsGradients changes seen of its param_groups"):
        counts_in_groups(CountsGradients(P, lr=0.1))


def test_an_optimizer_that_looks_at_everything_is_refused():
    with pytest.raises(UsageError, match="GlobalNorm updates a parameter by looking at others"):
        find_reach(GlobalNorm(P, lr=0.1))


class Noisy(torch.optim.SGD):
    """Langevin dynamics: adds noise to each step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=0.01)


class OwnNoise(torch.optim.SGD):
    """Draws from a generator of its own."""

    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn(p.shape, generator=self.generator), alpha=0.01)


class RoundsAtRandom(torch.optim.SGD):
    """Draws for parameters of 16 bits only."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.dtype is torch.bfloat16:
                p.add_(torch.rand(p.shape), alpha=0.01)


def test_an_optimizer_that_draws_random_numbers_is_refused_as_such():
    before = torch.get_rng_state()
    for kind in (Noisy, OwnNoise):
        with pytest.raises(UsageError, match=f"{kind.__name__} draws random numbers"):
            find_reach(kind(P, lr=0.1))
    assert find_reach(RoundsAtRandom(P, lr=0.1)) is Reach.ELEMENT
    in_16_bits = [torch.nn.Parameter(p.detach().bfloat16()) for p in P]
    with pytest.raises(UsageError, match="RoundsAtRandom draws random numbers"):
        find_reach(RoundsAtRandom(in_16_bits, lr=0.1))
    assert torch.equal(torch.get_rng_state(), before), "the user's generator was drawn"


def test_trying_leaves_the_optimizer_alone():
    optimizer = torch.optim.AdamW(P, lr=0.1)
    before = [dict(group) for group in optimizer.param_groups]
    find_reach(optimizer)
    assert optimizer.state == {}
    assert [dict(group) for group in optimizer.param_groups] == before
    assert P[0].grad is None


class Decoupled(torch.optim.SGD):
    """Adds weight decay to the gradient itself, in place."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.add_(p, alpha=0.1)
        super().step()


def test_an_optimizer_that_writes_gradients_is_found_out():
    assert all(leaves_gradients(make()) for make, _ in REACHES.values())
    assert not leaves_gradients(Decoupled(P, lr=0.1))
