"""Pickles and deep copies of a distributed model and its optimizer are plain objects."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline.checkpoint import digest_of
from worlds import untraced

HOOKS = [
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
]


class Net(nn.Module):
    """A tied weight, a norm layer, a parametrized layer, and hooks of the user's own."""

    def __init__(self, parametrized=False):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        if parametrized:
            self.more = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.register_forward_pre_hook(double)

    def forward(self, x):
        x = self.last(self.norm(torch.tanh(self.first(x))))
        return self.more(x) if hasattr(self, "more") else x


def double(module, args):
    return (2 * args[0],)


def make(**options):
    torch.manual_seed(0)
    model = Net(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def take_step(model, optimizer, step):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def through_pickle(pair):
    return pickle.loads(pickle.dumps(pair))


def through_torch(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch}


def check_plain(model, original):
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model.last.weight is model.first.weight
    memory = {p.untyped_storage().data_ptr() for p in (*original.parameters(), *original.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.untyped_storage().data_ptr() not in memory
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    for module in model.modules():
        assert not {"__getstate__", "__deepcopy__"} & vars(module).keys()
        for name in HOOKS:
            ours = [
                hook
                for hook in getattr(module, name).values()
                if hook.__module__.startswith("syncline")
            ]
            assert not ours, name
    assert list(model._forward_pre_hooks.values()) == [double]


@pytest.mark.parametrize("moment", ["before the first step", "after backward", "after a step"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("alone")
def test_a_copy_is_plain_and_goes_on_as_plain_pytorch_would(way, overlap, moment):
    syncline.init()
    plain, ours = make(), make()
    syncline.distribute(*ours, overlap=overlap)
    for pair in (plain, ours):
        if moment != "before the first step":
            take_step(*pair, 0)
        if moment == "after backward":
            pair[0](torch.ones(6, 8)).square().mean().backward()
    copied, copied_optimizer = WAYS[way](ours)
    check_plain(copied, ours[0])
    held = [p for group in copied_optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in copied.parameters()}
    plain = WAYS[way](plain)  # without gradients, as any copy
    for pair in (plain, (copied, copied_optimizer)):
        take_step(*pair, 1)
    assert digest_of(copied.state_dict()) == digest_of(plain[0].state_dict())
    assert digest_of(ours[0].state_dict()) != digest_of(copied.state_dict())


@pytest.mark.usefixtures("alone")
def test_a_copy_does_not_disturb_the_original():
    """Loading into a copy, as an average of the weights is loaded, leaves the original alone."""
    syncline.init()
    results = []
    for is_ours in (False, True):
        model, optimizer = make()
        if is_ours:
            syncline.distribute(model, optimizer)
        for step in range(4):
            take_step(model, optimizer, step)
            average = copy.deepcopy(model)
            average.load_state_dict({k: v * 0 for k, v in average.state_dict().items()})
            pickle.dumps(model)
        results.append(digest_of(model.state_dict()))
    assert results[0] == results[1]


@pytest.mark.usefixtures("alone")
def test_a_shallow_copy_shares_everything_as_always():
    syncline.init()
    model, optimizer = make()
    syncline.distribute(model, optimizer)
    take_step(model, optimizer, 0)
    shallow = copy.copy(model)
    assert shallow.first is model.first
    assert copy.copy(model.first).weight is model.first.weight


@pytest.mark.usefixtures("alone")
def test_a_parametrized_layer_is_copied_deeply():
    syncline.init()
    model, optimizer = make(parametrized=True)
    syncline.distribute(model, optimizer)
    take_step(model, optimizer, 0)
    check_plain(copy.deepcopy(model), model)
    take_step(model, optimizer, 1)
    plain, optimizer = make(parametrized=True)
    for step in range(2):
        take_step(plain, optimizer, step)
    assert digest_of(plain.state_dict()) == digest_of(model.state_dict())


@pytest.mark.usefixtures("alone")
def test_a_saved_model_is_loaded_without_syncline(tmp_path):
    syncline.init()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    syncline.distribute(model, optimizer)
    take_step(model, optimizer, 0)
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "saved.pt")
    program = (
        "import sys, torch; sys.modules['syncline'] = None\n"
        "found = torch.load(sys.argv[1], weights_only=False)\n"
        "found['model'](torch.ones(2, 8)).sum().backward(); found['optimizer'].step()\n"
        "assert len(found['optimizer'].state) == 4\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "saved.pt")]
    subprocess.run(command, check=True, timeout=60, env=untraced())


@pytest.mark.processes
def test_copies_on_two_ranks_share_no_memory():
    def work():
        rank = syncline.init()
        model, optimizer = make()
        syncline.distribute(model, optimizer)
        take_step(model, optimizer, rank)
        copied = copy.deepcopy(model)
        before = digest_of(model.state_dict())
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.add_(rank + 1)
        again = through_pickle(model)
        assert digest_of(again.state_dict()) == before
        check_plain(again, model)
        return digest_of(model.state_dict()) == before

    assert run_ranks(2, work) == [True, True]
