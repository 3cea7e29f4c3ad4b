"""Faults and jitter: hand cases, the mean, the same numbers everywhere, and refusals."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import msgspec
import pytest

from syncline.errors import ConfigError
from syncline.faults import ANY_RANK, Conditions, Fault, Jitter, LinkChange

LOGNORMAL = Jitter(kind="lognormal", sigma=0.3)
EXPONENTIAL = Jitter(kind="exponential", shift=0.9)


def test_without_faults_nothing_happens():
    calm = Conditions()
    calm.check(ranks=1, machines=1)
    assert calm.factor(0, 0) == 1.0
    assert calm.pause_s(0, 0) == 0.0
    assert not calm.dies(0, 0)


def test_a_slow_fault_holds_for_its_steps_and_its_rank():
    conditions = Conditions(faults=(Fault(rank=1, step=3, kind="slow", factor=4.0, steps=2),))
    assert [conditions.factor(1, step) for step in range(2, 7)] == [1.0, 4.0, 4.0, 1.0, 1.0]
    assert [conditions.factor(0, step) for step in range(2, 7)] == [1.0] * 5


def test_factors_multiply():
    conditions = Conditions(
        faults=(
            Fault(rank=0, step=0, kind="slow", factor=2.0, steps=10),
            Fault(rank=0, step=5, kind="slow", factor=3.0),
        ),
        slow_ranks={0: 1.5},
    )
    assert [conditions.factor(0, step) for step in (4, 5, 6, 10)] == [3.0, 9.0, 3.0, 1.5]
    jittery = msgspec.structs.replace(conditions, jitter=LOGNORMAL)
    alone = Conditions(jitter=LOGNORMAL)
    assert jittery.factor(0, 5) == pytest.approx(9.0 * alone.factor(0, 5))


def test_pauses_add_up_and_happen_once():
    conditions = Conditions(
        faults=(
            Fault(rank=2, step=1, kind="pause", seconds=0.5),
            Fault(rank=2, step=1, kind="pause", seconds=0.25),
            Fault(rank=2, step=1, kind="death"),
        )
    )
    assert [conditions.pause_s(2, step) for step in range(3)] == [0.0, 0.75, 0.0]
    assert conditions.pause_s(1, 1) == 0.0
    assert conditions.factor(2, 1) == 1.0


def test_a_rank_dies_at_its_step():
    conditions = Conditions(
        faults=(
            Fault(rank=0, step=2, kind="death"),
            Fault(rank=1, step=2, kind="pause", seconds=1.0),
        )
    )
    assert [conditions.dies(0, step) for step in range(4)] == [False, False, True, False]
    assert not conditions.dies(1, 2)


@pytest.mark.parametrize(
    ("jitter", "deviation"),
    [
        # A lognormal with mean 1 has variance exp(sigma**2) - 1; the exponential, (1 - shift)**2.
        (Jitter(kind="lognormal", sigma=0.2), 0.2020),
        (Jitter(kind="lognormal", sigma=0.5), 0.5329),
        (Jitter(kind="exponential"), 1.0),
        (Jitter(kind="exponential", shift=0.9), 0.1),
    ],
)
def test_jitter_has_mean_one_and_the_spread_it_says(jitter, deviation):
    conditions = Conditions(jitter=jitter, seed=1)
    factors = [conditions.factor(rank, step) for rank in range(50) for step in range(200)]
    assert min(factors) > jitter.shift
    assert abs(statistics.mean(factors) - 1) < 4 * deviation / 100
    assert statistics.stdev(factors) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("jitter", [LOGNORMAL, EXPONENTIAL])
def test_a_draw_depends_on_seed_rank_and_step_alone(jitter):
    places = [(rank, step) for rank in range(5) for step in range(5)]
    conditions = Conditions(jitter=jitter, seed=3)
    forwards = {place: conditions.factor(*place) for place in places}
    backwards = {place: conditions.factor(*place) for place in reversed(places)}
    assert forwards == backwards
    assert len(set(forwards.values())) == len(places)
    other = Conditions(jitter=jitter, seed=4)
    assert all(other.factor(*place) != forwards[place] for place in places)


def test_another_process_draws_the_same_numbers():
    program = (
        "from syncline.faults import Conditions, Jitter\n"
        "for jitter in (Jitter(kind='lognormal', sigma=0.3), Jitter(kind='exponential')):\n"
        "    conditions = Conditions(jitter=jitter, seed=5)\n"
        "    print([conditions.factor(rank, 7).hex() for rank in range(4)])\n"
    )
    found = set()
    for hash_seed in ("0", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        found.add(done.stdout.decode())
    here = "".join(
        f"{[Conditions(jitter=jitter, seed=5).factor(rank, 7).hex() for rank in range(4)]}\n"
        for jitter in (LOGNORMAL, Jitter(kind="exponential"))
    )
    assert found == {here}


STORMY = Conditions(
    faults=(Fault(rank=1, step=3, kind="slow", factor=2.0, steps=4),),
    jitter=EXPONENTIAL,
    slow_ranks={2: 1.5},
    link_changes=(LinkChange(time_s=1.5, machine=0, factor=0.5),),
    seed=11,
)


def test_conditions_survive_json():
    written = msgspec.json.encode(STORMY)
    assert msgspec.json.decode(written, type=Conditions) == STORMY


def test_conditions_can_be_read_from_toml():
    text = """
        seed = 11
        jitter = { kind = "exponential", shift = 0.9 }
        slow_ranks = { 2 = 1.5 }
        [[faults]]
        rank = 1
        step = 3
        kind = "slow"
        factor = 2
        steps = 4
        [[link_changes]]
        time_s = 1.5
        machine = 0
        factor = 0.5
    """
    assert msgspec.toml.decode(text, type=Conditions) == STORMY


def test_an_unknown_field_is_refused():
    with pytest.raises(msgspec.ValidationError, match="unknown field `secs`"):
        msgspec.convert({"rank": 0, "step": 0, "kind": "pause", "secs": 1.0}, Fault)


def test_what_is_right_passes():
    STORMY.check(ranks=3, machines=1)


def fault(**settings):
    return {"faults": (Fault(**{"rank": 0, "step": 0, "kind": "slow"} | settings),)}


def change(**settings):
    return {
        "link_changes": (LinkChange(**{"time_s": 0.0, "machine": 0, "factor": 1.0} | settings),)
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            fault(rank=4),
            "cluster.faults[0].rank: got rank 4, but the world has 4 ranks, counted from 0. "
            "Use 0 to 3.",
        ),
        (
            fault(rank=-2),
            "cluster.faults[0].rank: got rank -2, but the world has 4 ranks, counted from 0. "
            "Use 0 to 3.",
        ),
        (
            {"faults": (Fault(rank=0, step=0, kind="death"), fault(step=-1)["faults"][0])},
            "cluster.faults[1].step: got -1, but steps count from 0. Use 0 or more.",
        ),
        (
            fault(factor=0.0),
            "cluster.faults[0].factor: got 0, but a fault makes no step shorter. Use 1 or more.",
        ),
        (
            fault(factor=float("nan")),
            "cluster.faults[0].factor: got nan, but a fault makes no step shorter. Use 1 or more.",
        ),
        (
            fault(factor=0.5),
            "cluster.faults[0].factor: got 0.5, but a fault makes no step shorter. Use 1 or more.",
        ),
        (
            fault(seconds=-0.5),
            "cluster.faults[0].seconds: got -0.5, but no time is shorter than none. Use 0 or more.",
        ),
        (
            fault(steps=0),
            "cluster.faults[0].steps: got 0, but a fault lasts for one step at least. "
            "Use 1 or more.",
        ),
        (
            {"slow_ranks": {0: 1.5, 9: 1.5}},
            "cluster.slow_ranks: got rank 9, but the world has 4 ranks, counted from 0. "
            "Use 0 to 3.",
        ),
        (
            {"slow_ranks": {3: -2.0}},
            "cluster.slow_ranks.3: got -2, but a factor is more than 0. "
            "Use 2.0 for twice, 0.5 for half.",
        ),
        (
            change(time_s=-1.0),
            "cluster.link_changes[0].time_s: got -1, but a run begins at 0 s. Use 0 or more.",
        ),
        (
            change(machine=1),
            "cluster.link_changes[0].machine: got machine 1, but the world has 1 machine, "
            "counted from 0. Use 0.",
        ),
        (
            change(factor=0.0),
            "cluster.link_changes[0].factor: got 0, but a factor is more than 0. "
            "Use 2.0 for twice, 0.5 for half.",
        ),
    ],
)
def test_what_cannot_happen_is_refused_with_a_way_out(settings, message):
    with pytest.raises(ConfigError) as caught:
        Conditions(**settings).check(ranks=4, machines=1)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kind": "lognormal", "sigma": -0.1},
            "cluster.jitter_sigma: got -0.1, but a spread is 0 or more. "
            "Use 0.1 for ranks that differ by about 10 % from step to step.",
        ),
        (
            {"kind": "exponential", "shift": 1.0},
            "cluster.jitter_shift: got 1, but it is the least part of a step whose mean is 1, "
            "at least 0 and below 1. Use 0.9 for steps that take 0.9 of the mean at least.",
        ),
    ],
)
def test_jitter_that_cannot_have_mean_one_is_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        Jitter(**settings)
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as caught:
        msgspec.json.decode(msgspec.json.encode({"jitter": settings}), type=Conditions)
    assert str(caught.value) == message


def test_a_chance_is_drawn_for_each_rank_and_step_by_the_seed():
    often = Fault(rank=ANY_RANK, step=10, kind="pause", seconds=1.0, steps=400, chance=0.25)
    found = [
        [Conditions(faults=(often,), seed=seed).pause_s(rank, step) for step in range(420)]
        for seed, rank in ((0, 0), (0, 1), (1, 0))
    ]
    again = [Conditions(faults=(often,), seed=0).pause_s(0, step) for step in range(420)]
    assert again == found[0]
    assert len({tuple(one) for one in found}) == 3
    for one in found:
        assert sum(one[:10]) == sum(one[410:]) == 0
        assert 60 < sum(one) < 140


@pytest.mark.parametrize("chance", [0.0, 1.5])
def test_a_chance_is_a_chance(chance):
    fault = Fault(rank=0, step=0, kind="pause", seconds=1.0, chance=chance)
    with pytest.raises(ConfigError, match=r"faults\[0\].chance: got"):
        Conditions(faults=(fault,)).check(1, 1, "faults")
