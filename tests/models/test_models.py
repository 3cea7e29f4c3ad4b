"""The registry of networks: what it refuses, and that it does so without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from syncline import models
from syncline.errors import ConfigError


def refusal(name, sample_shape=(3, 32, 32), classes=10, **options):
    with pytest.raises(ConfigError) as caught:
        models.build(name, sample_shape, classes, **options)
    return caught.value


def test_the_tables_list_the_same_names_in_order():
    assert list(models.MODELS) == sorted(models.MODELS) == models.names()
    assert list(models.OPTIONS) == models.names()
    assert set(models.LEAST_PX) == set(models.names()) - {"mlp", "cd-dnn"}
    assert set(models.PUBLISHED) == set(models.names()) - {"mlp", "cnn"}


def test_importing_and_checking_does_not_import_torch():
    work = (
        "import sys; from syncline import models; models.check('vgg-a', (3, 32, 32), 10, {});"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", work], check=True)


def test_a_misspelt_name_gets_the_nearest_one():
    assert str(refusal("resnt-18")) == (
        "model.name: got 'resnt-18', but there is no such model. Did you mean resnet-18?"
    )


def test_a_name_like_no_other_gets_the_whole_list():
    error = refusal("transformer")
    assert error.key == "model.name"
    assert str(error).endswith(f"Choose from {', '.join(models.names())}.")


def test_an_unknown_option_gets_the_nearest_one():
    assert str(refusal("mlp", hiden=[3])) == (
        "model.options.hiden: got [3], but mlp has no such option. Did you mean hidden?"
    )


def test_an_option_of_another_network_is_refused():
    assert refusal("resnet-18", dropout=0.5).key == "model.options.dropout"
    assert "Leave it out." in str(refusal("resnet-18", dropout=0.5))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hidden", 128),
        ("hidden", [128, 0]),
        ("hidden", [12.5]),
        ("hidden", "128"),
        ("hidden", [True]),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("dropout", "half"),
        ("dropout", True),
        ("dropout", float("nan")),
        ("batch_norm", 1),
    ],
)
def test_an_option_with_a_wrong_value_is_refused(option, value):
    error = refusal("cnn", **{option: value})
    assert error.key == f"model.options.{option}"
    assert f"got {value!r}" in str(error)


def test_every_option_has_a_rule():
    values = {"hidden": [8], "dropout": 0.5, "batch_norm": True}
    for name in models.names():
        shape = models.PUBLISHED.get(name, ((1, 28, 28), 10))[0]
        models.check(name, shape, 10, {option: values[option] for option in models.OPTIONS[name]})


def test_alexnet_at_8_px_is_told_the_least_size():
    error = refusal("alexnet", (3, 8, 8))
    assert error.key == "model.image_size"
    assert "got 8x8 px" in str(error)
    assert "Use image_size 63 or more" in str(error)


def test_the_shorter_side_decides_whether_an_image_is_too_small():
    assert refusal("vgg-a", (3, 64, 31)).key == "model.image_size"
    assert refusal("vgg-a", (3, 31, 64)).key == "model.image_size"


def test_an_image_network_refuses_flat_samples():
    error = refusal("vgg-a", (429,))
    assert error.key == "model.name"
    assert "Choose mlp or cd-dnn" in str(error)


def test_nothing_in_or_nothing_out_is_refused():
    assert refusal("mlp", ()).key == "model.sample_shape"
    assert refusal("mlp", (0,)).key == "model.sample_shape"
    assert refusal("mlp", (4,), classes=0).key == "model.classes"
