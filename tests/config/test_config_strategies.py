"""Settings of a strategy's own, in its own table."""

from __future__ import annotations

from typing import Literal

import pytest

from small_job import SMALL, refusal, small
from syncline import config
from syncline.config import job_to_toml, parse_job
from syncline.errors import ConfigError
from syncline.strategies.registry import Entry
from syncline.strategies.settings import OwnSettings


class GossipSettings(OwnSettings, frozen=True, kw_only=True):
    mix: float = 0.5
    partner: Literal["hypercube", "ring"] = "hypercube"


@pytest.fixture
def gossip(monkeypatch):
    monkeypatch.setitem(config.STRATEGIES, "gossip", Entry("gossip:Gossip", GossipSettings))


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


def test_settings_of_an_asynchronous_strategy():
    sets = ["strategy.name=server", "strategy.server.servers=1", "run.ranks=5"]
    resolved = parse_job(SMALL, sets=sets).resolved()
    assert resolved.strategy.shards == 4
    assert parse_job(job_to_toml(resolved)) == resolved
    line = refusal(SMALL, "strategy.name=gossip", "strategy.gossip.partner=ring")
    assert "Did you mean strategy.gossip.partners?" in line


@pytest.mark.parametrize("name", ["all_reduce", "wait_free", "merged", "sync_server"])
def test_what_a_strategy_fixes_cannot_be_set(name):
    with pytest.raises(ConfigError) as caught:
        small(strategy__name=name, strategy__overlap="true").resolved(2)
    assert str(caught.value) == (
        f'strategy.overlap: got true with strategy.name = "{name}", but this strategy says itself'
        " when ranks exchange. Remove it (on the command line: --set strategy.overlap=)."
    )
    with pytest.raises(ConfigError, match="says itself where buckets end"):
        small(strategy__name=name, strategy__bucket_bytes="4096").resolved(2)


def test_split_layers_need_equally_many_shards_on_all_ranks():
    sets = ("strategy.name=hybrid", "strategy.shards=8", "strategy.hybrid.groups=1")
    assert refusal(SMALL, *sets, ranks=3) == (
        "strategy.shards: got 8 with 3 ranks and split layers, but the ranks of a group compute "
        "on their samples together, so all ranks have equally many shards. Use a multiple of 3."
    )
    for rest in ("strategy.hybrid.groups=3", "strategy.hybrid.groups=auto"):
        assert parse_job(SMALL, sets=(*sets, rest)).resolved(3).strategy.shards == 8


def test_an_empty_list_of_layers_to_split_is_refused():
    line = refusal(SMALL, "strategy.name=hybrid", "strategy.hybrid.layers=[]")
    assert line.startswith("strategy.hybrid.layers: got []")
