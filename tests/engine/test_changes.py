"""What changes a model behind the engine's back is refused at the next step, and named."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline
import syncline.session
from ranks import run_ranks
from syncline.checkpoint import digest_of
from syncline.errors import UsageError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x))).mean(dim=(2, 3)).repeat(1, 4))


def make(seed=0):
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def take_step(model, optimizer, step):
    x = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(step))
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def _world_of_one(alone):
    syncline.init()


def set_data(model):
    model.fc.bias.data = torch.zeros(16)


def transpose(model):
    model.fc.weight.data = model.fc.weight.data.t()


def replace_layer(model):
    model.fc = nn.Linear(16, 16)


def replace_parameter(model):
    model.fc.bias = nn.Parameter(torch.zeros(16))


def replace_statistic(model):
    model.norm.running_mean = torch.zeros(4)


def add_layer(model):
    model.more = nn.Linear(2, 2)


def add_norm(model):
    model.more = nn.BatchNorm1d(2, affine=False)


CHANGES = {
    "double": (nn.Module.double, r"conv\.weight was cast from torch\.float32 to torch\.float64"),
    "bfloat16": (nn.Module.bfloat16, r"conv\.weight was cast from .* to torch\.bfloat16"),
    "channels_last": (
        lambda model: model.to(memory_format=torch.channels_last),
        r"conv\.weight got another memory format",
    ),
    "set data": (set_data, r"fc\.bias got other memory"),
    "transpose": (transpose, r"fc\.weight got another memory format"),
    "replace a layer": (replace_layer, r"new parameter fc\.weight"),
    "replace a parameter": (replace_parameter, r"new parameter fc\.bias"),
    "replace a statistic": (replace_statistic, r"buffer norm\.running_mean got other memory"),
    "cast a norm's buffers": (lambda model: model.norm._apply(keep_parameters), r"norm\.running_"),
    "add a layer": (add_layer, r"new parameter more\.weight"),
    "add a norm layer": (add_norm, r"new running statistic more\.running_mean"),
}


def keep_parameters(tensor):
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("_world_of_one")
def test_a_change_after_the_first_step_is_refused_at_the_next(change, overlap):
    function, message = CHANGES[change]
    model, optimizer = make()
    syncline.distribute(model, optimizer, overlap=overlap)
    take_step(model, optimizer, 0)
    function(model)
    with pytest.raises(UsageError, match=message):
        take_step(model, optimizer, 1)


@pytest.mark.parametrize("change", ["double", "bfloat16", "channels_last"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("_world_of_one")
def test_a_cast_before_the_first_step_has_plain_s_bits(change, overlap):
    results = []
    for is_ours in (False, True):
        model, optimizer = make()
        if is_ours:
            syncline.distribute(model, optimizer, overlap=overlap)
        CHANGES[change][0](model)
        for step in range(3):
            take_step(model, optimizer, step)
        results.append(digest_of(model.state_dict()))
    assert results[0] == results[1]


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
def test_a_cast_before_the_first_step_gives_the_same_bits_on_two_ranks(overlap):
    """Running statistics are cast as well: they lie in memory of their own already."""

    def work():
        rank = syncline.init()
        model, optimizer = make(rank)
        replica = syncline.distribute(model, optimizer, shards=2, overlap=overlap)
        model.double()
        for step in range(3):
            for shard in replica.my_shards:
                replica.begin_shard(shard)
                seed = torch.Generator().manual_seed(10 * step + shard)
                x = torch.randn(6, 2, 8, 8, generator=seed, dtype=torch.float64)
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        assert state["norm.running_var"].dtype is torch.float64
        return digest_of(state)

    (expected,) = run_ranks(1, work)
    assert run_ranks(2, work) == [expected] * 2


@pytest.mark.usefixtures("_world_of_one")
def test_a_layer_without_parameters_may_be_replaced():
    results = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_ours:
            syncline.distribute(model, optimizer)
        for step in range(4):
            if step == 2:
                model[1] = nn.ReLU()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(digest_of(model.state_dict()))
    assert results[0] == results[1]


@pytest.mark.usefixtures("_world_of_one")
def test_norm_layers_of_different_types_are_refused():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4).double())
    with pytest.raises(UsageError, match="different types"):
        syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("_world_of_one")
def test_a_change_through_data_is_noticed(overlap):
    model, optimizer = make()
    syncline.distribute(model, optimizer, overlap=overlap)
    take_step(model, optimizer, 0)
    for parameter in model.parameters():
        parameter.data.mul_(0.98)
    with pytest.raises(UsageError, match="was changed in place"):
        take_step(model, optimizer, 1)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("_world_of_one")
def test_a_change_through_data_is_noticed_after_a_use_too(overlap):
    model, optimizer = make()
    syncline.distribute(model, optimizer, overlap=overlap)
    take_step(model, optimizer, 0)
    optimizer.zero_grad()
    model.state_dict()  # waits for all parameters
    for parameter in model.parameters():
        parameter.data.mul_(0.98)
    with pytest.raises(UsageError, match="was changed in place"):
        take_step(model, optimizer, 1)


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
def test_saving_common_parameters_that_were_changed_in_place_is_refused(overlap):
    """At the end of a script no step would refuse it."""

    def work():
        rank = syncline.init()
        model, optimizer = make()
        replica = syncline.distribute(model, optimizer, overlap=overlap)
        take_step(model, optimizer, rank)
        replica.synchronize()
        with torch.no_grad():
            model.fc.weight.mul_(0.5)
        with pytest.raises(UsageError, match=r"fc\.weight was changed in place"):
            model.state_dict()

    run_ranks(2, work)


# Other buffers.


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
def test_buffers_that_the_user_changes_between_steps_are_the_start_of_every_shard(overlap):
    def work():
        rank = syncline.init()
        model, optimizer = make(rank)
        replica = syncline.distribute(model, optimizer, shards=4, overlap=overlap)
        for step in range(4):
            for shard in replica.my_shards:
                replica.begin_shard(shard)
                seed = torch.Generator().manual_seed(10 * step + shard)
                model(torch.randn(6, 2, 8, 8, generator=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                replica.synchronize()
                model.norm.reset_running_stats()
        return digest_of(model.state_dict())

    (expected,) = run_ranks(1, work)
    assert run_ranks(2, work) == [expected] * 2
    assert run_ranks(4, work) == [expected] * 4


class Counting(nn.Module):
    """Puts a new tensor in a buffer's place in every forward, as `self.x = self.x + 1` does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("repeated", torch.zeros(1).expand(3))

    def forward(self, x):
        self.seen = self.seen + x.mean()
        return self.layer(x)


