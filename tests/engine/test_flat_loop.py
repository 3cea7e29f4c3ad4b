"""A loop over batches has the same bits on any number of ranks, though a rank gets several a step.

Real processes. The batches of a step are told to the replicas by hand, as a loader does.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import syncline
from ranks import RankError, run_ranks
from syncline.checkpoint import digest_of
from syncline.errors import UsageError
from syncline.loader import reseed

STEPS = 4
SHARDS = 4


class Net(nn.Module):
    """Batch norm and dropout: shards must start from the same buffers and seeds."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def forward(self, x):
        return self.body(x)


def batch(step, shard):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + shard))


def batches(*replicas, steps=STEPS, tells=True):
    """Yield this rank's batches one after the other, as a flat loader does."""
    for step in range(steps):
        for shard in replicas[0].my_shards:
            for replica in replicas if tells else ():
                replica.begin_shard(shard)
            reseed(0, step, shard)
            yield batch(step, shard)


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


def advance(scheduler):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def flat(schedule, *, overlap, made_before=True, zero_first=False, tells=True, clip=None):
    """Train in a flat loop; return the hash, the rates after each call, and the clipped norms."""
    syncline.init()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULES[schedule](optimizer) if made_before else None
    settings = {"shards": SHARDS, "overlap": overlap, "bucket_bytes": 256}
    replica = syncline.distribute(model, optimizer, **settings)
    scheduler = scheduler or SCHEDULES[schedule](optimizer)
    rates, norms = [], []
    for x in batches(replica, tells=tells):
        if zero_first:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        if clip is not None:
            norms.append(float(syncline.clip_grad_norm_(model, clip)))
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        advance(scheduler)
        if syncline.step_ended(model):
            rates.append(optimizer.param_groups[0]["lr"])
    assert replica.step_number == STEPS
    return digest_of(model.state_dict()), rates, norms


def same_on_all(sizes, **settings):
    """Return what a flat loop finds, equal on all ranks of all these worlds."""
    found = [run_ranks(size, lambda: flat(**settings)) for size in sizes]
    first = found[0][0]
    for ranks in found:
        assert [one[:2] for one in ranks] == [first[:2]] * len(ranks)
    return first


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
def test_a_flat_loop_has_the_same_bits_on_any_number_of_ranks(overlap):
    _, rates, _ = same_on_all((1, 2, 3, 4), schedule="cosine", overlap=overlap)
    expected = [0.05 * (1 + math.cos(math.pi * step / STEPS)) for step in range(1, STEPS + 1)]
    assert rates == pytest.approx(expected)


@pytest.mark.processes
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_schedulers_advance_once_a_step(schedule):
    before = same_on_all((1, 4), schedule=schedule, overlap=False)
    after = same_on_all((1,), schedule=schedule, overlap=False, made_before=False)
    assert before == after
    assert len(set(before[1])) > 1, "the rate should change"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_before", [True, False])
def test_a_rate_that_is_set_for_every_batch_is_refused(is_before):
    """With more ranks it would change once a step."""
    syncline.init()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = syncline.distribute(model, optimizer, shards=SHARDS)
    for number, x in enumerate(batches(replica)):
        model(x).square().mean().backward()
        if is_before:
            optimizer.param_groups[0]["lr"] *= 0.9
        if number == 1:
            with pytest.raises(UsageError, match="changed between two shards"):
                optimizer.step()
            break
        optimizer.step()
        if not is_before:
            optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()


@pytest.mark.usefixtures("alone")
def test_a_rate_that_is_set_once_a_step_is_taken():
    syncline.init()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = syncline.distribute(model, optimizer, shards=SHARDS)
    for x in batches(replica):
        model(x).square().mean().backward()
        optimizer.step()
        if syncline.step_ended(model):
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**STEPS


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
def test_zeroing_first_and_not_telling_shards_gives_the_same_bits(overlap):
    usual = same_on_all((1, 2), schedule="lambda", overlap=overlap)
    first = same_on_all((1, 2), schedule="lambda", overlap=overlap, zero_first=True)
    untold = same_on_all((1, 2), schedule="lambda", overlap=overlap, tells=False)
    assert usual[0] == first[0] == untold[0]


