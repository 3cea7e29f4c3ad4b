"""Clusters by name: each number with its range and its source.

Rates and latencies are those that messages reach, not those on the box, which are `nominal`. A
number whose source is "assumed" is a guess of ours; one that is "derived" follows from numbers that
were published. A GPU's own rates are rough: `flops_per_s` is one number for all kinds of layers.
"""

from __future__ import annotations

from syncline.cluster_facts import ClusterFacts, Fact, LinkFacts

DEFAULT = "1gbit"
"""The preset that says what others and files leave out."""

GB = 1e9

_GLOO = "gloo's issue 21: 88 % of the nominal rate"
_SHARE = "84 % of nominal, all-reduce over 8 nodes fitted by MG-WFBP; 68 % over 16"
_PCIE3 = "80 % of nominal, as SimAI has it for PCIe 4 and 5"
_NCCL = "NCCL's tuning.cc: a hop of the LL and Simple protocols"
_STAGED = "assumed: host memory in between, not pinned"


def _of_cpus(network: LinkFacts, source: str) -> ClusterFacts:
    """Return a cluster of one rank on one core of a commodity machine.

    Measured on such a core: copies write 8 GB/s, sums 6.8 GB/s; small all-reduces over TCP streams
    take 23.4, 40.5, 58.8, 91.9 and 125.5 us of processor time on 2, 3, 4, 6 and 8 ranks, which is
    6.8 us and 17.0 us for each message (`benchmarks/messages.py`). The link does not matter for
    that.
    """
    return ClusterFacts(
        source=source,
        network=network,
        inside=LinkFacts(
            latency_s=_us(20, 10, 40, "assumed"),
            rate_bytes_per_s=Fact(6 * GB, 4 * GB, 8 * GB, "sums and copies of one core"),
        ),
        flops_per_s=Fact(5e10, 2e10, 1e11, "assumed"),
        update_bytes_per_s=Fact(6 * GB, 4 * GB, 8 * GB, "sums and copies of one core"),
        message_s=_us(17, 10, 37, "benchmarks/messages.py, two machines"),
        collective_s=_us(7, 4, 53, "benchmarks/messages.py, two machines"),
        byte_s=Fact(0.4e-9, 0.2e-9, 1e-9, "measure links, loopback, two machines"),
    )


def _link(latency: Fact, rate: Fact, nominal_gb: float | None = None) -> LinkFacts:
    """Return a link: its latency, its rate, and its nominal rate in GB/s."""
    nominal = None if nominal_gb is None else Fact(nominal_gb * GB)
    return LinkFacts(latency_s=latency, rate_bytes_per_s=rate, nominal_bytes_per_s=nominal)


def _us(value: float, low: float, high: float, source: str = "assumed") -> Fact:
    return Fact(value / 1e6, low / 1e6, high / 1e6, source)


def _gb(value: float, low: float, high: float, source: str = "assumed") -> Fact:
    return Fact(value * GB, low * GB, high * GB, source)


# What a message and a collective cost the processor: with TCP, with MPI over InfiniBand, with NCCL.
_TCP = (_us(17, 10, 37), _us(7, 4, 60))
_VERBS = (_us(1, 0, 3), _us(5, 2, 20))
_OF_NCCL = (
    _us(1, 0.5, 3, "NCCL's tuning.cc: 1 us to post on Intel, 2 on AMD"),
    _us(8.4, 6.6, 14, "NCCL's tuning.cc: base latency of a ring"),
)
_TEN_GBE = _gb(1.12, 1.05, 1.17, "assumed: TCP reaches 1.10 to 1.17 of 1.25 GB/s")
_HUNDRED_GBE = _gb(11.9, 10, 12.1, "assumed: 93 to 97 % of nominal with RoCE")

