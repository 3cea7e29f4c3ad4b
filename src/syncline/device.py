"""Devices: how long a layer takes on hardware that is not there, from its FLOP and its bytes.

A layer takes as long as its arithmetic or as the memory it moves, whichever is longer, and a launch
besides:

    time = max(FLOP / (peak * efficiency * fill), moved bytes / memory rate) + launch

The roofline of Williams, Waterman and Patterson (2009), with two corrections. `fill` is below 1
where there is too little work to keep the device busy: b / (b + h) for a convolution of b samples,
r / (r + k) for a linear layer of r rows. Peaks and memory rates are facts of data sheets;
efficiencies, fills and launches are assumptions: each says how sure it is by a range.

Pure data and one function; no torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from syncline.cluster_facts import Fact

Kind = Literal["conv", "linear", "norm", "embedding", "attention", "other"]
"""What a layer computes, as far as its speed depends on it."""

DEFAULT = "core"
"""One core with the rate `cluster.flops_per_s` for every kind of layer, and nothing else."""


def _fact(value: float, source: str) -> Fact:
    return Fact(value, source=source)


def _known(low: float, value: float, high: float, source: str) -> Fact:
    return Fact(value, low, high, source)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank computes on. Peaks are those of one rank's device, in float32 tensors."""

    name: str
    conv_peak_flops_per_s: Fact
    peak_flops_per_s: Fact
    """Of everything that is not a convolution."""
    conv_efficiency: Fact
    """The part of the peak that large convolutions reach."""
    linear_efficiency: Fact
    """The part that large matrix products reach, in linear layers and elsewhere."""
    conv_half_samples: Fact
    """With this many samples a convolution reaches half of its efficiency."""
    linear_half_rows: Fact
    """With this many rows a matrix product reaches half of its efficiency."""
    memory_bytes_per_s: Fact
    """The rate that streaming reads and writes reach."""
    launch_s: Fact
    """What a layer costs in each direction besides: starting its kernels."""


class Work(msgspec.Struct, frozen=True):
    """What a layer does in one direction, for all samples."""

    kind: Kind
    flops: float
    moved_bytes: float
    """Activations and parameters, read and written."""
    samples: int
    rows: float
    """Rows of its matrix product; a layer of an image has one for each sample."""


def seconds_of(work: Work, device: Device) -> float:
    """Return how long a layer takes in one direction. A layer without work takes no time.

    >>> v100 = DEVICES["v100"]
    >>> round(seconds_of(Work("linear", 15.7e9, 1e6, 64, 64.0), v100) * 1e3, 6)
    2.01
    """
    if not work.flops and not work.moved_bytes:
        return 0.0
    arithmetic_s = work.flops / flops_per_s(work, device)
    memory_s = work.moved_bytes / device.memory_bytes_per_s.value
    return max(arithmetic_s, memory_s) + device.launch_s.value


def flops_per_s(work: Work, device: Device) -> float:
    """Return the rate at which a device does a layer's arithmetic."""
    if work.kind == "conv":
        fill = work.samples / (work.samples + device.conv_half_samples.value)
        return device.conv_peak_flops_per_s.value * device.conv_efficiency.value * fill
    fill = work.rows / (work.rows + device.linear_half_rows.value)
    return device.peak_flops_per_s.value * device.linear_efficiency.value * fill


def update_s(size_bytes: int, state_copies: int, device: Device) -> float:
    """Return how long an optimizer takes: it reads gradients, reads and writes the rest.

    `state_copies` is how many numbers it keeps for each parameter.

    >>> round(update_s(900, 1, DEVICES["v100"]) - 10e-6, 12) == round(900 * 5 / 765e9, 12)
    True
    """
    moved_bytes = size_bytes * (3 + 2 * state_copies)
    return moved_bytes / device.memory_bytes_per_s.value + device.launch_s.value


_GPU_FILL = "assumed: a batch of a few images does not fill a GPU"
_GPU_ROWS = "assumed: tiles of matrix products have 64 to 256 rows"
_GPU_LAUNCH = "assumed: eager PyTorch starts a kernel in 5 to 10 us, a layer has one or two"
_CPU_LAUNCH = "assumed: starting and joining the threads of all cores"
_MEMORY = "assumed: 85 % of the data sheet's peak"


