"""Trials of an optimizer on small tensors, before anything is distributed.

They show which elements it reads when it updates one, whether it draws random numbers, and whether
it changes gradients. What cannot be spread over ranks is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from syncline.contract import ParamGroups
from syncline.engine.optimizer import (
    Reach,
    changed_settings,
    clone_for,
    count_in_groups,
    snapshot,
)
from syncline.errors import UsageError

_SHAPES = {1: (1536,), 2: (32, 48), 3: (32, 6, 8), 4: (32, 4, 3, 4), 5: (32, 3, 4, 2, 2)}
"""Shapes of a trial's tensors, by number of dimensions: optimizers treat biases, matrices and
convolutions differently."""
_AWAKE_LR = 1e-3
"""The learning rate of a trial if a schedule that warms up starts from zero: then no step would
change anything, and every optimizer would look elementwise."""


class _Trial(NamedTuple):
    """One kind of parameter: the settings of its group, its type and a shape."""

    settings: dict[str, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(self.shape, generator=generator).to(self.dtype)


def _trials(optimizer: Optimizer) -> list[_Trial]:
    """Return a trial for each kind of parameter that the optimizer holds.

    Groups whose settings differ only in numbers above zero are of one kind: a trust ratio, for
    example, may be used where weights decay, whatever the rate.
    """
    found: dict[Any, _Trial] = {}
    pairs = zip(optimizer.param_groups, map(_awake, snapshot(optimizer)), strict=True)
    for group, settings in pairs:
        kind = {k: bool(v) if isinstance(v, int | float) else repr(v) for k, v in settings.items()}
        kind = {key: value for key, value in kind.items() if not key.endswith("lr")}
        name = repr(sorted(kind.items()))
        with torch._C.DisableTorchFunctionSubclass():  # to ask for a type is no use of a parameter
            kinds = dict.fromkeys((p.dtype, min(max(p.dim(), 1), 5)) for p in group["params"])
        for dtype, num_dims in kinds:
            trial = _Trial(settings, dtype, _SHAPES[num_dims])
            found.setdefault((name, dtype, num_dims), trial)
    return list(found.values())


def _awake(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings with a learning rate that changes parameters."""
    rate = settings.get("lr", 1.0)
    if not isinstance(rate, int | float | torch.Tensor) or bool(rate != 0):
        return settings
    awake = float(settings.get("initial_lr") or _AWAKE_LR)
    if isinstance(rate, torch.Tensor):
        return {**settings, "lr": torch.full_like(rate, awake)}
    return {**settings, "lr": awake}