@pytest.mark.processes
def test_clipping_waits_for_the_last_shard_and_returns_the_last_norm_before():
    _, _, norms = same_on_all((1, 2, 4), schedule="lambda", overlap=True, clip=0.1)
    known = norms[SHARDS - 1 :: SHARDS]
    assert len(set(known)) == STEPS
    assert all(norm > 0.1 for norm in known), "the test should clip"
    assert all(map(math.isnan, norms[: SHARDS - 1]))
    assert norms[SHARDS : 2 * SHARDS - 1] == known[:1] * (SHARDS - 1)


def nested(overlap):
    syncline.init()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"shards": SHARDS, "overlap": overlap, "bucket_bytes": 256}
    replica = syncline.distribute(model, optimizer, **settings)
    scheduler = SCHEDULES["cosine"](optimizer)
    found = batches(replica)
    for _ in range(STEPS):
        for _ in replica.my_shards:
            model(next(found)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return digest_of(model.state_dict())


@pytest.mark.processes
def test_a_loop_over_steps_and_shards_has_the_bits_of_a_flat_one():
    expected = same_on_all((1,), schedule="cosine", overlap=True)[0]
    found = {digest for size in (1, 2) for digest in run_ranks(size, lambda: nested(True))}
    assert found == {expected}


# What would make the number of ranks matter is refused.


@pytest.fixture
def loop(alone):
    """A model with four shards on one rank, after one step; its replica and optimizer."""
    syncline.init()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = syncline.distribute(model, optimizer, shards=SHARDS)
    for x in batches(replica, steps=1):
        one_shard(model, optimizer, x)
    return model, optimizer, replica


def one_shard(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model.body[0].weight.detach(),
        lambda model: model(batch(9, 9)),
        lambda model: model.state_dict(),
        lambda model: copy.deepcopy(model),
        lambda model: model.body[0].weight.data,
        lambda model: torch._foreach_mul(list(model.parameters()), 2.0),
    ],
)
def test_parameters_are_not_read_in_the_middle_of_a_step(loop, read):
    model, optimizer, replica = loop
    replica.begin_shard(0)
    one_shard(model, optimizer, batch(1, 0))
    assert not syncline.step_ended(model)
    assert sum(p.numel() for p in model.parameters()) == 6 * 16 + 16 + 32 + 16 * 3 + 3
    assert model.body[0].weight.shape == (16, 6)
    assert model.body[0].weight.dtype is torch.float32
    assert model.body[0].weight.requires_grad
    with pytest.raises(UsageError, match="ended a shard, not the step"):
        read(model)
    for shard in (1, 2, 3):
        replica.begin_shard(shard)
        one_shard(model, optimizer, batch(1, shard))
    assert syncline.step_ended(model)
    read(model)


def test_a_step_after_some_of_the_batches_only_is_refused(loop):
    model, optimizer, replica = loop
    for shard in (0, 1):
        replica.begin_shard(shard)
        model(batch(1, shard)).square().mean().backward()
    with pytest.raises(UsageError, match="add up K batches for each shard"):
        optimizer.step()


def test_a_flat_loader_s_batch_without_a_step_is_refused(loop):
    """Without the loader's word it might be a loop over shards, with one step() after the last."""
    model, _, replica = loop
    replica.begin_shard(0, is_flat=True)
    replica.begin_shard(1, is_flat=True)  # no gradient yet: as in an evaluation
    replica.begin_shard(0, is_flat=True)
    model(batch(1, 0)).square().mean().backward()
    with pytest.raises(UsageError, match="add up K batches for each shard"):
        replica.begin_shard(1, is_flat=True)


def test_a_batch_without_a_step_between_others_is_refused(loop):
    model, optimizer, replica = loop
    replica.begin_shard(0)
    one_shard(model, optimizer, batch(1, 0))
    replica.begin_shard(1)
    with pytest.raises(UsageError, match="step\\(\\) after every batch"):
        replica.begin_shard(2)


