"""A job as a whole: its defaults, resolving, and how two differ."""

from __future__ import annotations

import pytest

from small_job import small
from syncline import config
from syncline.config import (
    ClusterSettings,
    DataSettings,
    Job,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    StrategySettings,
    what_changed,
)


def test_a_small_job_gets_the_documented_defaults():
    assert small() == Job(
        model=ModelSettings(
            name="cnn", image_size=None, classes=None, options={}, loss="cross_entropy"
        ),
        data=DataSettings(name="digits", batch=64, options={}),
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
            stop_when_not_finite=True,
            silent_s=20.0,
            hung_s=600.0,
            meet_s=300.0,
            device="cpu",
        ),
        cluster=ClusterSettings(preset="1gbit", machines=None, algorithm="direct", jitter="none"),
    )


def test_a_job_cannot_be_changed():
    with pytest.raises(AttributeError):
        small().run.steps = 3  # type: ignore[misc]


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


def test_the_settings_of_a_job_are_these():
    assert config.keys() == [
        *("model.name", "model.image_size", "model.classes", "model.options"),
        "model.loss",
        *("data.name", "data.batch", "data.path", "data.image_size", "data.sample_shape"),
        *("data.classes", "data.samples", "data.options", "data.workers", "data.prefetch"),
        *("optimizer.name", "optimizer.lr", "optimizer.momentum", "optimizer.nesterov"),
        *("optimizer.weight_decay", "optimizer.betas", "optimizer.clip_norm"),
        *("optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_steps"),
        *("optimizer.milestones", "optimizer.decay_factor"),
        *("strategy.name", "strategy.shards", "strategy.bucket_bytes", "strategy.overlap"),
        "strategy.comm",
        *("run.ranks", "run.steps", "run.epochs", "run.seed", "run.threads", "run.evaluate_every"),
        *("run.checkpoint_every", "run.stop_when_not_finite", "run.out", "run.log"),
        "run.silent_s",
        *("run.hung_s", "run.meet_s", "run.device"),
        *("cluster.preset", "cluster.device", "cluster.machines"),
        *("cluster.latency_s", "cluster.rate_bytes_per_s"),
        *("cluster.inside_latency_s", "cluster.inside_rate_bytes_per_s", "cluster.flops_per_s"),
        *(
            "cluster.update_bytes_per_s",
            "cluster.message_s",
            "cluster.collective_s",
            "cluster.duplex",
            "cluster.copy_latency_s",
            "cluster.copy_rate_bytes_per_s",
            "cluster.byte_s",
            "cluster.cores",
            "cluster.one_computer",
            "cluster.input_s",
            "cluster.algorithm",
            "cluster.links",
            "cluster.jitter",
        ),
        *("cluster.jitter_sigma", "cluster.jitter_shift", "cluster.slow_ranks", "cluster.faults"),
        "cluster.link_changes",
    ]


@pytest.mark.parametrize(
    ("sets", "prefetch"),
    [
        ({}, 0),  # in memory
        ({"data__name": "folder"}, 2),  # by a thread
        ({"data__name": "own:load"}, 0),  # may draw at random: not by a thread
        ({"data__name": "own:load", "data__workers": "3"}, 6),
        ({"data__workers": "256"}, 256),
        ({"data__name": "folder", "data__prefetch": "0"}, 0),
    ],
)
def test_resolving_says_how_many_batches_are_read_ahead(sets, prefetch):
    job = small(**sets).resolved()
    assert job.data.prefetch == prefetch
    assert job.resolved() == job


def test_a_resumed_run_may_have_other_workers_and_prefetch():
    now = small(data__workers="2", data__prefetch="7").resolved()
    assert list(what_changed(small().resolved(), now)) == []


def test_what_has_changed_of_a_strategys_own_settings_is_named():
    def job(**sets):
        return small(strategy__name="server", **sets).resolved(2)

    assert list(what_changed(job(), job(strategy__server__max_staleness=3))) == [
        ("strategy.server.max_staleness", "none", 3)
    ]
    # With an asynchronous strategy shards fix no arithmetic.
    assert list(what_changed(job(), job(strategy__shards=8))) == []
