"""Checkpoints hold everything, refuse damage, and are never half written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from syncline.checkpoint import (
    Checkpoint,
    check_same_job,
    digest_of,
    is_good,
    load,
    newest,
    newest_good,
    path_of,
    save,
)
from syncline.config import job_to_toml, parse_job
from syncline.errors import CheckpointError
from syncline.files import write_atomically

JOB = """
[model]
name = "mlp"
[data]
name = "digits"
batch = 8
[optimizer]
lr = 0.1
[run]
steps = 5
"""


def make(step=3, job=JOB):
    generator = torch.Generator().manual_seed(step)
    model = {
        "a.weight": torch.randn(3, 4, generator=generator),
        "a.half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "n": torch.tensor(7),
    }
    optimizer = {
        "a.weight": {"exp_avg": torch.randn(3, 4, generator=generator), "step": torch.tensor(3.0)},
        "odd/name": {"momentum_buffer": None, "count": 4},
    }
    strategy = {"center": torch.randn(2, generator=generator)}
    return Checkpoint(step, parse_job(job).resolved(), model, optimizer, strategy)


def test_what_is_saved_is_loaded(tmp_path):
    saved = make()
    found = load(save(tmp_path, saved))
    assert found.step == 3
    assert found.job == saved.job
    assert digest_of(found.model) == digest_of(saved.model)
    assert found.optimizer["odd/name"] == {"momentum_buffer": None, "count": 4}
    assert torch.equal(
        found.optimizer["a.weight"]["exp_avg"], saved.optimizer["a.weight"]["exp_avg"]
    )
    assert torch.equal(found.strategy["center"], saved.strategy["center"])


def test_the_newest_two_are_kept(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, make(step))
    assert sorted(os.listdir(tmp_path)) == [
        "step-00000010.safetensors",
        "step-00000015.safetensors",
    ]
    assert newest(tmp_path).name == "step-00000015.safetensors"
    assert newest(tmp_path / "nowhere") is None


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_damage_is_refused_and_the_file_left_alone(tmp_path, data):
    path = save(tmp_path, make())
    whole = path.read_bytes()
    if data.draw(st.booleans(), "cut"):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    path.write_bytes(damaged)
    said = None
    try:
        found = load(path)
    except CheckpointError as error:
        said = str(error)
    assert path.read_bytes() == damaged
    if said is None:
        # A flipped bit may fall on white space in the header; the content must be what it was.
        assert digest_of(found.model) == digest_of(make().model)
    else:
        assert str(path) in said
        assert "\n" not in said


def test_a_flipped_bit_in_the_numbers_is_found(tmp_path):
    path = save(tmp_path, make())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not match its digest"):
        load(path)


def test_a_changed_step_or_setting_is_found(tmp_path):
    """The numbers are right and the file is well-formed: only the text beside them is changed."""
    path = save(tmp_path, make())
    whole = path.read_bytes()
    changes = {
        rb"\"step\":3": rb"\"step\":2",
        rb"lr = 0.1": rb"lr = 0.3",
        rb"\"count\":4": rb"\"count\":5",
    }
    for before, after in changes.items():
        assert whole.count(before) == 1
        path.write_bytes(whole.replace(before, after))
        with pytest.raises(CheckpointError, match="does not match its digest"):
            load(path)


def test_text_that_was_added_is_found(tmp_path):
    path = save(tmp_path, make())
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, path, file.metadata() | {"more": "text"})
    with pytest.raises(CheckpointError, match="does not match its digest"):
        load(path)


def save_as_version_0_1_0(folder, saved, **changes):
    """Write a file as version 0.1.0 did: the digest is that of the tensors."""
    tensors = {f"model/{name}": tensor for name, tensor in saved.model.items()}
    tensors["optimizer/a.weight/exp_avg"] = saved.optimizer["a.weight"]["exp_avg"]
    tensors["strategy/center"] = saved.strategy["center"]
    meta = {"format": 1, "step": saved.step, "job": job_to_toml(saved.job)}
    meta |= {"digest": digest_of(tensors), "plain": {"a.weight": {"count": 4}}} | changes
    path = path_of(folder, saved.step)
    save_file(tensors, path, {"syncline": json.dumps(meta)})
    return path


def test_a_checkpoint_of_version_0_1_0_is_loaded(tmp_path):
    saved = make()
    found = load(save_as_version_0_1_0(tmp_path, saved))
    assert (found.step, found.format, found.job) == (3, 1, saved.job)
    assert digest_of(found.model) == digest_of(saved.model)
    assert found.optimizer["a.weight"]["count"] == 4
    assert load(save(tmp_path, found)).format == 2


def test_a_checkpoint_of_version_0_1_0_that_cannot_be_right_is_refused(tmp_path):
    path = save_as_version_0_1_0(tmp_path, make(), step=2)
    with pytest.raises(CheckpointError, match="it says that it is of step 2"):
        load(path)
    text = JOB.replace('"mlp"', '"mlp"\nforgotten = 1')
    path = save_as_version_0_1_0(tmp_path, make(), job=text)
    with pytest.raises(CheckpointError, match=r"an older version wrote it.*model\.forgotten"):
        load(path)


def test_a_later_format_is_refused_by_its_number(tmp_path):
    path = save_as_version_0_1_0(tmp_path, make(), format=3)
    with pytest.raises(CheckpointError, match="written in format 3, but this version reads"):
        load(path)


def test_a_folder_and_a_fifo_are_no_checkpoints(tmp_path):
    save(tmp_path, make(1))
    save(tmp_path, make(2))
    fifo, folder = path_of(tmp_path, 8), path_of(tmp_path, 9)
    os.mkfifo(fifo)
    folder.mkdir()
    for path, kind in ((fifo, "a FIFO"), (folder, "a folder")):
        with pytest.raises(CheckpointError) as caught:
            load(path)
        line = f"{path}: this is {kind}, not a checkpoint. It was left alone; move it away."
        assert str(caught.value) == line
    save(tmp_path, make(3))
    left = {fifo.name, folder.name, path_of(tmp_path, 2).name, path_of(tmp_path, 3).name}
    assert set(os.listdir(tmp_path)) == left


def test_a_checkpoint_is_good_if_parameters_and_optimizer_state_are_finite():
    good = make()
    good.model["mask"] = torch.tensor([0.0, -float("inf")])  # a buffer, which may hold infinities
    assert is_good(good, ["a.weight", "a.half"])
    for values in (good.model["a.half"], good.optimizer["a.weight"]["exp_avg"]):
        kept = values.clone()
        values.view(-1)[1] = float("inf")
        assert not is_good(good, ["a.weight", "a.half"])
        values.copy_(kept)
    assert is_good(good, ["a.weight", "a.half"])


def test_the_newest_good_one_is_found_among_damaged_and_spoilt_ones(tmp_path):
    assert newest_good(tmp_path, ["a.weight"]) is None
    good = save(tmp_path, make(1))
    spoilt = make(2)
    spoilt.model["a.weight"][0] = float("nan")
    save(tmp_path, spoilt)
    save(tmp_path, make(3), spared=[good]).write_bytes(b"damaged")
    assert newest_good(tmp_path, ["a.weight"]) == good


def test_somebody_else_s_file_is_refused(tmp_path):
    path = tmp_path / "step-00000001.safetensors"
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="not a Syncline checkpoint"):
        load(path)


def test_the_way_out_names_an_older_checkpoint(tmp_path):
    save(tmp_path, make(1))
    path = save(tmp_path, make(2))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="go on from step-00000001"):
        load(path)


def test_a_checkpoint_of_another_job_is_refused_by_key(tmp_path):
    one = parse_job(JOB).resolved()
    check_same_job(tmp_path, one, parse_job(JOB, sets=["run.steps=99"]).resolved())
    for setting in ("optimizer.lr=0.2", "run.seed=1", "data.batch=16", "run.threads=2"):
        other = parse_job(JOB, sets=[setting]).resolved()
        with pytest.raises(CheckpointError, match=setting.split("=")[0]):
            check_same_job(tmp_path, one, other)


def test_a_writer_killed_at_any_time_leaves_the_old_file_or_the_new(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"0" * 100_000)
    code = (
        "import sys; from pathlib import Path; from syncline.files import write_atomically\n"
        "print('ready', flush=True)\n"
        "for i in range(10**6): write_atomically(Path(sys.argv[1]), str(i % 10).encode() * 100_000)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout.readline()
    time.sleep(0.2)
    child.kill()
    child.communicate()
    content = path.read_bytes()
    assert len(content) == 100_000
    assert len(set(content)) == 1
