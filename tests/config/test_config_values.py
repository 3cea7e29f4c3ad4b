"""The line with which a wrong value, an unknown key or a missing one is refused."""

from __future__ import annotations

import pytest

from small_job import SMALL, refusal


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
            " or a number or text in quotes or a list or a table."
            " Write for example model.options = {dropout = 0.1}.",
        ),
        (
            "model.options.dropout=inf",
            "model.options.dropout: got inf, but numbers here are finite."
            " Write for example model.options.dropout = 0.1.",
        ),
        (
            "data.options.scale=[1.0, {low = [nan]}]",
            "data.options.scale: got [1.0, {low = [nan]}], but numbers here are finite."
            " Write for example data.options.scale = 0.1.",
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
            " name, batch, path, image_size, sample_shape, classes, samples, options, workers,"
            " prefetch.",
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


@pytest.mark.parametrize("key", ["model.name", "data.name", "data.batch", "optimizer.lr"])
def test_a_missing_setting_without_a_default_is_named(key):
    line = refusal(SMALL, f"{key}=")
    assert line.startswith(f"{key}: it is not there, but it has no default. Write for example")


def test_long_and_unprintable_values_stay_on_one_short_line():
    line = refusal(SMALL, 'run.device="' + "x\\n" * 500 + '"')
    assert len(line) < 250
    assert "..." in line
