"""Makes a workload by counting, without running the model on data.

On a core each operation takes its time and memory none, so measured layer times are better if there
are any. On a device (`syncline/device.py`) the kind of a layer, its batch and memory count too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from syncline import device as devices
from syncline.device import Device, Work
from syncline.engine.buffer_homes import find_statistics
from syncline.linear_layers import copy_to_meta
from syncline.measure.count import Counted, CountedLayer, count
from syncline.workload import Layer, Workload


def derive(
    model: nn.Module,
    sample_shape: Sequence[int],
    batch: int,
    flops_per_s: float,
    input_s: float = 0.0,
    name: str = "",
    dtype: torch.dtype = torch.float32,
    *,
    device: Device | None = None,
    state_copies: int = 0,
) -> Workload:
    """Return a model's workload; `batch` is the number of samples of one forward: a shard.

    `dtype` is the type of a sample: integers, for example, for the words of a text. With a device
    `flops_per_s` has no effect, and the workload also says how long an update takes, with an
    optimizer that keeps `state_copies` numbers for each parameter.

    Operations count for layers as `measure/count.py` says. A tied weight's bytes count where it is
    used first. Unused parameters make layers without time at the end.

    Convolutions and matrix products are counted, a multiplication and an addition as two. Backward
    is counted by running it; if it cannot run, it takes twice the time of forward. The model itself
    is not touched: a copy on the meta device runs.
    """
    sample = torch.empty((batch, *sample_shape), dtype=dtype, device="meta")
    counted = count(copy_to_meta(model), sample)
    layers, update_s = [], None
    for one in counted.layers:
        if device is None:
            forward_s, backward_s = (
                one.forward_flops / flops_per_s,
                one.backward_flops / flops_per_s,
            )
        else:
            forward_s, backward_s = times_on(device, one)
        layers.append(layer_of(one, forward_s, backward_s))
    if device is not None:
        used_bytes = sum(size.size_bytes for size in counted.sizes if size.is_used)
        update_s = devices.update_s(used_bytes, state_copies, device)
    return workload_of(
        model,
        counted,
        layers,
        name=name or type(model).__name__,
        samples=batch,
        input_s=input_s,
        update_s=update_s,
        made_by="derived",
        machine={"device": devices.DEFAULT, "flops_per_s": flops_per_s}
        if device is None
        else {"device": device.name},
    )


def times_on(device: Device, layer: CountedLayer) -> tuple[float, float]:
    """Return a layer's seconds of forward and of backward on a device.

    Backward moves the activations twice: it reads gradients of the outputs and the inputs, and
    writes gradients of the inputs. It reads the parameters once and writes their gradients. An
    embedding reads only some of its rows, but its gradient is as large as the table.
    """
    reads_bytes = 0 if layer.kind == "embedding" else layer.size_bytes
    ways = (
        (layer.forward_flops, layer.moved_bytes + reads_bytes),
        (layer.backward_flops, 2 * layer.moved_bytes + reads_bytes + layer.size_bytes),
    )
    forward_s, backward_s = (
        devices.seconds_of(Work(layer.kind, flops, moved, layer.samples, layer.rows), device)
        for flops, moved in ways
    )
    if not layer.moved_bytes:
        return 0.0, 0.0  # it is not used
    return forward_s, backward_s if layer.backward_flops or layer.size_bytes else 0.0


def layer_of(counted: CountedLayer, forward_s: float, backward_s: float) -> Layer:
    """Return a layer with these times."""
    return Layer(
        counted.name,
        counted.size_bytes,
        forward_s,
        backward_s,
        input_bytes=counted.input_bytes,
        output_bytes=counted.output_bytes,
        kind=counted.kind,
        flops=counted.forward_flops / counted.samples,
        moved_bytes=counted.moved_bytes / counted.samples,
    )


def workload_of(
    model: nn.Module, counted: Counted, layers: Sequence[Layer], **facts: Any
) -> Workload:
    """Return the workload of a model that was counted."""
    statistics, counters = find_statistics(model)
    return Workload(
        layers=tuple(layers),
        parameters=counted.sizes,
        num_statistics=sum(buffer.numel() for buffer in statistics),
        num_counters=len(counters),
        **facts,
    )
