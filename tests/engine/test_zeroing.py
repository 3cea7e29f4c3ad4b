"""`zero_grad()` and `.grad` after a step: as in plain PyTorch, or refused with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import syncline
from ranks import run_ranks
from syncline.checkpoint import digest_of
from syncline.errors import UsageError

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def _world_of_one(alone):
    syncline.init()


class Net(nn.Module):
    """A branch that is not always used, and statistics that forward writes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.aside = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self.uses_aside = True

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(self.aside(x) if self.uses_aside else x)


def inputs(step):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))


def backward(model, step):
    model(inputs(step)).square().mean().backward()


def make():
    torch.manual_seed(0)
    model = Net()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    return model, torch.optim.SGD(model.parameters(), **options)


def against_plain(loop, **settings):
    """Run a loop on a plain model and on a distributed copy; both must end with the same bits."""
    plain, ours = make(), make()
    loop(*plain)
    syncline.distribute(*ours, bucket_bytes=256, **settings)
    loop(*ours)
    expected = plain[0].state_dict()
    for name, value in ours[0].state_dict().items():
        assert torch.equal(value, expected[name]), name


either_way = pytest.mark.parametrize("overlap", [True, False])


# Ways to zero gradients.


def set_each_to_none(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = None


def in_parts(model, optimizer):
    for part in (model.first, model.norm, model.aside, model.last):
        part.zero_grad()


WAYS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model's zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "each": set_each_to_none,
    "parts": in_parts,
    "container": lambda model, optimizer: nn.ModuleList([model, nn.Linear(1, 1)]).zero_grad(),
    "twice": lambda model, optimizer: (optimizer.zero_grad(), model.zero_grad()),
}


@either_way
@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("moment", ["after step", "before forward", "before backward"])
def test_every_way_to_zero_gradients_is_plain_pytorch_s(way, moment, overlap):
    def loop(model, optimizer):
        for step in range(3):
            if moment == "before forward":
                WAYS[way](model, optimizer)
            loss = model(inputs(step)).square().mean()
            if moment == "before backward":
                WAYS[way](model, optimizer)
            loss.backward()
            optimizer.step()
            if moment == "after step":
                WAYS[way](model, optimizer)

    against_plain(loop, overlap=overlap)


@either_way
@pytest.mark.parametrize("to_none", [True, False])
def test_zeros_are_a_gradient_and_none_is_not(overlap, to_none):
    """With zeros in `.grad` weight decay and momentum move a parameter that is not used."""

    def loop(model, optimizer):
        for step in range(5):
            model.uses_aside = step < 2
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none or step == 3)

    against_plain(loop, overlap=overlap)


@either_way
def test_gradients_of_one_s_own_need_no_zero_grad(overlap):
    def loop(model, optimizer):
        for step in range(3):
            found = torch.autograd.grad(model(inputs(step)).square().mean(), model.parameters())
            if step == 0:
                backward(model, step)
            else:
                for parameter, gradient in zip(model.parameters(), found, strict=True):
                    parameter.grad = gradient
            optimizer.step()

    against_plain(loop, overlap=overlap)


# A forgotten zero_grad().


@either_way
def test_a_forgotten_zero_grad_is_refused(overlap):
    model, optimizer = make()
    syncline.distribute(model, optimizer, overlap=overlap)
    backward(model, 0)
    optimizer.step()
    backward(model, 1)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"without zero_grad\(\) since the last step"):
            optimizer.step()
    with pytest.raises(UsageError, match=r"without zero_grad\(\) since the last step"):
        syncline.clip_grad_norm_(model, 1.0)


@either_way
def test_zeroing_some_of_the_parameters_is_not_enough(overlap):
    model, optimizer = make()
    syncline.distribute(model, optimizer, overlap=overlap)
    backward(model, 0)
    optimizer.step()
    model.first.zero_grad()
    model.last.weight.grad = None
    backward(model, 1)
    with pytest.raises(UsageError, match=r"without zero_grad\(\)"):
        optimizer.step()


@either_way
def test_a_step_without_gradients_asks_for_no_zero_grad(overlap):
    """Some scripts call it first, so that a scheduler does not warn."""

    def loop(model, optimizer):
        optimizer.step()
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()

    against_plain(loop, overlap=overlap)


# Reading `.grad` after a step.


@either_way
def test_gradients_cannot_be_read_after_a_step(overlap):
    model, optimizer = make()
    syncline.distribute(model, optimizer, overlap=overlap)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        for use in (lambda: None, lambda: model(inputs(9)), lambda: model.state_dict()):
            use()
            with pytest.raises(UsageError, match="was read after step"):
                _ = model.first.weight.grad
            with pytest.raises(UsageError, match=r"syncline.clip_grad_norm_"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert model(inputs(9)).isfinite().all()
        assert all(parameter.grad is None for parameter in model.parameters())


@either_way
def test_what_torch_itself_does_after_a_step_works(overlap):
    model, optimizer = make()
    syncline.distribute(model, optimizer, overlap=overlap)
    backward(model, 0)
    optimizer.step()
    model.to("cpu").float().requires_grad_(True).train()
    copied = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter and p.grad is None for p in copied.parameters())
    copied.zero_grad()  # a copy's gradients are its own
    with pytest.raises(UsageError, match="was read after step"):
        _ = model.first.weight.grad
    assert sum(p.numel() for p in model.parameters()) > 0
    nn.utils.parameters_to_vector(model.parameters())


