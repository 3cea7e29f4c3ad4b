"""Constants of `benchmarks.das`, each with range, mark and source. Committed before the first run.

The published results were known when these were written: they are in the paper's abstract. So were
the results of an earlier trial with a smaller model and nearly these constants. docs/das.md says
what follows from that, and lists every later change.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.constants import Constant

CONSTANTS: dict[str, Constant] = {
    "conv_efficiency": Constant(
        0.90, 0.75, 0.92, "unverified", "Das et al. 2016: about 90 % of peak in convolutions"
    ),
    "linear_efficiency": Constant(
        0.70, 0.50, 0.80, "unverified", "Das et al. 2016: about 70 % of peak in linear layers"
    ),
    "conv_half_samples": Constant(
        0.5,
        0.0,
        1.0,
        "assumed",
        "b samples reach b / (b + h) of the efficiency. 16 or 32 cores divide the work of a few"
        " images unevenly, so h is not 0; nothing says what it is, so the middle of its range",
    ),
    "linear_half_rows": Constant(
        16.0, 8.0, 32.0, "assumed", "r rows reach r / (r + h): a weight is read once for all rows"
    ),
    "link_share": Constant(
        0.84,
        0.68,
        0.95,
        "derived",
        "share of the nominal rate: MG-WFBP's fit of all-reduce over FDR, 8 nodes; 16 nodes: 0.68",
    ),
    "fdr_latency_s": Constant(
        3e-6, 1.5e-6, 8e-6, "assumed", "a message of MPI; from point to point 1.1 us"
    ),
    "tcp_latency_s": Constant(
        40e-6, 20e-6, 80e-6, "assumed", "a message of MPI over 10 GbE; B-Caffe's fit says 45 us"
    ),
    "cores_lost": Constant(
        1.0, 0.0, 2.0, "unverified", "Das et al. 2016: one thread a node communicates"
    ),
    "fdr_memory_bytes_per_s": Constant(
        110e9, 90e9, 125e9, "assumed", "80 % of two sockets' 68 GB/s (Intel ARK)"
    ),
    "aws_memory_bytes_per_s": Constant(
        100e9, 80e9, 120e9, "assumed", "two sockets of the same generation, in a virtual machine"
    ),
    "jitter_sigma": Constant(
        0.02, 0.0, 0.05, "assumed", "lognormal factor on a node's compute of a step"
    ),
    "cd_dnn_batch": Constant(
        1024, 256, 1024, "assumed", "frames; in draws 256, 512 or 1024. The abstract gives none"
    ),
}
CD_DNN_BATCHES = (256, 512, 1024)


class Machine(NamedTuple):
    """Facts about a node; two sockets are one rank."""

    name: str
    cores: int
    peak_flops_per_s: float
    nominal_bytes_per_s: float
    latency: str
    """Names in `CONSTANTS`."""
    memory: str


FDR = Machine("e5-2698v3-fdr", 32, 2355e9, 6.8e9, "fdr_latency_s", "fdr_memory_bytes_per_s")
"""Intel ARK: 2 x 16 cores at 2.3 GHz, 32 FLOP a cycle; 56 Gbit/s with 64/66 coding."""
AWS = Machine("c4.8xlarge-10gbe", 18, 1670e9, 1.25e9, "tcp_latency_s", "aws_memory_bytes_per_s")
"""Amazon: 2 x 9 cores at 2.9 GHz, 32 FLOP a cycle; 10 Gbit/s."""


class Row(NamedTuple):
    """A result of the paper's abstract."""

    name: str
    network: str
    sample_shape: tuple[int, ...]
    classes: int
    machine: Machine
    nodes: int
    batch: int | None
    """Of all nodes; None for `cd_dnn_batch`."""
    published: float
    half_unit: float = 0.5
    """Half of the last digit that is published."""


ROWS = (
    Row("VGG-A, 128 nodes", "vgg-a", (3, 224, 224), 1000, FDR, 128, 512, 90.0),
    Row("VGG-A, 64 nodes", "vgg-a", (3, 224, 224), 1000, FDR, 64, 256, 53.0),
    Row("OverFeat-FAST, 64 nodes", "overfeat-fast", (3, 231, 231), 1000, FDR, 64, 256, 42.0),
    Row("CD-DNN, 16 nodes", "cd-dnn", (429,), 9304, FDR, 16, None, 6.5, 0.05),
    Row("VGG-A, 16 nodes, AWS", "vgg-a", (3, 224, 224), 1000, AWS, 16, 256, 14.0),
)
"""The abstract says neither the network nor the minibatch of the last row (about 14), nor CD-DNN's
sizes: 429 inputs, seven layers of 2048, 9304 outputs are those of the 1-bit SGD paper."""