def test_a_second_step_after_a_batch_is_refused(loop):
    model, optimizer, replica = loop
    replica.begin_shard(0)
    one_shard(model, optimizer, batch(1, 0))
    with pytest.raises(UsageError, match="twice after one batch"):
        optimizer.step()


def test_a_step_that_was_left_in_the_middle_is_refused(loop):
    model, optimizer, replica = loop
    replica.begin_shard(0)
    one_shard(model, optimizer, batch(1, 0))
    with pytest.raises(UsageError, match="leave a step before its last"):
        replica.begin_shard(0)


def test_a_scheduler_before_the_step_is_refused_in_the_middle_of_a_step(loop):
    model, optimizer, replica = loop
    scheduler = SCHEDULES["lambda"](optimizer)
    replica.begin_shard(0)
    one_shard(model, optimizer, batch(1, 0))
    replica.begin_shard(1)
    with pytest.raises(UsageError, match=r"after optimizer.step\(\)"):
        scheduler.step()


def test_a_scheduler_made_in_the_middle_of_a_step_begins_as_ever(loop):
    model, optimizer, replica = loop
    replica.begin_shard(0)
    one_shard(model, optimizer, batch(1, 0))

    class Halving(lr_scheduler.LRScheduler):
        def get_lr(self):
            return [base * 0.5**self.last_epoch for base in self.base_lrs]

        def step(self, epoch=None):
            super().step()

    scheduler = Halving(optimizer)
    assert scheduler.last_epoch == 0
    scheduler.step()
    assert scheduler.last_epoch == 0, "the step has not ended"


def test_other_optimizers_schedulers_are_left_alone(loop):
    model, optimizer, replica = loop
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(other, 0.5)
    replica.begin_shard(0)
    one_shard(model, optimizer, batch(1, 0))
    other.step()
    scheduler.step()
    assert other.param_groups[0]["lr"] == 0.5


def test_a_loop_without_gradients_may_run_through_the_shards(loop):
    """Evaluation with a loader of ours: its batches belong to no step."""
    model, optimizer, replica = loop
    expected = copy.deepcopy(model)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x in batches(replica, steps=2):
        model.eval()
        with torch.no_grad():
            model(x)
    model.train()
    for shard in range(SHARDS):
        replica.begin_shard(shard)
        reseed(0, 1, shard)
        one_shard(model, optimizer, batch(1, shard))
    for shard in range(SHARDS):
        reseed(0, 1, shard)
        (expected(batch(1, shard)).square().mean() / SHARDS).backward()
    plain.step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


# Two models.


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        return self.body(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x)


def noise(step, shard):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(7000 + 100 * step + shard))


def make_gan():
    torch.manual_seed(0)
    models = Discriminator(), Generator()
    return [(m, torch.optim.Adam(m.parameters(), lr=0.01)) for m in models]


def judge(critic, maker, x, z):
    """The discriminator's loss, as in most scripts: two backward passes."""
    (critic(x) - 1).square().mean().backward()
    critic(maker(z).detach()).square().mean().backward()


def fool(critic, maker, z):
    """The generator's loss: its backward leaves gradients in the discriminator."""
    (critic(maker(z)) - 1).square().mean().backward()


def gan_in_two_passes(overlap):
    """All shards for the discriminator and its step, then all shards for the generator."""
    syncline.init()
    (critic, of_critic), (maker, of_maker) = pairs = make_gan()
    settings = {"shards": SHARDS, "overlap": overlap, "bucket_bytes": 128}
    replicas = [syncline.distribute(*pair, **settings) for pair in pairs]
    found = []
    for step in range(STEPS):
        critic.zero_grad()
        for shard in replicas[0].my_shards:
            for replica in replicas:
                replica.begin_shard(shard)
            judge(critic, maker, batch(step, shard), noise(step, shard))
        of_critic.step()
        found.append(digest_of(critic.state_dict()))
        maker.zero_grad()
        for shard in replicas[0].my_shards:
            for replica in replicas:
                replica.begin_shard(shard)
            fool(critic, maker, noise(step, shard))
        of_maker.step()
        found.append(digest_of(maker.state_dict()))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