# Gradients that zero_grad() drops.


@either_way
@pytest.mark.parametrize("way", ["optimizer", "model", "zeros", "container"])
def test_dropped_gradients_leave_what_they_leave_in_plain_pytorch(way, overlap):
    """The statistics that forward wrote stay; the gradients go, in the first step and later."""

    def loop(model, optimizer):
        for step in range(4):
            if step != 2:
                backward(model, 50 + step)
                WAYS[way](model, optimizer)
            backward(model, step)
            if step == 3:
                WAYS[way](model, optimizer)
                continue
            optimizer.step()
            WAYS[way](model, optimizer)

    against_plain(loop, overlap=overlap)


@either_way
def test_gradients_that_were_clipped_can_be_dropped(overlap):
    def loop(model, optimizer):
        for step in range(3):
            backward(model, step)
            if step == 1:
                if model is ours:
                    syncline.clip_grad_norm_(model, 1.0)
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()

    plain, (ours, optimizer) = make(), make()
    loop(*plain)
    syncline.distribute(ours, optimizer, overlap=overlap, bucket_bytes=256)
    loop(ours, optimizer)
    for name, value in plain[0].state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name


def test_setting_one_gradient_to_none_before_the_step_stays_refused():
    for overlap in (True, False):
        model, optimizer = make()
        syncline.distribute(model, optimizer, overlap=overlap)
        backward(model, 0)
        with pytest.raises(UsageError, match="was set between"):
            model.first.weight.grad = None
        with pytest.raises(UsageError, match="was set between"):
            model.first.zero_grad()


def test_dropping_one_shard_of_several_is_refused_where_it_is_in_a_sum():
    model, optimizer = make()
    replica = syncline.distribute(model, optimizer, overlap=True, shards=2)
    for step in range(2):
        for shard in (0, 1):
            replica.begin_shard(shard)
            backward(model, 10 * step + shard)
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(UsageError, match="2 shards a step"):
        optimizer.zero_grad()


def test_inline_one_shard_of_several_can_be_dropped():
    plain, plain_optimizer = make()
    model, optimizer = make()
    replica = syncline.distribute(model, optimizer, overlap=False, shards=2)
    for step in range(3):
        for shard in (0, 1):
            replica.begin_shard(shard)
            model.eval()
            backward(model, 10 * step + shard)
            if shard == 0 and step > 0:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        for shard in (0, 1) if step == 0 else (1,):
            plain.eval()
            (plain(inputs(10 * step + shard)).square().mean() / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


@pytest.mark.processes
@either_way
def test_ranks_drop_gradients_together(overlap):
    def work():
        rank = syncline.init()
        model, optimizer = make()
        syncline.distribute(model, optimizer, overlap=overlap, bucket_bytes=256)
        for step in range(6):
            backward(model, 10 * step + rank)
            if step % 2:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        return digest_of({k: v for k, v in model.state_dict().items() if "norm" not in k})

    syncline.session.close_session()
    first, second = run_ranks(2, work)
    assert first == second


# After all, other models.


def test_models_that_are_not_distributed_are_left_alone():
    syncline.distribute(*make())
    model, optimizer = make()
    backward(model, 0)
    first = model.first.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.first.weight.grad, first)
    optimizer.zero_grad(set_to_none=False)
    assert not model.first.weight.grad.any()
    model.zero_grad()
    assert model.first.weight.grad is None


def test_a_detached_model_is_plain_again():
    model, optimizer = make()
    replica = syncline.distribute(model, optimizer)
    backward(model, 0)
    optimizer.step()
    replica.detach()
    backward(model, 1)
    assert model.first.weight.grad is not None
    optimizer.zero_grad()
    assert model.first.weight.grad is None


@either_way
@pytest.mark.parametrize("fused", [True, False])
def test_grad_scaler_is_refused_before_the_first_step(overlap, fused):
    model, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    before = copy.deepcopy(model.state_dict())
    syncline.distribute(model, optimizer, overlap=overlap)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(inputs(0)).square().mean()).backward()
    with pytest.raises(UsageError, match="GradScaler"):
        scaler.step(optimizer)
    assert torch.equal(model.state_dict()["first.weight"], before["first.weight"])


def test_a_grad_scaler_that_is_switched_off_works():
    def loop(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for step in range(3):
            scaler.scale(model(inputs(step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    against_plain(loop)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_after_a_step_do_not_begin_the_next(overlap):
    """A GAN's generator leaves some in the discriminator."""
    syncline.init()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.distribute(model, optimizer, shards=2, overlap=overlap)
    steps = syncline.shards(DataLoader(torch.ones(16, 4), batch_size=2))
    for number, step in enumerate(steps):
        if number:
            next(iter(step))
            model.load_state_dict(model.state_dict())  # before the step's first gradient
            assert steps.state_dict()["step"] == number
            optimizer.zero_grad()
        for x in step:
            model(x).sum().backward()
        optimizer.step()
        model(torch.ones(2, 4)).sum().backward()
