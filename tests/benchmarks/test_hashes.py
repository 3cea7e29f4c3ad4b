"""`benchmarks.hashes`: the list is sound, equal is equal, and different is seen."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.hash_jobs import BASE, JOBS, RUNS
from benchmarks.hashes import Outcome, Row, chosen, commands, compare
from benchmarks.versions import TOP_FOLDER, Version, git
from checkout import needs_git

from syncline.config import parse_job
from worlds import untraced


def hashes(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.hashes", *arguments],
        cwd=TOP_FOLDER,
        env=untraced("RANK") | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As from a terminal: a background job of a script starts with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def worktrees_in(folder):
    return [line for line in git("worktree", "list").splitlines() if str(folder) in line]


def test_every_run_has_a_name_of_its_own_and_a_job_that_this_version_takes():
    assert len({run.name for run in RUNS}) == len(RUNS)
    for run in RUNS:
        sets = [*JOBS[run.job], *run.sets, f"strategy.name={run.strategy}"]
        parse_job(BASE, sets=sets).resolved(run.ranks)
        if run.start is not None:
            parse_job(BASE, sets=[*sets, *run.start.sets]).resolved(run.start.ranks)


def test_a_resumed_run_is_two_commands_in_one_folder():
    (run,) = chosen(["cnn-1-resumed-from-4"])
    first, then = commands(run, Path("job.toml"), Path("out"))
    assert first[first.index("--ranks") + 1] == "4"
    assert then[then.index("--ranks") + 1] == "1"
    assert ("--resume" in first, "--resume" in then) == (False, True)
    assert "run.steps=3" in first
    assert "run.steps=3" not in then


@pytest.mark.parametrize(
    ("this", "other", "of_job", "is_equal"),
    [
        ("a", "a", "a", True),
        ("a", "b", "a", False),
        ("a", "a", "b", False),  # equal to the other version, not to the job's other runs
        ("a", "b", None, False),
        ("a", None, "a", False),  # the other version failed
        (None, None, None, False),
    ],
)
def test_a_row_is_equal_if_both_versions_and_all_runs_of_the_job_are(this, other, of_job, is_equal):
    assert Row("mlp-1", True, Outcome(this), Outcome(other), of_job).is_equal is is_equal


def test_a_strategy_unknown_to_the_other_commit_is_compared_within_this_version():
    assert Row("mlp-2-new", True, Outcome("a"), None, "a").is_equal
    assert not Row("mlp-2-new", True, Outcome("a"), None, "b").is_equal


@needs_git
@pytest.mark.processes
@pytest.mark.slow
def test_this_version_has_the_weights_of_its_own_commit(tmp_path):
    done = hashes(
        tmp_path, "--against", "HEAD", "--only", "mlp-2", "--only", "mlp-virtual-2", "--json"
    )
    out, err = done.communicate(timeout=110)
    assert done.returncode == 0, err
    found = json.loads(out)
    assert found["against"] == git("rev-parse", "HEAD")
    assert [(row["name"], row["is_equal"]) for row in found["runs"]] == [
        ("mlp-2", True),
        ("mlp-virtual-2", True),
    ]
    (real, virtual) = (row["this"]["sha256"] for row in found["runs"])
    assert real == virtual
    assert err.splitlines() == ["1 of 2: mlp-2", "2 of 2: mlp-virtual-2"]
    assert not worktrees_in(tmp_path)


OTHER_WEIGHTS = """
import json, sys
known = "--print-job" in sys.argv
print("{}" if known else json.dumps({"weights_sha256": "0" * 64}))
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_version_with_other_weights_is_found_out(tmp_path):
    package = tmp_path / "other" / "src" / "syncline"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(OTHER_WEIGHTS)
    other = Version("other", "0" * 40, tmp_path / "other")
    (row,) = compare(chosen(["mlp-1"]), other, tmp_path)
    assert row.this.failure is None
    assert row.other == Outcome("0" * 64)
    assert not row.is_equal


@needs_git
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_left_when_it_is_interrupted(number, status, tmp_path):
    started = hashes(tmp_path, "--against", "HEAD", "--only", "mlp-4")
    assert started.stderr.readline() == "1 of 1: mlp-4\n"
    assert worktrees_in(tmp_path)
    started.send_signal(number)
    started.communicate(timeout=60)
    assert started.returncode == status
    assert list(tmp_path.iterdir()) == []
    assert not worktrees_in(tmp_path)


def test_an_unknown_run_is_refused_with_the_names_there_are(tmp_path):
    started = hashes(tmp_path, "--against", "HEAD", "--only", "mpl")
    _, err = started.communicate(timeout=60)
    assert started.returncode == 2
    assert "--only: no run is named mpl. Choose from mlp-1, mlp-2" in err
