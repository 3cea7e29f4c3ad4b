"""Split layers in a user's own loop: what keeps its meaning, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import syncline
from ranks import run_ranks
from syncline.errors import CommError, ConfigError, UsageError
from syncline.linear_layers import find_linear_layers
from syncline.strategies import Hybrid, HybridSettings
from whole_batch import distance

pytestmark = pytest.mark.processes

IN, OUT, BATCH = 6, 5, 8


class Net(nn.Module):
    """A chain of two layers, used as it stands or by checkpointing, and one layer by itself."""

    def __init__(self, dropout=0.0, checkpoints=False):
        super().__init__()
        self.up, self.down = nn.Linear(IN, 9), nn.Linear(9, 7)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(7, OUT)
        self.checkpoints = checkpoints

    def inner(self, x):
        return self.down(self.drop(functional.gelu(self.up(x))))

    def forward(self, x):
        if self.checkpoints:
            return self.last(checkpoint(self.inner, x, use_reentrant=False))
        return self.last(self.inner(x))


def data(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, IN, generator=generator)
    return x, torch.randint(0, OUT, (BATCH,), generator=generator)


def train(model, optimizer, replica=None, steps=6, cast=False, scheduler=None):
    """Train on this rank's rows of each batch, or on all of them."""
    size = syncline.world_size() if replica is not None else 1
    rows = BATCH // size
    at = syncline.rank() * rows if replica is not None else 0
    for step in range(steps):
        x, y = (one[at : at + rows] for one in data(step))
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def whole_state(replica, model):
    with replica.whole():
        return {name: value.clone() for name, value in model.state_dict().items()}


def near(found, expected, error=1e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=error, atol=error, msg=name)


def start(model, groups=1, kind=torch.optim.SGD, **settings):
    optimizer = kind(model.parameters(), lr=0.05)
    replica = syncline.distribute(
        model, optimizer, Hybrid(HybridSettings(groups=groups)), **settings
    )
    return optimizer, replica


def make(**settings):
    torch.manual_seed(0)
    return Net(**settings)


def plain(kind=torch.optim.SGD, **settings):
    """Return the weights of one process on the whole batch."""
    model = make(**settings)
    train(model, kind(model.parameters(), lr=0.05))
    return model.state_dict()


def on_two(work):
    run_ranks(2, work)


def test_checkpointing_recomputes_split_layers():
    def work():
        syncline.init(threads=1)
        model = make(checkpoints=True)
        optimizer, replica = start(model)
        train(model, optimizer, replica)
        near(whole_state(replica, model), plain())

    on_two(work)


def test_autocast_computes_split_layers_in_its_type():
    def work():
        syncline.init(threads=1)
        expected = make()
        train(expected, torch.optim.SGD(expected.parameters(), lr=0.05), cast=True)
        model = make()
        optimizer, replica = start(model)
        train(model, optimizer, replica, cast=True)
        near(whole_state(replica, model), expected.state_dict(), 0.01)

    on_two(work)


def test_dropout_between_split_layers_is_the_same_in_every_run():
    def once():
        syncline.init(threads=1)
        model = make(dropout=0.5)
        optimizer, replica = start(model)
        torch.manual_seed(syncline.rank())
        train(model, optimizer, replica)
        found = whole_state(replica, model)
        return [value.double().sum().item() for value in found.values()]

    first, second = run_ranks(2, once), run_ranks(2, once)
    assert first == second
    assert first[0] == first[1]


def test_schedules_keep_their_meaning():
    def work():
        syncline.init(threads=1)
        expected = make()
        own = torch.optim.SGD(expected.parameters(), lr=0.05)
        train(expected, own, scheduler=torch.optim.lr_scheduler.ExponentialLR(own, 0.5))
        model = make()
        optimizer, replica = start(model)
        train(
            *(model, optimizer, replica),
            scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        )
        near(whole_state(replica, model), expected.state_dict())

    on_two(work)


