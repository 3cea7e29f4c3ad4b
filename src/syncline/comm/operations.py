"""What a collective is, in one number, so that ranks notice when they call different ones.

Every meeting and every message carries the number: the kind of collective, the memory that it works
on and its size. Ranks allocate memory in the same order, so an allocation has the same number on
all of them. An `all_to_all` works on any tensors: its number has a checksum of the blocks instead.
Each channel counts its own collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.errors import CommError

if TYPE_CHECKING:
    from syncline.comm.base import Memory
    from syncline.comm.blocks import Blocks
    from syncline.comm.control import Control

BITS = 32
"""How many bits the number has."""
_SIZE_BITS = 19
_MEMORY_BITS = 8
_KIND_BITS = 4
_KINDS = (
    "message",
    "barrier",
    "end_lending",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "reduce",
    "all_to_all",
)
KIND = {what: number << (_SIZE_BITS + _MEMORY_BITS) for number, what in enumerate(_KINDS)}
"""By the name of a collective: its part of the number. The rest is `about`."""
ANNOUNCES = 1 << (BITS - 1)
"""The bit of a collective that also tells peers that small sums are ready (`announce`)."""


def about(memory: Memory) -> int:
    """Return the part of the number that tells one memory from another."""
    return about_size(memory.mine.numel()) | (memory.number % (1 << _MEMORY_BITS)) << _SIZE_BITS


def about_size(num_elements: int) -> int:
    """Return the part of the number for a tensor that no communicator allocated."""
    return num_elements % (1 << _SIZE_BITS)


def about_blocks(blocks: Blocks) -> int:
    """Return the part of the number that tells blocks from others."""
    return about_size(blocks.num_bytes) | (blocks.checksum % (1 << _MEMORY_BITS)) << _SIZE_BITS


def describe(operation: int) -> str:
    """Return the number in words.

    >>> describe(KIND["all_gather"] | 3 << 19 | 4096)
    'all_gather (memory 3, size 4096)'
    """
    what = _KINDS[(operation >> (_SIZE_BITS + _MEMORY_BITS)) % (1 << _KIND_BITS)]
    memory = (operation >> _SIZE_BITS) % (1 << _MEMORY_BITS)
    size = operation % (1 << _SIZE_BITS)
    of = "checksum" if what == "all_to_all" else "memory"
    name = f"{what} ({of} {memory}, size {size})" if size else what
    return f"{name} of step()" if operation & ANNOUNCES else name


def refuse_mismatch(control: Control, mine: int, rank: int, theirs: int) -> CommError:
    """Return the error for two ranks that call different collectives at the same place."""
    me = control.place.rank
    hint = ""
    if any(describe(one).startswith("all_to_all") for one in (mine, theirs)):
        hint = " Ranks that have split a layer call it together, with batches of one shape."
    return CommError(
        f"rank {me} calls {describe(mine)} {control.where_is(me)}, while rank {rank} calls "
        f"{describe(theirs)} {control.where_is(rank)}: all ranks must make the same calls in the "
        "same order. Look for a call that only some ranks make: step(), clip_grad_norm_(), "
        "optimizer_state(), discard_gradients(), whole(), detach(), barrier() and "
        f"sum_over_ranks() need every rank.{hint}"
    )
