"""Digests of a model's parameters and buffers, tensor by tensor."""

from __future__ import annotations

import hashlib
import itertools

import torch
from torch import nn


def parameter_digests(model: nn.Module, *, buffers: bool = False) -> dict[str, str]:
    """Return 64 bits of the SHA-256 of each parameter by name; of each buffer too, if asked for.

    Equal digests mean equal types, shapes and bits, whatever the memory format. The parameters must
    be up to date: `Replica.synchronize` waits until they are.
    """
    named = itertools.chain(model.named_parameters(), model.named_buffers() if buffers else ())
    return {name: tensor_digest(tensor) for name, tensor in named}


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return 64 bits of the SHA-256 of a tensor's type, shape and bits, as 16 digits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
