"""Trials of an optimizer on small tensors, before anything is distributed.

They show which elements it reads when it updates one, whether it draws random numbers, and whether
it changes gradients. What cannot be spread over ranks is refused.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from syncline.engine.optimizer import Reach, clone_for, snapshot
from syncline.errors import UsageError


def _try(
    optimizer: Optimizer, tensors: list[torch.Tensor], gradients: list[list[torch.Tensor]]
) -> None:
    """Take steps with a copy of the optimizer, one for each list of gradients."""
    clone = clone_for(optimizer, [tensors], snapshot(optimizer)[:1])
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient.clone()
        clone.step()


def find_reach(optimizer: Optimizer) -> Reach:
    """Return the optimizer's reach, found by a trial: is updating parts like updating the whole?"""
    kind = type(optimizer).__name__
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.random.fork_rng(devices=[]):  # an optimizer that draws leaves the user's state alone
        try:
            is_random = any(_is_random(optimizer, dtype) for dtype in {p.dtype for p in held})
        except Exception as error:
            raise UsageError(
                f"optimizer {kind} cannot update a parameter by itself ({error}). Syncline spreads "
                "the update over ranks: use an optimizer that treats each parameter alone, such as "
                "SGD or AdamW."
            ) from None
    if is_random:
        raise UsageError(
            f"optimizer {kind} draws random numbers (or remembers things outside optimizer.state), "
            "but each rank updates only its strips, and would draw others than one rank that "
            "updates everything. Use one that draws none, or add noise to the loss or the inputs."
        )
    return _find_reach(optimizer, kind)


def _is_random(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    """Say whether steps that ought to be equal are not, or whether torch's generator is drawn."""
    generator = torch.Generator().manual_seed(1)
    start, *gradients = (torch.randn(6, 8, generator=generator).to(dtype) for _ in range(4))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        tensor = start.clone()
        _try(optimizer, [tensor], [[gradient] for gradient in gradients])
        found.append(tensor)
        if not torch.equal(before, torch.get_rng_state()):
            return True
    return not torch.equal(found[0], found[1])


def _find_reach(optimizer: Optimizer, kind: str) -> Reach:
    generator = torch.Generator().manual_seed(0)
    shape = (32, 48)

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    start, other = draw(), draw()
    gradients = [draw() for _ in range(3)]
    other_gradients = [draw() for _ in range(3)]
    whole = start.clone()
    _try(optimizer, [whole], [[gradient] for gradient in gradients])
    together = [start.clone(), other.clone()]
    both = [list(pair) for pair in zip(gradients, other_gradients, strict=True)]
    _try(optimizer, together, both)
    if not torch.equal(together[0], whole):
        raise UsageError(
            f"optimizer {kind} updates a parameter by looking at others, but "
            "Syncline spreads parameters over ranks. Use one that treats each parameter alone, "
            "such as SGD or AdamW."
        )
    if not _equal_in_parts(optimizer, start, gradients, whole, cut=512):
        return Reach.PARAMETER
    # Try lengths that end inside a vector register: the last elements must get the same bits. Fused
    # kernels were seen to differ there at times, so one trial would not be enough.
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    seamless = not is_fused and _equal_in_parts(optimizer, start, gradients, whole, cut=37)
    return Reach.ELEMENT if seamless else Reach.PIECE


def leaves_gradients(optimizer: Optimizer) -> bool:
    """Say, after a trial, whether the optimizer only reads gradients: then it can be undone."""
    tensor, gradient = torch.ones(32, 48), torch.arange(32.0 * 48).view(32, 48)
    clone = clone_for(optimizer, [[tensor]], snapshot(optimizer)[:1])
    tensor.grad = gradient.clone()
    clone.step()
    return tensor.grad is not None and torch.equal(tensor.grad, gradient)


def _equal_in_parts(
    optimizer: Optimizer,
    start: torch.Tensor,
    gradients: list[torch.Tensor],
    whole: torch.Tensor,
    cut: int,
) -> bool:
    parts = [part.clone() for part in start.view(-1).split(cut)]
    try:
        _try(optimizer, parts, [list(gradient.view(-1).split(cut)) for gradient in gradients])
    except Exception:
        return False  # Muon, for example, accepts only matrices
    return torch.equal(torch.cat(parts), whole.view(-1))
