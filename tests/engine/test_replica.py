"""An ordinary loop keeps its ordinary meaning: each case against plain PyTorch, bit for bit.

The comm lane is slowed down on purpose, so that a use of parameters that does not wait reads old
values and the comparison fails.
"""

from __future__ import annotations

import copy
import itertools
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import syncline
import syncline.session
from syncline.engine.parameters import Watched
from syncline.errors import UsageError
from syncline.strategies import Synchronous

pytestmark = pytest.mark.usefixtures("alone")


class SlowSynchronous(Synchronous):
    """Takes its time before parameters are ready, so that whoever does not wait is found out."""

    def before_use(self, bucket, update):
        time.sleep(0.01)
        super().before_use(bucket, update)


@pytest.fixture(autouse=True)
def _world_of_one(alone):
    syncline.init()


class Net(nn.Module):
    """Layers registered in another order than they are used."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 4)
        self.first = nn.Linear(8, 16)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Tied(nn.Module):
    """A weight used outside its module, twice in one forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.out.weight = self.embed.weight

    def forward(self, x):
        hidden = functional.linear(x, self.embed.weight)
        return self.out(self.embed(hidden))


class Twice(nn.Module):
    """A module used twice in one forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


class Attention(nn.Module):
    """Uses out_proj.weight without calling out_proj."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(1)
        return self.attention(x, x, x, need_weights=False)[0].squeeze(1)


class Parametrized(nn.Module):
    """Weight norm: the parameter is read while another tensor is computed from it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.cell(x.unsqueeze(1))[0].squeeze(1)


class Encoder(nn.Module):
    """Its fast path in eval mode reads all parameters in C++."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1)).squeeze(1)


