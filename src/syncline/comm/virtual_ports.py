"""The ports of a cluster's links in virtual time: their names and rates."""

from __future__ import annotations

from syncline.cluster import Cluster
from syncline.virtual.link import Port


def ways_of(cluster: Cluster) -> tuple[str, str]:
    """Return the names of a machine's ports: for what leaves it, and for what comes to it.

    On a half-duplex link they are one port.
    """
    return ("out", "in") if cluster.network.duplex == "full" else ("both", "both")


def rates_of(cluster: Cluster) -> dict[Port, float]:
    """Return the rate of every port: those of each machine, and of each rank inside machines."""
    rates: dict[Port, float] = {}
    for machine in range(cluster.machines):
        for way in ways_of(cluster):
            rates[way, machine] = cluster.network.rate_bytes_per_s
    for rank in range(cluster.ranks):
        rates["inside", rank] = cluster.inside.rate_bytes_per_s
    return rates