def test_a_frozen_layer_and_a_tied_one_stay_whole():
    model = make()
    model.last.weight.requires_grad_(False)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert set(find_linear_layers(model, trained)) == {"up", "down"}
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    assert find_linear_layers(tied, dict(tied.named_parameters())) == {}


def test_layers_that_follow_each_other_are_found():
    found = find_linear_layers(make(), dict(make().named_parameters()))
    assert {name: one.follows for name, one in found.items()} == {
        "up": "",
        "down": "up",
        "last": "down",
    }


def test_a_layer_whose_output_goes_two_ways_begins_no_chain():
    class Two(Net):
        def forward(self, x):
            y = self.up(x)
            return self.last(self.down(y)) + y.sum()

    found = find_linear_layers(Two(), dict(Two().named_parameters()))
    assert found["down"].follows == ""
    assert found["last"].follows == "down"


def test_backward_inside_whole_is_refused():
    def work():
        syncline.init(threads=1)
        model = make()
        optimizer, replica = start(model)
        x, y = data(0)
        for _ in range(2):
            with pytest.raises(UsageError, match="backward"), replica.whole():
                functional.cross_entropy(model(x), y).backward()
            optimizer.zero_grad()
        with replica.whole():
            x.requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
            pickle.dumps(model)
        train(model, optimizer, replica)
        near(whole_state(replica, model), plain())

    on_two(work)


