"""Checkpoints: one safetensors file that holds everything, written atomically, never unpickled.

Parameters, buffers and optimizer state are stored whole, by name, so that any number of ranks can
resume from them. A digest over all of it shows damage; the job inside shows which run it belongs
to. A file that cannot be used is refused with a one-line error and not changed.

Format 2 is that of version 0.2.0. In format 1 the digest covered the tensors alone, not the step,
the job and the optimizer's plain values. Such files are still read.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from syncline.config import Job, job_to_toml, parse_job, what_changed
from syncline.errors import CheckpointError, ConfigError
from syncline.files import explained, make_folder, replacing
from syncline.resources import reason

FORMAT = 2
KEEP = 2
"""How many checkpoints stay in a folder: the last, and one more in case the last is damaged."""
_PATTERN = "step-*.safetensors"


class _Meta(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: int
    step: int
    job: str
    digest: str
    plain: dict[str, dict[str, Any]]
    """Optimizer state that is not a tensor: parameter -> key -> value."""
    rank: int | None = None


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on after `step` steps."""

    step: int
    job: Job
    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]
    strategy: dict[str, torch.Tensor]
    rank: int | None = None
    """The rank whose own parameters these are; None if they represent the run."""
    digest: str = ""
    """What the file says of itself; empty before it is saved."""
    format: int = FORMAT


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of named tensors: names, types, shapes and bytes, by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save(folder: Path, checkpoint: Checkpoint, spared: Collection[Path] = ()) -> Path:
    """Write a checkpoint into a folder; the newest few are kept, and those in `spared`."""
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
    job = job_to_toml(checkpoint.job)
    meta = _Meta(FORMAT, checkpoint.step, job, "", plain, checkpoint.rank)
    meta.digest = _digest_of_all(tensors, meta)
    path = path_of(folder, checkpoint.step)
    with explained(path):
        make_folder(folder)
        with replacing(path) as partial:
            _write(tensors, partial, {"syncline": msgspec.json.encode(meta).decode()})
        for old in files_in(folder)[:-KEEP]:
            if old not in spared:
                old.unlink()
    return path


def _digest_of_all(tensors: Mapping[str, torch.Tensor], meta: _Meta) -> str:
    """Return the SHA-256 of everything in a file of format 2 but the digest itself."""
    rest = msgspec.structs.replace(meta, digest="")
    text = msgspec.json.encode(rest)
    return hashlib.sha256(f"{digest_of(tensors)}\n".encode() + text).hexdigest()


def _write(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        # The library says a refusal of the system as text.
        found = re.search(r"os error (\d+)|code: (\d+)", str(error))
        if found is None:
            raise
        number = int(found[1] or found[2])
        raise OSError(number, os.strerror(number)) from None


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def files_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, damaged or not, the newest last."""
    return sorted(path for path in folder.glob(_PATTERN) if path.is_file())


def newest(folder: Path) -> Path | None:
    """Return what has the name of the newest checkpoint of a folder, damaged or not."""
    return max(folder.glob(_PATTERN), default=None)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; raise CheckpointError if it is damaged or not from Syncline."""
    _check_is_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "syncline" not in metadata:
                raise CheckpointError(
                    f"{path}: this is not a Syncline checkpoint. It was left alone; move it away."
                )
            meta = msgspec.json.decode(metadata.pop("syncline"), type=_Meta)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({reason(error)}).") from None
    except (SafetensorError, msgspec.MsgspecError) as error:
        raise CheckpointError(_damaged(path, str(error))) from None
    if meta.format not in (1, FORMAT):
        raise CheckpointError(
            f"{path}: written in format {meta.format}, but this version reads formats 1 to "
            f"{FORMAT}. Use the version that wrote it."
        )
    is_old = meta.format == 1
    found = digest_of(tensors) if is_old else _digest_of_all(tensors, meta)
    if found != meta.digest or (metadata and not is_old):
        raise CheckpointError(_damaged(path, "its content does not match its digest"))
    if is_old and path.name != path_of(path.parent, meta.step).name:
        raise CheckpointError(_damaged(path, f"it says that it is of step {meta.step}"))
    try:
        job = parse_job(meta.job, str(path))
    except ConfigError as error:
        raise CheckpointError(_unreadable_job(path, meta.format, error)) from None
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}, "strategy": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = tensor
    optimizer: dict[str, dict[str, Any]] = {name: dict(state) for name, state in meta.plain.items()}
    for name, tensor in parts["optimizer"].items():
        parameter, _, key = name.rpartition("/")
        optimizer.setdefault(parameter, {})[key] = tensor
    return Checkpoint(
        meta.step,
        job,
        parts["model"],
        optimizer,
        parts["strategy"],
        meta.rank,
        digest=meta.digest,
        format=meta.format,
    )


def _check_is_file(path: Path) -> None:
    """Refuse what has a checkpoint's name and is none: opening a FIFO would wait for ever."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({reason(error)}).") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "no file"
        raise CheckpointError(
            f"{path}: this is {kind}, not a checkpoint. It was left alone; move it away."
        )


def _damaged(path: Path, why: str) -> str:
    others = [other.name for other in files_in(path.parent) if other != path]
    way_out = f"move it away to go on from {others[-1]}" if others else "start without --resume"
    first_line = why.splitlines()[0] if why else "unreadable"
    return f"{path}: damaged ({first_line}). It was left alone; {way_out}."


def _unreadable_job(path: Path, format: int, error: ConfigError) -> str:
    if format == FORMAT:
        return _damaged(path, str(error))
    return (
        f"{path}: an older version wrote it, and this one cannot read its job ({error}) "
        "Use the version that wrote it."
    )


def is_finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether all numbers are finite."""
    return all(
        bool(torch.isfinite(tensor.detach()).all())
        for tensor in tensors.values()
        if tensor.is_floating_point() or tensor.is_complex()
    )


def is_good(checkpoint: Checkpoint, parameters: Collection[str]) -> bool:
    """Tell whether a run can go on from it: parameters and optimizer state are finite.

    Buffers do not count: masks hold infinities.
    """
    states = {
        f"{name}/{key}": value
        for name, state in checkpoint.optimizer.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    weights = {name: checkpoint.model[name] for name in parameters if name in checkpoint.model}
    return is_finite(weights | states)


def newest_good(folder: Path, parameters: Collection[str]) -> Path | None:
    """Return the newest checkpoint that a run can go on from; None if there is none."""
    for path in reversed(files_in(folder)):
        try:
            if is_good(load(path), parameters):
                return path
        except CheckpointError:
            continue
    return None


def check_owner(path: Path, saved: Checkpoint, rank: int | None, step: int) -> None:
    """Refuse a checkpoint of another rank or step than its path says.

    `rank` is None for a checkpoint of the run. Format 1 does not say whose it is.
    """
    if saved.step == step and (saved.rank == rank or saved.format == 1):
        return
    found, wanted = (
        f"step {at} of {'the run' if of is None else f'rank {of} alone'}"
        for at, of in ((saved.step, saved.rank), (step, rank))
    )
    raise CheckpointError(
        f"{path}: it holds {found}, but {wanted} belongs there. It was left alone; put the right "
        "file there, or move it away."
    )


def check_same_job(path: Path, saved: Job, job: Job) -> None:
    """Refuse a checkpoint of another job: what fixes the arithmetic must be equal."""
    for key, before, now in what_changed(saved, job):
        raise CheckpointError(
            f"{path}: made with {key} = {before!r}, but the job says {now!r}, which would not "
            "continue the same run. Set it back, or start without --resume in another folder."
        )
