"""A job written as TOML reads back as the same job."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from small_job import SMALL, small
from syncline.cluster import PRESETS
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
)
from syncline.faults import Fault

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
counts = st.integers(1, 10**9)
above_0 = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
shares = st.floats(0, 1, exclude_max=True)
plain = (
    st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
options = st.dictionaries(
    texts,
    st.recursive(
        plain,
        lambda inner: (
            st.lists(inner, max_size=3).map(tuple) | st.dictionaries(texts, inner, max_size=3)
        ),
        max_leaves=5,
    ),
)


def maybe(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | values


@st.composite
def optimizers(draw: st.DrawFn) -> OptimizerSettings:
    name = draw(st.sampled_from(["sgd", "adam", "adamw"]))
    schedule = draw(st.sampled_from(["constant", "cosine", "step", "milestones"]))
    own = {"betas": draw(maybe(st.tuples(shares, shares)))}
    if name == "sgd":
        own = {"momentum": draw(maybe(shares))}
        own["nesterov"] = draw(maybe(st.booleans())) if own["momentum"] else None
    if schedule == "step":
        own |= {"decay_steps": draw(counts), "decay_factor": draw(maybe(above_0))}
    if schedule == "milestones":
        steps = draw(st.sets(counts, min_size=1, max_size=4))
        own |= {"milestones": tuple(sorted(steps)), "decay_factor": draw(maybe(above_0))}
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
        stop_when_not_finite=draw(st.booleans()),
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
    model=st.builds(ModelSettings, name=texts, classes=maybe(counts), options=options, loss=texts),
    data=st.builds(
        DataSettings,
        name=texts,
        batch=counts,
        path=maybe(texts),
        options=options,
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
        '[model]\nname = "cnn"\noptions = {hidden = [3]}\nloss = "cross_entropy"\n\n'
        '[data]\nname = "digits"\nbatch = 64\nworkers = 0\nprefetch = 0\n\n'
        '[optimizer]\nname = "sgd"\nlr = 0.05\nmomentum = 0.0\nnesterov = false\n'
        'weight_decay = 0.0\nschedule = "constant"\nwarmup_steps = 0\n\n'
        '[strategy]\nname = "synchronous"\nshards = 2\nbucket_bytes = "auto"\n'
        'overlap = "auto"\ncomm = "auto"\n\n'
        "[run]\nranks = 2\nsteps = 30\nseed = 0\nthreads = 1\nstop_when_not_finite = true\n"
        'out = "a\\u007f\\"\\n"\nsilent_s = 20.0\nhung_s = 600.0\nmeet_s = 300.0\n'
        'device = "cpu"\n'
    )


def test_faults_stand_above_all_tables_and_are_written_back():
    job = parse_job(SMALL, sets=['faults=[{rank=1, step=5, kind="death"}]'])
    assert job.faults == (Fault(rank=1, step=5, kind="death"),)
    assert parse_job(job_to_toml(job)) == job
    assert job_to_toml(job).startswith("faults = [")
