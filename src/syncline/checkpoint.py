"""Checkpoints: one safetensors file that holds everything, written atomically, never unpickled.

Parameters, buffers and optimizer state are stored whole, by name, so that any number of ranks can
resume from them. A digest over all of it shows damage; the job inside shows which run it belongs
to. A file that cannot be used is refused with a one-line error and not changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from syncline.config import Job, job_to_toml, parse_job, what_changed
from syncline.errors import CheckpointError, ConfigError
from syncline.files import replacing

FORMAT = 1
KEEP = 2
"""How many checkpoints stay in a folder: the last, and one more in case the last is damaged."""
_PATTERN = "step-*.safetensors"


class _Meta(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    step: int
    job: str
    digest: str
    plain: dict[str, dict[str, Any]]
    """Optimizer state that is not a tensor: parameter -> key -> value."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on after `step` steps."""

    step: int
    job: Job
    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]
    strategy: dict[str, torch.Tensor]


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of named tensors: names, types, shapes and bytes, by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into a folder; the newest few are kept."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for name, tensor in checkpoint.model.items():
        tensors[f"model/{name}"] = tensor
    for name, state in checkpoint.optimizer.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
            else:
                plain.setdefault(name, {})[key] = value
    for name, tensor in checkpoint.strategy.items():
        tensors[f"strategy/{name}"] = tensor
    # Copy each tensor: tied weights may share memory, which safetensors refuses.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    meta = _Meta(FORMAT, checkpoint.step, job_to_toml(checkpoint.job), digest_of(tensors), plain)
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, checkpoint.step)
    with replacing(path) as partial:
        save_file(tensors, partial, {"syncline": msgspec.json.encode(meta).decode()})
    for old in sorted(folder.glob(_PATTERN))[:-KEEP]:
        old.unlink()
    return path


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a folder, damaged or not."""
    return max(folder.glob(_PATTERN), default=None)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; raise CheckpointError if it is damaged or not from Syncline."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("syncline")
            if text is None:
                raise CheckpointError(
                    f"{path}: this is not a Syncline checkpoint. It was left alone; move it away."
                )
            meta = msgspec.json.decode(text, type=_Meta)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(_damaged(path, str(error))) from None
    if meta.format != FORMAT:
        raise CheckpointError(
            f"{path}: written in format {meta.format}, but this version reads format {FORMAT}. "
            "Use the version that wrote it."
        )
    if digest_of(tensors) != meta.digest:
        raise CheckpointError(_damaged(path, "its content does not match its digest"))
    try:
        job = parse_job(meta.job, str(path))
    except ConfigError as error:
        raise CheckpointError(_damaged(path, str(error))) from None
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}, "strategy": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = tensor
    optimizer: dict[str, dict[str, Any]] = {name: dict(state) for name, state in meta.plain.items()}
    for name, tensor in parts["optimizer"].items():
        parameter, _, key = name.rpartition("/")
        optimizer.setdefault(parameter, {})[key] = tensor
    return Checkpoint(meta.step, job, parts["model"], optimizer, parts["strategy"])


def _damaged(path: Path, reason: str) -> str:
    others = sorted(other.name for other in path.parent.glob(_PATTERN) if other != path)
    way_out = f"move it away to go on from {others[-1]}" if others else "start without --resume"
    first_line = reason.splitlines()[0] if reason else "unreadable"
    return f"{path}: damaged ({first_line}). It was left alone; {way_out}."


def check_same_job(path: Path, saved: Job, job: Job) -> None:
    """Refuse a checkpoint of another job: what fixes the arithmetic must be equal."""
    for key, before, now in what_changed(saved, job):
        raise CheckpointError(
            f"{path}: made with {key} = {before!r}, but the job says {now!r}, which would not "
            "continue the same run. Set it back, or start without --resume in another folder."
        )
