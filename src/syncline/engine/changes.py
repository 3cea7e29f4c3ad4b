"""Notices changes of parameters, buffers and the optimizer's groups outside `step()`.

A change in place is part of the next update if parameters are private, and refused otherwise. A
change of type, memory format or storage is refused: the update would go on in the bucket's memory,
which the model no longer reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.engine.agreement import Agreement
from syncline.engine.bucket import Address, Slot
from syncline.engine.buffers import Buffers
from syncline.engine.refusals import Found, refuse_change_in_step
from syncline.errors import UsageError

_tensor: Any = torch.Tensor
_version: Any = _tensor._version.__get__
_address: Any = torch.Tensor.data_ptr
_strides: Any = torch.Tensor.stride
_place: Any = attrgetter("place")
_params: Any = itemgetter("params")

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
        self.has_changed = False
        """Whether parameters were loaded or changed in place since the last step."""
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._all_strides: list[tuple[int, ...]] = []
        """Where and how the parameters lay when they last lay as their buckets say."""
        self._is_in_step = False
        """Whether a `step()` has ended a shard of this step, but not the step."""
        self._needed: list[bool] = []
        """Which parameters needed a gradient when the step's first shard began; empty if that is
        not known, or if the rank has one shard a step."""
        self.note()

    def note(self) -> None:
        """Accept the parameters as they are now."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = list(map(_version, self._parameters))

    def note_load(self) -> None:
        """Accept parameters that were loaded; ranks compare them in the next step."""
        self.note()
        self.has_changed = True

    def raise_versions(self, *, ends_step: bool = True) -> None:
        """Raise autograd's version counters after a step: the lane and other ranks do not.

        After a shard of it, too: in plain PyTorch parameters have changed by then.
        """
        torch.autograd.graph.increment_version(self._parameters)
        self._versions = [version + 1 for version in self._versions]
        self._is_in_step = not ends_step
        if ends_step:
            self.has_changed = False
            self._needed = []
        else:
            self._needed = self._find_needed()

    def begin_shard(self, *, is_first: bool) -> None:
        """Raise if parameters were changed, frozen or thawed since another shard of the step began.

        Called if this rank has several shards a step.
        """
        self.check_values(is_in_step=not is_first)
        if is_first and not self._is_in_step:
            self._needed = self._find_needed()
        elif self._needed:
            self._check_needed()

    def _find_needed(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter.requires_grad for parameter in self._parameters]

    def _check_needed(self) -> None:
        for slot, now, was in zip(self._slots, self._find_needed(), self._needed, strict=True):
            if now != was:
                raise refuse_change_in_step(slot, "thawed" if now else "frozen")

    # Every step calls this: each list is made by one call of `map`, without a step in Python for
    # each parameter.

    def check(self, *, ends_step: bool = True) -> None:
        """Raise if something has changed since the last step that cannot be right.

        Without `ends_step` this is a `step()` that ends a shard only.
        """
        parameters, slots = self._parameters, self._slots
        with torch._C.DisableTorchFunctionSubclass():
            # Until buckets are built parameters have no place: buckets take them as they find them.
            if slots[0].place is not None:
                addresses = list(map(_address, parameters))
                strides = list(map(_strides, parameters))
                if addresses != self._addresses or strides != self._all_strides:
                    found = list(zip(addresses, strides, strict=True))
                    if found != list(map(_place, slots)):
                        raise self._refuse_move(found)
                    self._addresses, self._all_strides = addresses, strides
                if self._buffers.statistics is not None:
                    self._check_statistics()
            if list(map(_version, parameters)) != self._versions:
                self.check_values(is_in_step=bool(self._needed) and not ends_step)
        if self._needed and (self._is_in_step or not ends_step):
            self._check_needed()
        self._agreement.has_told = self.has_changed
        if self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError(
                "a parameter that was frozen at distribute() now needs a gradient, and would be "
                f"updated on each rank alone. {_ANEW}"
            )
        if self._find_held() != self._held:
            known = set(map(id, self._known))
            if known.issuperset(map(id, self._list_held())):
                raise UsageError(
                    "parameters were moved between the optimizer's groups, or taken out of them, "
                    f"after distribute(), but ranks update strips by the groups of then. {_ANEW}"
                )
            raise UsageError(
                "the optimizer got new parameters after distribute(): they would be updated on "
                f"each rank alone. {_ANEW}"
            )
        if self._find_structure() != self._structure:
            self._check_structure()

    def check_values(self, *, is_in_step: bool = False) -> None:
        """Raise if parameters were changed in place that other ranks read, or within a step."""
        before = self._versions
        self.note()
        if self._versions == before:
            return
        is_in_step = is_in_step or self._is_in_step
        if is_in_step or not self.may_change_parameters:
            triples = zip(self._slots, self._versions, before, strict=True)
            self._versions = before
            slot = next(slot for slot, now, was in triples if now != was)
            raise (
                refuse_change_in_step(slot, "changed in place")
                if is_in_step
                else self._refuse_change(slot)
            )
        self.has_changed = True

    def _refuse_change(self, slot: Slot) -> UsageError:
        way = "load them with load_state_dict(), or use distribute(..., private_parameters=True)."
        if not self._may_be_private:
            way = "or load them before the first step."
        return UsageError(
            f"parameter {slot.name} was changed in place outside the optimizer, but ranks of a "
            "machine share one copy, and servers hold another: changes would add up, or be lost. "
            f"Change parameters before distribute(), {way}"
        )

    def _refuse_move(self, found: Sequence[Address]) -> UsageError:
        pairs = zip(self._slots, found, strict=True)
        slot, place = next((slot, place) for slot, place in pairs if slot.place != place)
        assert slot.bucket is not None
        assert slot.place is not None
        with torch._C.DisableTorchFunctionSubclass():
            dtype = slot.parameter.dtype
        what = "got other memory (its .data was set)"
        if dtype != slot.bucket.dtype:
            what = f"was cast from {slot.bucket.dtype} to {dtype}"
        elif place[1] != slot.place[1]:
            what = f"got another memory format (strides {place[1]}, before {slot.place[1]})"
        return UsageError(
            f"parameter {slot.name} {what} after the first step, but updates go to the memory that "
            f"it had. {_ANEW}"
        )

    def _check_statistics(self) -> None:
        name = self._buffers.moved()
        if name is not None:
            raise UsageError(
                f"buffer {name} got other memory after the first step (a cast, or another tensor "
                f"put in its place), but ranks average it where it was. {_ANEW}"
            )

    # Which parameters there are.

    def _list_held(self) -> list[Any]:
        return list(chain.from_iterable(map(_params, self._optimizer.param_groups)))

    def _find_held(self) -> list[int]:
        """Return the ids of the optimizer's parameters, then the lengths of its groups."""
        lists = list(map(_params, self._optimizer.param_groups))
        return [*map(id, chain.from_iterable(lists)), *map(len, lists)]

    def _find_structure(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._holders))))

    def _note_structure(self) -> None:
        modules = list(self._model.modules())
        holders: list[dict[str, Any]] = [
            holder for one in modules for holder in (one._parameters, one._modules)
        ]
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