def _xeon(name: str, peak: Fact, memory: Fact) -> Device:
    """Return a machine of two Xeon processors as one rank, with the kernels of Das et al. 2016."""
    assumed = "assumed, after Das et al. 2016 for kernels made for it; PyTorch's may be slower"
    return Device(
        name=name,
        conv_peak_flops_per_s=peak,
        peak_flops_per_s=peak,
        conv_efficiency=_known(0.75, 0.90, 0.92, assumed),
        linear_efficiency=_known(0.5, 0.70, 0.8, assumed),
        conv_half_samples=_known(0.0, 0.0, 1.0, "assumed: threads share an image's features"),
        linear_half_rows=_known(8.0, 16.0, 32.0, "assumed: a weight is read once for all rows"),
        memory_bytes_per_s=memory,
        launch_s=_known(2e-6, 10e-6, 50e-6, _CPU_LAUNCH),
    )


def _gpu(
    name: str,
    *,
    conv_peak: Fact,
    peak: Fact,
    conv: tuple[float, float, float],
    linear: tuple[float, float, float],
    memory_bytes_per_s: float,
    why: str,
) -> Device:
    assumed, memory = f"assumed: {why}", memory_bytes_per_s
    return Device(
        name=name,
        conv_peak_flops_per_s=conv_peak,
        peak_flops_per_s=peak,
        conv_efficiency=_known(*conv, assumed),
        linear_efficiency=_known(*linear, assumed),
        conv_half_samples=_known(0.5, 2.0, 8.0, _GPU_FILL),
        linear_half_rows=_known(8.0, 32.0, 128.0, _GPU_ROWS),
        memory_bytes_per_s=_known(0.7 * memory, 0.85 * memory, 0.93 * memory, _MEMORY),
        launch_s=_known(4e-6, 10e-6, 25e-6, _GPU_LAUNCH),
    )


_V100, _A100, _H100 = (
    f"NVIDIA {one} Tensor Core GPU data sheet" for one in ("V100", "A100", "H100")
)
_K80 = "NVIDIA Tesla K80 board specification: 2496 cores at 875 MHz, one of the board's two GPUs"
_TF32 = "TF32, without sparsity: PyTorch's default for convolutions"
_FP32 = "FP32: PyTorch's default for matrix products"

DEVICES: dict[str, Device] = {
    one.name: one
    for one in (
        _xeon(
            "e5-2698v3",
            _fact(2355e9, "Intel ARK: 2 x 16 cores, 2.3 GHz; 32 FLOP a cycle with two AVX2 FMA"),
            _known(90e9, 110e9, 125e9, "assumed: 80 % of two sockets' 68 GB/s (Intel ARK)"),
        ),
        _xeon(
            "e5-2666v3",
            _fact(1670e9, "Amazon c4.8xlarge: 2 x 9 cores, 2.9 GHz; 32 FLOP a cycle"),
            _known(80e9, 100e9, 120e9, "assumed: as two sockets of the same generation"),
        ),
        _gpu(
            "k80",
            conv_peak=_fact(4.37e12, _K80),
            peak=_fact(4.37e12, _K80),
            conv=(0.2, 0.35, 0.5),
            linear=(0.3, 0.5, 0.7),
            memory_bytes_per_s=240e9,
            why="it seldom holds its boost clock",
        ),
        _gpu(
            "v100",
            conv_peak=_fact(15.7e12, f"{_V100}, SXM2, FP32"),
            peak=_fact(15.7e12, f"{_V100}, SXM2, FP32"),
            conv=(0.5, 0.7, 0.85),
            linear=(0.6, 0.75, 0.9),
            memory_bytes_per_s=900e9,
            why="FP32 kernels reach most of the peak with large layers",
        ),
        _gpu(
            "a100",
            conv_peak=_fact(156e12, f"{_A100}, {_TF32}"),
            peak=_fact(19.5e12, f"{_A100}, {_FP32}"),
            conv=(0.2, 0.35, 0.5),
            linear=(0.6, 0.8, 0.9),
            memory_bytes_per_s=1555e9,
            why="tensor cores wait for memory",
        ),
        _gpu(
            "h100",
            conv_peak=_fact(494e12, f"{_H100}, SXM5, {_TF32}"),
            peak=_fact(67e12, f"{_H100}, SXM5, {_FP32}"),
            conv=(0.12, 0.25, 0.4),
            linear=(0.5, 0.7, 0.85),
            memory_bytes_per_s=3350e9,
            why="tensor cores wait for memory",
        ),
    )
}
"""Devices by name; `core` is none of them: it has the cluster's rate and nothing else."""


def names() -> list[str]:
    """List the devices that a job can name."""
    return [DEFAULT, *DEVICES]
