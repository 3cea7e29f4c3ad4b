"""A rank's batches read in line, by a thread and by processes: bits, waiting, order, failures."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from data_files import write_image
from own_code import POINTS, write_job
from patience import one_of_three
from ranks import RankError
from syncline.comm.alone import Alone
from syncline.config import read_job
from syncline.data import folder
from syncline.engine.lane import Lane
from syncline.errors import SynclineError
from syncline.input import Input
from syncline.launch.env import read_world
from training import ranks_of, start_training, train_forked

pytestmark = pytest.mark.processes

IMAGES = """
import os
import time
import numpy as np
import torch
from torch import nn
from syncline.data import folder
from syncline.models.sleeping import Sleeper, SleepingLayer


class SlowDisk:
    # Images of a folder, whose disk takes its time for every batch.
    def __init__(self, images, wait_s, log):
        self.images, self.wait_s, self.log = images, wait_s, log

    def __len__(self):
        return len(self.images)

    def __getitems__(self, rows):
        time.sleep(self.wait_s)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()} {rows}\\n")
        samples, labels = self.images.batch(np.array(rows))
        return [(torch.from_numpy(one), int(label)) for one, label in zip(samples, labels)]

    def __getitem__(self, row):
        return self.__getitems__([row])[0]


def images(path="images", wait_s=0.0, log=""):
    return SlowDisk(folder.load(path=path, image_size=8).train, wait_s, log), None


def make(forward_s=0.0, backward_s=0.0):
    layer = SleepingLayer(4, forward_s, backward_s)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(192, 2), Sleeper(layer))
"""

IN_LINE = ("data.prefetch=0",)
THREAD = ("data.prefetch=2",)


def workers(number, prefetch="auto"):
    return (f"data.workers={number}", f"data.prefetch={prefetch}")


@pytest.fixture
def images(own, tmp_path):
    """A job on a folder of 16 images; the name of its module is in the job."""
    for number in range(16):
        write_image(tmp_path / f"images/train/{number % 2}/{number}.png", seed=number)
    name = own(IMAGES)
    job = Path("images.toml")
    job.write_text(f"""
model = {{ name = "{name}:make" }}
data = {{ name = "{name}:images", batch = 8 }}
optimizer = {{ lr = 0.1, momentum = 0.9 }}
strategy = {{ shards = 2 }}
run = {{ steps = 6 }}
""")
    return job


BUILT_IN = ("data.name=folder", "data.path=images", "data.image_size=8")

_outs = itertools.count()


def trained(job, *sets, **options):
    return train_forked(job, Path(f"run-{next(_outs)}").resolve(), *sets, **options)


# The same bits.


def test_a_folder_has_one_hash_in_line_by_a_thread_and_by_any_number_of_workers(images):
    ways = [IN_LINE, THREAD, ("data.prefetch=7",), workers(1), workers(2, 5), workers(4)]
    found = [trained(images, *BUILT_IN, *way) for way in ways]
    found += [trained(images, *BUILT_IN, *way, ranks=2) for way in (THREAD, workers(2))]
    assert len({one["weights_sha256"] for one in found}) == 1


def test_data_and_models_that_draw_have_one_hash_with_any_number_of_workers(own):
    job = write_job(own(POINTS), "points")
    ways = [IN_LINE, workers(1), workers(2), workers(4)]
    found = [trained(job, *way, "model.loss=mse") for way in ways]
    found += [trained(job, *way, "model.loss=mse", ranks=2) for way in (IN_LINE, workers(2))]
    assert len({one["weights_sha256"] for one in found}) == 1
    assert len({one["loss"] for one in found}) == 1


@pytest.mark.parametrize("sets", [BUILT_IN, ()], ids=["folder", "own"])
def test_a_run_that_resumes_reads_from_its_step_on_with_any_number_of_workers(images, sets):
    whole = trained(images, *sets, *IN_LINE)
    first = THREAD if sets else workers(1)
    for number, after in enumerate([workers(2), IN_LINE]):
        out = Path(f"halves-{number}").resolve()
        half = train_forked(images, out, *sets, *first, "run.steps=3")
        assert half["weights_sha256"] != whole["weights_sha256"]
        again = train_forked(images, out, *sets, *after, resume=True, ranks=2)
        assert again["resumed_at"] == 3
        assert again["weights_sha256"] == whole["weights_sha256"]


PARALLEL = """
import torch
from torch import nn


class Means:
    # Each sample is the mean of many numbers: how they are summed depends on the threads.
    def __init__(self):
        self.numbers = torch.randn(8, 400_000)
        self.numbers -= self.numbers.mean()

    def __len__(self):
        return 8

    def __getitem__(self, row):
        return self.numbers[row].mean().reshape(1) * 1e3, torch.zeros(1)


