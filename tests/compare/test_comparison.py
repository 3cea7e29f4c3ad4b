"""A comparison's folder: the same rows again, resuming, and mistakes of one line."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from pathlib import Path

import pytest

from command import Started
from comparing import ALL, JOB, compare, plan_of, write_study
from syncline.compare.cell import Found, Point
from syncline.compare.study import read_study, study_to_toml
from syncline.errors import ConfigError


def rows_of(folder):
    with (folder / "points.csv").open() as file:
        return list(csv.DictReader(file))


SOME = ("synchronous", "layered", "served", "gossip")


def test_the_same_study_has_the_same_files_byte_for_byte(tmp_path):
    study = write_study(tmp_path, SOME, more="tune = 2")
    for name, jobs in (("one", 2), ("other", 1)):
        _, num_runs = compare(study, tmp_path / name, jobs=jobs)
        # Two scenarios with two seeds, and two trials of each variant.
        assert num_runs == len(SOME) * (2 * 2 + 2)
    for file in ("points.csv", "summary.json", "study.toml"):
        one, other = ((tmp_path / name / file).read_bytes() for name in ("one", "other"))
        assert one == other, file
    rows = rows_of(tmp_path / "one")
    assert len(rows) == len(SOME) * 2 * 2 * 4
    assert {row["samples"] for row in rows} == {"120", "240", "360", "480"}
    served = [row for row in rows if row["variant"] == "served"]
    assert {(row["ranks"], row["servers"], row["batch"]) for row in served} == {("4", "2", "24")}
    check_summary(json.loads((tmp_path / "one" / "summary.json").read_text()), rows)


def check_summary(summary, rows):
    assert summary["is_complete"]
    assert [table["scenario"] for table in summary["tables"]] == ["calm", "straggling"]
    table = summary["tables"][0]
    assert [row["variant"] for row in table["rows"]] == [*SOME]
    for row in table["rows"]:
        tried = row["tuning"]["tried"]
        assert [one["is_chosen"] for one in tried].count(True) == 1
        assert tried[0]["words"] == "as it is"
        (chosen,) = (one for one in tried if one["is_chosen"])
        assert row["settings"]["optimizer.lr"] == chosen["settings"]["optimizer.lr"]
        # The last rows of its runs are the figures at the end.
        last = {
            one["seed"]: float(one["accuracy"])
            for one in rows
            if (one["variant"], one["scenario"], one["samples"]) == (row["variant"], "calm", "480")
        }
        assert row["final"]["accuracy"]["seeds"] == last
    by_name = {row["variant"]: row for row in table["rows"]}
    same = ("synchronous", "layered")  # the same bits
    assert by_name[same[0]]["final"]["accuracy"] == by_name[same[1]]["final"]["accuracy"]


def test_a_comparison_that_was_killed_goes_on(tmp_path):
    study, out = write_study(tmp_path, ("synchronous", "gossip", "local")), tmp_path / "out"
    started = Started("compare", str(study), "--out", str(out), "--jobs", "2", traced=False)
    until = time.monotonic() + 30
    while len(list(out.glob("cells/*.json"))) < 3 and time.monotonic() < until:
        time.sleep(0.002)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    there = {path.name: path.stat().st_mtime_ns for path in out.glob("cells/*.json")}
    assert 3 <= len(there) < 12, "killed too late"
    time.sleep(0.1)
    assert len(list(out.glob("cells/*.json"))) == len(there), "a run went on after its parent"
    _, num_runs = compare(study, out)
    assert num_runs == 12 - len(there)
    for name, written in there.items():
        assert (out / "cells" / name).stat().st_mtime_ns == written
    compare(study, tmp_path / "whole")
    assert (out / "points.csv").read_bytes() == (tmp_path / "whole" / "points.csv").read_bytes()
    assert not list(out.glob("cells/.*"))


def test_ctrl_c_leaves_no_process_and_the_tables_of_what_has_ended(tmp_path):
    study, out = write_study(tmp_path, ("synchronous", "gossip", "local")), tmp_path / "out"
    started = Started("compare", str(study), "--out", str(out), "--jobs", "2", traced=False)
    until = time.monotonic() + 30
    while len(list(out.glob("cells/*.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.002)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    started.send_signal(signal.SIGINT)
    assert started.wait() == 130
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not list(out.glob("cells/.*")) + list(out.glob(".lock"))
    summary = json.loads((out / "summary.json").read_text())
    done = len(list(out.glob("cells/*.json")))
    assert summary["cells"] == {"wanted": 12, "done": done, "failed": 0, "missing": 12 - done}
    assert summary["is_complete"] == (done == 12)


@pytest.mark.processes
def test_real_runs_have_the_same_files(tmp_path):
    path, out = tmp_path / "job.toml", tmp_path / "out"
    path.write_text(JOB)
    more = ("--strategies", "synchronous", "--ranks", "2", "--seeds", "1", "--real")
    started = Started("compare", str(path), *more, "--out", str(out), traced=False)
    _, said = started.communicate(60.0)
    assert started.returncode == 0, said
    rows = rows_of(out)
    assert [row["samples"] for row in rows] == [str(24 * step) for step in range(1, 21)]
    times = [float(row["time_s"]) for row in rows]
    assert times[0] > 0
    assert times == sorted(times)
    assert [bool(row["sent_bytes"]) for row in rows] == [False] * 19 + [True]
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["clock"] == "wall"
    assert summary["tables"][0]["rows"][0]["samples_by_rank"] == {"least": 240, "most": 240}
    assert not (out / "runs").exists()


def test_a_folder_takes_more_of_the_same_job(tmp_path):
    out = tmp_path / "out"
    compare(write_study(tmp_path), out)
    _, num_runs = compare(write_study(tmp_path, ("gossip", "local"), ranks=(4, 2)), out)
    assert num_runs == 3 * 2 * 2  # gossip on four ranks is there
    _, num_runs = compare(write_study(tmp_path), out)
    assert num_runs == 0
    assert {row["variant"] for row in rows_of(out)} == {"synchronous", "gossip"}


def test_a_study_is_read_back_as_it_was_written(tmp_path):
    study = read_study(write_study(tmp_path, ALL, more='set = ["optimizer.lr=0.1"]'))
    again = tmp_path / "again.toml"
    again.write_text(study_to_toml(study))
    read = read_study(again)
    assert (read.tables, read.compare) == (study.tables, study.compare)


def test_a_run_that_fails_is_said_and_the_others_are_compared(tmp_path):
    def run(cell):
        if cell.variant == "gossip" and cell.seed == 1:
            return Found(failed="rank 1 is gone")
        point = Point(
            step=20,
            samples=480,
            time_s=1.0 + cell.seed,
            sent_bytes=1,
            loss=1.0,
            test_loss=None,
            accuracy=0.7,
        )
        return Found(points=(point,), rank_samples=(120,) * 4)

    summary, _ = compare(write_study(tmp_path), tmp_path / "out", run)
    assert summary["cells"] == {"wanted": 8, "done": 8, "failed": 2, "missing": 0}
    assert {one["why"] for one in summary["failed"]} == {"rank 1 is gone"}
    by_time = summary["tables"][0]["winners"][0]["by_time"]
    assert (by_time["first"], by_time["others"][0]["why"]) == ("synchronous", "reached 1 of 2")


def mistake(tmp_path, *arguments, job=JOB, out="out"):
    path = tmp_path / "job.toml"
    if job is None:
        from comparing import JOB as job
    path.write_text(job)
    started = Started("compare", str(path), "--out", str(tmp_path / out), *arguments, traced=False)
    printed, said = started.communicate()
    assert (started.returncode, printed) == (2, "")
    assert len(said.splitlines()) == 1, said
    assert not (tmp_path / "out" / "cells").exists()
    return said


GRID = ("--strategies", "synchronous,gossip", "--ranks", "2,4")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--strategies", "gosip", "--ranks", "2"),
            'got "gosip", but this is a strategy',
        ),
        ((*GRID, "--target", "1.5"), "--target: got 1.5, but an accuracy lies between 0 and 1"),
        (("--strategies", "gossip"), "--ranks: it is not there"),
        (("--ranks", "2"), "--strategies: it is not there"),
        (("--strategies", "gossip", "--ranks", "2,x"), "--ranks: got"),
        (
            ("--strategies", "gossip", "--ranks", "5"),
            "gossip on 5 ranks: run.ranks: got 5",
        ),
        (
            (*GRID, "--ranks-per-machine", "3"),
            "on 4 ranks: ranks: got 4 on machines of 3",
        ),
        (
            ("--strategies", "layered", "--ranks", "2", "--set", "strategy.layered.groups=3"),
            "layered on 2 ranks: strategy.layered.groups: got 3 with 2 ranks",
        ),
        ((*GRID, "--set", "strategy.name=local"), "--set: got"),
        ((*GRID, "--cluster", "11gbit"), "--cluster: got"),
        ((*GRID, "--faults", "[{rank=9, step=0, kind='death'}]"), "faults[0].rank: got rank 9"),
        ((*GRID, "--samples", "5"), "compare.samples: got 5 with batches of [24]"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(tmp_path, arguments, expected):
    assert expected in mistake(tmp_path, *arguments)


def test_hybrid_with_groups_is_refused_before_anything_runs(tmp_path):
    said = mistake(
        tmp_path, "--strategies", "hybrid", "--ranks", "4", "--set", "strategy.hybrid.groups=2"
    )
    assert "hybrid on 4 ranks: strategy.hybrid" in said


def test_a_damaged_cell_is_named(tmp_path):
    study, out = write_study(tmp_path), tmp_path / "out"
    compare(study, out)
    plan = plan_of(study)
    path = out / "cells" / f"{plan.cell(plan.places[0], 0).id}.json"
    whole = path.read_bytes()
    for data in (whole[:100], b"", b"[]", b"{}", whole.replace(b'"points"', b'"dots"', 1)):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="Delete the file") as caught:
            compare(study, out)
        assert path.name in str(caught.value)
    path.unlink()
    _, num_runs = compare(study, out)
    assert num_runs == 1


def test_folders_of_others_are_refused(tmp_path):
    study, out = write_study(tmp_path), tmp_path / "out"
    compare(study, out, lambda cell: Found(failed="not run"))
    study.write_text(study.read_text().replace("lr = 0.02", "lr = 0.5"))
    with pytest.raises(ConfigError, match=r"optimizer\.lr is 0\.02 there and 0\.5 here"):
        compare(study, out)
    study.write_text(study.read_text().replace("samples = 480", "samples = 240"))
    with pytest.raises(ConfigError, match=r"compare\.samples is 480 there and 240 here"):
        compare(study, out)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"")
    with pytest.raises(ConfigError, match="holds other files"):
        compare(study, tmp_path / "photos")
    with pytest.raises(ConfigError, match="is a file"):
        compare(study, study)
