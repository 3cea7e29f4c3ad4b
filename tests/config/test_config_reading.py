"""Reading a job: files, TOML, and settings laid over them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from small_job import SMALL, refusal, small
from syncline import config
from syncline.config import RunSettings, parse_job, read_job
from syncline.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["digits", "fashion"])
def test_the_examples_are_jobs(name):
    job = read_job(EXAMPLES / f"{name}.toml").resolved()
    assert job.strategy.shards == 8
    assert job.run.ranks == 2


@pytest.mark.parametrize("name", sorted(config.STRATEGIES))
def test_every_strategy_runs_the_example_with_its_defaults(name):
    job = read_job(EXAMPLES / "fashion.toml", [f"strategy.name={name}", "run.ranks=4"]).resolved()
    assert (job.strategy.name, job.run.ranks, job.strategy.shards) == (name, 4, 8)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("fashion-*.toml")), ids=lambda p: p.stem)
def test_the_examples_of_strategies_are_jobs(path):
    job = read_job(path).resolved()
    assert (job.strategy.name, job.run.ranks) == (path.stem.removeprefix("fashion-"), 4)
    assert job.strategy.shards == 4


def test_settings_laid_over_the_file_are_toml_or_bare_words():
    job = small(
        model__name="resnet-20",
        model__options__hidden="[128, 64]",
        data__path="/data/x y",
        optimizer__lr="1e-3",
        strategy__overlap="false",
        run__steps="1_000",
        run__out='"a=b"',
    )
    assert job.model.name == "resnet-20"
    assert job.model.options == {"hidden": (128, 64)}
    assert job.data.path == "/data/x y"
    assert job.optimizer.lr == 1e-3
    assert job.strategy.overlap is False
    assert job.run.steps == 1000
    assert job.run.out == "a=b"


def test_a_bare_word_that_looks_like_a_date_is_text():
    assert small(run__out="2026-01-02").run.out == "2026-01-02"


def test_a_bare_word_cannot_smuggle_in_a_second_setting():
    assert small(run__out="x\nsteps = 1").run.out == "x\nsteps = 1"


def test_the_last_of_two_equal_sets_wins():
    assert parse_job(SMALL, sets=["run.steps=1", "run.steps=2"]).run.steps == 2


def test_an_empty_value_takes_the_setting_out():
    text = SMALL.replace("lr = 0.05", "lr = 0.05\nmomentum = 0.9")
    job = parse_job(text, sets=["optimizer.momentum=", "optimizer.name=adam"])
    assert job.optimizer.momentum is None


def test_steps_on_the_command_line_displace_epochs_in_the_file_and_the_other_way_round():
    epochs = SMALL.replace("steps = 30", "epochs = 2")
    assert parse_job(epochs, sets=["run.steps=30"]).run == RunSettings(steps=30)
    assert parse_job(SMALL, sets=["run.epochs=2"]).run == RunSettings(epochs=2)


@pytest.mark.parametrize("written", ['shards = "auto"', ""])
def test_automatic_shards_are_one_a_rank(written):
    job = parse_job(f"{SMALL}\n[strategy]\n{written}")
    assert job.strategy.shards is None
    assert job.resolved(4).strategy.shards == 4


def test_a_file_with_a_byte_order_mark_and_windows_line_ends_is_read(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert read_job(path) == small()


def test_reading_a_job_does_not_import_torch():
    code = "import sys, syncline.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("table", ["model", "data", "optimizer", "run"])
def test_a_missing_table_is_named(table):
    assert refusal(SMALL.replace(f"[{table}]", "[strategy]")).startswith(
        f"{table}: there is no such table in job.toml, but a job has the tables"
    )


def test_an_empty_file_is_told_what_a_job_has():
    assert refusal("") == (
        "model: there is no such table in job.toml, but a job has the tables model, data,"
        " optimizer and run. Add a line [model] and its settings below it."
    )


@pytest.mark.parametrize("text", ["run.steps", "=3", "run..steps=3", ".=3"])
def test_a_set_that_is_not_key_equals_value_is_refused(text):
    assert refusal(SMALL, text) == (
        f'--set: got "{text}", but it takes KEY=VALUE. Write for example --set run.steps=100.'
    )


def test_a_set_with_broken_brackets_is_not_taken_for_a_word():
    assert refusal(SMALL, "optimizer.betas=[0.9") == (
        'optimizer.betas: got "[0.9", but that is no TOML value. Look at its quotes and brackets.'
    )


def test_taking_out_what_is_not_there_is_refused():
    assert refusal(SMALL, "run.epochs=") == (
        "run.epochs: taken out with --set, but the job does not have it. Remove that --set."
    )


def file_refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_job(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    assert file_refusal(tmp_path / "no.toml").startswith(f"{tmp_path}/no.toml: there is no such")


def test_a_file_name_with_a_line_break_stays_on_one_line(tmp_path):
    assert file_refusal(tmp_path / "a\nb.toml").startswith(f"{tmp_path}/a\\nb.toml: ")


def test_a_folder_is_refused_as_one(tmp_path):
    assert file_refusal(tmp_path).startswith(f"{tmp_path}: this is a folder, but a job is one file")


def test_a_file_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be read (not a directory)" in file_refusal(tmp_path / "file" / "job.toml")


@pytest.mark.parametrize(
    ("text", "line_number"),
    [
        ("[model]\nname = cnn\n", 2),
        ("[model\n", 1),
        ('[model]\nname = "cnn\n', 2),
        ("a = [1,\n", 1),
    ],
)
def test_a_syntax_error_names_its_line(tmp_path, text, line_number):
    path = tmp_path / "job.toml"
    path.write_text(text)
    line = file_refusal(path)
    assert line.startswith(f"{path}, line {line_number}: ")
    assert "a job is valid TOML" in line


def test_a_key_given_twice_is_a_syntax_error_with_its_line(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[run]\nsteps = 1\nsteps = 2\n")
    assert file_refusal(path).startswith(f"{path}, line 3: ")


def test_bytes_that_are_not_utf_8_are_named_with_their_line(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b'[model]\nname = "caf\xe9"\n')
    assert file_refusal(path) == (
        f"{path}, line 2: byte 0xe9 is not UTF-8, but TOML files are. Save the file as UTF-8 text."
    )


def test_endless_brackets_are_refused_not_a_crash(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("a = " + "[" * 100_000)
    assert "nested too deeply" in file_refusal(path)
