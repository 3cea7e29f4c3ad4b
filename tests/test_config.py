"""A job: what is read, what is written, and the line each mistake ends in."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import config
from syncline.cluster import PRESETS, cluster_of, conditions_of
from syncline.config import (
    ClusterSettings,
    DataSettings,
    Job,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    StrategySettings,
    job_to_toml,
    parse_job,
    read_job,
    what_changed,
)
from syncline.errors import ConfigError
from syncline.faults import Conditions, Fault, Jitter, LinkChange

EXAMPLES = Path(__file__).parent.parent / "examples"

SMALL = """
[model]
name = "cnn"

[data]
name = "digits"
batch = 64

[optimizer]
lr = 0.05

[run]
steps = 30
"""


def small(**sets: object) -> Job:
    """The small job with settings such as run__steps="30" laid over it."""
    return parse_job(
        SMALL, sets=[f"{key.replace('__', '.')}={value}" for key, value in sets.items()]
    )


def refusal(text: str, *sets: str, ranks: int | None = None) -> str:
    """The one line with which a job is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_job(text, source="job.toml", sets=sets).resolved(ranks)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(caught.value.key + ": ")
    return line


# -- reading ---------------------------------------------------------------------------------------


def test_a_small_job_gets_the_documented_defaults():
    assert small() == Job(
        model=ModelSettings(name="cnn", image_size=None, classes=None, options={}),
        data=DataSettings(name="digits", batch=64),
        optimizer=OptimizerSettings(name="sgd", lr=0.05, schedule="constant", warmup_steps=0),
        strategy=StrategySettings(
            name="synchronous", shards=None, bucket_bytes="auto", overlap="auto", comm="auto"
        ),
        run=RunSettings(
            ranks=1,
            steps=30,
            seed=0,
            threads=1,
            evaluate_every=None,
            checkpoint_every=None,
            silent_s=20.0,
            hung_s=600.0,
            device="cpu",
        ),
        cluster=ClusterSettings(preset="1gbit", machines=None, algorithm="direct", jitter="none"),
    )


def test_a_job_cannot_be_changed():
    with pytest.raises(AttributeError):
        small().run.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["digits", "fashion"])
def test_the_examples_are_jobs(name):
    job = read_job(EXAMPLES / f"{name}.toml").resolved()
    assert job.strategy.shards == 8
    assert job.run.ranks == 2


@pytest.mark.parametrize("name", sorted(config.STRATEGIES))
def test_every_strategy_has_an_example(name):
    job = read_job(EXAMPLES / f"fashion-{name}.toml").resolved()
    assert (job.strategy.name, job.run.ranks, job.strategy.shards) == (name, 4, 4)


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


# -- resolving -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "betas": None}),
        ("adam", {"momentum": None, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("adamw", {"momentum": None, "betas": (0.9, 0.999), "weight_decay": 0.01}),
    ],
)
def test_resolving_writes_out_the_defaults_of_the_chosen_optimizer_only(name, expected):
    optimizer = small(optimizer__name=name).resolved().optimizer
    assert {key: getattr(optimizer, key) for key in expected} == expected


def test_resolving_keeps_what_was_given():
    optimizer = small(optimizer__momentum="0.9", optimizer__weight_decay="0.5").resolved().optimizer
    assert (optimizer.momentum, optimizer.weight_decay) == (0.9, 0.5)


def test_resolving_fills_in_ranks_and_shards_once():
    job = small(run__ranks="2").resolved(8)
    assert (job.run.ranks, job.strategy.shards) == (8, 8)
    assert job.resolved() == job
    assert small(run__ranks="2").resolved().run.ranks == 2


def test_shards_need_not_be_a_multiple_of_ranks():
    assert small(strategy__shards="8").resolved(3).strategy.shards == 8


