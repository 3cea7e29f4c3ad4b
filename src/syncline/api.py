"""What a training script calls: `init`, `distribute`, and a few more if needed.

`shard` and `shards` are in `sharding.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from syncline import replica as published
from syncline.comm.base import sum_by_rank
from syncline.config.session import SessionSettings
from syncline.config.settings import HUNG_S, MEET_S, SILENT_S
from syncline.contract import Strategy
from syncline.engine.parts import Options
from syncline.engine.replica import Replica
from syncline.engine.torch_calls import watch
from syncline.errors import ConfigError, UsageError
from syncline.session import current_session, open_session
from syncline.strategies import make_strategy
from syncline.verify.recording import record_if_verifying, wanted_overlap


def init(
    *,
    comm: str = "auto",
    silent_s: float = SILENT_S,
    hung_s: float = HUNG_S,
    meet_s: float = MEET_S,
    threads: int | None = None,
) -> int:
    """Join the job that this process was started for, and return this process's rank.

    Works with a process group of torch.distributed that exists, under torchrun, `syncline run`,
    Lightning, Slurm, mpirun and Flux, and alone as a world of one. Ranks wait for each other up to
    `meet_s`. The other ranks report a rank at once if it dies, after `silent_s` without a
    heartbeat, and after `hung_s` if they wait for it without progress. `threads` fixes torch's
    intra-op threads: results depend on it. `comm` says how ranks exchange: "auto" is shared memory
    inside a machine and TCP between machines, "shared_memory" and "network" are one of the two, and
    "torch" is messages of torch.distributed. Called again with the same settings it returns the
    rank again.
    """
    session = open_session(SessionSettings(comm, silent_s, hung_s, meet_s, threads))
    if threads is not None:
        torch.set_num_threads(threads)
    return session.world.rank


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
    check_every: int | None = None,
) -> published.Replica:
    """Spread training over all ranks, in place: names and `state_dict()` stay as they are.

    Every rank starts from rank 0's parameters. `strategy` is a name, or an object with settings:
    `Gossip(GossipSettings(period=10))` from `syncline.strategies`. `shards` is the number of
    batches in a step, over all ranks: with the same `shards` any number of ranks gives the same
    bits. By default it is the number of ranks, and then the result depends on it. `bucket_bytes`
    and `overlap` are chosen and logged if None. `accumulate` is the most backward passes of any
    step, needed if the first step has fewer. `private_parameters` gives each rank its own copy of
    the parameters, which may be changed in place, alike on every rank. `early` allows updates
    during backward, while the network is idle; it takes memory for half the parameters. With
    `check_every` ranks compare parameters and buffers in every so many steps, and raise if any
    differ.
    """
    session = current_session()
    session.check_alone()
    if not (isinstance(model, nn.Module) and isinstance(optimizer, Optimizer)):
        found = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise UsageError(
            f"distribute() got {found}, but it takes a torch Module and its Optimizer, in this "
            "order. Call distribute(model, optimizer)."
        )
    chosen = make_strategy(strategy) if isinstance(strategy, str) else strategy
    at_least_1 = {
        "shards": shards,
        "bucket_bytes": bucket_bytes,
        "accumulate": accumulate,
        "check_every": check_every,
    }
    for name, value in at_least_1.items():
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
        Options(
            shards=shards,
            bucket_bytes=bucket_bytes,
            overlap=wanted_overlap(chosen, overlap),
            accumulate=accumulate,
            private_parameters=private_parameters,
            early=early,
            check_every=check_every,
        ),
    )
    if replica.is_served:
        raise UsageError(
            "some ranks would only serve, and take part in every step of the others: they cannot "
            "know when a loop of your own has ended. Use servers=0, or `syncline train`."
        )
    replica.state.open(session.world.address if session.comm.num_machines > 1 else None)
    replica.warn_of_own()
    watch(replica.loop, optimizer)
    session.replicas.append(replica)
    record_if_verifying(replica)
    return replica


def _replica_of(model: nn.Module) -> Replica:
    for replica in current_session().replicas:
        is_model = model is replica.model or model is getattr(replica.model, "_orig_mod", None)
        if is_model and not replica.is_detached:
            return replica
    raise UsageError("this model was not given to syncline.distribute()")


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


def barrier() -> None:
    """Wait until every rank has called it: before a file is read that one rank has written.

    It raises if a rank is gone, also with strategies whose other ranks continue.
    """
    session = current_session()
    with session.comm.traffic.apart():
        session.lane.call(session.comm.barrier)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a small tensor over all ranks, the same on each: counts, sums of metrics.

    Every rank calls it, with the same shape and type; once a step or less often, since ranks may
    have different numbers of batches a step. It raises if a rank is gone. Terms are added in the
    order of ranks: whole numbers are exact on any number of ranks, the last digits of others depend
    on it.
    """
    session = current_session()
    dtype = torch.int64 if values.dtype == torch.bool else values.dtype  # as torch.sum does
    mine = values.detach().to("cpu", dtype).contiguous()
    with session.comm.traffic.apart():
        return session.lane.call(sum_by_rank, session.comm, mine).to(values.device)


def optimizer_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the whole optimizer state by parameter name. Every rank calls it.

    `optimizer.state_dict()` returns it in torch's format, on one rank alone.
    """
    return _replica_of(model).optimizer_state()


def load_optimizer_state(model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Load what `optimizer_state` returned, perhaps on another number of ranks; on every rank.

    What `optimizer.state_dict()` returned is taken as well. Names, keys and shapes must be those of
    this model and optimizer.
    """
    _replica_of(model).load_optimizer_state(state)