PRESETS: dict[str, ClusterFacts] = {
    "1gbit": _of_cpus(_link(_us(75, 50, 100), _gb(0.110, 0.1, 0.1196, _GLOO), 0.125), "TCP"),
    "10gbit": _of_cpus(_link(_us(30, 15, 60), _TEN_GBE, 1.25), "TCP"),
    "25gbit": _of_cpus(
        _link(_us(20, 15, 30), _gb(2.97, 2.9, 3.03, "assumed: 93 to 97 % of nominal"), 3.125),
        "TCP",
    ),
    "100gbit": _of_cpus(
        # TCP is far slower: gloo's issue 248 has 1.07 GB/s for one core on 40 Gbit/s.
        _link(_us(4, 2, 5), _HUNDRED_GBE, 12.5),
        "RoCE",
    ),
    "e5-2698v3-fdr": ClusterFacts(
        source="a rank on two 16-core Xeons, FDR InfiniBand, as in Das et al. 2016",
        device="e5-2698v3",
        network=_link(_us(3, 1.5, 8), _gb(5.7, 4.6, 6.5, _SHARE), 6.8),
        flops_per_s=Fact(2.12e12, 1.77e12, 2.17e12, "2355 GFLOP/s; 90 % in convolutions"),
        update_bytes_per_s=_gb(22, 15, 27, "derived: 110 GB/s of memory, five passes"),
        message_s=_VERBS[0],
        collective_s=_VERBS[1],
    ),
    "c4.8xlarge-10gbe": ClusterFacts(
        source="a rank on two 9-core Xeons, 10 Gbit/s Ethernet, as in Das et al. 2016",
        device="e5-2666v3",
        network=_link(_us(40, 20, 80), _gb(1.05, 0.85, 1.19, "assumed: 84 % of nominal"), 1.25),
        flops_per_s=Fact(1.5e12, 1.25e12, 1.54e12, "1670 GFLOP/s; 90 % in convolutions"),
        update_bytes_per_s=_gb(20, 14, 25, "derived: 100 GB/s of memory, five passes"),
        message_s=_TCP[0],
        collective_s=_TCP[1],
    ),
    "k80-10gbe": ClusterFacts(
        source="one board of two GPUs a machine, MPI over 10 Gbit/s Ethernet, as in B-Caffe's logs",
        device="k80",
        ranks_per_machine=2,
        network=_link(_us(45, 30, 100, "B-Caffe"), _TEN_GBE, 1.25),
        inside=_link(_us(5.7, 1, 10, _NCCL), _gb(10, 6, 12.8, "assumed"), 16),
        copies=_link(_us(10, 5, 30), _gb(6, 4, 10, _STAGED), 16),
        flops_per_s=Fact(1.1e12, 0.9e12, 1.3e12, "derived: resnet-50, 45 images a second"),
        update_bytes_per_s=_gb(30, 20, 40, "derived: 240 GB/s of memory, five passes"),
        message_s=_us(17, 10, 37),
        collective_s=_us(60, 20, 100),
    ),
    "k80-edr": ClusterFacts(
        source="two boards of two GPUs a machine, 100 Gbit/s InfiniBand, as in LSGD's experiments",
        device="k80",
        ranks_per_machine=4,
        network=_link(_us(2, 1, 10), _gb(11, 6, 11.9, "assumed: 94 % of nominal at most"), 12.5),
        inside=_link(_us(5.7, 1, 10, _NCCL), _gb(10, 6, 12.8, "assumed"), 16),
        copies=_link(_us(10, 5, 30), _gb(6, 4, 10, _STAGED), 16),
        flops_per_s=Fact(1.1e12, 0.9e12, 1.3e12, "derived: resnet-50, 45 images a second"),
        update_bytes_per_s=_gb(30, 20, 40, "derived: 240 GB/s of memory, five passes"),
        message_s=_VERBS[0],
        collective_s=_VERBS[1],
    ),
    "v100-nvlink-100gib": ClusterFacts(
        source="eight GPUs a machine on NVLink, one port of 100 Gbit/s InfiniBand",
        device="v100",
        ranks_per_machine=8,
        network=_link(_us(5, 2.7, 14, _NCCL), _gb(11.75, 10, 12.1, "SimAI: 94 %"), 12.5),
        inside=_link(
            _us(3.4, 0.6, 3.4, _NCCL),
            _gb(136, 86, 140, "fitted to public all-reduces of 8 GPUs; 86 of 4"),
            150,
        ),
        flops_per_s=Fact(8e12, 6e12, 1.2e13, "assumed: half of 15.7 TFLOP/s"),
        update_bytes_per_s=_gb(140, 100, 160, "derived: 900 GB/s of memory, five passes"),
        message_s=_OF_NCCL[0],
        collective_s=_OF_NCCL[1],
    ),
    "v100-pcie-10gbe": ClusterFacts(
        source="four GPUs a machine on PCIe 3, 10 Gbit/s Ethernet, through host memory",
        device="v100",
        ranks_per_machine=4,
        network=_link(_us(30, 15, 60), _TEN_GBE, 1.25),
        inside=_link(_us(5.7, 1, 5.7, _NCCL), _gb(12.8, 10, 13.2, _PCIE3), 16),
        copies=_link(_us(10, 5, 30), _gb(12, 6, 12.8, _PCIE3), 16),
        flops_per_s=Fact(8e12, 6e12, 1.2e13, "assumed: half of 15.7 TFLOP/s"),
        update_bytes_per_s=_gb(140, 100, 160, "derived: 900 GB/s of memory, five passes"),
        message_s=_TCP[0],
        collective_s=_TCP[1],
    ),
    "v100-pcie-100gbe": ClusterFacts(
        source="four GPUs a machine on PCIe 3, 100 Gbit/s Ethernet (RoCE), through host memory",
        device="v100",
        ranks_per_machine=4,
        network=_link(_us(4, 2, 14), _HUNDRED_GBE, 12.5),
        inside=_link(_us(5.7, 1, 5.7, _NCCL), _gb(12.8, 10, 13.2, _PCIE3), 16),
        copies=_link(_us(10, 5, 30), _gb(12, 6, 12.8, _PCIE3), 16),
        flops_per_s=Fact(8e12, 6e12, 1.2e13, "assumed: half of 15.7 TFLOP/s"),
        update_bytes_per_s=_gb(140, 100, 160, "derived: 900 GB/s of memory, five passes"),
        message_s=_OF_NCCL[0],
        collective_s=_OF_NCCL[1],
    ),
    "a100": ClusterFacts(
        source="eight GPUs a machine on NVLink 3, eight ports of HDR InfiniBand",
        device="a100",
        ranks_per_machine=8,
        network=_link(_us(5, 2.7, 14, _NCCL), _gb(188, 170, 194, "SimAI: 23.5 of 25 a port"), 200),
        inside=_link(
            _us(3.4, 0.6, 3.4, _NCCL),
            _gb(230, 218, 240, "SimAI 240; measured bus rates of 227 and 230"),
            300,
        ),
        flops_per_s=Fact(6e13, 1.5e13, 1e14, "assumed: TF32, 40 % of its peak"),
        update_bytes_per_s=_gb(260, 200, 290, "derived: 1555 GB/s of memory, five passes"),
        message_s=_OF_NCCL[0],
        collective_s=_OF_NCCL[1],
    ),
    "h100": ClusterFacts(
        source="eight GPUs a machine on NVLink 4, eight ports of NDR InfiniBand",
        device="h100",
        ranks_per_machine=8,
        network=_link(_us(5, 2.7, 14, _NCCL), _gb(388, 350, 392, "SimAI: 48.5 of 50 a port"), 400),
        inside=_link(
            _us(3.4, 0.6, 3.4, _NCCL), _gb(370, 340, 371, "SimAI, and nccl-tests' issue 212"), 450
        ),
        flops_per_s=Fact(1.5e14, 6e13, 2.5e14, "assumed: TF32, 30 % of its peak"),
        update_bytes_per_s=_gb(570, 400, 630, "derived: 3350 GB/s of memory, five passes"),
        message_s=_OF_NCCL[0],
        collective_s=_OF_NCCL[1],
    ),
    "lab": ClusterFacts(
        source="machines of the lab on two cores: namespaces, links of 1 Gbit/s (docs/lab.md)",
        network=_link(
            _us(74, 60, 90, "benchmarks/latency.py, in the lab"),
            _gb(0.11955, 0.1172, 0.1196, "1448 of 1514 bytes of a frame are payload"),
            0.125,
        ),
        message_s=_us(37, 17, 45, "benchmarks/messages.py, two cores with other work"),
        collective_s=_us(53, 7, 70, "benchmarks/messages.py, two cores with other work"),
    ),
}
