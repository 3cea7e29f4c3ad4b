"""A job: its tables together, with defaults filled in for a number of ranks; and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

import msgspec

from syncline.comm.shape import Machines
from syncline.config.rules import (
    check_cluster,
    check_faults,
    check_image_size,
    check_input,
    check_length,
    check_log,
    check_optimizer,
    check_shards,
    check_strategy,
    check_warmup,
)
from syncline.config.settings import (
    ClusterSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    StrategySettings,
    Table,
)
from syncline.errors import ConfigError
from syncline.faults import Fault


class Job(Table, frozen=True, kw_only=True):
    """Everything a training run depends on, and the cluster to simulate it on."""

    model: ModelSettings
    data: DataSettings
    optimizer: OptimizerSettings
    strategy: StrategySettings = StrategySettings()
    run: RunSettings
    cluster: ClusterSettings = ClusterSettings()
    faults: tuple[Fault, ...] = ()
    """Faults to inject: real ones in training, simulated ones in a simulation."""

    @property
    def image_size(self) -> int | None:
        """The side of the images in pixels, from either table; None to use them as they are."""
        return self.data.image_size if self.model.image_size is None else self.model.image_size

    def check(self) -> None:
        """Check what does not depend on the number of ranks."""
        check_optimizer(self.optimizer)
        check_cluster(self.cluster)
        check_faults("faults", self.faults)
        check_length(self.run)
        check_log(self.run.log)
        check_warmup(self.optimizer, self.run)
        check_image_size(self.model, self.data)
        check_input(self.data)

    def resolved(self, ranks: int | None = None, machines: Machines | None = None) -> Job:
        """Fill in what is automatic for this many ranks (`run.ranks` if None), and check it all.

        `machines` are the ranks by machine; None if all are on one. Afterwards `strategy.shards`
        and `data.prefetch` are numbers, and the chosen optimizer's settings are written out.
        Resolving twice changes nothing.
        """
        ranks = self.run.ranks if ranks is None else ranks
        if ranks < 1:
            raise ConfigError(
                "run.ranks", f"got {ranks}", "a world has at least one rank", "Use 1 or more."
            )
        self.check()
        own = self.strategy.own
        own.check(ranks)
        workers = len(own.workers(machines or (tuple(range(ranks)),)))
        own.check_optimizer(self.optimizer.name)
        check_strategy(self.strategy, self.run.steps)
        check_shards(self.data.batch, self.strategy.shards, ranks, workers)
        shards = workers if self.strategy.shards is None else self.strategy.shards
        own.check_shards(shards, ranks)
        return msgspec.structs.replace(
            self,
            data=self.data.resolved(),
            optimizer=self.optimizer.resolved(),
            strategy=msgspec.structs.replace(self.strategy, shards=shards),
            run=msgspec.structs.replace(self.run, ranks=ranks),
        )


# The settings of each table, for suggestions and for `keys`.
KEYS: dict[str, list[str]] = {
    table.name: [field.name for field in msgspec.structs.fields(table.type)]
    for table in msgspec.structs.fields(Job)
    if table.name != "faults"
}
KEYS["strategy"].remove("settings")  # in the file this is the table [strategy.NAME]


def keys() -> list[str]:
    """List every setting by its dotted key."""
    return [f"{table}.{name}" for table, names in KEYS.items() for name in names]


# Settings that a resumed run may change: where and how fast it runs, how long, what it writes.
_MAY_CHANGE = {
    "data": {"path", "workers", "prefetch"},
    "strategy": {"bucket_bytes", "overlap", "comm"},
    "run": {
        "ranks",
        "steps",
        "epochs",
        "evaluate_every",
        "checkpoint_every",
        "stop_when_not_finite",
        "out",
        "log",
        "silent_s",
        "hung_s",
        "meet_s",
    },
    "cluster": set(ClusterSettings.__struct_fields__),
}


def what_changed(before: Job, now: Job) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value before, value now) of the settings that a resumed run may not change."""
    before = msgspec.structs.replace(before, optimizer=before.optimizer.resolved())
    now = msgspec.structs.replace(now, optimizer=now.optimizer.resolved())
    for table in now.__struct_fields__:
        if table == "faults":
            continue
        may_change = _MAY_CHANGE.get(table, set())
        if table == "run" and now.optimizer.schedule == "cosine":
            may_change = may_change - {"steps", "epochs"}  # its learning rates depend on the end
        if table == "strategy" and now.strategy.own.is_synchronous:
            if before.strategy.name == now.strategy.name:
                may_change = {"settings", *may_change}  # the shards alone make the result
        elif table == "strategy":
            may_change = {"shards", "settings", *may_change}
            was, is_now = before.strategy.settings, now.strategy.settings
            if type(was) is type(is_now):
                yield from _differences(f"strategy.{now.strategy.name}", was, is_now, set())
        yield from _differences(table, getattr(before, table), getattr(now, table), may_change)


def _differences(
    key: str, was: Any, is_now: Any, may_change: Set[str]
) -> Iterator[tuple[str, Any, Any]]:
    for name in is_now.__struct_fields__:
        old, new = getattr(was, name), getattr(is_now, name)
        if old != new and name not in may_change:
            yield f"{key}.{name}", old, new
