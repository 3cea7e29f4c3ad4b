"""The networks themselves: sizes as published, and promises that all of them keep.

Large networks are built on the meta device: shapes without memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline import models

every_network = pytest.mark.parametrize("name", models.names())


def published(name, **options):
    """Build a network of its paper's size without memory, and a batch of two for it."""
    shape, classes = models.PUBLISHED.get(name, ((1, 28, 28), 10))
    with torch.device("meta"):
        return models.build(name, shape, classes, **options), torch.empty(2, *shape)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def layers_with_weights(model):
    kinds = (nn.Conv2d, nn.Linear)
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}


def map_sizes(model, batch):
    """Run the model and give the height of what each convolution puts out."""
    sizes, layers = {}, layers_with_weights(model)
    for name, layer in layers.items():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(
                lambda module, inputs, output, name=name: sizes.update({name: output.shape[2]})
            )
    model(batch)
    return sizes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("alexnet", 61_100_840),
        ("cd-dnn", 45_122_648),
        ("cnn", 824_554),
        ("googlenet", 6_998_552),
        ("mlp", 784 * 128 + 128 + 128 * 10 + 10),
        ("overfeat-fast", 145_909_792 + 96 + 256 + 512 + 1024 + 1024 + 3072 + 4096 + 1000),
        ("resnet-18", 11_689_512),
        ("resnet-20", 269_722),
        ("resnet-50", 25_557_032),
        ("vgg-a", 132_851_392 + 64 + 128 + 2 * 256 + 4 * 512 + 2 * 4096 + 1000),
    ],
)
def test_parameters_are_as_many_as_published(name, parameters):
    assert count(published(name)[0]) == parameters


def test_vgg_a_is_the_table():
    model, batch = published("vgg-a")
    assert {name: layer.weight.numel() for name, layer in layers_with_weights(model).items()} == {
        "c1": 1_728,
        "c2": 73_728,
        "c3": 294_912,
        "c4": 589_824,
        "c5": 1_179_648,
        "c6": 2_359_296,
        "c7": 2_359_296,
        "c8": 2_359_296,
        "f1": 102_760_448,
        "f2": 16_777_216,
        "f3": 4_096_000,
    }
    assert list(map_sizes(model, batch).values()) == [224, 112, 56, 56, 28, 28, 14, 14]


def test_overfeat_fast_is_the_table():
    model, batch = published("overfeat-fast")
    assert {name: layer.weight.numel() for name, layer in layers_with_weights(model).items()} == {
        "c1": 34_848,
        "c2": 614_400,
        "c3": 1_179_648,
        "c4": 4_718_592,
        "c5": 9_437_184,
        "f6": 113_246_208,
        "f7": 12_582_912,
        "f8": 4_096_000,
    }
    assert list(map_sizes(model, batch).values()) == [56, 24, 12, 12, 12]


def test_cd_dnn_is_seven_sigmoid_layers_of_2048():
    model, _ = published("cd-dnn")
    shapes = [tuple(layer.weight.shape) for layer in layers_with_weights(model).values()]
    assert shapes == [(2048, 429), *[(2048, 2048)] * 6, (9304, 2048)]
    assert sum(isinstance(layer, nn.Sigmoid) for layer in model) == 7


def test_alexnet_maps_shrink_as_published():
    assert list(map_sizes(*published("alexnet")).values()) == [55, 27, 13, 13, 13]


def test_googlenet_is_szegedys_table():
    # Weights and biases of each part by hand, e.g. 3a: 192*64+64 + 192*96+96 + 96*128*9+128
    # + 192*16+16 + 16*32*25+32 + 192*32+32.
    model, batch = published("googlenet")
    assert {name: count(part) for name, part in model.named_children() if count(part)} == {
        "conv1": 9_472,
        "conv2_reduce": 4_160,
        "conv2": 110_784,
        "inception_3a": 163_696,
        "inception_3b": 388_736,
        "inception_4a": 376_176,
        "inception_4b": 449_160,
        "inception_4c": 510_104,
        "inception_4d": 605_376,
        "inception_4e": 868_352,
        "inception_5a": 1_043_456,
        "inception_5b": 1_444_080,
        "fc": 1_025_000,
    }
    sizes = map_sizes(model, batch)
    assert sizes["conv1.0"] == 112
    assert sizes["conv2.0"] == 56
    assert [sizes[f"inception_{name}.one.0"] for name in ("3a", "4a", "5a")] == [28, 14, 7]


