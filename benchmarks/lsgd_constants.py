"""What `benchmarks.lsgd` assumes, each with a range, a mark and a source."""

from __future__ import annotations

from benchmarks.constants import Constant

WORKERS = (4, 8, 16, 32, 64, 128, 256)
PER_MACHINE = 4
"""GPUs of a machine: two K80 boards. Layered SGD adds a process that leads them."""
BATCH = 64
"""Samples of a worker, in the authors' code: github.com/ML4HPC/scalable_DNN at e827d938."""

CONSTANTS: dict[str, Constant] = {
    "samples_per_s": Constant(
        45.0, 38.0, 50.0, "assumed", "resnet-50 on one GPU of a K80; B-Caffe's logs imply 38"
    ),
    "input_s": Constant(0.15, 0.0, 0.5, "assumed", "a worker loads its batch in line"),
    "update_bytes_per_s": Constant(
        40e9, 30e9, 45e9, "derived", "240 GB/s of memory, 85 % of it reached, five passes"
    ),
    "latency_s": Constant(5e-6, 2e-6, 20e-6, "assumed", "a message of MPI from GPU memory, EDR"),
    "rate_bytes_per_s": Constant(
        8e9, 6e9, 11e9, "assumed", "12.5 GB/s nominal; 6 GB/s if staged through host memory"
    ),
    "inside_latency_s": Constant(10e-6, 5e-6, 30e-6, "assumed", "a message between processes"),
    "inside_rate_bytes_per_s": Constant(
        6e9, 4e9, 10e9, "assumed", "PCIe 3 x16, through host memory"
    ),
}

FLOWS = {"ring": 1, "recursive doubling": 4, "halving-doubling": 4}
"""How many workers of a machine send across its port at the same time in the conventional exchange.
In a ring one sends to the next machine; in the others each worker has a partner elsewhere. Leaders
are one for each machine."""

PUBLISHED = {("conventional", 8): 0.987, ("conventional", 256): 0.638}
PUBLISHED |= {("layered", 8): 1.0, ("layered", 256): 0.931}
"""Efficiencies of the paper, unverified: not checked against its text. They are no goals."""
