"""Fits of links: known constants come back, and what the hardware cannot do is refused."""

from __future__ import annotations

import functools
import itertools
import random

import msgspec
import numpy as np
import pytest

from syncline.cluster import Cluster, Link, cluster_from
from syncline.cluster_facts import Measured
from syncline.cluster_file import cluster_to_toml, parse_cluster
from syncline.errors import MeasureError
from syncline.measure import fit
from syncline.measure.fit import Limit, predicted_s
from syncline.measure.least_squares import non_negative
from syncline.measure.sweep import KINDS, SIZES

RATES = ((65536.0, 0.4e9), (1048576.0, 1.0e9))
TRUTH = Cluster(
    machines=1,
    ranks_per_machine=1,
    network=Link(latency_s=40e-6, rate_bytes_per_s=1.0e9, rates=RATES),
    inside=Link(latency_s=10e-6, rate_bytes_per_s=5e9),
    flops_per_s=1e9,
    update_bytes_per_s=1e9,
    message_s=20e-6,
    collective_s=8e-6,
)
LIMITS = {"inside": Limit(8e9, "a copy takes"), "across": Limit(1.25e9, "the wire has")}
SHAPES = ((2, 1), (3, 1), (4, 1), (1, 2), (1, 4), (2, 2))


def table(noise=0.0, shapes=SHAPES, truth=TRUTH, seed=0):
    """Return what would be measured on this cluster, with relative noise."""
    draw = random.Random(seed)
    rows = []
    for machines, ranks in shapes:
        for what in KINDS:
            for size in SIZES:
                row = Measured(
                    what=what,
                    size_bytes=size,
                    machines=machines,
                    ranks_per_machine=ranks,
                    median_s=1.0,
                    low_s=0.0,
                    high_s=0.0,
                    cpu_s=0.0,
                )
                exact_s = predicted_s(truth, row) * draw.lognormvariate(0, noise)
                cpu_s = truth.collective_s + (machines - 1) * truth.message_s
                cpu_s *= draw.lognormvariate(0, noise) * (machines > 1)
                rows.append(msgspec.structs.replace(row, median_s=exact_s, cpu_s=cpu_s))
    return rows


fitted = functools.partial(fit.fitted, draws=4)


def errors_of(facts):
    """Return the relative errors of what was fitted."""
    found = cluster_from(facts)
    pairs = [
        (found.inside.latency_s, 10e-6),
        (found.network.latency_s, 40e-6),
        (found.message_s, 20e-6),
        (found.collective_s, 8e-6),
        *((1 / found.inside.seconds_per_byte(size), 5e9) for size in (1 << 18, 1 << 22)),
        (1 / found.network.seconds_per_byte(1 << 16), 0.4e9),
        (1 / found.network.seconds_per_byte(1 << 22), 1e9),
    ]
    return [abs(one / other - 1) for one, other in pairs]


def test_exact_times_give_the_constants_back():
    facts = fitted(table(), LIMITS)
    assert max(errors_of(facts)) < 0.03
    assert max(abs(one.residual) for one in facts.measured) < 0.02


@pytest.mark.parametrize("seed", [1, 2])
def test_noisy_times_give_constants_near_and_residuals_like_the_noise(seed):
    facts = fitted(table(noise=0.05, seed=seed), LIMITS)
    assert max(errors_of(facts)) < 0.3
    assert np.median(errors_of(facts)) < 0.06
    found = np.array([one.residual for one in facts.measured])
    assert 0.02 < np.median(np.abs(found)) < 0.06
    latency = facts.network.latency_s
    assert latency is not None
    assert latency.bounds[0] < latency.value < latency.bounds[1]
    # Residuals are of the simulator's own cost, on the cluster as it is written and read.
    read = cluster_from(parse_cluster(cluster_to_toml(facts)))
    for one in facts.measured:
        assert predicted_s(read, one) / one.median_s - 1 == pytest.approx(one.residual, abs=1e-12)


def test_a_few_disturbed_times_do_not_move_the_fit():
    rows = table(noise=0.02)
    rows[5::10] = [msgspec.structs.replace(one, median_s=5 * one.median_s) for one in rows[5::10]]
    assert np.median(errors_of(fitted(rows, LIMITS))) < 0.1


def test_groups_without_a_core_for_each_rank_tell_processor_times_only():
    rows = table()
    slow = [
        msgspec.structs.replace(one, median_s=9 * one.median_s) if one.machines > 2 else one
        for one in rows
    ]
    facts = fitted(slow, LIMITS, most_ranks=2)
    assert max(errors_of(facts)) < 0.05
    assert {one.machines * one.ranks_per_machine for one in facts.measured} == {2}


@pytest.mark.parametrize(
    ("level", "where", "shapes"),
    [("across", "between machines", ((2, 1), (3, 1))), ("inside", "inside a machine", ((1, 2),))],
)
def test_a_fit_faster_than_the_hardware_is_refused(level, where, shapes):
    limits = LIMITS | {level: Limit(0.3e9, "the wire has")}
    with pytest.raises(MeasureError) as caught:
        fitted(table(shapes=shapes), limits)
    said = str(caught.value)
    assert said.startswith("measure links: ")
    assert f"GB/s was fitted {where}, but the wire has 0.3 GB/s. Measure again" in said


def test_sizes_that_times_cannot_tell_apart_share_a_rate():
    # 1 MB messages seem to be faster than the wire: something was wrong with these rows alone.
    rows = [
        msgspec.structs.replace(one, median_s=one.median_s / 4)
        if one.size_bytes == 1 << 22
        else one
        for one in table(shapes=((2, 1), (3, 1)))
    ]
    facts = fitted(rows, LIMITS)
    reached = facts.network.rate_bytes_per_s
    assert reached is not None
    assert reached.value <= 1.25e9
    assert max(abs(one.residual) for one in facts.measured) > 1


def test_only_levels_that_were_measured_are_described():
    facts = fitted(table(shapes=((1, 2), (1, 4))), LIMITS)
    assert facts.network.latency_s is None
    assert facts.message_s is None
    assert "[network]" not in cluster_to_toml(facts)


def test_least_squares_without_negative_numbers_by_hand():
    # Least squares alone would give (2, -1): without negative numbers it is (1, 0).
    matrix, targets = np.array([[1.0, 1.0], [1.0, 1.0 + 1.0]]), np.array([1.0, 0.0])
    assert np.linalg.solve(matrix, targets) == pytest.approx([2.0, -1.0])
    assert non_negative(matrix, targets) == pytest.approx([0.5, 0.0])


def best_of_all_choices(matrix, targets):
    """Return the least error of x >= 0, by trying which unknowns are zero."""
    least = float(np.linalg.norm(targets))
    for count in range(1, matrix.shape[1] + 1):
        for free in itertools.combinations(range(matrix.shape[1]), count):
            part = matrix[:, free]
            found = np.linalg.lstsq(part, targets, rcond=None)[0]
            if found.min() >= 0:
                least = min(least, float(np.linalg.norm(part @ found - targets)))
    return least


def test_no_other_choice_of_zeros_is_better():
    numbers = np.random.default_rng(0)
    for _ in range(100):
        matrix, targets = numbers.normal(size=(6, 4)), numbers.normal(size=6)
        found = non_negative(matrix, targets)
        assert found.min() >= 0
        error = float(np.linalg.norm(matrix @ found - targets))
        assert error == pytest.approx(best_of_all_choices(matrix, targets))
