"""What a rank records while it is verified: a line per step with a digest of each parameter.

The lines also hold what the bits of a step depend on: each forward's input and the state of
torch's generator by shard, learning rates, threads. If the bits of two runs differ, `compare.py`
finds the likely reason among these. Nothing here runs unless `syncline verify` started the rank.

A rank waits for all parameters before it digests them, so in these steps no forward overlaps the
exchange. As many steps follow without a digest, at full speed, and one more line after the last.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils._pytree import tree_leaves

from syncline.contract import Strategy
from syncline.engine.digests import parameter_digests, tensor_digest
from syncline.engine.replica import Replica
from syncline.launch.env import Verification, read_verification

_MANY_TIMES = 10
"""A model may never step. The run then ends when another has taken so many times the steps."""

_recordings: list[Recording] = []
"""Those of this process: one for each `distribute`."""


class StepsVerified(SystemExit):
    """Ends a rank in good order: enough steps are recorded."""

    def __init__(self) -> None:
        super().__init__(0)


def wanted_overlap(strategy: Strategy, overlap: bool | None) -> bool | None:
    """Return what `distribute` was given, or what `syncline verify` wants instead."""
    wanted = read_verification()
    if wanted is None or strategy.settings.fixes_overlap:
        return overlap
    return wanted.overlap


def record_if_verifying(replica: Replica) -> Callable[[], None]:
    """Record the replica's steps, if `syncline verify` started this rank.

    Returns the function to call after a step on a rank that only serves. It does nothing if nothing
    is recorded.
    """
    wanted = read_verification()
    if wanted is None:
        return lambda: None
    recording = Recording(replica, wanted, len(_recordings))
    _recordings.append(recording)
    return recording.note_step


class Recording:
    """Records the steps of one replica into a file of its own."""

    def __init__(self, replica: Replica, wanted: Verification, number: int) -> None:
        """`number` counts the replicas of this process."""
        self._replica = replica
        self._wanted = wanted
        rank = replica.comm.ranks[replica.comm.position]
        path = Path(wanted.folder) / f"rank-{rank}-model-{number}.jsonl"
        self._file: IO[str] = path.open("w")
        self.num_steps = 0
        self._last_step = replica.step_number
        self._start: dict[str, str] | None = None
        self._forwards: list[dict[str, Any]] = []
        settings = replica.strategy.settings
        is_synchronous = settings.is_synchronous and not settings.splits_layers
        self._write(
            {
                "strategy": type(replica.strategy).__name__,
                "is_synchronous": is_synchronous,
                "fixes_overlap": replica.strategy.settings.fixes_overlap,
                "ranks": replica.comm.size,
                "shards": replica.shards,
                "overlap": replica.overlap,
                "threads": torch.get_num_threads(),
            }
        )
        if not is_synchronous:
            raise SystemExit(2)  # the launcher reads the line above, and says why
        replica.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        replica.optimizer.register_step_post_hook(lambda *_: self.note_step())

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        replica = self._replica
        if self._start is None:
            replica.synchronize()
            self._start = parameter_digests(replica.model, buffers=True)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        self._forwards.append(
            {
                "shard": replica.loop.gradients.shard,
                "shapes": [list(one.shape) for one in tensors],
                "inputs": [tensor_digest(one) for one in tensors],
                "generator": tensor_digest(torch.get_rng_state()),
            }
        )

    def note_step(self) -> None:
        """Write the line of a step, and end this rank if it was the last one."""
        replica = self._replica
        if replica.step_number == self._last_step:
            return  # a call of step() that took none
        self._last_step = replica.step_number
        self.num_steps += 1
        if self._wanted.steps < self.num_steps < 2 * self._wanted.steps:
            return
        replica.synchronize()
        self._write(
            {
                "step": self.num_steps,
                "start": self._start,
                "digests": parameter_digests(replica.model, buffers=True),
                "forwards": self._forwards,
                "lr": [float(group.get("lr", 0.0)) for group in replica.optimizer.param_groups],
            }
        )
        self._start, self._forwards = {}, []
        taken, enough = [one.num_steps for one in _recordings], 2 * self._wanted.steps
        if min(taken) >= enough or max(taken) >= _MANY_TIMES * enough:
            raise StepsVerified

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
