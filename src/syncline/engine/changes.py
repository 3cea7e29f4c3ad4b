"""Notices changes of parameters, buffers and the optimizer's groups outside `step()`.

A change in place is part of the next update if parameters are private, and refused otherwise. A
change of type, memory format or storage is refused: the update would go on in the bucket's memory,
which the model no longer reads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.engine.agreement import Agreement
from syncline.engine.bucket import Slot
from syncline.engine.buffers import Buffers
from syncline.engine.parameters import version_of
from syncline.engine.refusals import Found
from syncline.errors import UsageError

_ANEW = (
    "Do it before distribute(); or call replica.detach() on every rank, do it, and call "
    "distribute() again: the optimizer keeps its state."
)


class ChangesOutside:
    """Refuses, or accepts, what changed between two steps."""

    def __init__(
        self,
        model: nn.Module,
        found: Found,
        optimizer: Optimizer,
        buffers: Buffers,
        agreement: Agreement,
        *,
        may_change_parameters: bool,
        may_be_private: bool,
    ) -> None:
        """`may_be_private` says whether `private_parameters=True` would allow changes in place."""
        self._model = model
        self._slots = found.slots
        self._parameters = [slot.parameter for slot in found.slots]
        self._frozen = found.frozen
        self._optimizer = optimizer
        self._buffers = buffers
        self._agreement = agreement
        self.may_change_parameters = may_change_parameters
        self._may_be_private = may_be_private
        self._held = self._find_held()
        self._known = list(model.parameters())
        """All parameters at distribute(), kept alive so that no other can get an id of theirs."""
        self._note_structure()
        self._versions: list[int] = []
        self.note()

    @property
    def has_changed(self) -> bool:
        """Whether parameters were loaded or changed in place since the last step."""
        return self._agreement.has_changed

    def tell(self) -> bool:
        """Return whether to tell the other ranks of such a change in the step's flags."""
        return self._agreement.tell()

    def note(self) -> None:
        """Accept the parameters as they are now."""
        self._versions = [version_of(parameter) for parameter in self._parameters]

    def note_load(self) -> None:
        """Accept parameters that were loaded; ranks compare them in the next step."""
        self.note()
        self._agreement.has_changed = True

    def raise_versions(self) -> None:
        """Raise autograd's version counters after a step: the lane and other ranks do not."""
        torch.autograd.graph.increment_version(self._parameters)
        self._versions = [version + 1 for version in self._versions]
        self._agreement.has_changed = False

    def check(self) -> None:
        """Raise if something has changed since the last step that cannot be right."""
        self._check_places()
        self.check_values()
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError(
                "a parameter that was frozen at distribute() now needs a gradient, and would be "
                f"updated on each rank alone. {_ANEW}"
            )
        if self._find_held() != self._held:
            raise UsageError(
                "the optimizer got new parameters after distribute(): they would be updated on "
                f"each rank alone. {_ANEW}"
            )
        if self._find_structure() != self._structure:
            self._check_structure()

    def check_values(self) -> None:
        """Raise if parameters were changed in place that other ranks read."""
        versions = [version_of(parameter) for parameter in self._parameters]
        if versions != self._versions:
            if not self.may_change_parameters:
                pairs = zip(self._slots, versions, self._versions, strict=True)
                raise self._refuse_change(next(slot for slot, now, was in pairs if now != was))
            self._versions = versions
            self._agreement.has_changed = True

    def _refuse_change(self, slot: Slot) -> UsageError:
        way = "load them with load_state_dict(), or use distribute(..., private_parameters=True)."
        if not self._may_be_private:
            way = "or load them before the first step."
        return UsageError(
            f"parameter {slot.name} was changed in place outside the optimizer, but ranks of a "
            "machine share one copy, and servers hold another: changes would add up, or be lost. "
            f"Change parameters before distribute(), {way}"
        )

    # Type, memory format, storage.

    def _check_places(self) -> None:
        if self._slots[0].place is None:
            return  # buckets are not built: they take parameters as they find them
        with torch._C.DisableTorchFunctionSubclass():
            found = [(p.data_ptr(), p.stride()) for p in self._parameters]
        if found != [slot.place for slot in self._slots]:
            pairs = zip(self._slots, found, strict=True)
            raise self._refuse_move(next(slot for slot, place in pairs if place != slot.place))
        name = self._buffers.moved()
        if name is not None:
            raise UsageError(
                f"buffer {name} got other memory after the first step (a cast, or another tensor "
                f"put in its place), but ranks average it where it was. {_ANEW}"
            )

    def _refuse_move(self, slot: Slot) -> UsageError:
        assert slot.bucket is not None
        assert slot.place is not None
        with torch._C.DisableTorchFunctionSubclass():
            dtype, strides = slot.parameter.dtype, slot.parameter.stride()
        what = "got other memory (its .data was set)"
        if dtype != slot.bucket.dtype:
            what = f"was cast from {slot.bucket.dtype} to {dtype}"
        elif strides != slot.place[1]:
            what = f"got another memory format (strides {strides}, before {slot.place[1]})"
        return UsageError(
            f"parameter {slot.name} {what} after the first step, but updates go to the memory that "
            f"it had. {_ANEW}"
        )

    # Which parameters there are.

    def _find_held(self) -> list[int]:
        return [id(p) for group in self._optimizer.param_groups for p in group["params"]]

    def _find_structure(self) -> list[int]:
        return [id(one) for holder in self._holders for one in holder.values()]

    def _note_structure(self) -> None:
        modules = list(self._model.modules())
        holders = [holder for one in modules for holder in (one._parameters, one._modules)]
        self._holders = [holder for holder in holders if holder]
        self._structure = self._find_structure()
        self._kept = modules  # alive, so that no other module can get an id of theirs

    def _check_structure(self) -> None:
        """Raise if the model has a parameter that it did not have at distribute()."""
        known = {id(parameter) for parameter in self._known}
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in known:
                raise UsageError(
                    f"the model got a new parameter {name} after distribute(), which ranks would "
                    f"not exchange. {_ANEW}"
                )
        statistic = self._buffers.find_new()
        if statistic is not None:
            raise UsageError(
                f"the model got a new running statistic {statistic} after distribute(), which "
                f"ranks would not average. {_ANEW}"
            )
        self._note_structure()
