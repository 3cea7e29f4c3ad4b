"""Compares parameters and buffers over ranks, and names the first that differs.

In `distribute` ranks compare names, shapes and types. They compare values when the buckets are
built, in a step before which some rank's parameters were loaded or changed in place, and every
`check_every` steps if the user asks for it. They exchange one digest of everything; only if that
differs do they exchange one for each parameter.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import nn

from syncline.comm.base import Communicator, exchange_bytes
from syncline.engine.bucket import Bucket, Slot
from syncline.engine.buffers import Buffers
from syncline.engine.digests import tensor_digest
from syncline.errors import UsageError

Digests = dict[str, str]
"""By "parameter NAME" or "buffer NAME"."""


def compare_models(model: nn.Module, comm: Communicator) -> None:
    """Raise on every rank if parameters or buffers differ in name, shape or type.

    Every rank calls it, on the comm lane, before ranks take rank 0's values.
    """
    if comm.size == 1:
        return
    kinds = (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
    mine = [
        (f"{kind} {name}", f"shape {tuple(one.shape)}, {str(one.dtype).removeprefix('torch.')}")
        for kind, named in kinds
        for name, one in named
    ]
    text = msgspec.json.encode(mine)
    if len(set(exchange_bytes(comm, hashlib.sha256(text).digest()))) == 1:
        return
    models = {
        rank: msgspec.json.decode(text, type=list[tuple[str, str]])
        for rank, text in zip(comm.ranks, exchange_bytes(comm, text), strict=True)
    }
    raise UsageError(f"{_other_model(models)} Build the same model on every rank.")


def _other_model(models: Mapping[int, Sequence[tuple[str, str]]]) -> str:
    """Say where the first model that is not rank 0's differs from it.

    >>> _other_model({0: [("parameter a", "shape (2,)")], 1: []})
    'the models differ between ranks: rank 0 has parameter a (shape (2,)), rank 1 has none.'
    """
    first = min(models)
    other = min(rank for rank in models if models[rank] != models[first])
    pairs = itertools.zip_longest(models[first], models[other])
    there, here = next((a, b) for a, b in pairs if a != b)
    has, holds = (f"{one[0]} ({one[1]})" if one else "none" for one in (there, here))
    return f"the models differ between ranks: rank {first} has {has}, rank {other} has {holds}."


class _Told(msgspec.Struct):
    """What one rank tells the others."""

    digests: Digests
    has_changed: bool


class Agreement:
    """Compares one model's parameters and buffers over the ranks that should hold the same ones."""

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Slot],
        buffers: Buffers,
        comm: Communicator,
        check_every: int | None,
    ) -> None:
        """`comm` is the step group's. `check_every` is the number of steps; None: never."""
        self._model = model
        self._buffers = buffers
        self._comm = comm
        self._check_every = check_every
        self._step = 0
        self._taken: Digests | None = None
        """Digests of this step's parameters, if they are due."""
        self._split = [f"parameter {slot.name}" for slot in slots if slot.is_split]
        self.take_loaded: Callable[[], Digests] = dict
        """Returns digests of whole values that were loaded into split layers."""
        trained = {id(slot.parameter) for slot in slots}
        named = model.named_parameters()
        self._frozen = {id(p): f"parameter {name}" for name, p in named if id(p) not in trained}
        """Names of the parameters that no bucket holds."""
        self._before_load: Digests = {}
        self._loaded: Digests = {}
        """Parameters that need no gradient and that were loaded since the last step."""
        self.has_told = False
        """Whether this rank told the others that its parameters were changed before this step."""

    @property
    def is_due(self) -> bool:
        """Whether parameters are compared in this step also if no rank has changed them."""
        return self._taken is not None

    def begin_step(self, number: int) -> None:
        """Take the digests that are due on entering a step. Called on the compute lane."""
        self._step = number
        if self._check_every and number and number % self._check_every == 0:
            self._taken = self._digests()

    def before_load(self, module: nn.Module) -> None:
        """Note a module's own parameters that need no gradient, which no bucket holds."""
        self._before_load |= self._frozen_of(module)

    def after_load(self, module: nn.Module) -> None:
        """Note which of them were changed by a load."""
        for name, digest in self._frozen_of(module).items():
            if self._before_load.pop(name, None) != digest:
                self._loaded[name] = digest

    def _frozen_of(self, module: nn.Module) -> Digests:
        own = module.parameters(recurse=False) if self._comm.size > 1 else ()
        names = ((self._frozen.get(id(parameter)), parameter) for parameter in own)
        return {name: tensor_digest(parameter) for name, parameter in names if name is not None}

    def _digests(self) -> Digests:
        # Without waiting: the parameters are up to date, or a wait would count as the first use.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            named = self._model.named_parameters()
            found = {f"parameter {name}": tensor_digest(one) for name, one in named}
        return found | self._buffer_digests()

    def _buffer_digests(self) -> Digests:
        named = self._buffers.start_values().items()
        return {f"buffer {name}": tensor_digest(value) for name, value in named}

    # Called on the comm lane.

    def compare_first(self, comm: Communicator, across: Communicator) -> None:
        """Compare everything over all ranks of the world, before buckets are built.

        `across` has the ranks that hold the same rows of split layers.
        """
        everything = self._digests()
        split = {name: everything.pop(name) for name in self._split}
        everything |= self.take_loaded()
        compared = [(comm, everything), (across, split)] if split else [(comm, everything)]
        for group, mine in compared:
            if group.size > 1:
                _compare(
                    group,
                    _Told(mine, has_changed=False),
                    "All ranks started from rank 0's values at distribute(): load or change them "
                    "on every rank alike.",
                )

    def compare(self, buckets: Sequence[Bucket]) -> None:
        """Raise on every rank if ranks hold different values. Every rank calls it."""
        taken, self._taken = self._taken, None
        loaded, self._loaded = self._loaded, {}
        by_comm: dict[Communicator, Digests] = {}
        for bucket in buckets:
            mine = by_comm.setdefault(bucket.comm, {})
            for slot in bucket.slots:
                name = f"parameter {slot.name}"
                if taken is not None:
                    mine[name] = taken.pop(name)
                elif bucket.comm.size > 1:
                    mine[name] = tensor_digest(slot.parameter)
        # The rest is the same on all ranks of the step group.
        rest = (loaded | self._buffer_digests()) if taken is None else taken
        rest |= self.take_loaded()
        by_comm.setdefault(self._comm, {}).update(rest)
        for comm, mine in by_comm.items():
            if comm.size > 1:
                with comm.traffic.apart():
                    _compare(comm, _Told(mine, self.has_told), self._advice())

    def _advice(self) -> str:
        return (
            f"check_every found this at step {self._step}. Look for code that changes parameters "
            "or buffers outside the optimizer, and not alike on every rank."
        )