def test_the_image_size_comes_from_either_table():
    assert small(model__image_size="32").image_size == 32
    assert small(data__image_size="16").image_size == 16
    assert small().image_size is None


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "run.steps=many",
            'run.steps: got "many", but this is a whole number, 1 or more.'
            " Write for example run.steps = 1000.",
        ),
        (
            'run.steps="30"',
            'run.steps: got "30", but this is a whole number, 1 or more.'
            " Write it without quotes: run.steps = 30.",
        ),
        (
            "run.steps=0",
            "run.steps: got 0, but this is a whole number, 1 or more."
            " Write for example run.steps = 1000.",
        ),
        (
            "run.steps=2.5",
            "run.steps: got 2.5, but this is a whole number, 1 or more."
            " Write for example run.steps = 1000.",
        ),
        (
            "run.steps=true",
            "run.steps: got true, but this is a whole number, 1 or more."
            " Write for example run.steps = 1000.",
        ),
        (
            "run.ranks=0",
            "run.ranks: got 0, but this is a whole number, 1 or more."
            " Write for example run.ranks = 2.",
        ),
        (
            "optimizer.lr=0",
            "optimizer.lr: got 0, but this is a number, above 0."
            " Write for example optimizer.lr = 0.05.",
        ),
        (
            "optimizer.lr=-0.1",
            "optimizer.lr: got -0.1, but this is a number, above 0."
            " Write for example optimizer.lr = 0.05.",
        ),
        (
            "optimizer.lr=inf",
            "optimizer.lr: got inf, but numbers here are finite."
            " Write for example optimizer.lr = 0.05.",
        ),
        (
            "optimizer.lr=nan",
            "optimizer.lr: got nan, but this is a number, above 0."
            " Write for example optimizer.lr = 0.05.",
        ),
        (
            "optimizer.momentum=1",
            "optimizer.momentum: got 1, but this is a number, 0 or more, below 1."
            " Write for example optimizer.momentum = 0.9.",
        ),
        (
            "optimizer.betas=[0.9]",
            "optimizer.betas: got [0.9], but this is a list of 2, each a number, 0 or more,"
            " below 1. Write for example optimizer.betas = [0.9, 0.999].",
        ),
        (
            "optimizer.name=adamm",
            'optimizer.name: got "adamm", but this is "adam", "adamw" or "sgd".'
            ' Did you mean "adam"?',
        ),
        (
            "optimizer.name=lion",
            'optimizer.name: got "lion", but this is "adam", "adamw" or "sgd".'
            ' Write for example optimizer.name = "adam".',
        ),
        (
            "optimizer.nesterov=True",
            'optimizer.nesterov: got "True", but this is true or false.'
            " Write it without quotes: optimizer.nesterov = true.",
        ),
        (
            "optimizer.nesterov=1",
            "optimizer.nesterov: got 1, but this is true or false."
            " Write for example optimizer.nesterov = true.",
        ),
        (
            "data.sample_shape=[]",
            "data.sample_shape: got [], but this is a list, not empty, each a whole number,"
            " 1 or more. Write for example data.sample_shape = [3, 32, 32].",
        ),
        (
            "data.path=3",
            "data.path: got 3, but this is text in quotes, not empty."
            ' Write for example data.path = "/data/images".',
        ),
        (
            "model.options=3",
            "model.options: got 3, but this is a table, each value true or false or a whole number"
            " or a number or text in quotes or a list, each a whole number."
            " Write for example model.options = {dropout = 0.1}.",
        ),
        (
            "model.options.dropout=inf",
            "model.options.dropout: got inf, but numbers here are finite."
            " Write for example model.options.dropout = 0.1.",
        ),
        (
            "strategy.bucket_bytes=big",
            'strategy.bucket_bytes: got "big", but this is a whole number, 1 or more or "auto".'
            " Write for example strategy.bucket_bytes = 4194304.",
        ),
        (
            "strategy.comm=shared-memory",
            'strategy.comm: got "shared-memory", but this is "auto", "network" or "shared_memory".'
            ' Did you mean "shared_memory"?',
        ),
        (
            "strategy.shards=all",
            'strategy.shards: got "all", but this is a whole number, 1 or more.'
            " Write for example strategy.shards = 8.",
        ),
        (
            "strategy.name=synchronus",
            'strategy.name: got "synchronus", but no such strategy exists.'
            ' Did you mean "synchronous"?',
        ),
        (
            "run.device=cuda",
            'run.device: got "cuda", but this is "cpu".'
            " Remove the line: this version trains on CPUs.",
        ),
        (
            "run=3",
            "run: got 3, but this is a table of settings."
            " Write a line [run] and the settings below it.",
        ),
        (
            "run.steps.first=3",
            "run.steps: got 30, but this is a table of settings."
            " Write a line [run.steps] and the settings below it.",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_the_rule_and_the_way_out(setting, line):
    assert refusal(SMALL, setting) == line


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (
            "run.stesp",
            "run.stesp: set on the command line, but no such setting exists."
            " Did you mean run.steps?",
        ),
        (
            "run.lr",
            "run.lr: set on the command line, but no such setting exists."
            " Did you mean optimizer.lr?",
        ),
        (
            "modle.name",
            "modle: set on the command line, but no such setting exists. Did you mean model?",
        ),
        (
            "steps",
            "steps: set on the command line, but no such setting exists. Did you mean run.steps?",
        ),
        (
            "epoch",
            "epoch: set on the command line, but no such setting exists. Did you mean run.epochs?",
        ),
        (
            "zzz",
            "zzz: set on the command line, but no such setting exists."
            " Tables of a job: model, data, optimizer, strategy, run, cluster, faults.",
        ),
        (
            "data.zzz",
            "data.zzz: set on the command line, but no such setting exists. Settings of data:"
            " name, batch, path, image_size, sample_shape, classes, samples.",
        ),
        (
            "strategy.settings",
            "strategy.settings: set on the command line, but no such setting exists. Settings of"
            " strategy: name, shards, bucket_bytes, overlap, comm.",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_spelling(key, line):
    assert refusal(SMALL, f"{key}=3") == line


def test_an_unknown_key_says_when_it_was_found_in_the_file():
    assert refusal(SMALL.replace("steps", "stesp")) == (
        "run.stesp: found in the file, but no such setting exists. Did you mean run.steps?"
    )


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


@pytest.mark.parametrize("key", ["model.name", "data.name", "data.batch", "optimizer.lr"])
def test_a_missing_setting_without_a_default_is_named(key):
    line = refusal(SMALL, f"{key}=")
    assert line.startswith(f"{key}: it is not there, but it has no default. Write for example")


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            ["run.epochs=2", "run.steps=3"],
            "run.steps: got 3 together with run.epochs = 2, but exactly one of the two ends a run."
            " Remove one of them.",
        ),
        (
            ["run.steps="],
            "run.steps: neither run.steps nor run.epochs is there, but exactly one of the two ends"
            " a run. Write for example run.epochs = 10.",
        ),
        (
            ["optimizer.name=adamw", "optimizer.momentum=0.9"],
            'optimizer.momentum: got 0.9 while optimizer.name is "adamw", but it has an effect'
            " with sgd only. Remove it (on the command line: --set optimizer.momentum=).",
        ),
        (
            ["optimizer.name=adam", "optimizer.nesterov=false"],
            'optimizer.nesterov: got false while optimizer.name is "adam", but it has an effect'
            " with sgd only. Remove it (on the command line: --set optimizer.nesterov=).",
        ),
        (
            ["optimizer.betas=[0.9, 0.99]"],
            'optimizer.betas: got [0.9, 0.99] while optimizer.name is "sgd", but it has an effect'
            " with adam and adamw only. Remove it (on the command line: --set optimizer.betas=).",
        ),
        (
            ["optimizer.decay_steps=3"],
            'optimizer.decay_steps: got 3 while optimizer.schedule is "constant", but it has an'
            ' effect with schedule = "step" only.'
            " Remove it (on the command line: --set optimizer.decay_steps=).",
        ),
        (
            ["optimizer.decay_factor=0.5", "optimizer.schedule=cosine"],
            'optimizer.decay_factor: got 0.5 while optimizer.schedule is "cosine", but it has an'
            ' effect with schedule = "step" only.'
            " Remove it (on the command line: --set optimizer.decay_factor=).",
        ),
        (
            ["optimizer.schedule=step"],
            'optimizer.decay_steps: it is not there, but schedule = "step" needs the steps between'
            " two decays. Write for example optimizer.decay_steps = 1000.",
        ),
        (
            ["optimizer.nesterov=true"],
            "optimizer.nesterov: got true without momentum, but Nesterov's step is a form of"
            " momentum. Write for example optimizer.momentum = 0.9.",
        ),
        (
            ["optimizer.schedule=cosine", "optimizer.warmup_steps=30"],
            "optimizer.warmup_steps: got 30 with run.steps = 30, but the cosine schedule begins"
            " after the warm-up. Use less than 30.",
        ),
        (
            ["model.image_size=32", "data.image_size=28"],
            "model.image_size: got 32 with data.image_size = 28, but the model reads the images as"
            " the data gives them. Remove one of the two.",
        ),
        (
            ["strategy.synchronous.mix=0.5"],
            "strategy.synchronous: set on the command line, but synchronous has no settings of its"
            " own. Remove it.",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(sets, line):
    assert refusal(SMALL, *sets) == line


@pytest.mark.parametrize(
    ("sets", "ranks", "line"),
    [
        (
            ["strategy.shards=2"],
            4,
            "strategy.shards: got 2 with 4 ranks, but each rank needs at least one shard."
            " Use 4, 8, 16 or 32 shards, or at most 2 ranks.",
        ),
        (
            ["strategy.shards=4", "data.batch=4"],
            5,
            "strategy.shards: got 4 with 5 ranks, but each rank needs at least one shard."
            " Use more shards and a larger batch, or at most 4 ranks.",
        ),
        (
            ["strategy.shards=8", "data.batch=60"],
            2,
            "data.batch: got 60 with strategy.shards = 8, but shards are equal."
            " Use 56 or 64, or 4, 5, 6 or 10 shards.",
        ),
        (
            ["strategy.shards=128"],
            2,
            "strategy.shards: got 128 with data.batch = 64, but each shard needs at least one"
            " sample. Use at most 64 shards, or make data.batch a multiple of 128.",
        ),
        (
            [],
            3,
            "run.ranks: got 3 with data.batch = 64, but without strategy.shards each rank takes"
            " one equal share of the batch. Use 1, 2, 4 or 8 ranks, set strategy.shards,"
            " or make data.batch 63 or 66.",
        ),
        ([], 0, "run.ranks: got 0, but a world has at least one rank. Use 1 or more."),
    ],
)
def test_ranks_shards_and_batch_that_do_not_fit_are_refused_with_numbers_that_do(sets, ranks, line):
    assert refusal(SMALL, *sets, ranks=ranks) == line


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
        "run.epochs: taken out with --set, but the job does not have it. Leave that --set away."
    )


def test_long_and_unprintable_values_stay_on_one_short_line():
    line = refusal(SMALL, 'run.device="' + "x\\n" * 500 + '"')
    assert len(line) < 250
    assert "..." in line


# -- files -----------------------------------------------------------------------------------------


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


# -- settings of a strategy of its own -------------------------------------------------------------


class GossipSettings(msgspec.Struct, frozen=True, kw_only=True):
    mix: float = 0.5
    partner: Literal["hypercube", "ring"] = "hypercube"


@pytest.fixture
def gossip(monkeypatch):
    monkeypatch.setitem(config.STRATEGIES, "gossip", GossipSettings)


@pytest.mark.usefixtures("gossip")
def test_a_strategy_reads_its_own_table_and_writes_it_back():
    job = small(strategy__name="gossip", strategy__gossip__mix="0.4")
    assert job.strategy.settings == GossipSettings(mix=0.4)
    assert "[strategy.gossip]\nmix = 0.4\n" in job_to_toml(job)
    assert parse_job(job_to_toml(job)) == job


@pytest.mark.usefixtures("gossip")
def test_a_strategy_without_its_table_gets_its_defaults():
    assert small(strategy__name="gossip").strategy.settings == GossipSettings()


@pytest.mark.usefixtures("gossip")
def test_the_table_of_a_strategy_that_is_not_chosen_is_refused():
    assert refusal(SMALL, "strategy.gossip.mix=0.4") == (
        'strategy.gossip: set on the command line while strategy.name is "synchronous", but'
        " settings of a strategy that is not chosen have no effect."
        ' Remove them, or choose strategy.name = "gossip".'
    )


@pytest.mark.usefixtures("gossip")
def test_mistakes_in_a_strategys_own_table_are_named_in_full():
    assert refusal(SMALL, "strategy.name=gossip", "strategy.gossip.mixx=1") == (
        "strategy.gossip.mixx: set on the command line, but no such setting exists."
        " Did you mean strategy.gossip.mix?"
    )
    assert refusal(SMALL, "strategy.name=gossip", "strategy.gossip.partner=rign") == (
        'strategy.gossip.partner: got "rign", but this is "hypercube" or "ring".'
        ' Did you mean "ring"?'
    )
    assert refusal(SMALL, "strategy.name=gossip", "strategy.gossip=1").startswith(
        "strategy.gossip: got 1, but this is a table of settings."
    )


# -- the cluster to simulate -----------------------------------------------------------------------

FAULTS = """
[cluster]
preset = "10gbit"
slow_ranks = {3 = 2}
link_changes = [{time_s = 2.5, machine = 1, factor = 0.5}]

[[cluster.faults]]
rank = 1
step = 3
kind = "slow"
factor = 10
steps = 2

[[cluster.faults]]
rank = 0
step = 9
kind = "death"
"""


def test_faults_are_lists_of_tables_and_come_back_as_written():
    job = parse_job(SMALL + FAULTS)
    assert job.cluster == ClusterSettings(
        preset="10gbit",
        slow_ranks={"3": 2.0},
        faults=(
            Fault(rank=1, step=3, kind="slow", factor=10.0, steps=2),
            Fault(rank=0, step=9, kind="death"),
        ),
        link_changes=(LinkChange(time_s=2.5, machine=1, factor=0.5),),
    )
    assert parse_job(job_to_toml(job)) == job
    assert parse_job(job_to_toml(job.resolved(4))) == job.resolved(4)


def test_a_cluster_is_set_on_the_command_line():
    job = small(
        cluster__rate_bytes_per_s="1e9",
        cluster__slow_ranks__1="2",
        cluster__faults='[{rank = 1, step = 3, kind = "death"}]',
    )
    assert job.cluster == ClusterSettings(
        rate_bytes_per_s=1e9,
        slow_ranks={"1": 2.0},
        faults=(Fault(rank=1, step=3, kind="death"),),
    )


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            ["cluster.preset=10gbits"],
            'cluster.preset: got "10gbits", but this is "1gbit", "10gbit", "25gbit" or "100gbit".'
            ' Did you mean "10gbit"?',
        ),
        (
            ["cluster.preset=token-ring"],
            'cluster.preset: got "token-ring", but this is "1gbit", "10gbit", "25gbit" or'
            ' "100gbit". Use "1gbit", "10gbit", "25gbit" or "100gbit".',
        ),
        (
            ["cluster.rate=3"],
            "cluster.rate: set on the command line, but no such setting exists. Settings of"
            " cluster: preset, machines, latency_s, rate_bytes_per_s, inside_latency_s,"
            " inside_rate_bytes_per_s, flops_per_s, update_bytes_per_s, input_s, algorithm,"
            " jitter, jitter_sigma, jitter_shift, slow_ranks, faults, link_changes.",
        ),
        (
            ["cluster.rate_byte_per_s=3"],
            "cluster.rate_byte_per_s: set on the command line, but no such setting exists."
            " Did you mean cluster.rate_bytes_per_s?",
        ),
        (
            ["cluster.rate_bytes_per_s=0"],
            "cluster.rate_bytes_per_s: got 0, but this is a number, above 0."
            " Write for example cluster.rate_bytes_per_s = 1000000000.0.",
        ),
        (
            ["cluster.jitter=lognormal"],
            'cluster.jitter_sigma: it is not there, but jitter = "lognormal" needs a spread above'
            " 0. Write for example cluster.jitter_sigma = 0.1.",
        ),
        (
            ["cluster.jitter_sigma=0.1"],
            'cluster.jitter_sigma: got 0.1 while cluster.jitter is "none", but it has an effect'
            ' with jitter = "lognormal" only.'
            " Remove it (on the command line: --set cluster.jitter_sigma=).",
        ),
        (
            ["cluster.jitter=exponential", "cluster.jitter_sigma=0.1"],
            'cluster.jitter_sigma: got 0.1 while cluster.jitter is "exponential", but it has an'
            ' effect with jitter = "lognormal" only.'
            " Remove it (on the command line: --set cluster.jitter_sigma=).",
        ),
        (
            ["cluster.jitter=lognormal", "cluster.jitter_sigma=1", "cluster.jitter_shift=0.5"],
            'cluster.jitter_shift: got 0.5 while cluster.jitter is "lognormal", but it has an'
            ' effect with jitter = "exponential" only.'
            " Remove it (on the command line: --set cluster.jitter_shift=).",
        ),
        (
            ["cluster.jitter=exponential", "cluster.jitter_shift=1"],
            "cluster.jitter_shift: got 1, but this is a number, 0 or more, below 1."
            " Write for example cluster.jitter_shift = 0.9.",
        ),
        (
            ["cluster.slow_ranks=3"],
            "cluster.slow_ranks: got 3, but this is a table, each value a number, above 0."
            " Write for example cluster.slow_ranks = {1 = 2.0}.",
        ),
        (
            ["cluster.slow_ranks.1=0"],
            "cluster.slow_ranks.1: got 0, but this is a number, above 0."
            " Write for example cluster.slow_ranks.1 = 2.0.",
        ),
        (
            ["cluster.slow_ranks.one=2"],
            'cluster.slow_ranks.one: got "one", but ranks are whole numbers, counted from 0.'
            " Write for example cluster.slow_ranks = {1 = 2.0}.",
        ),
        (
            ["cluster.faults=3"],
            "cluster.faults: got 3, but this is a list of tables. Write for example"
            ' cluster.faults = [{rank = 1, step = 1, kind = "death"}].',
        ),
        (
            ["cluster.link_changes=[3]"],
            "cluster.link_changes: got [3], but this is a list of tables. Write for example"
            " cluster.link_changes = [{time_s = 0.1, machine = 1, factor = 0.1}].",
        ),
        (
            ['cluster.faults=[{rank = 1, step = 3, kind = "deaf"}]'],
            'cluster.faults[0].kind: got "deaf", but this is "death", "pause" or "slow".'
            ' Did you mean "death"?',
        ),
        (
            ["cluster.faults=[{rank = 1, step = 3}]"],
            "cluster.faults[0].kind: it is not there, but it has no default."
            ' Write for example cluster.faults[0].kind = "death".',
        ),
        (
            ['cluster.faults=[{rnk = 1, step = 3, kind = "death"}]'],
            "cluster.faults[0].rnk: set on the command line, but no such setting exists."
            " Did you mean cluster.faults[0].rank?",
        ),
        (
            ['cluster.faults=[{rank = 1.5, step = 3, kind = "death"}]'],
            "cluster.faults[0].rank: got 1.5, but this is a whole number."
            " Write for example cluster.faults[0].rank = 1.",
        ),
        (
            ['cluster.faults=[{rank = 1, step = 3, kind = "slow", factor = inf}]'],
            "cluster.faults[0].factor: got inf, but numbers here are finite."
            " Write for example cluster.faults[0].factor = 0.1.",
        ),
        (
            ['cluster.faults=[{rank = 1, step = 3, kind = "death", seconds = 2}]'],
            'cluster.faults[0].seconds: got 2.0 while its kind is "death", but it has an effect'
            ' with kind = "pause" only. Remove it.',
        ),
    ],
)
def test_mistakes_in_a_cluster_are_refused_like_all_others(sets, line):
    assert refusal(SMALL, *sets) == line


