"""Compares the recordings of runs: whether all bits are equal and, if not, the likely reason.

Pure functions on what `recording.py` wrote. No torch here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Forwards = dict[int, list[dict[str, Any]]]
"""The forward passes of a step, in order, by shard."""


@dataclass(frozen=True)
class Step:
    """A step of one model as all ranks recorded it: digests by rank, forward passes by shard."""

    number: int
    """Counted from 1."""
    digests: dict[int, dict[str, str]]
    start: dict[str, str]
    """Digests before the first step; empty in later steps."""
    forwards: Forwards
    lr: tuple[float, ...]

    @property
    def first(self) -> dict[str, str]:
        """The digests of the lowest rank."""
        return self.digests[min(self.digests)]


@dataclass(frozen=True)
class Recorded:
    """One run: what it was asked for, and for each model its facts and its steps."""

    ranks: int
    overlap: bool
    facts: tuple[dict[str, Any], ...] = ()
    models: tuple[tuple[Step, ...], ...] = ()

    @property
    def num_steps(self) -> int:
        """The number of the last step that was recorded."""
        return max((step.number for steps in self.models for step in steps), default=0)

    @property
    def weights(self) -> str:
        """16 digits that stand for all parameters and buffers after the last step."""
        last = [steps[-1].first if steps else {} for steps in self.models]
        return hashlib.sha256(json.dumps(last, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        ranks = f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"
        return f"{ranks}, {'overlapped' if self.overlap else 'inline'}"


@dataclass(frozen=True)
class Difference:
    """Where two runs, or two ranks of one run, differ first, and why that may be."""

    run: str
    base: str
    step: int
    """Counted from 1; 0 is before the first step."""
    model: int
    names: tuple[str, ...]
    """The parameters and buffers that differ, in the model's order."""
    reason: str = ""


def read_run(folder: Path, ranks: int, overlap: bool) -> Recorded:
    """Read what the ranks of a run wrote."""
    by_model: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for path in folder.glob("rank-*-model-*.jsonl"):
        _, rank, _, model = path.stem.split("-")
        # A rank that was stopped may have left half a line.
        whole = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        if whole:
            by_model.setdefault(int(model), {})[int(rank)] = [json.loads(line) for line in whole]
    facts = tuple(by_model[model][min(by_model[model])][0] for model in sorted(by_model))
    models = tuple(tuple(_steps_of(by_model[model])) for model in sorted(by_model))
    return Recorded(ranks, overlap, facts, models)


def _steps_of(lines: dict[int, list[dict[str, Any]]]) -> Iterator[Step]:
    """Put the ranks' lines of each step together; stop at the first that a rank does not have."""
    ranks = sorted(lines)
    for of_step in zip(*(lines[rank][1:] for rank in ranks), strict=False):
        forwards: Forwards = {}
        for line in of_step:
            for one in line["forwards"]:
                forwards.setdefault(one["shard"], []).append(one)
        digests = {rank: line["digests"] for rank, line in zip(ranks, of_step, strict=True)}
        start: dict[str, str] = next((line["start"] for line in of_step if line["start"]), {})
        yield Step(of_step[0]["step"], digests, start, forwards, tuple(of_step[0]["lr"]))


def first_difference(runs: Sequence[Recorded]) -> Difference | None:
    """Return where the first run that is not like the first one differs; None if all are equal."""
    for run in runs:
        if (found := _between_ranks(run)) is not None:
            return found
    for run in runs[1:]:
        if (found := _between(runs[0], run)) is not None:
            reason = found.reason or _reason(runs, runs[0], run, found)
            return dataclasses.replace(found, reason=reason)
    return None


def is_like(base: Recorded, run: Recorded) -> bool:
    """Tell whether two runs have the same bits after every step."""
    return _between_ranks(run) is None and _between(base, run) is None


def _between_ranks(run: Recorded) -> Difference | None:
    for model, steps in enumerate(run.models):
        for step in steps:
            for rank, digests in step.digests.items():
                if names := _unequal(step.first, digests):
                    return Difference(
                        f"{run.name}, rank {rank}",
                        f"rank {min(step.digests)} of the same run",
                        step.number,
                        model,
                        names,
                        "something changes parameters or buffers outside of optimizer.step(), and "
                        "not in the same way on every rank: an in-place change, a write through "
                        ".data, a state that one rank loads.",
                    )
    return None


def _between(base: Recorded, run: Recorded) -> Difference | None:
    """Return the first difference in the order of steps; the start counts as step 0.

    It comes without a reason, unless one of the runs is only shorter.
    """
    found: list[Difference] = []
    for model, (these, those) in enumerate(zip(base.models, run.models, strict=False)):
        for one, other in zip(these, those, strict=False):
            if names := _unequal(one.start, other.start):
                found.append(Difference(run.name, base.name, 0, model, names))
                break
            if names := _unequal(one.first, other.first):
                found.append(Difference(run.name, base.name, one.number, model, names))
                break
    if found:
        return min(found, key=lambda difference: (difference.step, difference.model))
    numbers = [[[step.number for step in steps] for steps in one.models] for one in (base, run)]
    if numbers[0] != numbers[1]:
        steps = min(base.num_steps, run.num_steps) + 1
        reason = (
            f"the loop took {base.num_steps} steps there and {run.num_steps} here: its length "
            "depends on the number of ranks."
        )
        return Difference(run.name, base.name, steps, 0, (), reason)
    return None


