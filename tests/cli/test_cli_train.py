"""`syncline train`: what is checked before ranks start, what they are given, what is printed."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from small_job import SYNTHETIC
from syncline.cli.folder import choose_folder
from syncline.config import STRATEGIES, parse_job, read_job
from syncline.perf.trace import Trace
from traces import check_trace
from training import start_training, train_forked

pytestmark = pytest.mark.processes


def only(folder: Path) -> Path:
    (one,) = folder.iterdir()
    return one


def test_json_prints_one_object_and_all_else_goes_to_stderr(cli):
    status, out, err = cli("train", "job.toml", "--ranks", "2", "--json")
    assert status == 0, err
    assert json.loads(out) == {
        "steps": 30,
        "samples_per_s": 1234.5,
        "loss": 0.25,
        "accuracy": 0.975,
        "exposed_communication": 0.031,
        "weights_sha256": "ab" * 32,
        "ranks": 2,
        "shards": 2,
        "resumed": False,
    }
    assert err.count("noise from a rank") == 2
    assert err.count("step 1/30") == 1


def test_the_result_is_readable_and_tells_the_run_folder(cli, tmp_path):
    status, out, err = cli("train", "job.toml")
    assert status == 0, err
    folder = only(tmp_path / "runs")
    assert folder.name.startswith("job-20")
    assert out.splitlines()[-1].split() == ["run", "folder", f"runs/{folder.name}"]
    for piece in ("97.50%", "1,23", "3.1%", "ab" * 32):
        assert piece in out


def test_progress_is_plain_lines_of_rank_0_without_a_terminal(cli):
    _, out, err = cli("train", "job.toml", "--ranks", "2", "--json")
    lines = [line for line in err.splitlines() if "noise" not in line]
    assert lines == [
        "cnn on synthetic: synchronous, 2 ranks, 2 shards, batch 64",
        "2 buckets",
        "step 1/30  loss 2.5000  1,000 samples/s  25% exposed communication",
        "evaluated at step 30:  loss 0.2500  accuracy 97.50%",
    ]
    assert "\x1b" not in out + err


def test_the_run_folder_holds_the_resolved_job(cli, tmp_path):
    cli("train", "job.toml", "--ranks", "2", "--out", "mine", "--set", "optimizer.lr=0.5")
    job = read_job(tmp_path / "mine" / "job.toml")
    assert (job.run.ranks, job.strategy.shards, job.run.out) == (2, 2, "mine")
    assert (job.optimizer.lr, job.optimizer.momentum) == (0.5, 0.0)
    assert job.resolved() == job
    assert not list((tmp_path / "mine").glob(".*"))


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda pattern: "20260102-030405")
    job = parse_job(SYNTHETIC)
    folders = [choose_folder(Path("a/job.toml"), job, None, None) for _ in range(3)]
    names = ["job-20260102-030405", "job-20260102-030405-2", "job-20260102-030405-3"]
    assert folders == [Path("runs") / name for name in names]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_permission_is_refused(cli, tmp_path):
    tmp_path.chmod(0o500)
    assert cli("train", "job.toml")[0] == 2
    tmp_path.chmod(0o700)


def test_a_file_where_the_run_folders_go_is_refused(cli, tmp_path):
    (tmp_path / "runs").touch()
    status, _, err = cli("train", "job.toml")
    assert status == 2
    assert err.startswith("syncline: --out: runs/job-20")
    assert err.endswith(
        " cannot be written (not a directory), but the run writes its results there."
        " Name another folder.\n"
    )


def test_a_link_to_nowhere_where_the_run_folders_go_is_refused(cli, tmp_path):
    (tmp_path / "runs").symlink_to("nowhere")
    status, _, err = cli("train", "job.toml")
    assert status == 2
    assert err.startswith("syncline: --out: runs cannot be written (file exists), but")


def test_print_job_shows_every_setting_and_starts_nothing(cli, tmp_path):
    status, out, err = cli("train", "job.toml", "--ranks", "4", "--print-job")
    assert (status, err) == (0, "")
    (tmp_path / "again.toml").write_text(out)
    assert read_job(tmp_path / "again.toml") == read_job(tmp_path / "job.toml").resolved(4)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["job.toml", "--set", "run.stesp=3"],
            "run.stesp: set on the command line, but no such setting exists."
            " Did you mean run.steps?",
        ),
        (["no.toml"], "no.toml: there is no such file, but a job is read from one."),
        (["job.toml", "--ranks", "0"], "--ranks: got 0, but a world has at least one rank."),
        (["job.toml", "--set", "model.name=cnnn"], "model.name: got 'cnnn', but"),
        (["job.toml", "--set", "model.options.dropot=1"], "model.options.dropot: got 1, but"),
        (["job.toml", "--set", "data.name=digit"], "data.name: got 'digit', but"),
        (["job.toml", "--set", "data.path=x"], "data.path: got 'x', but it has no effect on"),
        (["job.toml", "--out", "job.toml"], "--out: job.toml is a file, but a run needs a folder."),
        (
            ["job.toml", "--out", "job.toml/x"],
            "--out: job.toml/x cannot be written (not a directory), but",
        ),
        (["job.toml", "--resume"], "--resume: no run folder is named, but a run goes on where"),
        (
            ["job.toml", "--resume", "--out", "nowhere"],
            "--resume: nowhere holds no checkpoint, but a run goes on from its last one.",
        ),
        (
            ["job.toml", "--trace", "nowhere/run.trace"],
            "--trace: there is no folder nowhere, but a file is written into a folder that is"
            " there. Create it, or name another.",
        ),
        (["job.toml", "--trace", "."], "--trace: . is a folder, but this is one file."),
        (["job.toml", "--rnks", "2"], "No such option: --rnks"),
        (["job.toml", "--ranks", "two"], "Invalid value for '--ranks'"),
        ([], "Missing argument 'JOB.toml'."),
    ],
)
def test_a_mistake_is_one_line_and_status_2_and_nothing_is_started(cli, tmp_path, arguments, line):
    status, out, err = cli("train", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"syncline: {line}")
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("*/pid.*"))


def test_debug_shows_where_an_error_came_from(cli):
    _, _, err = cli("train", "no.toml", "--debug")
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("syncline: no.toml: there is no such file")


def test_checking_a_job_does_not_import_torch(cli, tmp_path):
    program = tmp_path / "check.py"
    program.write_text(
        "import sys\n"
        "from syncline.cli.main import _run\n"
        "sys.argv = ['syncline', 'train', 'job.toml', '--print-job']\n"
        "status = _run()\n"
        "sys.exit(status or 'torch' in sys.modules)\n"
    )
    status, _, err = cli("run", "--ranks", "1", "check.py")
    assert status == 0, err


# -- a folder that is there already ----------------------------------------------------------------


def test_a_run_is_never_overwritten(cli, tmp_path):
    assert cli("train", "job.toml", "--out", "mine")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    status, out, err = cli("train", "job.toml", "--out", "mine")
    assert (status, out) == (2, "")
    assert err == (
        "syncline: --out: mine already holds a run, but runs are not overwritten."
        " Add --resume to go on with it, or name another folder.\n"
    )
    assert {path: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


def test_a_folder_with_other_things_in_it_is_used(cli, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    assert cli("train", "job.toml", "--out", "mine")[0] == 0


def a_run_to_resume(cli, tmp_path, *sets):
    chosen = [word for one in sets for word in ("--set", one)]
    status, _, err = cli(
        "train", "job.toml", "--ranks", "2", *chosen, "--out", "mine", FAKE="checkpoint"
    )
    assert status == 1
    last = err.splitlines()[-1]
    assert last.startswith("syncline: to go on from the last checkpoint: syncline train job.toml ")
    assert last.endswith(" --out mine --resume")
    return shlex.split(last.partition("checkpoint: syncline ")[2])


def test_the_command_to_resume_has_the_settings_of_the_run_but_not_its_faults(cli, tmp_path):
    faults = 'faults=[{rank=1, step=5, kind="death"}]'
    again = a_run_to_resume(cli, tmp_path, "optimizer.lr=0.1", faults)
    assert again == [
        *("train", "job.toml", "--ranks", "2", "--set", "optimizer.lr=0.1"),
        *("--out", "mine", "--resume"),
    ]
    assert cli(*again)[0] == 0


def test_a_run_goes_on_with_its_shards_on_another_number_of_ranks(cli, tmp_path):
    a_run_to_resume(cli, tmp_path)
    status, out, err = cli(
        "train", "job.toml", "--out", "mine", "--resume", "--ranks", "1", "--json"
    )
    assert status == 0, err
    result = json.loads(out)
    assert (result["resumed"], result["shards"], result["ranks"]) == (True, 2, 1)


def test_a_run_does_not_go_on_as_another_run(cli, tmp_path):
    a_run_to_resume(cli, tmp_path)
    before = (tmp_path / "mine" / "job.toml").read_bytes()
    status, _, err = cli(
        "train", "job.toml", "--out", "mine", "--resume", "--set", "optimizer.lr=0.1"
    )
    assert status == 2
    assert err == (
        "syncline: optimizer.lr: got 0.1 to go on with a run that had 0.05, but this would no"
        " longer be the same run. Set it back, or start a new run in another folder.\n"
    )
    assert (tmp_path / "mine" / "job.toml").read_bytes() == before


def test_a_run_may_go_on_for_longer(cli, tmp_path):
    a_run_to_resume(cli, tmp_path)
    resume = ["--out", "mine", "--resume", "--set", "run.steps=60", "--json"]
    status, out, err = cli("train", "job.toml", *resume)
    assert status == 0, err
    assert json.loads(out)["steps"] == 60


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        ("run.steps=30", "run.steps=60", "run.steps: got 60 to go on with a run that had 30"),
        ("run.steps=30", "run.epochs=2", "run.steps: got none to go on with a run that had 30"),
    ],
)
def test_a_run_with_a_cosine_schedule_keeps_its_length(cli, tmp_path, before, now, why):
    a_run_to_resume(cli, tmp_path, "optimizer.schedule=cosine", before)
    sets = ["--set", "optimizer.schedule=cosine", "--set", now]
    sets += ["--set", "run.steps="] * ("epochs" in now)
    status, _, err = cli("train", "job.toml", *sets, "--out", "mine", "--resume")
    assert (status, err) == (
        2,
        f"syncline: {why}, but the learning rates of the cosine schedule depend on it. Set it back,"
        " or start a new run in another folder; with schedule constant, step or milestones a run"
        " can be made longer later.\n",
    )


def test_an_unfinished_checkpoint_does_not_count(cli, tmp_path):
    (tmp_path / "mine" / "checkpoints" / ".step-3").mkdir(parents=True)
    (tmp_path / "mine" / "checkpoints" / "step-3.tmp").mkdir(parents=True)
    status, _, err = cli("train", "job.toml", "--out", "mine", "--resume")
    assert status == 2
    assert "mine holds no checkpoint" in err


# -- ranks that fail -------------------------------------------------------------------------------


def test_bad_input_found_by_a_rank_is_status_2(cli):
    status, out, err = cli("train", "job.toml", "--json", FAKE="config")
    assert (status, out) == (2, "")
    assert "syncline: rank 0: model.name: got x, but y. Z.\n" in err
    assert "Traceback" not in err


def test_debug_reaches_the_ranks(cli):
    _, _, err = cli("train", "job.toml", "--debug", FAKE="config")
    assert "Traceback" in err


def test_a_dead_rank_is_named_and_the_status_is_1(cli):
    status, out, err = cli("train", "job.toml", "--ranks", "2", "--json", FAKE="dies")
    assert (status, out) == (1, "")
    assert "syncline: rank 1 was killed by SIGKILL (exit status -9)\n" in err
    assert "syncline: rank 0: rank 1 died at step 3\n" in err
    assert "syncline: rank 0 ended with status 1\n" in err
    assert "Traceback" not in err


def test_a_bug_in_a_rank_shows_its_traceback(cli):
    status, _, err = cli("train", "job.toml", FAKE="bug")
    assert status == 1
    assert "syncline: rank 0: ZeroDivisionError: a bug\n" in err
    assert "Traceback" in err


def test_a_result_that_was_not_written_is_an_error(cli):
    status, out, err = cli("train", "job.toml", "--json", "--out", "mine", FAKE="no summary")
    assert (status, out) == (1, "")
    assert "syncline: mine/summary.json is missing or damaged though every rank ended well" in err


def test_a_loss_that_is_no_number_is_null_in_json(cli):
    _, out, _ = cli("train", "job.toml", "--json", FAKE="nan")
    assert json.loads(out, parse_constant=pytest.fail)["loss"] is None


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_a_run_quietly_and_leave_no_process(cli, tmp_path, sent, status):
    process = cli.start("train", "job.toml", "--ranks", "2", "--out", "mine", FAKE="hangs")
    end_s = time.monotonic() + 30
    files = [tmp_path / "mine" / f"pid.{rank}" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    ranks = [int(file.read_text()) for file in files]
    process.send_signal(sent)
    _, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert "Traceback" not in err
    assert f"syncline: stopping ranks 0, 1: {sent.name} was received" in err


# -- traces ----------------------------------------------------------------------------------------


def trace_of_a_real_run(job_file, tmp_path, *sets):
    path = tmp_path / "run.trace"
    more = ("--trace", str(path))
    started = start_training(job_file, tmp_path / "run", *sets, ranks=2, more=more, traced=True)
    _, said = started.communicate()
    assert started.returncode == 0, said
    return Trace.read(path)


@pytest.mark.slow
def test_a_trace_holds_the_tasks_of_all_ranks_and_what_they_waited_for(cli, tmp_path):
    sets = ["run.steps=6", "data.samples=512", "strategy.bucket_bytes=300000"]
    sets += ["strategy.shards=4", "run.evaluate_every=2", "strategy.overlap=true"]
    trace = trace_of_a_real_run(cli.job, tmp_path, *sets)
    by_id = {(task.rank, task.number): task for task in trace.tasks}
    assert len(by_id) == len(trace.tasks)
    buckets = {task.bucket for task in trace.tasks if task.kind == "reduce"}
    assert len(buckets) > 1
    for rank in range(2):
        mine = [task for task in trace.tasks if task.rank == rank]
        found = Counter((task.kind, task.bucket, task.step) for task in mine)
        for step in range(6):
            assert found["step", -1, step] == 1
            for bucket in buckets:
                assert found["reduce", bucket, step] == found["gather", bucket, step] == 1
                # Two shards a rank, the first of all without: it sets up.
                for kind in ("forward", "backward"):
                    assert found[kind, bucket, step] == (2 if step else 1), (kind, step)
        assert min(task.start_s for task in mine) >= 0
        compute = sorted((task.start_s, task.end_s) for task in mine if task.lane == "compute")
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(compute))
        # Besides the task before it on the comm lane, which may be any:
        comm = [task for task in mine if task.lane == "comm"]
        previous = {
            after.number: (rank, before.number) for before, after in itertools.pairwise(comm)
        }
        kinds_before = {
            (task.kind, by_id[one].kind, task.bucket == by_id[one].bucket)
            for task in comm
            for one in task.after
            if one != previous.get(task.number)
        }
        assert all(previous[task.number] in task.after for task in comm[1:])
        assert kinds_before == {
            ("reduce", "backward", True),
            ("step", "backward", False),
            ("gather", "reduce", True),
            ("gather", "step", False),
        }
    check_trace(trace)
    ends = {
        (task.rank, task.step): task.end_s
        for task in trace.tasks
        if (task.kind, task.bucket) == ("backward", 0)
    }
    overlapped = [
        task
        for task in trace.tasks
        if task.kind == "reduce" and task.start_s < ends[task.rank, task.step]
    ]
    assert len(overlapped) > len(buckets)


@pytest.mark.slow
def test_a_trace_of_an_inline_exchange_holds_both_lanes(cli, tmp_path):
    sets = ["run.steps=3", "data.samples=256", "strategy.overlap=false"]
    path = tmp_path / "run.trace"
    train_forked(cli.job, tmp_path / "run", *sets, ranks=2, trace=path)
    trace = Trace.read(path)
    check_trace(trace)
    kinds = ("input", "forward", "backward", "wait", "reduce", "step", "gather")
    found = Counter((task.rank, task.kind) for task in trace.tasks)
    for rank in range(2):
        assert found[rank, "checkpoint"] == 1
        assert all(found[rank, kind] % 3 == 0 for kind in kinds), found
        assert {found[rank, kind] for kind in kinds[3:]} == {3}


# -- other launchers -------------------------------------------------------------------------------

TORCHRUN = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "here",
}


def as_rank(cli, rank, *arguments, **environ):
    place = TORCHRUN | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return cli("train", "job.toml", *arguments, **place, **environ)


def test_under_torchrun_the_process_is_the_rank_and_rank_0_prints(cli, tmp_path):
    status, out, err = as_rank(cli, 0, "--json")
    assert status == 0, err
    assert json.loads(out.removeprefix("noise from a rank\n"))["ranks"] == 2
    status, out, err = as_rank(cli, 1, "--json")
    assert (status, out, err) == (0, "noise from a rank\n", "")
    folder = only(tmp_path / "runs")
    assert sorted(path.name for path in folder.iterdir()) == [
        "job.toml",
        "pid.0",
        "pid.1",
        "summary.json",
    ]


def test_under_torchrun_another_number_of_ranks_is_refused(cli):
    status, _, err = as_rank(cli, 0, "--ranks", "3")
    assert status == 2
    assert err == (
        "syncline: --ranks: got 3 under torchrun, which started 2, but the launcher decides."
        " Leave --ranks away.\n"
    )


def test_under_torchrun_a_failing_rank_names_itself(cli):
    status, _, err = as_rank(cli, 1, FAKE="config")
    assert (status, err) == (2, "syncline: rank 1: model.name: got x, but y. Z.\n")


def test_a_slurm_job_of_one_task_may_start_ranks(cli):
    slurm = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "n1",
    }
    status, out, err = cli("train", "job.toml", "--ranks", "2", "--json", **slurm)
    assert status == 0, err
    assert json.loads(out)["ranks"] == 2


# -- help ------------------------------------------------------------------------------------------


def test_help_teaches(cli):
    status, out, _ = cli("train", "--help")
    assert status == 0
    words = ["syncline train examples/digits.toml", "job.toml", "metrics.jsonl", "summary.json"]
    words += ["checkpoints", "torchrun", *STRATEGIES]
    for word in words:
        assert word in out


def test_the_flags_of_train_are_these(cli):
    _, out, _ = cli("train", "--help")
    options = out[out.index("─ Options") :]
    listed = {word for word in options.split() if word.startswith("--")}
    assert listed == {
        "--ranks",
        "--set",
        "--out",
        "--report",
        "--resume",
        "--trace",
        "--log",
        "--json",
        "--print-job",
        "--debug",
        "--help",
    }


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_syncline_alone_shows_its_help(cli, arguments):
    status, out, err = cli(*arguments)
    assert (status, err) == (0, "")
    for word in ("train", "run", "key", "syncline train examples/digits.toml --ranks 2"):
        assert word in out


def test_an_unknown_verb_is_one_line(cli):
    status, out, err = cli("trian")
    assert (status, out) == (2, "")
    assert (
        err == "syncline: No such command 'trian'. Did you mean 'train'? See `syncline --help`.\n"
    )


def test_output_cut_short_by_its_reader_is_no_crash(cli, tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.Popen(
        [sys.executable, "-m", "syncline", "train", "job.toml", "--print-job"],
        cwd=tmp_path,
        env=cli.environ,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (1, "")