def load():
    return Means(), None


def make():
    return nn.Linear(1, 1)
"""


def test_a_function_that_computes_with_several_threads_neither_hangs_nor_changes(own):
    job = write_job(own(PARALLEL), "load")
    sets = ("data.batch=4", "model.loss=mse", "optimizer.lr=0.001", "run.threads=2")
    found = [trained(job, *sets, *way) for way in (IN_LINE, workers(1))]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


STRIDED = """
import torch
from torch import nn


def load():
    inputs = torch.randn(8, 4, 6, 3).permute(0, 3, 1, 2)
    return (inputs, torch.arange(8).to(torch.int32).long() % 2), None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(72, 2)

    def forward(self, x):
        with open("layouts", "a") as file:
            file.write(f"{x.stride()} {x.dtype} {x.data_ptr() % 64}\\n")
        return self.line(x.flatten(1))


def make():
    return Net()
"""


def test_a_batch_has_the_memory_layout_it_was_made_with(own):
    job = write_job(own(STRIDED), "load")
    for way in (IN_LINE, workers(1)):
        trained(job, "data.batch=8", "strategy.shards=1", "run.steps=1", *way)
    first, second = Path("layouts").read_text().splitlines()
    assert first == second == "(72, 1, 18, 3) torch.float32 0"


# Waiting.

SLOW = ("data.options.wait_s=0.02", "model.options.forward_s=0.04", "model.options.backward_s=0.04")
STEP_S = 2 * (0.04 + 0.04)
WAIT_S = 2 * 0.02


def metrics(found):
    lines = Path(found["run_folder"], "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_in_line_a_rank_waits_as_long_as_reading_takes(images):
    found = trained(images, *SLOW, *IN_LINE)
    assert found["input_wait_s"] >= WAIT_S
    assert found["exposed_input"] >= 0.8 * WAIT_S / (STEP_S + WAIT_S)
    assert found["step_s"] >= STEP_S + WAIT_S
    assert all(line["input_wait_s"] >= WAIT_S for line in metrics(found))
    assert metrics(found)[-1]["exposed_input"] == round(found["exposed_input"], 5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_processes_hide_a_slow_disk_behind_compute(images, ranks):
    one_of_three(
        lambda: trained(images, *SLOW, *workers(1), "run.steps=12", ranks=ranks),
        lambda found: (
            found["exposed_input"] < 0.05 and found["input_wait_s"] < 0.05 * STEP_S / ranks
        ),
    )


def test_a_thread_hides_a_slow_disk_behind_compute(images, monkeypatch):
    read = folder._read

    def slow(file, size):
        time.sleep(0.005)  # there are four images in a shard
        return read(file, size)

    monkeypatch.setattr(folder, "_read", slow)
    sets = (*BUILT_IN, *SLOW[1:], "run.steps=12")
    assert read_job(images, sets).resolved().data.prefetch == 2, "the default for files"
    found = one_of_three(
        lambda: trained(images, *sets), lambda found: found["exposed_input"] < 0.05
    )
    in_line = trained(images, *sets, *IN_LINE)
    assert in_line["input_wait_s"] >= WAIT_S
    assert in_line["weights_sha256"] == found["weights_sha256"]


# At most so many batches ahead.


@pytest.mark.parametrize("way", [IN_LINE, THREAD, workers(1, 1), workers(2, 3)])
def test_no_more_batches_are_read_than_may_wait(images, way, monkeypatch):
    log = Path("log").resolve()
    sets = [*way, f"data.options.log={log}"]
    if way == THREAD:
        sets = [*BUILT_IN, *way]
        read = folder.ImageFiles.batch

        def logged(self, rows):
            with log.open("a") as file:
                file.write(f"{os.getpid()} {rows}\n")
            return read(self, rows)

        monkeypatch.setattr(folder.ImageFiles, "batch", logged)
    job = read_job(images, sets).resolved(1)
    places = [(step, shard) for step in (3, 4, 5) for shard in (0, 1)]

    def num_read():
        # Not the samples that are read to see whether data is the same.
        return sum(line.count(" ") > 3 for line in log.read_text().splitlines())

    log.touch()
    with Input(job, read_world()) as batches:
        lane = Lane()
        batches.check_data(Alone(), lane)
        lane.close()
        batches.begin(iter(places))
        for taken, place in enumerate(places):
            most = min(taken + job.data.prefetch, len(places))
            deadline = time.monotonic() + 10.0
            while num_read() < most and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)
            assert num_read() == most
            batches.take(*place)
        assert num_read() == len(places)


# Failures.

BROKEN = """
import os
import signal
import torch
from torch import nn


class Oddity(Exception):
    pass


