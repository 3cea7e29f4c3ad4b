"""Loops made up at random: each is refused with a reason, or has the bits of plain PyTorch.

On one rank with one shard a script is compared with the same script in plain PyTorch; with two
shards the body of a loop is compared on one rank and on two.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from torch import nn

import syncline
from ranks import RankError, run_ranks
from syncline.checkpoint import digest_of
from syncline.errors import UsageError
from syncline.session import close_session


class Net(nn.Module):
    """A branch that is not always used, and statistics."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.aside = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x, uses_aside):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(self.aside(x) if uses_aside else x)


class Script:
    """One model, its optimizer and scheduler, and what a loop may do with them."""

    def __init__(self, *, is_ours, shards=1, overlap=None):
        torch.manual_seed(0)
        self.model = Net()
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
        self.optimizer = torch.optim.SGD(self.model.parameters(), **options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.is_ours = is_ours
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.replica = None
        if is_ours:
            how = {"shards": shards, "overlap": overlap, "bucket_bytes": 64, "accumulate": 4}
            self.replica = syncline.distribute(self.model, self.optimizer, **how)

    def x(self, seed):
        return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))

    def do(self, what, seed):
        model, optimizer = self.model, self.optimizer
        if what in ("backward", "backward without aside"):
            model(self.x(seed), what == "backward").square().mean().backward()
        elif what == "step":
            optimizer.step()
        elif what == "zero":
            optimizer.zero_grad()
        elif what == "zeros":
            model.zero_grad(set_to_none=False)
        elif what == "each to none":
            for parameter in model.parameters():
                parameter.grad = None
        elif what == "schedule":
            self.scheduler.step()
        elif what == "clip":
            if self.is_ours:
                syncline.clip_grad_value_(model, 0.02)
            elif any(p.grad is not None for p in model.parameters()):  # else torch raises
                nn.utils.clip_grad_value_(model.parameters(), 0.02)
        elif what == "evaluate":
            model.eval()
            with torch.no_grad():
                model(self.x(seed), True)
            model.train()
        elif what == "load":
            model.load_state_dict(self.start)
        elif what == "read":
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            sum(norms)
        else:
            raise AssertionError(what)

    def digest(self):
        rate = torch.tensor(self.optimizer.param_groups[0]["lr"], dtype=torch.float64)
        return digest_of(dict(self.model.state_dict()) | {"rate": rate})


DEEDS = ["backward", "backward without aside", "step", "zero", "zeros", "each to none"]
DEEDS += ["schedule", "clip", "evaluate", "load", "read"]
USUAL = [["backward", "step", "zero"], ["zero", "backward", "step"], ["zeros", "backward", "step"]]
scripts = st.lists(
    st.one_of(st.sampled_from(DEEDS).map(lambda deed: [deed]), st.sampled_from(USUAL)),
    min_size=2,
    max_size=10,
).map(lambda parts: [deed for part in parts for deed in part])


def run(script, deeds):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers before steps
        for number, deed in enumerate(deeds):
            script.do(deed, number)
    return script.digest()


@pytest.mark.usefixtures("alone")
@settings(max_examples=150, derandomize=True)
@given(scripts, st.booleans())
@example(["backward", "zeros", "backward", "step", "each to none", "step"], False)
def test_a_script_is_refused_or_has_the_bits_of_plain_pytorch(deeds, overlap):
    expected = run(Script(is_ours=False), deeds)
    close_session()
    syncline.init()
    try:
        found = run(Script(is_ours=True, overlap=overlap), deeds)
    except UsageError as refusal:
        event(str(refusal)[:40])
        return
    event("accepted")
    assert found == expected


bodies = st.lists(st.sampled_from([deed for deed in DEEDS if deed != "load"]), max_size=3)


def run_body(before, after, overlap):
    """Run a body for each batch of a flat loop, with two shards."""
    syncline.init()
    script = Script(is_ours=True, shards=2, overlap=overlap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            for shard in script.replica.my_shards:
                script.replica.begin_shard(shard, is_flat=True)
                for number, deed in enumerate([*before, "backward", *after]):
                    script.do(deed, 100 * step + 10 * shard + number)
    return script.digest()


@pytest.mark.processes
@settings(max_examples=25, derandomize=True)
@given(bodies, bodies, st.sampled_from(USUAL), st.booleans())
def test_the_body_of_a_loop_is_refused_or_has_the_same_bits_on_one_rank_and_two(
    before, after, usual, overlap
):
    if usual[0] == "backward":
        after = [*after, "step", "zero"]
    else:
        before, after = [*before, usual[0]], [*after, "step"]
    found = []
    for size in (1, 2):
        try:
            found += run_ranks(size, lambda: run_body(before, after, overlap))
        except RankError as refusal:
            if "UsageError" not in str(refusal):
                raise
            event("refused")
            return
    event("accepted")
    assert len(set(found)) == 1