def _compare(comm: Communicator, mine: _Told, advice: str) -> None:
    """Raise on every rank of a group if digests differ. Every rank calls it."""
    whole = hashlib.sha256(msgspec.json.encode(mine.digests)).digest()
    if len(set(exchange_bytes(comm, whole))) == 1:
        return
    texts = exchange_bytes(comm, msgspec.json.encode(mine))
    told = {
        rank: msgspec.json.decode(text, type=_Told)
        for rank, text in sorted(zip(comm.ranks, texts, strict=True))
    }
    changed = [rank for rank, one in told.items() if one.has_changed]
    if changed:
        advice = (
            f"Since the last step it was loaded or changed in place on {_ranks(changed)}: do the "
            "same on every rank before the next step()."
        )
    raise UsageError(f"{_difference({rank: one.digests for rank, one in told.items()})} {advice}")


def _difference(digests: Mapping[int, Digests]) -> str:
    """Say which value differs first, and on which ranks.

    >>> _difference({0: {"parameter a": "1"}, 1: {"parameter a": "1"}, 2: {"parameter a": "2"}})
    'parameter a differs between ranks: rank 2 holds other values than rank 0.'
    """
    first = min(digests)
    names = dict.fromkeys(name for one in digests.values() for name in one)
    for name in names:
        expected = digests[first].get(name)
        others = [rank for rank, one in digests.items() if one.get(name) != expected]
        if others:
            hold = "holds" if len(others) == 1 else "hold"
            return (
                f"{name} differs between ranks: {_ranks(others)} {hold} other values than rank "
                f"{first}."
            )
    return "parameters lie in another order on some ranks."


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> _ranks([0]), _ranks([1, 2, 5])
    ('rank 0', 'ranks 1, 2, 5')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