class Broken:
    def __init__(self, how):
        self.how = how
        self.rank = os.getppid() if how == "dies" else 0

    def __len__(self):
        return 16

    def __getitem__(self, row):
        if row == 13:
            if self.how == "value":
                raise ValueError("sample 13 is bad")
            if self.how == "own":
                raise Oddity("sample 13 is odd")
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3), torch.zeros(1)


def load(how="value"):
    return Broken(how), None


def elsewhere():
    # What every process draws for itself, from a generator that nobody seeds.
    return (torch.full((16, 3), float(os.getpid())), torch.zeros(16, 1)), None


def make():
    return nn.Linear(3, 1)
"""


def steps_before_sample_13(job):
    from syncline.recipe import Order, load_data

    resolved = read_job(job, ["data.batch=2", "strategy.shards=1"]).resolved(1)
    order = Order(resolved, load_data(resolved))
    return next(step for step in range(16) if 13 in order.indices(step, 0))


@pytest.mark.parametrize("way", [IN_LINE, workers(1), workers(2, 5)])
def test_an_error_in_the_data_is_raised_at_its_step_with_its_traceback(own, way):
    module = own(BROKEN)
    job = write_job(module, "load")
    sets = ("data.batch=2", "strategy.shards=1", "model.loss=mse", "run.steps=8", *way)
    out = Path("broken").resolve()
    with pytest.raises(RankError) as caught:
        train_forked(job, out, *sets)
    text = str(caught.value)
    assert "ValueError: sample 13 is bad" in text.splitlines()[-1]
    assert f'{module}.py", line 23, in __getitem__' in text
    before = steps_before_sample_13(job)
    lines = (out / "metrics.jsonl").read_text().splitlines() if before > 1 else []
    assert len(lines) == max(0, before - 1), "a step is reported during the next"


def test_an_error_of_a_type_of_the_users_own_keeps_its_name(own):
    job = write_job(own(BROKEN), "load", "[data.options]", 'how = "own"')
    with pytest.raises(RankError, match="RuntimeError: Oddity: sample 13 is odd"):
        trained(job, "model.loss=mse", *workers(1))


def test_a_loader_process_that_is_killed_is_named(own):
    job = write_job(own(BROKEN), "load", "[data.options]", 'how = "dies"')
    with pytest.raises(
        RankError,
        match=r"data\.workers: loader process \d was killed by SIGKILL \(exit status -9\) while it "
        r"read step 0, shard \d\. If memory ran out",
    ):
        trained(job, "model.loss=mse", *workers(2))


def test_processes_that_load_other_data_are_refused(own):
    job = write_job(own(BROKEN), "elsewhere")
    with pytest.raises(
        RankError, match=r"data\.workers: .* other samples in loader process 0 than on the rank"
    ):
        trained(job, "model.loss=mse", *workers(1))


def test_a_damaged_image_is_one_line_also_from_a_process(images):
    Path("images/train/0/6.png").write_bytes(b"not an image")
    for way in (THREAD, workers(1)):
        with pytest.raises(RankError, match=r"SynclineError: .*6\.png: the image cannot be read"):
            trained(images, *BUILT_IN, *way)


def is_running(pid):
    """Say whether a process runs; one that waits for its new parent to notice its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("how", ["interrupted", "killed", "done"])
def test_no_process_is_left_behind(images, how):
    log = Path("log").resolve()
    sets = [*workers(2), f"data.options.log={log}", "model.options.forward_s=0.05"]
    sets.append("run.steps=1000" if how != "done" else "run.steps=3")
    started = start_training(images, Path("left").resolve(), *sets, ranks=2)
    if how != "done":
        metrics = Path("left/metrics.jsonl")
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert started.poll() is None, started.communicate()
            time.sleep(0.02)
        if how == "interrupted":
            started.send_signal(signal.SIGINT)
        else:
            os.kill(ranks_of(started)[1], signal.SIGKILL)
    _, said = started.communicate()
    assert started.returncode == {"interrupted": 130, "killed": 1, "done": 0}[how], said
    assert "loader process" not in said
    pids = {line.split()[0] for line in log.read_text().splitlines()}
    assert len(pids) >= 4, "two processes on each rank"
    deadline = time.monotonic() + 5.0  # the kernel kills them, but not within the same instant
    while (left := list(filter(is_running, pids))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def test_closing_twice_and_a_job_that_is_refused_leave_nothing(images):
    job = read_job(images, ["data.workers=1", "data.batch=64"]).resolved(1)
    with pytest.raises(SynclineError, match=r"data\.batch: got 64"):
        Input(job, read_world())
    batches = Input(read_job(images, ["data.workers=1"]).resolved(1), read_world())
    batches.close()
    batches.close()