def test_an_unknown_key_of_a_fault_in_the_file_says_so():
    assert refusal(SMALL + FAULTS.replace("factor = 10", "facter = 10")) == (
        "cluster.faults[0].facter: found in the file, but no such setting exists."
        " Did you mean cluster.faults[0].factor?"
    )


def test_a_job_that_says_nothing_of_a_cluster_is_written_without_one():
    assert "cluster" not in job_to_toml(small())
    assert "cluster" not in job_to_toml(small(cluster__preset="1gbit").resolved())
    assert '[cluster]\npreset = "10gbit"\n' in job_to_toml(small(cluster__preset="10gbit"))


def test_a_run_may_go_on_with_another_cluster():
    before, now = small(), parse_job(SMALL + FAULTS)
    assert list(what_changed(before, now)) == []


def test_a_preset_is_one_rank_and_a_cluster_as_many_as_asked_for():
    for preset in PRESETS.values():
        assert preset.ranks == 1
    cluster = cluster_of(ClusterSettings(preset="25gbit"), ranks=6, machines=None)
    assert (cluster.machines, cluster.ranks_per_machine, cluster.ranks) == (6, 1, 6)
    assert cluster.network == PRESETS["25gbit"].network
    settings = ClusterSettings(machines=3)
    assert cluster_of(settings, 6, None).ranks_per_machine == 2
    assert cluster_of(settings, 6, 2).ranks_per_machine == 3


