"""How many groups split layers: chosen by simulated steps, and kept in the job."""

from __future__ import annotations

import pytest
from torch import nn

from command import Started
from syncline.cluster import Link
from syncline.config import read_job
from syncline.measure.derive import derive
from syncline.sim.groups_choice import Handling, best_of, candidates, table_of
from syncline.strategies import HybridSettings
from worlds import cluster

AUTO = HybridSettings()


def wide(samples):
    """A chain of layers with many weights."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return derive(nn.Sequential(*layers), (256,), samples, 1e12)


def choose(workload, rate, wanted=AUTO, shards=4):
    return candidates(workload, cluster(4, rate=rate), shards, wanted)


def test_on_a_slow_wire_few_samples_of_wide_layers_are_split_over_all_ranks():
    found = choose(wide(samples=2), rate=1e6)
    assert [one.settings.groups for one in found] == [4, 2, 1]
    assert best_of(found).settings == HybridSettings(groups=1, layers=("0", "2", "4"))
    assert found[2].sent_bytes < found[0].sent_bytes / 4


def test_many_samples_are_not_worth_splitting():
    found = choose(wide(samples=4096), rate=1e6)
    assert [one.settings.groups for one in found] == [4]
    assert table_of(found)[0].endswith("nothing is split (chosen)")


def test_layers_that_are_named_are_split_whether_they_pay_or_not():
    found = choose(wide(samples=4096), 1e6, HybridSettings(layers=("2",)))
    assert [one.layers for one in found] == [(), ("2",), ("2",)]


def test_shards_that_ranks_do_not_have_alike_cannot_be_split():
    assert [one.settings.groups for one in choose(wide(2), 1e6, shards=6)] == [4]


def test_what_gradients_cost_the_processor_is_paid_for_the_rows_that_a_rank_holds():
    # 3 layers of 257 * 256 * 4 bytes, a second for each megabyte. Nothing else takes time.
    links = cluster(4, 4, inside=Link(latency_s=0.0, rate_bytes_per_s=1e15))

    def step_s(**costs):
        found = candidates(wide(2), links, 4, AUTO, Handling(**costs))
        return {one.settings.groups: one.step_s for one in found}

    free, megabytes = step_s(), 3 * 257 * 256 * 4e-6
    taken, added = step_s(taking_s=1e-6), step_s(adding_s=1e-6)
    for groups, part in ((4, 1.0), (2, 0.5), (1, 0.25)):
        assert taken[groups] - free[groups] == pytest.approx(part * megabytes, rel=1e-3)
    assert added[2] - free[2] == pytest.approx(0.5 * megabytes, rel=1e-3)
    assert added[1] == pytest.approx(free[1])  # no other rank holds the same rows


JOB = """
[model]
name = "mlp"
options = { hidden = [512, 512] }

[data]
name = "digits"
batch = 16

[optimizer]
lr = 0.01

[strategy]
name = "hybrid"
shards = 4

[run]
ranks = 2
steps = 4
checkpoint_every = 2
"""


@pytest.mark.processes
def test_a_run_writes_what_it_chose_and_goes_on_with_it(tmp_path):
    job, out = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(JOB)
    words = ("train", str(job), "--out", str(out), "--json")
    stops = ("--set", 'faults=[{rank=1, step=3, kind="death"}]')
    broken = Started(*words, *stops)
    _, said = broken.communicate()
    assert broken.returncode == 1, said
    chosen = read_job(out / "job.toml").strategy.own
    assert chosen.groups in (1, 2)
    assert f"{chosen.groups} group" in said
    # Had it to choose again, it might choose something else.
    other = {1: 2, 2: 1}[chosen.groups]
    text = (out / "job.toml").read_text()
    (out / "job.toml").write_text(text.replace(f"groups = {chosen.groups}", f"groups = {other}"))
    again = Started(*words, "--resume")
    _, said = again.communicate()
    assert again.returncode == 0, said
    assert read_job(out / "job.toml").strategy.own.groups == other
    assert "(chosen)" not in said
