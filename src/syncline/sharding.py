"""`shard` and `shards`: loaders over this rank's part of the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, overload

from torch.utils.data import DataLoader

from syncline.comm.tree import shard_range
from syncline.draws import DrawnBatches, DrawnSteps
from syncline.engine.replica import Replica
from syncline.errors import ConfigError, UsageError
from syncline.loader import FlatLoader, ServingLoader, ShardedLoader, made_of
from syncline.session import Session, current_session
from syncline.step_batches import Dealt


@overload
def shard(
    loader: DataLoader[Any], *, seed: int = 0, accumulate: int = 1
) -> FlatLoader | ServingLoader: ...
@overload
def shard(
    loader: Callable[[], Any], *, seed: int = 0, accumulate: int = 1
) -> DrawnBatches | ServingLoader: ...
def shard(
    loader: DataLoader[Any] | Callable[[], Any], *, seed: int = 0, accumulate: int = 1
) -> FlatLoader | ServingLoader:
    """Return a loader over this rank's part of the data; `batch_size` is the size of a shard.

    With more shards than ranks it yields this rank's shards of a step one after the other. With
    `accumulate=k` a shard has k batches: call `step()` after each k-th. Each loop over it is the
    next epoch, also if `shard(loader)` is called anew for it. It has `state_dict()`,
    `load_state_dict()` and `set_epoch()`, and the attributes of the loader. `len()` counts this
    rank's batches, `num_steps` the steps: use that for learning-rate schedules.

    On a rank that only serves others (strategy "server" with servers) it yields nothing, and ends
    when the others have left.

    Before each batch the generators of torch, Python and numpy are seeded by (seed, step, shard),
    so that augmentation and dropout do not depend on the number of ranks.

    In the place of a loader it takes a function that draws one batch from these generators, for
    loops without a DataLoader: `batches = shard(lambda: get_batch("train"))`. It is called for each
    batch, without an end; `next(batches)` works as well as a `for` loop.
    """
    if not isinstance(loader, DataLoader):
        steps = _drawn(loader, seed, accumulate)
        return DrawnBatches(steps) if isinstance(steps, DrawnSteps) else steps
    return _sharded(loader, seed, accumulate, FlatLoader)


@overload
def shards(
    loader: DataLoader[Any], *, seed: int = 0, accumulate: int = 1
) -> ShardedLoader | ServingLoader: ...
@overload
def shards(
    loader: Callable[[], Any], *, seed: int = 0, accumulate: int = 1
) -> DrawnSteps | ServingLoader: ...
def shards(
    loader: DataLoader[Any] | Callable[[], Any], *, seed: int = 0, accumulate: int = 1
) -> ShardedLoader | ServingLoader:
    """Return an iterator over steps; each step iterates over the shards that this rank computes.

    A step can be iterated over more than once: for several models, each in turn. Otherwise as
    `shard`. On a rank that only serves others it yields no step.
    """
    if not isinstance(loader, DataLoader):
        return _drawn(loader, seed, accumulate)
    return _sharded(loader, seed, accumulate, lambda steps: steps)


_Loader = TypeVar("_Loader", FlatLoader, ShardedLoader)


def _sharded(
    loader: DataLoader[Any], seed: int, accumulate: int, make: Callable[[ShardedLoader], _Loader]
) -> _Loader | ServingLoader:
    session = _session_for(accumulate)
    made, key = made_of(loader, session), (seed, accumulate)
    if key not in made:
        made[key] = ShardedLoader(loader, partial(_deal, session), seed, accumulate=accumulate)
    serving = _serving(session, made[key])
    return make(made[key]) if serving is None else serving


def _drawn(draw: Callable[[], Any], seed: int, accumulate: int) -> DrawnSteps | ServingLoader:
    if not callable(draw):
        raise UsageError(
            f"shard() takes a torch DataLoader, or a function that draws one batch, but got a "
            f"{type(draw).__name__}. Put a data set into a DataLoader; to draw batches yourself, "
            "write for example syncline.shard(lambda: get_batch('train'))."
        )
    session = _session_for(accumulate)
    deal = partial(_deal, session)
    steps = DrawnSteps(draw, deal, seed, session.streams, accumulate=accumulate)
    serving = _serving(session, steps)
    return steps if serving is None else serving


def _session_for(accumulate: int) -> Session:
    if accumulate < 1:
        raise ConfigError(
            "accumulate", f"got {accumulate}", "it must be at least 1", "Leave it out."
        )
    session = current_session()
    replicas = _live_replicas(session)
    serving = [one for one in replicas if not all(one.plan.shards)]
    if serving and len(replicas) > 1:
        raise UsageError(
            "ranks that only serve loop for one model. Use servers=0 for several: then every rank "
            "holds strips of each."
        )
    return session


def _serving(session: Session, steps: ShardedLoader) -> ServingLoader | None:
    """Return the loader of a rank that only serves; None on a rank that computes."""
    replicas = _live_replicas(session)
    replica = replicas[-1] if replicas else None
    if replica is not None and not replica.my_shards:
        return ServingLoader(replica, steps)
    return None


def _live_replicas(session: Session) -> list[Replica]:
    """Return the models that are distributed now: without those that were detached."""
    return [replica for replica in session.replicas if not replica.is_detached]


def _deal(session: Session) -> Dealt:
    """Return how the shards of a step are dealt to the ranks now."""
    replicas, world = _live_replicas(session), session.world
    if not replicas:
        return Dealt(world.size, range(*shard_range(world.size, world.size, world.rank)))
    counts = sorted({replica.shards for replica in replicas})
    if len(counts) > 1:
        raise UsageError(
            f"the models have {' and '.join(map(str, counts))} shards, but a batch is one shard of "
            "each. Use the same shards= for all."
        )
    if len({replica.my_shards for replica in replicas}) > 1:
        raise UsageError(
            "the models' strategies give this rank different shards, but a batch is one shard of "
            "each. Use strategies whose workers are the same ranks."
        )
    return Dealt(counts[0], replicas[0].my_shards, replicas)