def test_what_a_job_says_of_its_cluster_wins_over_the_preset():
    settings = {
        "latency_s": 0.0,
        "rate_bytes_per_s": 2.0,
        "inside_latency_s": 3.0,
        "inside_rate_bytes_per_s": 4.0,
        "flops_per_s": 5.0,
        "update_bytes_per_s": 6.0,
    }
    cluster = cluster_of(ClusterSettings(**settings), 1, None)
    links = cluster.network, cluster.inside
    found = [(link.latency_s, link.rate_bytes_per_s) for link in links]
    assert found == [(0.0, 2.0), (3.0, 4.0)]
    assert (cluster.flops_per_s, cluster.update_bytes_per_s) == (5.0, 6.0)


@pytest.mark.parametrize("machines", [4, 12, 0, -2])
def test_machines_with_unequal_ranks_are_refused(machines):
    with pytest.raises(ConfigError) as caught:
        cluster_of(ClusterSettings(), 6, machines)
    assert str(caught.value) == (
        f"cluster.machines: got {machines} with 6 ranks, but each machine has as many ranks as any"
        " other. Use 1, 2, 3, 6."
    )


def test_conditions_are_what_the_cluster_says_and_the_seed_is_the_runs():
    job = parse_job(SMALL + FAULTS, sets=["cluster.jitter=lognormal", "cluster.jitter_sigma=0.2"])
    assert conditions_of(job.cluster, 7) == Conditions(
        faults=job.cluster.faults,
        jitter=Jitter(kind="lognormal", sigma=0.2),
        slow_ranks={3: 2.0},
        link_changes=job.cluster.link_changes,
        seed=7,
    )


