"""Loggers: what they were given can be read back, and a run does not depend on them."""

from __future__ import annotations

import json
import re
import struct
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from command import Started
from small_job import SMALL, refusal
from syncline.errors import ConfigError
from syncline.loggers import Log
from syncline.loggers.names import check_installed
from syncline.loggers.tensorboard import TensorBoard


def scalars(folder):
    """Return what TensorBoard shows of a folder: by name, (step, value) of each point."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        name: [(one.step, one.value) for one in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


@pytest.mark.processes
def test_tensorboard_shows_what_metrics_jsonl_holds_also_of_a_resumed_run(tmp_path):
    (tmp_path / "job.toml").write_text(SMALL)
    command = ["train", "job.toml", "--out", "run", "--ranks", "2", "--set", "run.evaluate_every=4"]
    for more in (["--log", "tensorboard", "--set", "run.steps=6"], ["--resume"]):
        steps = ["--set", "run.steps=9", "--log", "tensorboard"] if "--resume" in more else []
        started = Started(*command, *more, *steps, cwd=tmp_path, traced=False)
        said = started.communicate(120)
        assert started.returncode == 0, said
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = scalars(tmp_path / "run" / "tensorboard")
    assert [line["step"] for line in lines] == [*range(1, 10)]
    assert {*found} == {*lines[0], "test_loss", "accuracy"} - {"step"}
    for name in {*lines[0]} - {"step"}:
        assert found[name] == [(line["step"], pytest.approx(line[name])) for line in lines]
    assert [step for step, _ in found["accuracy"]] == [4, 6, 8, 9]


def test_lines_are_those_of_the_last_try(tmp_path):
    for first, value in ((0, 1.0), (3, 2.0)):
        with Log(f"tensorboard:{tmp_path}", config={"a.b": 1}) as log:
            for step in range(first, 6):
                log.write(step, loss=value, accuracy=None)
    assert scalars(tmp_path) == {"loss": [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]}


def test_only_the_rank_that_writes_logs(tmp_path):
    with Log(f"tensorboard:{tmp_path / 'here'}", enabled=False) as log:
        log.write(0, loss=1.0)
    assert not (tmp_path / "here").exists()


def test_a_logger_that_fails_is_said_once_and_the_others_go_on(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    said = []
    log = Log(f"tensorboard:{tmp_path / 'file' / 'inside'}", say=said.append)
    for step in range(50):
        log.write(step, loss=0.0)
        time.sleep(0.01 if not said else 0)
    log.close()
    (line,) = said
    assert line.startswith(f"logger tensorboard:{tmp_path}/file/inside: NotADirectoryError: ")
    assert line.endswith("; the run goes on without it")


def test_a_logger_that_is_slow_holds_nobody_up(tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(TensorBoard, "write", lambda *_: go_on.wait(30))
    monkeypatch.setattr("syncline.loggers.log._MOST_WAITING", 100)
    monkeypatch.setattr("syncline.loggers.log._END_S", 0.1)
    said = []
    log = Log(f"tensorboard:{tmp_path}", say=said.append)
    began = time.perf_counter()
    for step in range(1000):
        log.write(step, loss=0.0)
    assert time.perf_counter() - began < 2.0
    assert said == [
        f"logger tensorboard:{tmp_path}: it is 100 steps behind; the run goes on without it"
    ]
    log.close()
    assert len(said) == 1
    go_on.set()


def test_the_end_waits_so_long_and_no_longer(tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(TensorBoard, "close", lambda *_, failed: go_on.wait(30))
    monkeypatch.setattr("syncline.loggers.log._FAILED_END_S", 0.1)
    said = []
    log = Log(f"tensorboard:{tmp_path}", say=said.append)
    log.write(0, loss=0.0)
    log.close(failed=True)
    (line,) = said
    assert "not done after 0.1 s: what it has not written is lost" in line
    go_on.set()


def test_loggers_are_checked_before_anything_starts():
    assert refusal(SMALL, 'run.log=["tensorbord:x"]') == (
        'run.log: got "tensorbord:x", but there is no such logger. Did you mean "tensorboard"?'
    )
    assert 'got "wandb" twice' in refusal(SMALL, 'run.log=["wandb:a", "wandb:b"]')
    with pytest.raises(ConfigError) as caught:
        check_installed(["nosuchlogger:x"])
    assert str(caught.value) == (
        'run.log: got "nosuchlogger", but the package nosuchlogger is not installed here. '
        "Install it: pip install 'syncline[nosuchlogger]'."
    )


def test_the_block_in_the_docs_runs(tmp_path, monkeypatch, alone):
    text = (Path(__file__).parents[2] / "docs" / "loggers.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert len(scalars(tmp_path / "boards" / "mine")["loss"]) == 100


# -- only where they are installed: together they are 1 GB -----------------------------------------


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_goes_on_with_a_run(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    where = f"sqlite:///{tmp_path / 'runs.db'}"
    for steps in (range(0, 3), range(3, 5)):
        with Log(f"mlflow:{where}", config={"a.b": 1}, folder=tmp_path, title="mine") as log:
            for step in steps:
                log.write(step, loss=float(step))
    client = mlflow.MlflowClient(where)
    (run,) = client.search_runs(["0"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert run.data.params == {"a.b": "1"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(step, step) for step in range(5)]


def records(data):
    """Yield the records of a file that W&B writes offline: a log of LevelDB after 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_goes_on_with_a_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (range(0, 3), range(3, 5)):
        with Log("wandb:trial", config={"a.b": 1}, folder=tmp_path, title="mine") as log:
            for step in steps:
                log.write(step, loss=float(step))
        time.sleep(1.1)  # W&B names the folder of a run by its id and the second
    rows, runs = [], set()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}
                rows.append((row["step"], row["loss"]))
            elif record.WhichOneof("record_type") == "run":
                runs.add((record.run.project, record.run.display_name, record.run.run_id))
    assert rows == [(step, step) for step in range(5)]
    assert len(runs) == 1