def _unequal(one: dict[str, str], other: dict[str, str]) -> tuple[str, ...]:
    names = [*one, *(name for name in other if name not in one)]
    return tuple(name for name in names if one.get(name) != other.get(name))


def _reason(runs: Sequence[Recorded], base: Recorded, run: Recorded, found: Difference) -> str:
    """Return the likely reason of a difference: the first fact that differs, as well."""
    model = found.model
    one, other = base.facts[model], run.facts[model]
    if one["shards"] != other["shards"]:
        most = max(facts["shards"] for each in runs for facts in each.facts)
        return (
            f"the shards of a step were {one['shards']} there and {other['shards']} here, which "
            "is another sum. Without shards= there is one for each rank: write "
            f"distribute(..., shards={most}) and loop over the shards of each step."
        )
    if one["threads"] != other["threads"]:
        return (
            f"the threads of a rank were {one['threads']} there and {other['threads']} here, and "
            "kernels sum in another order: write init(threads=1)."
        )
    if found.step == 0:
        return (
            "the parameters differ before the first step: seed torch before the model is built "
            "(torch.manual_seed)."
        )
    before, now = (_step(each, model, found.step) for each in (base, run))
    if before.lr != now.lr:
        return (
            f"the learning rate was {before.lr[0]:g} there and {now.lr[0]:g} here: it depends on "
            "the number of ranks, or a schedule does, through the length of a loader."
        )
    return _reason_in_forwards(runs, base, run, found, before.forwards, now.forwards)


def _step(run: Recorded, model: int, number: int) -> Step:
    return next(step for step in run.models[model] if step.number == number)


def _reason_in_forwards(
    runs: Sequence[Recorded],
    base: Recorded,
    run: Recorded,
    found: Difference,
    before: Forwards,
    now: Forwards,
) -> str:
    if (key := _first_unlike(before, now, "shapes")) is not None:
        shard, shapes = key
        return (
            f"shard {shard} had inputs of shape {shapes[0]} there and {shapes[1]} here: the size "
            "of a batch, or the number of forward passes, depends on the number of ranks. "
            "batch_size is the size of one shard."
        )
    if (key := _first_unlike(before, now, "inputs")) is not None:
        if _twins_differ(runs, found):
            return (
                f"shard {key[0]} got other samples, and did so on the same number of ranks, too: "
                "random numbers that are not seeded, in workers, in augmentation or outside torch."
            )
        return (
            f"shard {key[0]} got other samples: loop over syncline.shards(loader), and draw random "
            "numbers for a sample from its number, not from a generator that runs on."
        )
    if (key := _first_unlike(before, now, "generator")) is not None:
        return (
            f"torch's generator was in another state before the forward of shard {key[0]}: random "
            "numbers are drawn outside of the loop over syncline.shards(loader), which seeds it "
            "for each shard."
        )
    if base.ranks == run.ranks:
        return (
            "inputs and seeds were equal, and only the exchange differed: look for code that "
            "changes parameters or gradients between backward() and the next forward() (.data, in "
            "place). Without any this is a defect of Syncline: please report it."
        )
    return (
        "inputs, seeds, threads and learning rates were equal: the loop does something that "
        "depends on rank() or world_size(), on time, or on state that is kept outside of the model."
    )


def _first_unlike(before: Forwards, now: Forwards, key: str) -> tuple[int, tuple[Any, Any]] | None:
    """Return the first shard whose forward passes differ in `key`, and the two values."""
    for shard in sorted({*before, *now}):
        passes = before.get(shard, []), now.get(shard, [])
        none: dict[str, Any] = {key: []}
        for one, other in itertools.zip_longest(*passes, fillvalue=none):
            if one[key] != other[key]:
                return shard, (_short(one[key]), _short(other[key]))
    return None


def _short(values: Any) -> Any:
    """Return the value of a single input as it is; none stands for no forward pass."""
    return (values or ["none"])[0] if isinstance(values, list) and len(values) < 2 else values


def _twins_differ(runs: Sequence[Recorded], found: Difference) -> bool:
    """Tell whether two runs on the same number of ranks had different inputs in this step."""
    for number, one in enumerate(runs):
        for other in runs[number + 1 :]:
            steps = [each.models[found.model] for each in (one, other)]
            if one.ranks == other.ranks and any(
                a.number <= found.step and _first_unlike(a.forwards, b.forwards, "inputs")
                for a, b in zip(*steps, strict=False)
            ):
                return True
    return False
