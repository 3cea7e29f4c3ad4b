"""A workload: operations counted by hand, layers in order of use, files that come back."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from syncline import models, workload
from syncline.checkpoint import digest_of
from syncline.errors import ConfigError
from syncline.measure.derive import derive
from syncline.sizes import Size
from syncline.workload import Layer, LayerTimes, Reading, Workload


def size_of(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_linear_layer_counted_by_hand():
    # Forward 2 * 8 * 3 * 5; backward the gradient of the weights alone: nothing needs the input's.
    found = derive(nn.Linear(3, 5), (3,), batch=8, flops_per_s=10.0)
    sizes = (Size("weight", 0, 15, rows=5), Size("bias", 1, 5, rows=5))
    # Per sample: 2 * 3 * 5 operations; 3 numbers are read, 5 written, and the weights are apart.
    facts = {"input_bytes": 12, "output_bytes": 20, "kind": "linear", "flops": 30.0}
    layer = Layer("", 80, 24.0, 24.0, **facts, moved_bytes=32.0)
    assert found == Workload(
        *("Linear", (layer,), 0.0, sizes),
        samples=8,
        made_by="derived",
        machine={"device": "core", "flops_per_s": 10.0},
    )


def test_a_second_linear_layer_also_passes_a_gradient_on():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    found = derive(model, (3,), batch=8, flops_per_s=1.0, input_s=0.5, name="two")
    assert (found.name, found.input_s) == ("two", 0.5)
    first = {"input_bytes": 12, "output_bytes": 20, "kind": "linear", "flops": 30.0}
    second = {"input_bytes": 20, "output_bytes": 8, "kind": "linear", "flops": 20.0}
    assert found.layers == (
        Layer("0", 80, 240.0, 240.0, **first, moved_bytes=32.0 + 40.0),  # ReLU reads and writes
        Layer("2", 48, 160.0, 320.0, **second, moved_bytes=28.0),
    )
    assert [size.follows for size in found.parameters] == ["", "", "0", "0"]
    assert [size.name for size in found.sizes()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert (found.forward_s, found.backward_s, found.size_bytes) == (400.0, 560.0, 128)


def test_a_convolution_counted_by_hand():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 2, 1, bias=False))
    found = derive(model, (3, 10, 10), batch=2, flops_per_s=1.0)
    first = 2 * (2 * 8 * 8) * 4 * (3 * 3 * 3)
    second = 2 * (2 * 8 * 8) * 2 * 4
    both = {"kind": "conv"}
    bytes_ = (
        {"input_bytes": 1200, "output_bytes": 1024},
        {"input_bytes": 1024, "output_bytes": 512},
    )
    facts = (
        {**both, **bytes_[0], "flops": first / 2, "moved_bytes": 2224.0},
        {**both, **bytes_[1], "flops": second / 2, "moved_bytes": 1536.0},
    )
    assert found.layers == (
        Layer("0", 4 * 4 * 27, first, first, **facts[0]),
        Layer("1", 4 * 8, second, 2 * second, **facts[1]),
    )


def test_what_has_no_parameters_belongs_to_the_layer_before_it():
    class Attends(nn.Module):
        def forward(self, x):
            return x @ x.transpose(1, 2)

    model = nn.Sequential(Attends(), nn.Linear(4, 4), Attends(), nn.Linear(4, 1))
    found = derive(model, (4, 4), batch=1, flops_per_s=1.0)
    product, linear = 2 * 4 * 4 * 4, 2 * 4 * 4 * 4
    assert [layer.forward_s for layer in found.layers] == [
        product + linear + product,  # nothing is before the first, so it is the first layer's too
        2 * 4 * 4 * 1,
    ]


def test_layers_stand_in_the_order_of_their_first_use_and_what_is_not_used_at_the_end():
    class Crooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(7, 7)
            self.last = nn.Linear(4, 4)
            self.first = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = self.first(x)
            x = self.last(x) * self.scale
            return self.first(x)

    found = derive(Crooked(), (4,), batch=3, flops_per_s=1.0)
    assert [(layer.name, layer.size_bytes) for layer in found.layers] == [
        ("", 16),  # it is entered before what is inside it
        ("first", 80),
        ("last", 80),
        ("unused", 224),
    ]
    once = 2 * 3 * 4 * 4
    # The second use of `first` passes after `last` has begun.
    assert [layer.forward_s for layer in found.layers] == [0, once, 2 * once, 0]
    assert found.layers[-1].backward_s == 0


def test_parameters_used_without_calling_their_module_are_seen():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = attention

        def forward(self, x):
            return self.inner(x, x, x)[0]

    found = derive(Own(), (5, 8), batch=2, flops_per_s=1.0)
    assert [layer.name for layer in found.layers] == ["inner", "inner.out_proj"]
    assert found.layers[1].forward_s == 2 * (2 * 5) * 8 * 8


def test_tied_weights_are_counted_once_where_they_are_used_first():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.decode = nn.Linear(4, 6)
            self.encode = nn.Linear(6, 4, bias=False)
            self.encode.weight = nn.Parameter(torch.zeros(4, 6))
            self.decode.weight = nn.Parameter(torch.zeros(6, 4))
            self.again = nn.Linear(6, 4, bias=False)
            self.again.weight = self.encode.weight

        def forward(self, x):
            return self.again(self.decode(self.encode(x)))

    model = Tied()
    found = derive(model, (6,), batch=1, flops_per_s=1.0)
    assert [(layer.name, layer.size_bytes, layer.forward_s) for layer in found.layers] == [
        ("encode", 96, 48),
        ("decode", 96 + 24, 48),
        ("again", 0, 48),
    ]
    assert found.size_bytes == size_of(model)
    # The sum over both uses is there when the first use's backward is done.
    assert [layer.backward_s for layer in found.layers] == [48, 96 + 96, 0]


def test_frozen_layers_leave_their_work_to_the_layer_whose_gradient_comes_next():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    found = derive(model, (4,), batch=1, flops_per_s=1.0)
    assert [layer.backward_s for layer in found.layers] == [32 + 32, 0]
    assert found.size_bytes == size_of(model[0])  # what is frozen is not exchanged
    assert [size.name for size in found.sizes()] == ["0.weight", "0.bias"]


def test_backward_takes_twice_the_time_where_it_cannot_be_run():
    class Blind(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    (found,) = derive(Blind(3, 5), (3,), 8, 1.0).layers
    assert (found.forward_s, found.backward_s) == (240.0, 480.0)


@pytest.mark.parametrize("name", models.names())
def test_every_network_can_be_derived(name):
    size = models.LEAST_PX.get(name, 8)
    shape = (3, max(size, 8), max(size, 8)) if name in models.LEAST_PX else (64,)
    with torch.device("meta"):
        model = models.build(name, shape, 10)
    found = derive(model, shape, batch=2, flops_per_s=1e9, name=name)
    assert found.size_bytes == size_of(model)
    assert found.forward_s > 0
    # All but the first layer have two products in backward for one in forward.
    assert found.forward_s < found.backward_s <= 2 * found.forward_s
    owners = [n for n, m in model.named_modules() if list(m.parameters(recurse=False))]
    assert [layer.name for layer in found.layers] == owners


def test_the_model_is_not_touched():
    model = models.build("cnn", (1, 8, 8), 10, batch_norm=True).eval()
    before, twin = digest_of(model.state_dict()), copy.deepcopy(model)
    generator = torch.get_rng_state()
    derive(model, (1, 8, 8), batch=2, flops_per_s=1e9)
    assert digest_of(model.state_dict()) == before
    assert not model.training
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    x = torch.ones(1, 1, 8, 8)
    assert torch.equal(model(x), twin(x))


def test_a_model_that_needs_values_is_refused_with_a_way_out():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else functional.relu(x)

    with pytest.raises(ConfigError, match=r"^model: forward fails without data .* measure the"):
        derive(Looks(3, 3), (3,), 1, 1.0)


# -- files -----------------------------------------------------------------------------------------


def test_a_workload_comes_back_from_its_file(tmp_path):
    layers = (
        Layer("a", 3, 0.1, 1e-9),
        Layer("b", 0, 0.0, 1e300, (LayerTimes(4, 0.5, 1.0, 0.1),), 128, 0, 0.05, "conv", 2.5, 3.0),
    )
    saved = Workload(
        *("x", layers, 0.25, (Size("a", 0, 3),), 1, 2),
        samples=8,
        update_s=0.5,
        update_spread=0.1,
        reads=(Reading(8, 0.25, 0.2), Reading(4, 0.125)),
        spread=0.03,
        made_by="measured",
        machine={"processor": "x", "cores": 2, "share": 0.5, "is_shared": True},
    )
    workload.write(saved, tmp_path / "x.json")
    assert workload.read(tmp_path / "x.json") == saved
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("version", [1, 2])
def test_fields_that_both_versions_have_mean_the_same_in_both(tmp_path, version):
    path = tmp_path / "x.json"
    path.write_text(f'{{{HEAD.replace("1", str(version))}"samples": 8, "layers": [{ONE}}}]}}')
    assert workload.read(path) == Workload("x", (Layer("a", 4, 1.0, 2.0),), samples=8)


HEAD = '"format": "syncline-workload", "version": 1, "name": "x", '
HEAD_2 = HEAD.replace("1", "2")
ONE = '{"name": "a", "size_bytes": 4, "forward_s": 1, "backward_s": 2'
PARAMETER = '"parameters": [{"name": "w", "number": 0, "num_elements": 1'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "Input data was truncated"),
        ("{", "Input data was truncated"),
        ("[]", "it holds no JSON object"),
        ('{"name": "x", "layers": []}', "it says no format"),
        ('{"format": "trace", "version": 1}', "its format is 'trace'"),
        ('{"format": "syncline-workload"}', "it says no version"),
        ('{"format": "syncline-workload", "version": true}', "it says no version"),
        (
            '{"format": "syncline-workload", "version": 3, "depths": 3}',
            "its version is 3, of a newer Syncline",
        ),
        ('{"format": "syncline-workload", "version": 1, "name": "x"}', "missing required field"),
        (f'{{{HEAD}"layers": []}}', "it has no layers"),
        (f'{{{HEAD}"layers": [], "nodes": 3}}', "unknown field `nodes`"),
        (
            f'{{{HEAD}"layers": [{ONE.replace("4", "-1")}}}]}}',
            "Expected `int` >= 0 - at `$.layers[0].size_bytes`",
        ),
        (f'{{{HEAD}"layers": [{ONE.replace("1", "NaN")}}}]}}', "malformed"),
        (f'{{{HEAD}"layers": [{ONE.replace("1", "1e308").replace("2", "1e308")}}}]}}', "no finite"),
        (
            f'{{{HEAD}"samples": 8, "layers": [{ONE}, "times": '
            '[{"samples": 8, "forward_s": 1, "backward_s": 1}]}]}',
            "layer 'a' has two times for one number of samples",
        ),
        (
            f'{{{HEAD}"layers": [{ONE}}}], {PARAMETER}, "dtype": "float99"}}]}}',
            "parameter 'w' has elements of type 'float99' of 4 bytes",
        ),
        (
            f'{{{HEAD}"layers": [{ONE}}}], {PARAMETER.replace(": 1", ": 0")}}}]}}',
            "parameter 'w' has 0 elements",
        ),
        (
            f'{{{HEAD}"layers": [{ONE}}}], {PARAMETER.replace(": 0", ": 1")}}}]}}',
            "numbers do not count from 0",
        ),
        (f'{{{HEAD}"update_s": 1, "layers": [{ONE}}}]}}', "no field `update_s`: version 2 has it"),
        (f'{{{HEAD}"layers": [{ONE}, "kind": "conv"}}]}}', "no field `kind`: version 2 has it"),
        (
            f'{{{HEAD}"layers": [{ONE}, "times": [{{"samples": 4, "spread": 1}}]}}]}}',
            "no field `spread`: version 2 has it",
        ),
        (f'{{{HEAD}"layers": {{"kind": 3}}}}', "Expected `array`, got `object`"),
        (f'{{{HEAD_2}"layers": [{ONE}, "kind": "convolution"}}]}}', "Invalid enum value"),
        (f'{{{HEAD_2}"layers": [{ONE}, "flops": -1}}]}}', "Expected `float` >= 0"),
        (f'{{{HEAD_2}"machine": {{"cores": null}}, "layers": [{ONE}}}]}}', "got `null`"),
        (
            f'{{{HEAD_2}"reads": [{{"samples": 4, "read_s": 1}}], "layers": [{ONE}}}]}}',
            "it has reads, and does not say for how many samples its times are",
        ),
        (
            f'{{{HEAD_2}"samples": 8, "reads": [{{"samples": 4, "read_s": 1}}], '
            f'"layers": [{ONE}}}]}}',
            "it has no read of 8 samples",
        ),
        (
            f'{{{HEAD_2}"samples": 4, "reads": [{{"samples": 4, "read_s": 1}}, '
            f'{{"samples": 4, "read_s": 2}}], "layers": [{ONE}}}]}}',
            "it has two reads of one number of samples",
        ),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_file_that_holds_no_workload_is_refused(tmp_path, text, found):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        workload.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(no such file or directory\)"):
        workload.read(tmp_path / "nowhere.json")


def test_a_workload_is_read_without_torch():
    code = "import sys, syncline.workload; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_times_between_two_batch_sizes_are_interpolated_and_no_others_are_made_up():
    layer = Layer("a", 4, 8.0, 16.0, (LayerTimes(32, 20.0, 28.0),))
    known = Workload("x", (layer,), 4.0, samples=8)
    assert known.for_samples(8) is known
    between = known.for_samples(16)
    assert (between.forward_s, between.backward_s) == (12.0, 20.0)
    assert (between.input_s, between.samples) == (8.0, 16)
    assert known.for_samples(32).forward_s == 20.0
    for samples in (4, 33):
        with pytest.raises(ValueError, match=r"layer 'a' has times for 8, 32 samples"):
            known.for_samples(samples)
    with pytest.raises(ValueError, match="does not say for how many samples"):
        Workload("x", (layer,)).for_samples(8)


def test_what_was_known_of_other_batch_sizes_stays_known_and_is_written(tmp_path):
    times = (LayerTimes(32, 20.0, 28.0, 0.3), LayerTimes(2, 4.0, 6.0))
    layer = Layer("a", 4, 8.0, 16.0, times, spread=0.1)
    reads = (Reading(2, 1.0), Reading(32, 4.0), Reading(8, 2.5))
    known = Workload("x", (layer,), samples=8, reads=reads)
    for samples, forward_s, spread, read_s in ((20, 14.0, 0.2, 3.25), (2, 4.0, None, 1.0)):
        found = known.for_samples(samples)
        assert (found.layers[0].forward_s, found.layers[0].spread) == (forward_s, spread)
        assert found.read_of(found.samples) == read_s
        assert found.shard_input_s(shards=3) == read_s  # of one shard, however many a rank has
        workload.write(found, tmp_path / "x.json")
        again = workload.read(tmp_path / "x.json")
        assert again == found
        assert again.for_samples(8).forward_s == 8.0
    short = Workload("x", (layer,), samples=8, reads=reads[1:])
    with pytest.raises(ValueError, match="it has reads of 8, 32 samples"):
        short.for_samples(4)
    assert Workload("x", (layer,), 6.0, samples=8).shard_input_s(shards=3) == 2.0


def test_the_rate_of_updates_follows_from_the_seconds_of_an_update():
    sizes = (Size("w", 0, 100), Size("unused", 1, 900, is_used=False))
    found = Workload("x", (Layer("a", 4000, 1.0, 2.0),), parameters=sizes, update_s=0.5)
    assert found.update_bytes_per_s(otherwise=7.0) == 800.0
    assert Workload("x", found.layers, update_s=0.0).update_bytes_per_s(7.0) == float("inf")
    assert Workload("x", found.layers).update_bytes_per_s(otherwise=7.0) == 7.0