def test_two_models_with_more_shards_than_ranks_have_the_same_bits(overlap):
    def work():
        return gan_in_two_passes(overlap)

    found = [digests for size in (1, 2, 3, 4) for digests in run_ranks(size, work)]
    assert found == found[:1] * 10


def gan_with_samples(shards):
    """A GAN over a loader that looks at samples between steps, with batch norm in training mode."""
    syncline.init()
    (critic, of_critic), (maker, of_maker) = pairs = make_gan()
    for pair in pairs:
        syncline.distribute(*pair, shards=shards)
    data = TensorDataset(torch.randn(60, 6, generator=torch.Generator().manual_seed(1)))
    found = []
    for step in syncline.shards(DataLoader(data, batch_size=5)):
        critic.zero_grad()
        for (x,) in step:
            judge(critic, maker, x, torch.randn(5, 4))
        of_critic.step()
        maker.zero_grad()
        for _ in step:
            fool(critic, maker, torch.randn(5, 4))
        of_maker.step()
        maker(noise(0, 0))
        found += [digest_of(model.state_dict()) for model, _ in pairs]
    return found


@pytest.mark.processes
def test_buffers_between_a_gan_s_steps_do_not_depend_on_the_number_of_ranks():
    found = [f for size in (1, 2, 4) for f in run_ranks(size, lambda: gan_with_samples(SHARDS))]
    assert found == found[:1] * 7


def gan_in_a_flat_loop(pairs, batch_of, maker_first):
    (critic, of_critic), (maker, of_maker) = pairs
    found = []
    for step in range(STEPS):
        x, z = batch_of(step)

        def train_maker(z=z):
            of_maker.zero_grad()
            fool(critic, maker, z)
            of_maker.step()
            found.append(digest_of(maker.state_dict()))

        if maker_first:
            train_maker()
        critic.zero_grad()
        judge(critic, maker, x, z)
        of_critic.step()
        found.append(digest_of(critic.state_dict()))
        if not maker_first:
            train_maker()
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("maker_first", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_usual_loop_of_a_gan_is_plain_pytorch_s_on_one_rank(overlap, maker_first):
    def batch_of(step):
        return batch(step, 0), noise(step, 0)

    expected = gan_in_a_flat_loop(make_gan(), batch_of, maker_first)
    syncline.init()
    pairs = make_gan()
    settings = {"overlap": overlap, "bucket_bytes": 128}
    for pair in pairs:
        syncline.distribute(*pair, **settings)
    assert gan_in_a_flat_loop(pairs, batch_of, maker_first) == expected


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
def test_a_gan_with_a_shard_a_rank_trains_the_same_on_all_ranks(overlap):
    def work():
        rank = syncline.init()
        pairs = make_gan()
        for pair in pairs:
            syncline.distribute(*pair, overlap=overlap, bucket_bytes=128)
        return gan_in_a_flat_loop(pairs, lambda s: (batch(s, rank), noise(s, rank)), True)

    first, second = run_ranks(2, work)
    assert first == second


@pytest.mark.processes
@pytest.mark.parametrize("tells", [True, False])
def test_a_flat_loop_of_a_gan_with_more_shards_than_ranks_is_refused(tells):
    """The generator would see the discriminator before its step, with more ranks after it."""

    def work():
        syncline.init()
        pairs = make_gan()
        replicas = [syncline.distribute(*pair, shards=2) for pair in pairs]
        (critic, of_critic), (maker, of_maker) = pairs
        for x in batches(*replicas, tells=tells):
            critic.zero_grad()
            judge(critic, maker, x, x[:, :4])
            of_critic.step()
            maker.zero_grad()
            fool(critic, maker, x[:, :4])
            of_maker.step()

    with pytest.raises(RankError, match="not the step"):
        run_ranks(1, work)