class Checkpointed(nn.Module):
    """Activation checkpointing, of either kind, of a module that is used twice."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layer = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, x):
        x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=self.use_reentrant)
        x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return self.other(x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 8)
        )

    def forward(self, x):
        return self.body(x.repeat(1, 8).view(-1, 1, 8, 8))


MODELS = {
    "net": Net,
    "tied": Tied,
    "twice": Twice,
    "attention": Attention,
    "parametrized": Parametrized,
    "recurrent": Recurrent,
    "encoder": Encoder,
    "reentrant": lambda: Checkpointed(True),
    "checkpointed": lambda: Checkpointed(False),
    "normed": Normed,
}


def mixed_groups(parameters):
    """Give parameters that lie side by side groups with different kernels and rates."""
    flags = itertools.cycle([{"fused": True}, {"foreach": True}, {"foreach": False}])
    groups = [
        {"params": [parameter], "lr": 0.01 * (1 + number), **next(flags)}
        for number, parameter in enumerate(parameters)
    ]
    return torch.optim.AdamW(groups)


OPTIMIZERS = {
    "mixed groups": mixed_groups,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def make(model="net", optimizer="sgd"):
    torch.manual_seed(0)
    network = MODELS[model]()
    return network, OPTIMIZERS[optimizer](network.parameters())


def inputs(step):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))


def spread(model, optimizer, **settings):
    settings = {"strategy": SlowSynchronous(), "overlap": True, "bucket_bytes": 256} | settings
    return syncline.distribute(model, optimizer, **settings)


def plain_step(model, optimizer, step):
    model(inputs(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def against_plain(loop, model="net", optimizer="sgd", **settings):
    """Run a loop on a plain model and on a distributed copy; both must end with the same bits."""
    plain = make(model, optimizer)
    loop(*plain)
    ours = make(model, optimizer)
    spread(*ours, **settings)
    loop(*ours)
    assert_same(state(plain[0]), state(ours[0]))


def three_steps(model, optimizer):
    for step in range(3):
        plain_step(model, optimizer, step)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_way_to_use_a_parameter_waits_for_it(model):
    against_plain(three_steps, model)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_optimizer_takes_its_own_steps(optimizer):
    against_plain(three_steps, "net", optimizer)


@pytest.mark.parametrize("overlap", [True, False])
def test_inline_and_overlapped_give_the_same_bits(overlap):
    against_plain(three_steps, "normed", overlap=overlap)


def test_parameter_groups_and_schedulers_keep_their_meaning():
    def loop(model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.05
        optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.2})
        spread_if_ours(model, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            plain_step(model, optimizer, step)
            scheduler.step()  # right behind the step: the lane must not see the new rate

    def spread_if_ours(model, optimizer):
        if model is ours:
            spread(model, optimizer)

    results = []
    ours = None
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = Net()
        ours = model if is_ours else None
        loop(model, torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9))
        results.append(state(model))
    assert_same(*results)


def test_a_closure_runs_once_and_its_loss_is_returned():
    calls = []

    def loop(model, optimizer):
        for step in range(3):

            def closure(step=step):
                calls.append(step)
                optimizer.zero_grad()
                loss = model(inputs(step)).square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0

    against_plain(loop)
    assert calls == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_several_backward_passes_add_up(overlap):
    def loop(model, optimizer):
        for step in range(3):
            for part in range(3):
                model(inputs(3 * step + part)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    against_plain(loop, overlap=overlap)


def test_two_forwards_before_a_backward():
    def loop(model, optimizer):
        for step in range(3):
            (model(inputs(step)).square().mean() + model(inputs(step + 9)).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    against_plain(loop)


def test_more_backward_passes_than_any_step_before_are_refused_not_lost():
    model, optimizer = make()
    spread(model, optimizer)
    plain_step(model, optimizer, 0)
    model(inputs(1)).square().mean().backward()
    with pytest.raises(UsageError, match=r"gradient number 2 of this step.*accumulate=K"):
        model(inputs(2)).square().mean().backward()


def test_the_number_of_backward_passes_can_be_said_beforehand():
    def loop(model, optimizer):
        for step, passes in enumerate([1, 2, 1, 2]):
            for part in range(passes):
                model(inputs(2 * step + part)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    against_plain(loop, accumulate=2)


@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20])
@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
def test_a_parameter_without_a_gradient_is_not_touched(optimizer_name, bucket_bytes):
    """Weight decay, momentum and step counts leave it alone, as with grad = None.

    In a large bucket parameters are updated together until one is left out: then they part, and
    each takes its state along.
    """

    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            if bucket_bytes == 256:
                self.never = nn.Linear(8, 8)
            self.use_b = True

        def forward(self, x):
            return self.b(self.a(x)) if self.use_b else self.a(x)

    def loop(model, optimizer):
        for step, model.use_b in enumerate([True, True, False, True, False]):
            plain_step(model, optimizer, step)

    results = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = Switch()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        if is_ours:
            spread(model, optimizer, bucket_bytes=bucket_bytes)
        loop(model, optimizer)
        results.append(state(model))
    assert_same(*results)


def test_frozen_parameters_stay_and_thawing_them_later_is_refused():
    model, optimizer = make()
    model.first.weight.requires_grad_(False)
    before = model.first.weight.clone()
    spread(model, optimizer)
    plain_step(model, optimizer, 0)
    assert torch.equal(model.first.weight, before)
    model.first.weight.requires_grad_(True)
    model(inputs(1)).square().mean().backward()
    with pytest.raises(UsageError, match="frozen at distribute"):
        optimizer.step()


def test_evaluation_between_steps_sees_new_parameters():
    def loop(model, optimizer):
        seen = []
        for step in range(3):
            plain_step(model, optimizer, step)
            model.eval()
            with torch.no_grad():
                seen.append(model(inputs(50)))
            model.train()
        history.append(torch.stack(seen))

    history = []
    against_plain(loop, "encoder")
    assert torch.equal(*history)


def test_autocast_gives_the_same_bits():
    def loop(model, optimizer):
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(inputs(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    against_plain(loop)


def test_channels_last_parameters_keep_their_strides():
    def loop(model, optimizer):
        for step in range(3):
            x = inputs(step).repeat(1, 16).view(6, 2, 8, 8).to(memory_format=torch.channels_last)
            model.body(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    results = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = Normed()
        # With one channel both formats would be the same.
        model.body[0] = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        assert not model.body[0].weight.is_contiguous()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        strides = [p.stride() for p in model.parameters()]
        if is_ours:
            spread(model, optimizer)
        loop(model, optimizer)
        assert [p.stride() for p in model.parameters()] == strides
        results.append(state(model))
    assert_same(*results)


# What people do with parameters right after a step.


def after_steps(model="net"):
    network, optimizer = make(model)
    three_steps(network, optimizer)
    expected = state(network)
    network, optimizer = make(model)
    spread(network, optimizer)
    three_steps(network, optimizer)
    return network, expected


def test_state_dict_waits_and_looks_like_the_plain_model_s():
    network, expected = after_steps()
    assert_same(network.state_dict(), expected)
    assert all(type(p) is Watched for p in network.parameters())


def test_data_numpy_and_detach_wait():
    network, expected = after_steps()
    assert torch.equal(network.first.weight.data, expected["first.weight"])
    network, expected = after_steps()
    assert (network.last.weight.detach().numpy() == expected["last.weight"].numpy()).all()


def test_deepcopy_waits_and_gives_plain_parameters():
    network, expected = after_steps()
    copied = copy.deepcopy(network)
    assert_same(state(copied), expected)
    assert all(type(p) is nn.Parameter for p in copied.parameters())


def test_functional_call_waits():
    network, expected = after_steps()
    plain = Net()
    plain.load_state_dict(expected)
    given = {"first.bias": torch.zeros(16)}
    ours = torch.func.functional_call(network, given, (inputs(9),))
    assert torch.equal(ours, torch.func.functional_call(plain, given, (inputs(9),)))


def test_a_compiled_model_waits():
    plain, plain_optimizer = make()
    three_steps(plain, plain_optimizer)
    network, optimizer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(network, backend="eager")
        spread(compiled, optimizer)
        three_steps(compiled, optimizer)
        assert_same(state(plain), state(network))


def test_a_graph_kept_over_a_step_raises_as_in_plain_pytorch():
    network, optimizer = make()
    spread(network, optimizer)
    plain_step(network, optimizer, 0)
    old = network(inputs(1))
    plain_step(network, optimizer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.square().mean().backward()


def test_loading_a_state_dict_between_steps_is_allowed():
    def loop(model, optimizer):
        start = state(model)
        plain_step(model, optimizer, 0)
        model.load_state_dict(start)
        plain_step(model, optimizer, 1)

    against_plain(loop)


# What cannot be right is refused, with a reason.


def refused(match, action, model="net"):
    network, optimizer = make(model)
    spread(network, optimizer)
    plain_step(network, optimizer, 0)
    with pytest.raises(UsageError, match=match):
        action(network, optimizer)


def test_changing_parameters_in_place_is_refused():
    def action(network, optimizer):
        with torch.no_grad():
            network.first.weight.mul_(2)
        plain_step(network, optimizer, 1)

    refused("first.weight was changed in place", action)


def test_private_parameters_may_be_changed_in_place():
    def loop(model, optimizer):
        plain_step(model, optimizer, 0)
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        plain_step(model, optimizer, 1)

    against_plain(loop, private_parameters=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_torch_s_own_clipping_is_refused_in_the_first_step_too(overlap):
    for steps_before in (0, 1):
        network, optimizer = make()
        spread(network, optimizer, overlap=overlap)
        for step in range(steps_before):
            plain_step(network, optimizer, step)
        network(inputs(1)).square().mean().backward()
        with pytest.raises(UsageError, match=r"syncline.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)


def test_grad_scaler_is_refused_with_a_reason():
    network, optimizer = make()
    spread(network, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(network(inputs(1)).square().mean()).backward()
    with pytest.raises(UsageError, match="GradScaler"):
        scaler.step(optimizer)


def test_setting_grad_between_backward_and_step_is_refused():
    def action(network, optimizer):
        network(inputs(1)).square().mean().backward()
        network.first.weight.grad = None

    refused("discard_gradients", action)


def test_create_graph_is_refused():
    def action(network, optimizer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network(inputs(1)).square().mean().backward(create_graph=True)

    refused("create_graph", action)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spread(model, optimizer)
    with pytest.raises(UsageError, match="sparse"):
        model(torch.tensor([1, 2])).sum().backward()


def test_embeddings_that_rewrite_themselves_are_refused():
    model = nn.Embedding(10, 4, max_norm=1.0)
    with pytest.raises(UsageError, match="max_norm"):
        spread(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_with_parameters_of_others_is_refused():
    model, other = Net(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(UsageError, match="the model does not have"):
        spread(model, optimizer)


def test_parameters_added_to_the_optimizer_later_are_refused():
    def action(network, optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        plain_step(network, optimizer, 1)

    refused("new parameters after distribute", action)


def test_lbfgs_is_refused():
    model = Net()
    with pytest.raises(UsageError, match="LBFGS"):
        spread(model, torch.optim.LBFGS(model.parameters()))


def test_init_twice_with_other_settings_and_distribute_without_init_are_refused():
    with pytest.raises(UsageError, match="called twice, with other settings"):
        syncline.init(meet_s=5.0)
    syncline.session.close_session()
    with pytest.raises(UsageError, match="was not called"):
        make_and_spread()


def make_and_spread():
    spread(*make())


# Clipping, dropping, state.


class Complex(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 300, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(x.to(torch.complex64) @ self.weight)


def test_clipping_complex_gradients_counts_both_parts():
    torch.manual_seed(0)
    model, plain = Complex(), Complex()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spread(model, optimizer)
    for one in (model, plain):
        one(inputs(0)).square().mean().backward()
    ours = syncline.clip_grad_norm_(model, 0.05)
    torch.testing.assert_close(ours, nn.utils.clip_grad_norm_(plain.parameters(), 0.05))


@pytest.mark.parametrize("max_norm", [0.05, 1e9])
def test_clipping_leaves_gradients_of_float64_as_they_are(max_norm):
    found = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not is_plain:
            spread(model, optimizer)
        model(inputs(0).double()).square().mean().backward()
        if is_plain:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        else:
            syncline.clip_grad_norm_(model, max_norm)
        optimizer.step()
        found.append(state(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_clipping_scales_to_the_norm_that_it_returns():
    model, optimizer = make()
    spread(model, optimizer)
    plain, plain_optimizer = make()
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        plain(inputs(step)).square().mean().backward()
        ours = syncline.clip_grad_norm_(model, 0.05)
        torchs = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        torch.testing.assert_close(ours, torchs)
        assert ours > 0.05, "the test should clip"
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
    for name, value in state(plain).items():
        torch.testing.assert_close(state(model)[name], value)


@pytest.mark.parametrize("overlap", [True, False])
def test_clipping_by_value_is_torch_s_own(overlap):
    def loop(model, optimizer):
        for step in range(3):
            model(inputs(step)).square().mean().backward()
            if model is ours[0]:
                syncline.clip_grad_value_(model, 0.01)
            else:
                assert max(p.grad.abs().max() for p in model.parameters()) > 0.01
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()

    plain, ours = make(), make()
    loop(*plain)
    spread(*ours, overlap=overlap)
    ours[0](inputs(0)).square().mean().backward()
    with pytest.raises(UsageError, match=r"syncline.clip_grad_value_"):
        nn.utils.clip_grad_value_(ours[0].parameters(), 0.01)
    ours[1].zero_grad()
    loop(*ours)
    assert_same(state(plain[0]), state(ours[0]))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_backward_after_clipping_is_refused(overlap):
    model, optimizer = make()
    spread(model, optimizer, overlap=overlap)
    plain_step(model, optimizer, 0)
    model(inputs(1)).square().mean().backward()
    syncline.clip_grad_norm_(model, 1.0)

    def go_on():
        model(inputs(2)).square().mean().backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"Clip last|another gradient"):
        go_on()


@pytest.mark.parametrize("overlap", [True, False])
def test_discarded_gradients_leave_no_trace(overlap):
    def loop(model, optimizer):
        plain_step(model, optimizer, 0)
        model(inputs(77)).square().mean().backward()
        if type(model.first.weight) is nn.Parameter:
            optimizer.zero_grad()
        else:
            syncline.discard_gradients(model)
        plain_step(model, optimizer, 1)

    against_plain(loop, overlap=overlap)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor"])
def test_optimizer_state_moves_between_plain_and_distributed(optimizer):
    plain = make("normed", optimizer)
    three_steps(*plain)
    ours = make("normed", optimizer)
    spread(*ours)
    three_steps(*ours)
    plain_state = plain[1].state_dict()["state"]
    our_state = ours[1].state_dict()["state"]
    assert plain_state.keys() == our_state.keys()
    for number, values in plain_state.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(our_state[number][key]), torch.as_tensor(value))
    again = make("normed", optimizer)
    again[0].load_state_dict(state(ours[0]))
    again[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    spread(*again)
    for pair in (plain, again):
        three_steps(*pair)
    assert_same(state(plain[0]), state(again[0]))


def test_loading_optimizer_state_after_distribute_takes_effect():
    plain = make()
    three_steps(*plain)
    ours = make()
    spread(*ours)
    plain_step(*ours, 99)
    ours[0].load_state_dict(state(plain[0]))
    ours[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    for pair in (plain, ours):
        three_steps(*pair)
    assert_same(state(plain[0]), state(ours[0]))


def test_two_models_take_turns_on_one_lane():
    plain = make(), make("tied")
    ours = make(), make("tied")
    for one in ours:
        spread(*one)
    for step in range(3):
        for pair in (*plain, *ours):
            plain_step(*pair, step)
    for one, other in zip(plain, ours, strict=True):
        assert_same(state(one[0]), state(other[0]))


def test_detaching_gives_back_a_plain_model():
    model, optimizer = make()
    replica = spread(model, optimizer)
    plain_step(model, optimizer, 0)
    replica.detach()
    model(inputs(0)).sum().backward()
    assert model.first.weight.grad is not None


# Buckets.


def test_buckets_follow_the_order_of_use_not_of_registration():
    model, optimizer = make()
    replica = spread(model, optimizer, bucket_bytes=1)
    plain_step(model, optimizer, 0)
    names = [slot.name for bucket in replica.buckets for slot in bucket.slots]
    assert names == ["first.weight", "first.bias", "last.weight", "last.bias"]


def test_every_parameter_starts_on_its_boundary():
    model, optimizer = make("normed")
    replica = spread(model, optimizer, bucket_bytes=1 << 20)
    plain_step(model, optimizer, 0)
    replica.synchronize()
    (bucket,) = replica.buckets
    assert all(slot.offset * 4 % 128 == 0 for slot in bucket.slots)
    assert all(slot.parameter.data_ptr() % 64 == 0 for slot in bucket.slots)


def test_an_error_on_the_lane_reaches_the_loop():
    model, optimizer = make()
    replica = spread(model, optimizer)
    plain_step(model, optimizer, 0)

    def fail(bucket, update):
        raise RuntimeError("the wire is gone")

    replica.strategy.before_use = fail
    with pytest.raises(RuntimeError, match="the wire is gone"):
        three_steps(model, optimizer)


def shards_of_a_step(model, optimizer, replica, step):
    for shard in replica.my_shards:
        replica.begin_shard(shard)
        model(inputs(10 * step + shard)).square().mean().backward()


def test_every_shard_starts_from_the_buffers_that_were_loaded():
    model, optimizer = make("normed")
    replica = spread(model, optimizer, shards=2)
    shards_of_a_step(model, optimizer, replica, 0)
    optimizer.step()
    optimizer.zero_grad()
    loaded = {k: v + 100 if "running_mean" in k else v for k, v in state(model).items()}
    model.load_state_dict(loaded)
    shards_of_a_step(model, optimizer, replica, 1)
    optimizer.step()
    # Each shard keeps 0.9 of the mean that was loaded; one that started before it would keep 0.
    found = model.state_dict()["body.1.running_mean"]
    assert torch.allclose(found, 0.9 * loaded["body.1.running_mean"], atol=1.0)


def test_a_dropped_step_leaves_no_statistics_behind_whatever_the_shards():
    counts = []
    for shards in (1, 2, 3):
        syncline.session.close_session()
        syncline.init()
        model, optimizer = make("normed")
        replica = spread(model, optimizer, shards=shards)
        for step in range(3):
            shards_of_a_step(model, optimizer, replica, step)
            if step == 1:
                syncline.discard_gradients(model)
            else:
                optimizer.step()
                optimizer.zero_grad()
        counts.append(int(model.state_dict()["body.1.num_batches_tracked"]))
    assert counts == [2, 2, 2]


def test_a_learning_rate_that_changes_in_place_does_not_reach_a_step_under_way():
    def steps(model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.1)
        for step in range(3):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"].fill_(1e3)  # while the lane may still be updating
                group["lr"] = torch.tensor(0.1)
            optimizer.zero_grad()

    against_plain(steps, "net", "sgd")


def test_a_step_that_was_refused_is_refused_again():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 8, sparse=True)
            self.last = nn.Linear(8, 4)

        def forward(self, x):
            return self.last(self.embed(x))

    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.embed.sparse = False
    replica = spread(model, optimizer, overlap=False)
    model(torch.arange(9)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = state(model)
    model.embed.sparse = True
    model(torch.arange(9)).square().mean().backward()
    for _ in range(2):
        with pytest.raises(UsageError, match="sparse gradient"):
            optimizer.step()
    assert replica.step_number == 1
    assert_same(state(model), before)


# Models that cannot be right.


class Marked(nn.Parameter):
    """A parameter of a class of its own, such as a point on a manifold."""


def mark(model):
    model.first.weight = Marked(model.first.weight.data)


def tie_by_data(model):
    model.second = nn.Linear(8, 16)
    model.second.weight.data = model.first.weight.data


def keep_weight_as_buffer(model):
    model.register_buffer("kept", model.first.weight.data[2:])


def add_sparse_buffer(model):
    model.register_buffer("adjacency", torch.eye(3).to_sparse())


def add_lazy_layer(model):
    model.first = nn.LazyLinear(16)


def script_layer(model):
    model.first = torch.jit.script(model.first)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (mark, "parameter first.weight is a Marked, but ranks update strips of plain"),
        (tie_by_data, r"first.weight and second.weight share memory.*\(a.weight = b.weight\)"),
        (keep_weight_as_buffer, "first.weight and kept share memory"),
        (add_sparse_buffer, "buffer adjacency is sparse"),
        (add_lazy_layer, r"parameter first.weight of a lazy module.* before distribute\(\)"),
        (script_layer, "module first was made by torch.jit"),
    ],
)
def test_a_model_that_cannot_be_watched_is_refused(change, message):
    model = Net()
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=message):
        syncline.distribute(model, optimizer)


def test_parameters_that_lie_in_one_tensor_side_by_side_are_taken():
    both = torch.randn(8, 6)
    model = nn.ParameterList([nn.Parameter(both[:, :2]), nn.Parameter(both[:, 2:])])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.distribute(model, optimizer)
    (model[0].sum() + model[1].sum()).backward()
    optimizer.step()
    torch.testing.assert_close(torch.cat([*model], dim=1), both - 0.1)


@pytest.mark.parametrize("shards", [1, 3, 4, 7])
def test_norm_layers_in_eval_keep_their_statistics(shards):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 200), nn.BatchNorm1d(200))
    model[1].running_mean.normal_()
    model[1].eval()
    before = model[1].running_mean.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = syncline.distribute(model, optimizer, shards=shards)
    for step in range(3):
        for shard in range(shards):
            replica.begin_shard(shard)
            model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model[1].running_mean, before)