@pytest.mark.processes
def test_a_buffer_that_forward_replaces_takes_shard_0_s_values():
    def work():
        syncline.init()
        torch.manual_seed(0)
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = syncline.distribute(model, optimizer, shards=4)
        for _ in range(3):
            for shard in replica.my_shards:
                replica.begin_shard(shard)
                model(torch.full((2, 4), float(shard + 1))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()["seen"].tolist()

    for ranks in (1, 2):
        assert run_ranks(ranks, work) == [[3.0, 3.0]] * ranks


@pytest.mark.processes
def test_buffers_that_are_not_contiguous_are_exchanged():
    def work():
        rank = syncline.init()
        torch.manual_seed(rank)
        layer = nn.utils.parametrizations.orthogonal(nn.Linear(8, 6))
        model = nn.Sequential(layer, nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = syncline.distribute(model, optimizer, shards=4)
        for step in range(3):
            for shard in replica.my_shards:
                replica.begin_shard(shard)
                seed = torch.Generator().manual_seed(10 * step + shard)
                model(torch.randn(5, 8, generator=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest_of(model.state_dict())

    (expected,) = run_ranks(1, work)
    assert run_ranks(2, work) == [expected] * 2


# Distributing twice, and anew.


@pytest.mark.usefixtures("_world_of_one")
def test_a_model_or_an_optimizer_is_distributed_once():
    model, optimizer = make()
    replica = syncline.distribute(model, optimizer)
    with pytest.raises(UsageError, match=r"conv\.weight was given to distribute\(\) already"):
        syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="already"):
        syncline.distribute(model, optimizer)
    take_step(model, optimizer, 0)
    replica.detach()
    syncline.distribute(model, optimizer)
    take_step(model, optimizer, 1)


@pytest.mark.usefixtures("_world_of_one")
def test_a_loader_of_a_detached_model_is_refused():
    """It would take the gradients of the model that is distributed anew."""
    model, optimizer = make()
    replica = syncline.distribute(model, optimizer, shards=2)
    replica.detach()
    with pytest.raises(UsageError, match=r"Make it anew"):
        replica.begin_shard(0)


def freeze_all_but_the_last(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in model.fc.parameters():
        parameter.requires_grad_(True)


def fine_tune(settings=None, is_ours=True, cast=False):
    """Train the last layer, then all: groups are added and parameters thawed on the way."""
    model, _ = make(syncline.rank())
    freeze_all_but_the_last(model)
    optimizer = torch.optim.AdamW(model.fc.parameters(), lr=0.01)
    replica = syncline.distribute(model, optimizer, **settings) if is_ours else None

    def take(step):
        for shard in replica.my_shards if is_ours else (0,):
            if is_ours:
                replica.begin_shard(shard)
            seed = torch.Generator().manual_seed(10 * step + shard)
            x = torch.randn(6, 2, 8, 8, generator=seed).to(model.fc.weight.dtype)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        take(step)
    if is_ours:
        replica.detach()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    rest = [*model.conv.parameters(), *model.norm.parameters()]
    optimizer.add_param_group({"params": rest, "lr": 0.001})
    if cast:
        model.double()
    if is_ours:
        replica = syncline.distribute(model, optimizer, **settings)
    for step in range(3, 6):
        take(step)
    return digest_of(model.state_dict())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("_world_of_one")
def test_detaching_and_distributing_anew_has_plain_s_bits(overlap):
    found = [fine_tune({"overlap": overlap}, is_ours) for is_ours in (False, True)]
    assert found[0] == found[1]


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
def test_detaching_and_distributing_anew_gives_the_same_bits_on_any_number_of_ranks(overlap):
    def work():
        syncline.init()
        return fine_tune({"shards": 4, "overlap": overlap})

    (expected,) = run_ranks(1, work)
    assert run_ranks(2, work) == [expected] * 2
    assert run_ranks(4, work) == [expected] * 4


@pytest.mark.usefixtures("_world_of_one")
def test_thawing_and_adding_groups_without_detaching_say_how_to():
    model, _ = make()
    freeze_all_but_the_last(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    syncline.distribute(model, optimizer)
    take_step(model, optimizer, 0)
    model.conv.weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"replica\.detach\(\) on every rank"):
        take_step(model, optimizer, 1)


@pytest.mark.usefixtures("_world_of_one")
def test_as_many_other_parameters_in_the_optimizer_are_noticed():
    model, optimizer = make()
    syncline.distribute(model, optimizer)
    take_step(model, optimizer, 0)
    model(torch.ones(2, 2, 8, 8)).sum().backward()
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match="new parameters"):
        optimizer.step()


@pytest.mark.usefixtures("_world_of_one")
def test_parameters_that_move_between_groups_are_noticed():
    model, _ = make()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    syncline.distribute(model, optimizer)
    take_step(model, optimizer, 0)
    model(torch.ones(2, 2, 8, 8)).sum().backward()
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())  # the order of all parameters stays
    with pytest.raises(UsageError, match="moved between the optimizer's groups"):
        optimizer.step()


def samples():
    torch.manual_seed(7)
    return DataLoader(TensorDataset(torch.randn(24, 6), torch.randn(24, 3)), batch_size=2)


@pytest.mark.usefixtures("_world_of_one")
@pytest.mark.parametrize("is_same_loader", [True, False])
def test_a_loader_serves_the_model_that_is_distributed_anew(is_same_loader):
    model, loader = nn.Linear(6, 3), samples()
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = syncline.distribute(model, optimizer, shards=2)
        loader = loader if is_same_loader else samples()
        for x, y in syncline.shard(loader):
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert replica.step_number == 6
        replica.detach()


def train_with_two_optimizers(shards):
    torch.manual_seed(0)
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 9))
    model = nn.Sequential(first, nn.BatchNorm1d(9), nn.Linear(9, 3))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.Adam(others)]
    batches = samples()
    if shards:
        syncline.init()
        for optimizer in optimizers:
            syncline.distribute(model, optimizer, shards=shards, overlap=True, bucket_bytes=64)
        batches = syncline.shard(batches)
    for x, y in batches:
        (model(x) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    assert model[1].running_mean.any()
    return digest_of(model.state_dict())


def test_a_model_with_two_optimizers_has_plain_s_bits_and_one_hash():
    assert run_ranks(1, lambda: train_with_two_optimizers(1)) == [train_with_two_optimizers(0)]
    (alone,) = run_ranks(1, lambda: train_with_two_optimizers(4))
    assert run_ranks(2, lambda: train_with_two_optimizers(4)) == [alone] * 2