# -- writing ---------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
counts = st.integers(1, 10**9)
above_0 = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
shares = st.floats(0, 1, exclude_max=True)
options = st.dictionaries(
    texts,
    st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.lists(st.integers(-5, 5)).map(tuple),
)


def maybe(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | values


@st.composite
def optimizers(draw: st.DrawFn) -> OptimizerSettings:
    name = draw(st.sampled_from(["sgd", "adam", "adamw"]))
    schedule = draw(st.sampled_from(["constant", "cosine", "step"]))
    own = {"betas": draw(maybe(st.tuples(shares, shares)))}
    if name == "sgd":
        own = {"momentum": draw(maybe(shares))}
        own["nesterov"] = draw(maybe(st.booleans())) if own["momentum"] else None
    if schedule == "step":
        own |= {"decay_steps": draw(counts), "decay_factor": draw(maybe(above_0))}
    return OptimizerSettings(
        name=name,
        lr=draw(above_0),
        weight_decay=draw(maybe(st.floats(0, 1e9))),
        clip_norm=draw(maybe(above_0)),
        schedule=schedule,
        **own,
    )


@st.composite
def runs(draw: st.DrawFn) -> RunSettings:
    return RunSettings(
        **{draw(st.sampled_from(["steps", "epochs"])): draw(counts)},
        ranks=draw(counts),
        seed=draw(st.integers(0, 2**63 - 1)),
        evaluate_every=draw(maybe(counts)),
        out=draw(maybe(texts)),
        silent_s=draw(above_0),
    )


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSettings:
    jitter = draw(st.sampled_from(["none", "lognormal", "exponential"]))
    own = {"lognormal": {"jitter_sigma": above_0}, "exponential": {"jitter_shift": shares}}
    return ClusterSettings(
        preset=draw(st.sampled_from(sorted(PRESETS))),
        machines=draw(maybe(counts)),
        rate_bytes_per_s=draw(maybe(above_0)),
        jitter=jitter,
        **{name: draw(values) for name, values in own.get(jitter, {}).items()},
        slow_ranks=draw(st.dictionaries(st.integers(0, 99).map(str), above_0)),
        faults=draw(
            st.lists(
                st.builds(Fault, rank=counts, step=counts, kind=st.just("pause"), seconds=above_0),
                max_size=3,
            ).map(tuple)
        ),
    )


jobs = st.builds(
    Job,
    model=st.builds(ModelSettings, name=texts, classes=maybe(counts), options=options),
    data=st.builds(
        DataSettings,
        name=texts,
        batch=counts,
        path=maybe(texts),
        sample_shape=maybe(st.lists(counts, min_size=1).map(tuple)),
    ),
    optimizer=optimizers(),
    strategy=st.builds(
        StrategySettings,
        shards=maybe(counts),
        bucket_bytes=st.just("auto") | counts,
        overlap=st.just("auto") | st.booleans(),
        comm=st.sampled_from(["auto", "shared_memory", "network"]),
    ),
    run=runs(),
    cluster=st.just(ClusterSettings()) | clusters(),
)


@given(jobs)
def test_a_job_written_as_toml_reads_back_as_the_same_job(job):
    text = job_to_toml(job)
    assert tomllib.loads(text)["model"]["name"] == job.model.name
    assert parse_job(text) == job


def test_a_resolved_job_is_written_whole():
    text = job_to_toml(small(model__options__hidden="[3]", run__out='"a\\u007f\\"\\n"').resolved(2))
    assert text == (
        '[model]\nname = "cnn"\noptions = {hidden = [3]}\n\n'
        '[data]\nname = "digits"\nbatch = 64\n\n'
        '[optimizer]\nname = "sgd"\nlr = 0.05\nmomentum = 0.0\nnesterov = false\n'
        'weight_decay = 0.0\nschedule = "constant"\nwarmup_steps = 0\n\n'
        '[strategy]\nname = "synchronous"\nshards = 2\nbucket_bytes = "auto"\n'
        'overlap = "auto"\ncomm = "auto"\n\n'
        '[run]\nranks = 2\nsteps = 30\nseed = 0\nthreads = 1\nout = "a\\u007f\\"\\n"\n'
        'silent_s = 20.0\nhung_s = 600.0\ndevice = "cpu"\n'
    )


def test_the_settings_of_a_job_are_these():
    assert config.keys() == [
        *("model.name", "model.image_size", "model.classes", "model.options"),
        *("data.name", "data.batch", "data.path", "data.image_size", "data.sample_shape"),
        *("data.classes", "data.samples"),
        *("optimizer.name", "optimizer.lr", "optimizer.momentum", "optimizer.nesterov"),
        *("optimizer.weight_decay", "optimizer.betas", "optimizer.clip_norm"),
        *("optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_steps"),
        "optimizer.decay_factor",
        *("strategy.name", "strategy.shards", "strategy.bucket_bytes", "strategy.overlap"),
        "strategy.comm",
        *("run.ranks", "run.steps", "run.epochs", "run.seed", "run.threads", "run.evaluate_every"),
        *("run.checkpoint_every", "run.out", "run.silent_s", "run.hung_s", "run.device"),
        *("cluster.preset", "cluster.machines", "cluster.latency_s", "cluster.rate_bytes_per_s"),
        *("cluster.inside_latency_s", "cluster.inside_rate_bytes_per_s", "cluster.flops_per_s"),
        *("cluster.update_bytes_per_s", "cluster.input_s", "cluster.algorithm", "cluster.jitter"),
        *("cluster.jitter_sigma", "cluster.jitter_shift", "cluster.slow_ranks", "cluster.faults"),
        "cluster.link_changes",
    ]


def test_faults_stand_above_all_tables_and_are_written_back():
    job = parse_job(SMALL, sets=['faults=[{rank=1, step=5, kind="death"}]'])
    assert job.faults == (Fault(rank=1, step=5, kind="death"),)
    assert parse_job(job_to_toml(job)) == job
    assert job_to_toml(job).startswith("faults = [")


def test_a_death_of_all_ranks_is_refused():
    assert refusal(SMALL, 'faults=[{rank=-1, step=5, kind="death"}]').startswith(
        "faults[0].rank: got -1, every rank, for a death without a chance, but somebody has to"
    )


def test_settings_of_an_asynchronous_strategy():
    sets = ["strategy.name=server", "strategy.server.servers=1", "run.ranks=5"]
    resolved = parse_job(SMALL, sets=sets).resolved()
    assert resolved.strategy.shards == 4
    assert parse_job(job_to_toml(resolved)) == resolved
    line = refusal(SMALL, "strategy.name=gossip", "strategy.gossip.partner=ring")
    assert "Did you mean strategy.gossip.partners?" in line


# -- strategies whose ranks part -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "ranks", "expected"),
    [
        (
            ("strategy.name=gossip", "strategy.gossip.partners=hypercube"),
            3,
            'strategy.gossip.partners: got "hypercube" with 3 ranks, but a hypercube has',
        ),
        (
            ("strategy.name=server", "strategy.server.servers=1"),
            1,
            "strategy.server.servers: got 1 with 1 rank, but somebody has to work. "
            "Use 0 for strips on all ranks.",
        ),
        (
            ("strategy.name=server", "strategy.server.period=40"),
            2,
            "strategy.server.period: got 40 with run.steps = 30, but ranks would never",
        ),
        (
            ("strategy.name=server", "strategy.server.servers=1", "data.batch=64"),
            4,
            "run.ranks: got 4 (1 only serve) with data.batch = 64, but without strategy.shards "
            "each rank takes one equal share of the batch. Use 2, 3, 5 or 9 ranks, set",
        ),
        (
            ("strategy.name=gossip", 'faults=[{rank=0, step=1, kind="slow"}]'),
            2,
            "faults[0].factor: it is 1, or not given, but compute takes",
        ),
    ],
)
def test_settings_that_cannot_work_on_so_many_ranks_are_refused(sets, ranks, expected):
    said = refusal(SMALL, "run.steps=30", *sets, ranks=ranks)
    assert said.startswith(expected), said


def test_what_has_changed_of_a_strategys_own_settings_is_named():
    def job(**sets):
        return small(strategy__name="server", **sets).resolved(2)

    assert list(what_changed(job(), job(strategy__server__max_staleness=3))) == [
        ("strategy.server.max_staleness", "none", 3)
    ]
    # Where ranks part, shards fix no arithmetic.
    assert list(what_changed(job(), job(strategy__shards=8))) == []
