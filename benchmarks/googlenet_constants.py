"""The constants of `benchmarks.googlenet`, each with its source and a range. Committed before use.

Times of layers, sizes and the network's table are read from the logs, so they are not here. The
speed of one node is measured; the rest describes what one exchange costs a node besides MPI, and
how the table is read. docs/googlenet.md lists what was known when these were chosen, and changes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A value, what it may lie between, and where it comes from."""

    value: float
    low: float
    high: float
    source: str


LAYERS_FROM = "tmp2comm.log"
"""Layers' sizes and backward times of all nine cells: the log of the fewest nodes."""

FIT_FROM_BYTES = 1 << 14
"""From this size on the network's table is fitted, and taken to go on as a straight line. Below it
MPI uses another protocol: on 8 nodes the time jumps from 182 to 792 us between 8 and 12 KiB. Two
layers of 64 are smaller."""

SAMPLES_PER_GPU = 32
"""Batch 64 is a node's, which B-Caffe divides over its two GPUs (P2PSync::divide_batch_size)."""

COPIES_PER_BYTE = 3
"""To the host, and back to both GPUs (B-Caffe, src/caffe/distributed.cpp at 1e8a70d)."""

ALONE_SAMPLES_PER_S = Constant(
    81.68, 80.0, 83.4, "images/s of a GPU on one node: B-Caffe, scripts/gmwfbp.py; 2 % assumed"
)
COPY_BYTES_PER_S = Constant(
    6e9, 4e9, 10e9, "assumed: PCIe 3 x16 reaches 12.8 GB/s pinned; two dies of a K80 share it"
)
SCALE_BYTES_PER_S = Constant(
    5e9, 3e9, 8e9, "assumed: one core reads, multiplies and writes the sums"
)
CALL_S = Constant(60e-6, 20e-6, 150e-6, "assumed: three copies are started and waited for")

EXTRAPOLATION = Constant(
    1.0, 0.85, 1.15, "assumed: factor on the fitted seconds for each byte; the table ends at 1 MiB"
)