def normalized(x):
    return x / (1 + x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("name", ["up", "drop", "down"])
@pytest.mark.parametrize(
    "register", ["register_forward_pre_hook", "register_full_backward_hook", "both"]
)
def test_a_hook_that_would_see_some_features_ends_a_chain(name, register):
    model = make()
    module = model.get_submodule(name)
    if register != "register_full_backward_hook":
        module.register_forward_pre_hook(lambda module, inputs: (normalized(inputs[0]),))
    if register != "register_forward_pre_hook":
        module.register_full_backward_hook(lambda module, gives, takes: (normalized(gives[0]),))
    found = find_linear_layers(model, dict(model.named_parameters()))
    # What goes into the first layer of a chain is whole.
    is_seen = (name, register) != ("up", "register_forward_pre_hook")
    assert found["down"].follows == ("" if is_seen else "up")
    assert (found["last"].follows == "down") == (
        name != "down" or register == "register_forward_pre_hook"
    )


def test_a_chain_is_one_with_and_without_optional_arguments():
    class Optional(Net):
        def forward(self, x, scale=None, with_softmax=True):
            x = self.up(x)
            if scale is None:
                x = x.softmax(-1)
            x = self.last(self.down(x))
            return x if scale is None else x * scale

    found = find_linear_layers(Optional(), dict(Optional().named_parameters()))
    assert {name: one.follows for name, one in found.items()} == {
        "up": "",
        "down": "",
        "last": "down",
    }


def test_a_layer_whose_output_forward_keeps_begins_no_chain():
    class Keeps(Net):
        def forward(self, x):
            self.kept = {"hidden": [self.up(x)]}
            self.drop.seen = self.down(self.kept["hidden"][0])
            return self.last(self.drop.seen.relu())

    found = find_linear_layers(Keeps(), dict(Keeps().named_parameters()))
    assert [one.follows for one in found.values()] == ["", "", ""]


def test_chains_are_told_apart_whatever_the_order_of_their_layers():
    class Towers(nn.Module):
        """Two chains of which the parts are made in turn; each has an input of its own shape."""

        def __init__(self):
            super().__init__()
            self.last_a, self.last_b = nn.Linear(9, OUT), nn.Linear(9, OUT)
            self.a, self.b = nn.Linear(IN, 9), nn.Linear(IN // 2, 9)

        def forward(self, x):
            first, second = self.a(x), self.b(x.view(-1, 2, IN // 2))
            return self.last_a(first.relu()) + self.last_b(second.relu()).sum(dim=1)

    def work():
        syncline.init(threads=1)
        torch.manual_seed(0)
        model, expected = Towers(), Towers()
        expected.load_state_dict(model.state_dict())
        train(expected, torch.optim.SGD(expected.parameters(), lr=0.05))
        optimizer, replica = start(model)
        train(model, optimizer, replica)
        near(whole_state(replica, model), expected.state_dict())

    on_two(work)


def test_a_split_layer_takes_its_input_by_name():
    class Named(Net):
        def forward(self, x):
            return self.last(input=self.inner(x))

    def work():
        syncline.init(threads=1)
        torch.manual_seed(0)
        model = Named()
        optimizer, replica = start(model)
        train(model, optimizer, replica)
        near(whole_state(replica, model), plain())

    on_two(work)


def test_the_optimizer_state_is_whole_on_one_rank_alone():
    def work():
        syncline.init(threads=1)
        expected = make()
        own = torch.optim.AdamW(expected.parameters(), lr=0.05)
        train(expected, own)
        model = make()
        optimizer, replica = start(model, kind=torch.optim.AdamW)
        train(model, optimizer, replica)
        if syncline.rank() == 0:
            found, theirs = optimizer.state_dict()["state"], own.state_dict()["state"]
            for number, state in theirs.items():
                for key, value in state.items():
                    torch.testing.assert_close(found[number][key], value, rtol=1e-3, atol=1e-6)
        syncline.barrier()

    on_two(work)


def test_a_part_is_neither_saved_nor_copied():
    def work():
        syncline.init(threads=1)
        model = make()
        optimizer, replica = start(model)
        train(model, optimizer, replica)
        for read in (model.state_dict, lambda: copy.deepcopy(model)):
            with pytest.raises(UsageError, match="Put `with replica"):
                read()
        with replica.whole():
            alone = copy.deepcopy(model)
            x = data(9)[0]
            torch.testing.assert_close(alone(x), model(x))
            assert type(alone.up.weight) is nn.Parameter
            with pytest.raises(UsageError, match="inside whole"):
                optimizer.step()

    on_two(work)


def test_each_rank_loads_its_rows_of_whole_weights():
    def work():
        syncline.init(threads=1)
        model = make()
        optimizer, replica = start(model)
        train(model, optimizer, replica, steps=2)
        torch.manual_seed(7)
        other = Net().state_dict()
        model.load_state_dict(other)
        near(whole_state(replica, model), other, 0.0)
        train(model, optimizer, replica, steps=1)
        expected = Net()
        expected.load_state_dict(other)
        train(expected, torch.optim.SGD(expected.parameters(), lr=0.05), steps=1)
        near(whole_state(replica, model), expected.state_dict())

    on_two(work)


def test_a_detached_model_is_plain_and_whole():
    def work():
        syncline.init(threads=1)
        model = make()
        optimizer, replica = start(model)
        train(model, optimizer, replica)
        replica.detach()
        near(model.state_dict(), plain())
        train(model, optimizer, steps=1)

    on_two(work)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"layers": ("drop",)}, "so it cannot be split. Choose from up, down, last."),
        ({"groups": 3}, "got 3 with 2 ranks"),
    ],
)
def test_what_cannot_be_split_is_refused(settings, found):
    def work():
        syncline.init(threads=1)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        strategy = Hybrid(HybridSettings(**({"groups": 1} | settings)))
        with pytest.raises(ConfigError, match=found):
            syncline.distribute(model, optimizer, strategy)

    on_two(work)


def test_shards_that_ranks_do_not_have_alike_are_refused():
    def work():
        syncline.init(threads=1)
        with pytest.raises(ConfigError, match="Use a multiple of 2"):
            start(make(), shards=3)

    on_two(work)


def test_loading_inside_whole_is_refused():
    def work():
        syncline.init(threads=1)
        model = make()
        _, replica = start(model)
        with replica.whole(), pytest.raises(UsageError, match="came inside whole"):
            model.load_state_dict(Net().state_dict())

    on_two(work)


