"""Makes `load_state_dict` safe on a distributed model: on one rank or on all.

Ranks of a machine read one copy of the parameters. A rank that loads first gets memory of its own,
so it disturbs no other rank; a rank that loads and then only evaluates needs nothing more. In the
next step all ranks compare their parameters (`agreement.py`). If they are equal, the owners of
strips begin with the loaded values and the rank goes back to the common copy; if not, every rank
refuses the step.

The hooks are on every module: `model.head.load_state_dict()` calls those of `model.head` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from syncline.engine.agreement import Agreement
from syncline.engine.bucket import Bucket, Slot, point_to, view_of
from syncline.engine.buffers import Buffers
from syncline.engine.changes import ChangesOutside
from syncline.engine.compute import ComputeLane
from syncline.errors import UsageError


class Loading:
    """Watches loads into one model."""

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Slot],
        compute: ComputeLane,
        buffers: Buffers,
        outside: ChangesOutside,
        agreement: Agreement,
        is_in_model: Callable[[], bool],
        refuse: Callable[[], None],
    ) -> None:
        """`is_in_model` says whether the model holds values that are put away again soon; `refuse`
        raises if nothing may be loaded now."""
        self._model = model
        self._slot_of = {id(slot.parameter): slot for slot in slots}
        self._compute = compute
        self._buffers = buffers
        self._outside = outside
        self._agreement = agreement
        self._is_in_model = is_in_model
        self._refuse = refuse
        self.is_loaded = False
        """Whether parameters were loaded after the first step."""

    def hook(self) -> Iterator[Any]:
        """Hook every module; yields handles."""
        for module in self._model.modules():
            yield module.register_state_dict_pre_hook(self._before_save)
            yield module.register_load_state_dict_pre_hook(self._before_load)
            yield module.register_load_state_dict_post_hook(self._after_load)

    def _before_save(self, *_: Any) -> None:
        self._compute.synchronize()
        if any(self._is_shared(bucket) for bucket in self._compute.gradients.buckets):
            self._outside.check_values()  # there may be no further step that would refuse it

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        self._refuse()
        self._compute.synchronize()
        self._refuse_between_shards()
        self._agreement.before_load(module)
        if not self._is_in_model():
            for bucket in self._compute.gradients.buckets:
                if self._is_shared(bucket):
                    _leave_common_memory(bucket)

    @staticmethod
    def _is_shared(bucket: Bucket) -> bool:
        """Say whether this rank's model reads memory that other ranks read too."""
        return bucket.in_use.memory.is_common and bucket.comm.size > 1

    def _after_load(self, module: nn.Module, _: Any) -> None:
        self._outside.note_load()
        self._agreement.after_load(module)
        self.is_loaded = self._compute.steps is not None and not self._is_in_model()
        self._compute.settle("parameters were loaded between backward and step()")
        with torch.no_grad():
            self._buffers.begin_step_of(module)
            for parameter in module.parameters(recurse=False):
                slot = self._slot_of.get(id(parameter))
                if slot is not None and slot.bucket is not None and _is_for_early(slot.bucket):
                    # The next update may be taken early, before ranks compare.
                    view_of(slot.bucket.parameters.memory.mine, slot).copy_(parameter)

    def _refuse_between_shards(self) -> None:
        gradients = self._compute.gradients
        if len(gradients.mine) < 2:
            return
        if gradients.has_gradient() or gradients.shard != gradients.mine[0]:
            raise UsageError(
                "load_state_dict() came between two shards of a step: some shards would count with "
                "the values of before. Load after step(), or before the first shard."
            )


def _is_for_early(bucket: Bucket) -> bool:
    """Say whether what forward reads is a copy because updates are taken early."""
    return bucket.has_copy and not (bucket.is_private or bucket.is_loaded)


def _leave_common_memory(bucket: Bucket) -> None:
    """Give this rank's model memory of its own, until the next step."""
    bucket.copy_for_user()
    bucket.is_loaded = True
    for slot in bucket.slots:
        point_to(bucket.in_use.memory.mine, slot)
