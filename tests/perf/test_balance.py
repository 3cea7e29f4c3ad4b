"""Balance equations: cases worked by hand, and the tables that follow from the paper's layers."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import pytest

from syncline.perf.balance import (
    LayerShape,
    best_groups,
    best_groups_in_the_limit,
    data_bytes,
    exact_hybrid_bytes,
    exact_split_bytes,
    flop,
    flop_per_byte,
    hybrid_bytes,
    least_samples,
    model_bytes,
    most_ranks,
)

LINEAR = LayerShape(4096, 4096)
SETTING = {"minibatch": 256, "ranks": 64}


def square(in_features, out_features, kernel, in_side, out_side):
    return LayerShape(in_features, out_features, kernel**2, in_side**2, out_side**2)


# Layer, number of weights, forward GFLOP of an image: Das et al. train these two networks.
OVERFEAT = [
    (square(3, 96, 11, 231, 56), 34_848, "0.2186"),
    (square(96, 256, 5, 28, 24), 614_400, "0.7078"),
    (square(256, 512, 3, 12, 12), 1_179_648, "0.3397"),
    (square(512, 1024, 3, 12, 12), 4_718_592, "1.3590"),
    (square(1024, 1024, 3, 12, 12), 9_437_184, "2.7179"),
    (LayerShape(36_864, 3072), 113_246_208, "0.2265"),
    (LayerShape(3072, 4096), 12_582_912, "0.0252"),
    (LayerShape(4096, 1000), 4_096_000, "0.0082"),
]
VGG = [
    (square(3, 64, 3, 224, 224), 1728, "0.1734"),
    (square(64, 128, 3, 112, 112), 73_728, "1.8497"),
    (square(128, 256, 3, 56, 56), 294_912, "1.8497"),
    (square(256, 256, 3, 56, 56), 589_824, "3.6994"),
    (square(256, 512, 3, 28, 28), 1_179_648, "1.8497"),
    (square(512, 512, 3, 28, 28), 2_359_296, "3.6994"),
    (square(512, 512, 3, 14, 14), 2_359_296, "0.9248"),
    (square(512, 512, 3, 14, 14), 2_359_296, "0.9248"),
    (LayerShape(25_088, 4096), 102_760_448, "0.2055"),
    (LayerShape(4096, 4096), 16_777_216, "0.0336"),
    (LayerShape(4096, 1000), 4_096_000, "0.0082"),
]
CONVOLUTIONS = {
    "overfeat": [layer for layer, _, _ in OVERFEAT if layer.kernel_area > 1],
    "vgg": [layer for layer, _, _ in VGG if layer.kernel_area > 1],
}
ETHERNET = {"flop_per_s": 1670e9, "bytes_per_s": 1.25e9}
INFINIBAND = {"flop_per_s": 2355e9, "bytes_per_s": 7e9}


@pytest.mark.parametrize(("layer", "num_weights", "gflop"), OVERFEAT + VGG)
def test_weights_and_operations_are_those_of_the_layer_tables(layer, num_weights, gflop):
    assert layer.num_weights == num_weights
    assert f"{flop(layer, 1) / 3 / 1e9:.4f}" == gflop


@pytest.mark.parametrize(("table", "gflop"), [(OVERFEAT, "16.81"), (VGG, "45.65")])
def test_training_takes_three_times_the_operations_of_forward(table, gflop):
    assert f"{sum(flop(layer, 1) for layer, _, _ in table) / 1e9:.2f}" == gflop


def test_a_small_convolution_by_hand():
    # 2 -> 3 features, kernel 2 x 2, output 5 x 5, input 6 x 6: 24 weights, each used 25 times a
    # sample, in a product and a sum, three times: 24 * 25 * 2 * 3 = 3600 FLOP.
    layer = square(2, 3, 2, 6, 5)
    assert layer.num_weights == 24
    assert flop(layer, 1) == 3600
    assert flop(layer, 10) == 36_000
    # 24 gradients out and 24 weights in, of 4 bytes; at the same time half of it.
    assert data_bytes(layer) == 192
    assert data_bytes(layer, overlap=1) == 96
    assert data_bytes(layer, overlap=0.5) == 144
    assert data_bytes(layer, element_bytes=2) == 96
    # 2 features of 36 values for 10 samples, there and their gradients back.
    assert model_bytes(layer, 10) == 2 * 4 * 2 * 36 * 10
    assert model_bytes(layer, 10, element_bytes=2) == 2 * 2 * 2 * 36 * 10


@pytest.mark.parametrize("layer", CONVOLUTIONS["overfeat"])
@pytest.mark.parametrize("samples", [1, 3])
def test_the_ratio_of_a_layer_depends_on_its_output_map_and_samples_only(layer, samples):
    assert flop_per_byte([layer], samples) == pytest.approx(1.5 * layer.out_area * samples)
    assert flop_per_byte([layer], samples, overlap=0) == pytest.approx(
        0.75 * layer.out_area * samples
    )
    assert flop_per_byte([layer], samples, element_bytes=2) == pytest.approx(
        3 * layer.out_area * samples
    )


@pytest.mark.parametrize(
    ("network", "ratio", "system", "samples", "rounded", "ranks"),
    [
        ("overfeat", "250.7", ETHERNET, "5.33", 6, 42),
        ("overfeat", "250.7", INFINIBAND, "1.34", 2, 128),
        ("vgg", "1218.1", ETHERNET, "1.10", 2, 128),
        ("vgg", "1218.1", INFINIBAND, "0.28", 1, 256),
    ],
)
def test_the_least_samples_of_the_published_networks(
    network, ratio, system, samples, rounded, ranks
):
    layers = CONVOLUTIONS[network]
    assert f"{flop_per_byte(layers):.1f}" == ratio
    least = least_samples(layers, **system)
    assert f"{least:.2f}" == samples
    assert math.ceil(least) == rounded
    assert most_ranks(256, least) == ranks


def test_with_the_least_samples_bytes_take_as_long_as_operations():
    layers = CONVOLUTIONS["overfeat"]
    for overlap in (0.0, 1.0):
        least = least_samples(layers, overlap=overlap, **ETHERNET)
        compute_s = sum(flop(layer, least) for layer in layers) / ETHERNET["flop_per_s"]
        moved = sum(data_bytes(layer, overlap=overlap) for layer in layers)
        assert compute_s == pytest.approx(moved / ETHERNET["bytes_per_s"])


@pytest.mark.parametrize(
    ("overlap", "best", "table"),
    [
        (0, "2.00", ("8.39", "8.39", "9.09", "10.49", "17.83", "134.22")),
        (1, "2.83", ("8.39", "6.29", "5.94", "6.29", "9.44", "67.11")),
    ],
)
def test_hybrid_parallelism_in_the_limit_of_large_groups(overlap, best, table):
    found = [
        hybrid_bytes(LINEAR, **SETTING, groups=groups, overlap=overlap)
        for groups in (1, 2, 3, 4, 8, 64)
    ]
    assert tuple(f"{one.total / 1e6:.2f}" for one in found) == table
    assert f"{best_groups_in_the_limit(LINEAR, **SETTING, overlap=overlap):.2f}" == best
    assert found[0].across == 0
    assert found[0].inside == model_bytes(LINEAR, 256)
    assert found[-1].inside == 0
    assert found[-1].across == data_bytes(LINEAR, overlap=overlap)


@pytest.mark.parametrize("layer", [LINEAR, CONVOLUTIONS["vgg"][3], LayerShape(100, 5000)])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_at_the_best_number_of_groups_both_terms_are_equal(layer, overlap):
    # a / G + b G is least where a / G = b G. Enough ranks that it lies between the ends.
    best = best_groups_in_the_limit(layer, 256, ranks=1 << 40, overlap=overlap)
    found = hybrid_bytes(layer, 256, ranks=1 << 40, groups=best, overlap=overlap)
    assert found.inside == pytest.approx(found.across)


def test_exact_bytes_of_hybrid_parallelism():
    # n = 32: 31/32 of 2 * 4 * 4096 * 128 bytes, and 1/2 of 2 * 4 * 4096 * 4096 / 32 bytes.
    found = exact_hybrid_bytes(LINEAR, **SETTING, groups=2)
    assert (found.inside, found.across) == (4_063_232, 2_097_152)
    assert f"{found.total / 1e6:.2f}" == "6.16"
    # The ends: 63/64 of the limit, with one term each.
    one, all_ = (exact_hybrid_bytes(LINEAR, **SETTING, groups=groups) for groups in (1, 64))
    assert (one.across, all_.inside) == (0, 0)
    assert f"{one.total / 1e6:.2f}" == "8.26"
    assert all_.total == data_bytes(LINEAR) * 63 / 64


def test_exact_bytes_come_close_to_the_limit_with_many_ranks():
    found = exact_hybrid_bytes(LINEAR, 256, ranks=1 << 20, groups=1 << 10)
    limit = hybrid_bytes(LINEAR, 256, ranks=1 << 20, groups=1 << 10)
    assert found.inside == pytest.approx(limit.inside, rel=1e-3)
    assert found.across == pytest.approx(limit.across, rel=1e-3)
    assert found.inside < limit.inside
    assert found.across < limit.across


def test_a_job_has_one_number_of_groups_and_it_divides_the_ranks():
    assert best_groups([LINEAR], **SETTING) == 2
    # 6 ranks, 600 -> 20 features, 24 samples, in units of 2 * 4 * 600 bytes. Groups 1, 2, 3, 6:
    # 24 * 5/6 = 20; 12 * 2/3 + 20/3 * 1/2 = 11.33; 8 * 1/2 + 10 * 2/3 = 10.67; 20 * 5/6 = 16.67.
    narrow, wide = LayerShape(600, 20), LayerShape(600, 200)
    sent = [
        exact_hybrid_bytes(narrow, 24, ranks=6, groups=groups).total / 4800
        for groups in (1, 2, 3, 6)
    ]
    assert sent == pytest.approx([20, 34 / 3, 32 / 3, 50 / 3])
    assert best_groups([narrow], 24, ranks=6) == 3
    # 600 -> 200 has ten times the data term: 20; 41.33; 70.67; 166.67. Together the sums are 40;
    # 52.67; 81.33; 183.33: one group.
    assert best_groups([wide], 24, ranks=6) == 1
    assert best_groups([narrow, wide], 24, ranks=6) == 1


def test_groups_of_different_sizes_are_refused():
    with pytest.raises(AssertionError, match="3 groups of equal size cannot be made of 64 ranks"):
        exact_hybrid_bytes(LINEAR, **SETTING, groups=3)


# -- the way into a split part, through it and out of it -------------------------------------------


def count_by_hand(in_features, out_features, minibatch, ranks, groups, is_last):
    """Count the values that rank 0 sends, one message after the other."""
    size = ranks // groups
    rows = minibatch // groups // size
    forward = backward = 0
    for _ in range(size - 1):
        forward += rows * in_features  # its samples, or as many values of its features
        backward += rows * in_features  # the partial sums of the peer's samples
        if is_last:
            forward += rows * (out_features // size)  # its features of the peer's samples
            backward += rows * (out_features // size)  # the peer's features of its samples
    share = out_features // size * in_features
    across = sum(share // groups for _ in range(groups - 1))
    return [4 * count for count in (forward, backward, across, across)]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(("ranks", "groups"), [(4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (1, 1)])
def test_a_split_layer_message_by_message(ranks, groups, is_last):
    found = exact_split_bytes(36, 72, 144, ranks=ranks, groups=groups, is_last=is_last)
    expected = count_by_hand(36, 72, 144, ranks, groups, is_last)
    assert [found.forward, found.backward, found.gradients, found.parameters] == expected
    assert found.total == sum(expected)


def test_a_split_layer_inside_the_part_sends_what_the_equations_say():
    for groups in (1, 2, 4, 8):
        found = exact_split_bytes(512, 1024, 64, ranks=8, groups=groups)
        hybrid = exact_hybrid_bytes(LayerShape(512, 1024), 64, ranks=8, groups=groups)
        assert found.forward + found.backward == pytest.approx(hybrid.inside)
        assert found.gradients + found.parameters == pytest.approx(hybrid.across)


def test_the_speech_network_on_one_group_of_four():
    """429 inputs, 7 x 2048, 9304 outputs, all split; minibatch 256."""
    widths = [429, *[2048] * 7, 9304]
    layers = list(pairwise(widths))
    shapes = [LayerShape(*pair) for pair in layers]
    assert sum(layer.num_weights for layer in shapes) == 45_099_008
    assert f"{sum(flop(layer, 1) for layer in shapes) / 1e6:.1f}" == "270.6"

    def sent(groups):
        return [
            exact_split_bytes(
                *pair,
                256,
                ranks=4,
                groups=groups,
                is_last=at == len(layers) - 1,
                needs_input_gradient=at > 0,
                has_bias=True,
            )
            for at, pair in enumerate(layers)
        ]

    first, *middle, last = sent(1)
    assert f"{first.total / 1e6:.2f}" == "0.33"  # samples in, no gradient back
    assert first.total == 4 * 256 * 429 * 3 / 4
    inside = 2 * 4 * 256 * 2048 * 3 / 4
    assert [one.total for one in middle] == [inside] * 6
    assert f"{(last.total - inside) / 1e6:.1f}" == "3.6"  # the way out
    assert f"{sum(one.total for one in sent(1)) / 1e6:.1f}" == "25.9"
    # Without groups it is data parallelism: (N - 1) / N of all parameters, twice.
    assert sum(one.total for one in sent(4)) == 2 * 4 * 45_122_648 * 3 / 4


def test_the_module_needs_no_torch():
    code = "import sys, syncline.perf.balance; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