@pytest.mark.parametrize(("name", "depth"), [("resnet-18", 18), ("resnet-20", 20)])
def test_a_resnet_has_as_many_layers_as_its_name_says(name, depth):
    layers = layers_with_weights(published(name)[0])
    assert sum("shortcut" not in layer for layer in layers) == depth


def test_resnet_50_strides_as_in_the_paper():
    model, batch = published("resnet-50")
    layers = layers_with_weights(model)
    assert sum("shortcut" not in name for name in layers) == 50
    sizes = map_sizes(model, batch)
    assert [sizes[f"stage{stage}.0.body.0"] for stage in (1, 2, 3, 4)] == [56, 28, 14, 7]


@pytest.mark.parametrize("name", ["resnet-18", "resnet-50"])
def test_small_images_keep_their_size_through_the_stem(name):
    heights = {}
    for size in (64, 65):
        with torch.device("meta"):
            model = models.build(name, (3, size, size), 10)
            heights[size] = model.stem(torch.empty(1, 3, size, size)).shape[2]
    assert heights == {64: 64, 65: 17}


def test_a_padded_shortcut_keeps_every_other_pixel_and_adds_empty_channels():
    from syncline.models.resnet import PaddedShortcut

    x = torch.arange(32.0).reshape(1, 2, 4, 4)
    y = PaddedShortcut(3)(x)
    assert y.shape == (1, 5, 2, 2)
    assert y[0, 1].tolist() == [[16, 18], [24, 26]]
    assert not y[0, 2:].any()


@every_network
def test_layers_are_registered_in_the_order_of_use_and_all_are_used(name):
    model, batch = published(name)
    leaves = {key: part for key, part in model.named_modules() if not list(part.children())}
    used = []
    for key, part in leaves.items():
        part.register_forward_hook(lambda module, inputs, output, key=key: used.append(key))
    model(batch)
    assert used == list(leaves)


@every_network
def test_every_parameter_gets_a_gradient(name):
    model, batch = published(name)
    output = model(batch)
    assert output.shape == (2, models.PUBLISHED.get(name, (None, 10))[1])
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@every_network
def test_it_can_be_traced(name):
    model, batch = published(name)
    traced = torch.fx.symbolic_trace(model)
    assert traced(batch).shape == model(batch).shape


@every_network
def test_full_backward_hooks_are_welcome(name):
    # They refuse a module that is followed by one working in place.
    model, batch = published(name)
    fired = set()
    for key, part in model.named_modules():
        part.register_full_backward_hook(lambda *_, key=key: fired.add(key))
    model(batch.requires_grad_()).sum().backward()
    assert "" in fired


