"""The line with which settings are refused that do not go together."""

from __future__ import annotations

import pytest

from small_job import SMALL, refusal


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            ["run.epochs=2", "run.steps=3"],
            "run.steps: got 3 together with run.epochs = 2, but exactly one of the two ends a run."
            " Remove one of them.",
        ),
        (
            ["data.workers=2", "data.prefetch=1"],
            "data.prefetch: got 1 with data.workers = 2, but each worker reads at least one batch"
            " ahead of use. Use 2 or more, or data.workers = 1.",
        ),
        (
            ["data.name=nets:load", "data.prefetch=2"],
            "data.prefetch: got 2 with data.workers = 0, but a thread would read ahead, and what"
            " nets:load draws at random would mix with what the model draws. Use data.workers = 1"
            " or more, or leave data.prefetch out.",
        ),
        (
            ["data.workers=-1"],
            "data.workers: got -1, but this is a whole number, 0 or more, at most 256."
            " Write for example data.workers = 2.",
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
            ' effect with schedule = "step" or "milestones" only.'
            " Remove it (on the command line: --set optimizer.decay_factor=).",
        ),
        (
            ["optimizer.milestones=[3, 9]", "optimizer.schedule=step", "optimizer.decay_steps=3"],
            'optimizer.milestones: got [3, 9] while optimizer.schedule is "step", but it has an'
            ' effect with schedule = "milestones" only.'
            " Remove it (on the command line: --set optimizer.milestones=).",
        ),
        (
            ["optimizer.schedule=milestones"],
            'optimizer.milestones: it is not there, but schedule = "milestones" needs the steps at'
            " which it decays. Write for example optimizer.milestones = [800, 1200].",
        ),
        (
            ["optimizer.schedule=milestones", "optimizer.milestones=[9, 3, 9]"],
            "optimizer.milestones: got [9, 3, 9], but milestones are steps in ascending order,"
            " each once. Write optimizer.milestones = [3, 9].",
        ),
        (
            [
                "optimizer.schedule=milestones",
                "optimizer.milestones=[3, 9]",
                "optimizer.warmup_steps=4",
            ],
            "optimizer.warmup_steps: got 4 with a first milestone at 3, but the learning rate"
            " decays after the warm-up. Use at most 3.",
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


def test_a_death_of_all_ranks_is_refused():
    assert refusal(SMALL, 'faults=[{rank=-1, step=5, kind="death"}]').startswith(
        "faults[0].rank: got -1, every rank, for a death without a chance, but at least one rank"
    )


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
            "strategy.server.servers: got 1 with 1 rank, but at least one rank must compute. "
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
