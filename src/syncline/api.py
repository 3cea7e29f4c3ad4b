"""What a training script calls: `init`, `distribute`, `shard`, and a few more if needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from syncline.comm.tree import shard_range
from syncline.config.settings import HUNG_S, SILENT_S
from syncline.contract import Strategy
from syncline.engine.replica import Replica
from syncline.engine.torch_calls import watch
from syncline.errors import ConfigError, UsageError
from syncline.loader import FlatLoader, ServingLoader, ShardedLoader, check_one_shard
from syncline.session import current_session, open_session
from syncline.strategies import make_strategy


def init(
    *,
    comm: str = "auto",
    silent_s: float = SILENT_S,
    hung_s: float = HUNG_S,
    threads: int | None = None,
) -> int:
    """Join the job that this process was started for, and return this process's rank.

    Works under torchrun, `syncline run`, Slurm, and alone as a world of one. The other ranks report
    a rank at once if it dies, after `silent_s` without a heartbeat, and after `hung_s` if they wait
    for it without progress. `threads` fixes torch's intra-op threads: results depend on it.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    return open_session(comm, silent_s, hung_s).world.rank


def rank() -> int:
    """Return this process's rank."""
    return current_session().world.rank


def world_size() -> int:
    """Return the number of ranks."""
    return current_session().world.size


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: str | Strategy = "synchronous",
    *,
    shards: int | None = None,
    bucket_bytes: int | None = None,
    overlap: bool | None = None,
    accumulate: int = 1,
    private_parameters: bool = False,
    early: bool = True,
) -> Replica:
    """Spread training over all ranks, in place: names and `state_dict()` stay as they are.

    Every rank starts from rank 0's parameters. `strategy` is a name, or an object with settings:
    `Gossip(GossipSettings(period=10))` from `syncline.strategies`. `shards` fixes the arithmetic
    (default: one per rank), so that any number of ranks gives the same bits. `bucket_bytes` and
    `overlap` are chosen and logged if None. `accumulate` is the most backward passes of any step,
    needed if the first step has fewer. `private_parameters` gives each rank its own copy of the
    parameters. `early` allows updates during backward, while the network is idle; it takes memory
    for half the parameters.
    """
    session = current_session()
    chosen = make_strategy(strategy) if isinstance(strategy, str) else strategy
    for name, value in (("bucket_bytes", bucket_bytes), ("accumulate", accumulate)):
        if value is not None and value < 1:
            raise ConfigError(name, f"got {value}", "it must be at least 1", "Leave it out.")
    for name, value, is_fixed, rule in (
        ("overlap", overlap, chosen.settings.fixes_overlap, "says itself when ranks exchange"),
        ("bucket_bytes", bucket_bytes, chosen.settings.fixes_buckets, "says where buckets end"),
    ):
        if is_fixed and value is not None:
            kind = type(chosen).__name__
            raise ConfigError(name, f"got {value}", f"strategy {kind} {rule}", "Leave it out.")
    replica = Replica(
        model,
        optimizer,
        chosen,
        session.comm,
        session.control,
        session.lane,
        shards=shards,
        bucket_bytes=bucket_bytes,
        overlap=overlap,
        accumulate=accumulate,
        private_parameters=private_parameters,
        early=early,
    )
    if replica.is_served:
        raise UsageError(
            "some ranks would only serve, and take part in every step of the others: they cannot "
            "know when a loop of your own has ended. Use servers=0, or `syncline train`."
        )
    replica.warn_of_own()
    watch(replica.loop, optimizer)
    session.replicas.append(replica)
    return replica


def _replica_of(model: nn.Module) -> Replica:
    for replica in current_session().replicas:
        if model is replica.model or model is getattr(replica.model, "_orig_mod", None):
            return replica
    raise UsageError("this model was not given to syncline.distribute()")


def shard(loader: DataLoader[Any], *, seed: int = 0) -> FlatLoader | ServingLoader:
    """Return a loader over this rank's part of the data; `batch_size` is the size of a shard.

    On a rank that only serves others (strategy "server" with servers) it yields nothing, and ends
    when the others have left.

    Before each batch torch's generator is seeded by (seed, step, shard), so that dropout does not
    depend on the number of ranks.
    """
    steps = shards(loader, seed=seed)
    if isinstance(steps, ServingLoader):
        return steps
    check_one_shard(steps.mine)
    return FlatLoader(steps)


def shards(loader: DataLoader[Any], *, seed: int = 0) -> ShardedLoader | ServingLoader:
    """Return an iterator over steps; each step iterates over the shards that this rank computes.

    On a rank that only serves others it yields no step.
    """
    session = current_session()
    replica = session.replicas[-1] if session.replicas else None
    if replica is None:
        count = session.world.size
        mine = range(*shard_range(count, count, session.world.rank))
        return ShardedLoader(loader, count, mine, None, seed)
    serving = [one for one in session.replicas if not all(one.plan.shards)]
    if serving and len(session.replicas) > 1:
        raise UsageError(
            "ranks that only serve loop for one model. Use servers=0 for several: then every rank "
            "holds strips of each."
        )
    steps = ShardedLoader(loader, replica.shards, replica.my_shards, replica, seed)
    return steps if replica.my_shards else ServingLoader(replica, steps)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the step's gradients by their global norm, and return that norm.

    Call it between backward and step. The norm is the same for any number of ranks. If a rank
    computes several shards a step, it does nothing before the last of them, and returns the last
    step's norm (nan in the first step).
    """
    return _replica_of(model).clip_grad_norm_(max_norm)


def clip_grad_value_(model: nn.Module, clip_value: float) -> None:
    """Clamp each element of the step's gradients, summed over all ranks, to +-`clip_value`.

    Call it between backward and step. The result is torch's own, for any number of ranks.
    """
    _replica_of(model).loop.clip_grad_value_(clip_value)


def step_ended(model: nn.Module) -> bool:
    """Return whether the last `optimizer.step()` ended a step, and parameters are new.

    It is False if a rank computes several shards a step, and that call ended only a shard. Ask it
    before what is done once a step: averages of weights, schedules by hand, logs.
    """
    return _replica_of(model).loop.step_ended


def discard_gradients(model: nn.Module) -> None:
    """Drop this step's gradients, and what its forward passes wrote into buffers.

    Call it on every rank, or on none. `zero_grad()` drops gradients too, and leaves buffers alone.
    """
    _replica_of(model).discard_gradients()


def optimizer_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the whole optimizer state by parameter name. Every rank calls it."""
    return _replica_of(model).optimizer_state()


def load_optimizer_state(model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Load what `optimizer_state` returned, perhaps on another number of ranks."""
    _replica_of(model).load_optimizer_state(state)