@pytest.mark.parametrize("name", sorted(models.LEAST_PX))
def test_the_least_size_works(name):
    least = models.LEAST_PX[name]
    with torch.device("meta"):
        for shape in [(3, least, least), (1, least, 2 * least + 1), (1, least + 1, least)]:
            model = models.build(name, shape, 7)
            assert model(torch.empty(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", sorted(name for name, px in models.LEAST_PX.items() if px > 1))
def test_below_the_least_size_nothing_works(name, monkeypatch):
    size = models.LEAST_PX[name] - 1
    monkeypatch.setitem(models.LEAST_PX, name, 1)
    # Torch warns when a layer has no weights to initialise, and fails when a pooling has no room.
    with torch.device("meta"), pytest.raises((RuntimeError, UserWarning)):
        models.build(name, (3, size, size), 7)(torch.empty(2, 3, size, size))


def test_the_head_shrinks_with_the_image():
    with torch.device("meta"):
        assert models.build("vgg-a", (3, 32, 32), 10).f1.in_features == 512
        assert models.build("vgg-a", (3, 64, 32), 10).f1.in_features == 1024
        assert models.build("overfeat-fast", (3, 71, 71), 10).f6.in_features == 1024
        assert models.build("alexnet", (1, 63, 63), 10).f6.in_features == 256
        assert models.build("cnn", (1, 8, 8), 10).f1.in_features == 256


@pytest.mark.parametrize("name", sorted(n for n, o in models.OPTIONS.items() if "hidden" in o))
def test_hidden_sets_the_widths_of_the_fully_connected_layers(name):
    model, _ = published(name, hidden=[5, 6, 7])
    widths = [part.out_features for part in model.modules() if isinstance(part, nn.Linear)]
    assert widths == [5, 6, 7, models.PUBLISHED.get(name, (None, 10))[1]]


def test_a_layer_before_batch_norm_has_no_bias():
    assert published("mlp", batch_norm=True)[0].f1.bias is None
    assert published("mlp")[0].f1.bias is not None
    assert published("cnn")[0].c1.bias is None
    assert published("cnn", batch_norm=False)[0].c1.bias is not None


def test_no_hidden_layer_is_softmax_regression():
    assert count(published("mlp", hidden=[])[0]) == 7850


@pytest.mark.parametrize(
    ("name", "chance", "times"),
    [("alexnet", 0.5, 2), ("cnn", 0.25, 1), ("googlenet", 0.4, 1)],
)
def test_dropout_is_on_where_the_original_has_it(name, chance, times):
    dropouts = [part.p for part in published(name)[0].modules() if isinstance(part, nn.Dropout)]
    assert dropouts == [chance] * times


@pytest.mark.parametrize("name", sorted(n for n, o in models.OPTIONS.items() if "dropout" in o))
def test_dropout_can_be_set_and_switched_off(name):
    def chances(**options):
        parts = published(name, **options)[0].modules()
        return {part.p for part in parts if isinstance(part, nn.Dropout)}

    assert chances(dropout=0.3) == {0.3}
    assert chances(dropout=0) == set()


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_batch_norm_can_be_chosen(name):
    def norms(**options):
        parts = published(name, **options)[0].modules()
        return sum(isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) for part in parts)

    assert norms(batch_norm=True) > 0
    assert norms(batch_norm=False) == 0


SMALL = [
    ("alexnet", (3, 63, 63), {"hidden": [64, 64], "dropout": 0.0}),
    ("cd-dnn", (429,), {"hidden": [128] * 7}),
    ("cnn", (1, 8, 8), {}),
    ("googlenet", (3, 32, 32), {"dropout": 0.0}),
    ("mlp", (1, 8, 8), {}),
    ("overfeat-fast", (3, 71, 71), {"hidden": [64, 64]}),
    ("resnet-20", (3, 16, 16), {}),
    ("vgg-a", (3, 32, 32), {"hidden": [64, 64]}),
]


@pytest.mark.parametrize(("name", "shape", "options"), SMALL)
def test_an_untrained_network_tells_samples_apart_without_being_sure_of_itself(
    name, shape, options
):
    # With torch's default weights, the deep networks without batch norm put out the same for
    # every sample, to three digits or more, and do not start to learn.
    torch.manual_seed(0)
    model = models.build(name, shape, 10, **options)
    with torch.no_grad():
        output = model(torch.randn(8, *shape))
    assert 0.03 < output.std(dim=0).mean().item() < 3
    # Averaged over all labels; guessing costs log 10 = 2.3. With He's weights in the
    # last layer too, some networks start far worse.
    labels = torch.arange(10).repeat_interleave(8)
    assert nn.functional.cross_entropy(output.repeat(10, 1), labels).item() < 3.5


def test_weights_come_from_torchs_global_generator():
    def weights(seed):
        torch.manual_seed(seed)
        return models.build("vgg-a", (3, 32, 32), 10, hidden=[8]).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["c1.weight"], other["c1.weight"])


def test_cd_dnn_starts_as_a_tanh_network():
    torch.manual_seed(0)
    model = models.build("cd-dnn", (6,), 3, hidden=[5, 4])
    x = torch.randn(7, 6)
    plain = torch.tanh(x @ (model.f1.weight / 2).T)
    plain = torch.tanh(plain @ (model.f2.weight / 4).T)
    torch.testing.assert_close(model[:-1](x), (1 + plain) / 2)


def test_cd_dnn_learns_without_training_layer_by_layer():
    torch.manual_seed(0)
    model = models.build("cd-dnn", (16,), 4, hidden=[32] * 7)
    x, y = torch.randn(4, 16), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