@pytest.mark.parametrize("steps", [0, 2])
def test_split_layers_that_one_rank_alone_has_loaded_are_refused(steps):
    def work():
        syncline.init(threads=1)
        model = make()
        optimizer, replica = start(model)
        train(model, optimizer, replica, steps=steps)
        if syncline.rank() == 0:
            torch.manual_seed(7)
            model.up.load_state_dict(Net().up.state_dict())
        with pytest.raises(UsageError, match=r"up.weight differs between ranks"):
            train(model, optimizer, replica, steps=2)  # the next step waits for it

    on_two(work)


def test_layers_that_forward_reads_itself_stay_whole():
    class Direct(Net):
        def forward(self, x):
            return self.last(
                functional.linear(self.inner(x), self.last.weight.t() @ self.last.weight)
            )

    found = find_linear_layers(Direct(), dict(Direct().named_parameters()))
    assert set(found) == {"up", "down"}


def test_a_chain_is_one_in_training_and_in_evaluation():
    class Other(Net):
        def forward(self, x):
            x = self.inner(x)
            return self.last(x if self.training else x.softmax(-1))

    found = find_linear_layers(Other(), dict(Other().named_parameters()))
    assert found["down"].follows == "up"
    assert found["last"].follows == ""


def test_ranks_that_call_different_layers_of_one_shape_all_raise():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(IN, IN), nn.Linear(IN, IN)
            self.first = True

        def forward(self, x):
            one, other = (self.a, self.b) if self.first else (self.b, self.a)
            return other(one(x).softmax(-1))  # no chain

    def work():
        syncline.init(threads=1)
        model = Twins()
        start(model)
        model.first = syncline.rank() == 0
        with pytest.raises(CommError, match="all_to_all"):
            model(torch.ones(2, IN))

    on_two(work)


def test_a_layer_that_is_called_twice_gets_both_gradients():
    class Twice(Net):
        def forward(self, x):
            return self.last(self.down(functional.gelu(self.up(x))) + self.down(self.up(x)))

    def work():
        syncline.init(threads=1)
        torch.manual_seed(0)
        expected = Twice()
        train(expected, torch.optim.SGD(expected.parameters(), lr=0.05))
        torch.manual_seed(0)
        model = Twice()
        optimizer, replica = start(model)
        train(model, optimizer, replica)
        near(whole_state(replica, model), expected.state_dict())

    on_two(work)


def test_batches_of_different_shapes_in_a_group_are_refused_with_the_rule():
    def work():
        syncline.init(threads=1)
        model = make()
        start(model)
        with pytest.raises(CommError, match="with batches of one shape"):
            model(torch.ones(2 + syncline.rank(), IN))

    on_two(work)


class OneByOne(nn.Module):
    """Calls the layers of a Sequential itself, with a norm between them that the Sequential lacks.

    Its forward cannot be traced, the Sequential's can.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))

    def forward(self, x):
        for layer in self.layers if float(x.sum()) < 1e9 else ():
            x = layer(x)
            x = x / x.norm()
        return x


def test_a_chain_is_refused_where_another_forward_runs_than_the_traced_one():
    def work():
        syncline.init(threads=1)
        model = OneByOne()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        syncline.distribute(model, optimizer, Hybrid(HybridSettings(groups=1)))
        with pytest.raises(UsageError) as caught:
            model(torch.ones(2, 4))
        return str(caught.value)

    for said in run_ranks(2, work):
        assert said.startswith("layer layers.0 was called without 'layers', whose forward shows")


def test_layers_that_another_forward_calls_may_be_split_one_by_one():
    def work():
        syncline.init(threads=1)
        torch.manual_seed(0)
        model = OneByOne().double()
        plain = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = HybridSettings(groups=1, layers=("layers.1",))
        replica = syncline.distribute(model, optimizer, Hybrid(settings))
        own = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4).double()).sum().backward()
            plain(torch.ones(2, 4).double()).sum().backward()
            for one in (optimizer, own):
                one.step()
                one.zero_grad()
        with replica.whole():
            return distance(model.state_dict(), plain.state_dict())

    assert max(run_ranks(2, work)) < 1e-14