def _try(
    optimizer: Optimizer,
    settings: dict[str, Any],
    tensors: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> None:
    """Take steps with a copy of the optimizer, one for each list of gradients."""
    clone = clone_for(optimizer, [tensors], [settings])
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient.clone()
        clone.step()


def find_reach(optimizer: Optimizer) -> Reach:
    """Return the optimizer's reach, found by a trial: is updating parts like updating the whole?"""
    kind = type(optimizer).__name__
    trials = _trials(optimizer)
    with torch.random.fork_rng(devices=[]):  # an optimizer that draws leaves the user's state alone
        try:
            is_random = any(_is_random(optimizer, trial) for trial in trials)
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
    found = {_find_reach(optimizer, kind, trial) for trial in trials}
    return max(found, key=list(Reach).index, default=Reach.ELEMENT)


def _is_random(optimizer: Optimizer, trial: _Trial) -> bool:
    """Say whether steps that ought to be equal are not, or whether torch's generator is drawn."""
    generator = torch.Generator().manual_seed(1)
    start, *gradients = (trial.draw(generator) for _ in range(4))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        tensor = start.clone()
        _try(optimizer, trial.settings, [tensor], [[gradient] for gradient in gradients])
        found.append(tensor)
        if not torch.equal(before, torch.get_rng_state()):
            return True
    return not torch.equal(found[0], found[1])


def _find_reach(optimizer: Optimizer, kind: str, trial: _Trial) -> Reach:
    generator = torch.Generator().manual_seed(0)
    start, other = trial.draw(generator), trial.draw(generator)
    gradients = [trial.draw(generator) for _ in range(3)]
    other_gradients = [trial.draw(generator) for _ in range(3)]
    whole = start.clone()
    _try(optimizer, trial.settings, [whole], [[gradient] for gradient in gradients])
    together = [start.clone(), other.clone()]
    both = [list(pair) for pair in zip(gradients, other_gradients, strict=True)]
    _try(optimizer, trial.settings, together, both)
    if not torch.equal(together[0], whole):
        raise UsageError(
            f"optimizer {kind} updates a parameter by looking at others, but "
            "Syncline spreads parameters over ranks. Use one that treats each parameter alone, "
            "such as SGD or AdamW."
        )

    def is_equal_in_parts(cut: int) -> bool:
        return _equal_in_parts(optimizer, trial.settings, start, gradients, whole, cut)

    if not is_equal_in_parts(512):
        return Reach.PARAMETER
    # Try lengths that end inside a vector register: the last elements must get the same bits. Fused
    # kernels, 16-bit and complex numbers differ there at times (in bfloat16 `add` with a factor
    # rounds 1 element in 140 otherwise), so one trial would not be enough.
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    may_differ = is_fused or trial.dtype not in (torch.float32, torch.float64)
    return Reach.ELEMENT if not may_differ and is_equal_in_parts(37) else Reach.PIECE


def leaves_gradients(optimizer: Optimizer) -> bool:
    """Say, after a trial, whether the optimizer only reads gradients: then it can be undone."""
    for trial in _trials(optimizer):
        generator = torch.Generator().manual_seed(2)
        tensor, gradient = trial.draw(generator), trial.draw(generator)
        clone = clone_for(optimizer, [[tensor]], [trial.settings])
        tensor.grad = gradient.clone()
        clone.step()
        if tensor.grad is None or not torch.equal(tensor.grad, gradient):
            return False
    return True


def counts_in_groups(optimizer: Optimizer) -> bool:
    """Say whether `step()` changes the settings in `param_groups`, as some optimizers count there.

    Refuse if the change depends on parameters or gradients: each rank sees only its strips.
    """
    found = False
    for trial in _trials(optimizer):
        generator = torch.Generator().manual_seed(3)
        tensor, *gradients = (trial.draw(generator) for _ in range(3))
        clone = clone_for(optimizer, [[tensor]], [trial.settings])
        empty = clone_for(optimizer, [()], [trial.settings])
        for gradient in gradients:
            tensor.grad = gradient.clone()
            clone.step()
            changed = changed_settings(trial.settings, clone.param_groups[0])
            if not changed:
                continue
            found = True
            with contextlib.suppress(Exception):
                empty.step()
            alone = changed_settings(trial.settings, empty.param_groups[0])
            if repr(sorted(alone.items())) != repr(sorted(changed.items())):
                raise UsageError(
                    f"optimizer {type(optimizer).__name__} changes {', '.join(sorted(changed))} of "
                    "its param_groups in step(), by what it finds in parameters or gradients, but "
                    "each rank updates only its strips. Use one that keeps such values for each "
                    "parameter, in optimizer.state."
                )
    return found


def counter_of(optimizer: Optimizer) -> Callable[[ParamGroups], None]:
    """Return what to call with a step's settings, so that what groups count goes on."""
    if not counts_in_groups(optimizer):
        return lambda settings: None
    return functools.partial(count_in_groups, optimizer)


def _equal_in_parts(
    optimizer: Optimizer,
    settings: dict[str, Any],
    start: torch.Tensor,
    gradients: list[torch.Tensor],
    whole: torch.Tensor,
    cut: int,
) -> bool:
    parts = [part.clone() for part in start.view(-1).split(cut)]
    try:
        split = [list(gradient.view(-1).split(cut)) for gradient in gradients]
        _try(optimizer, settings, parts, split)
    except Exception:
        return False  # Muon, for example, accepts only matrices
    return torch.equal(torch.cat(parts), whole.view(-1))
