"""Clusters as tables: the presets, and what was measured on links."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from syncline.cluster import Link, cluster_from, known_facts
from syncline.cluster_facts import ClusterFacts, Fact, LinkFacts
from syncline.presets import PRESETS


def print_clusters(console: Console) -> None:
    """Print the presets: their links, and where they come from."""
    table = Table("preset", "ranks a machine", "between machines", "inside", "device", "what")
    for name, own in PRESETS.items():
        facts, cluster = known_facts(own), cluster_from(own)
        ranks = "any" if facts.ranks_per_machine is None else str(facts.ranks_per_machine)
        links = link_in_words(cluster.network), link_in_words(cluster.inside)
        table.add_row(name, ranks, *links, facts.device, own.source)
    console.print(table)


def link_in_words(link: Link) -> str:
    """Return a link's rate and latency, as "1.12 GB/s, 30 us"."""
    half = ", half duplex" if link.duplex == "half" else ""
    return f"{link.rate_bytes_per_s / 1e9:.3g} GB/s, {link.latency_s * 1e6:.3g} us{half}"


def print_measured(facts: ClusterFacts, path: Path, console: Console) -> None:
    """Print what was fitted, how well it fits, and where it was written."""
    table = Table("", "fitted", "90 % of redrawn tables")
    for name, link in (("inside a machine", facts.inside), ("between machines", facts.network)):
        for row in _rows_of(name, link):
            table.add_row(*row)
    for name, fact in (("a message", facts.message_s), ("a collective", facts.collective_s)):
        if fact is not None:
            table.add_row(f"{name}, processor time", *_in_us(fact))
    if facts.byte_s is not None:
        low, high = (f"{end * 1e9:.3g}" for end in facts.byte_s.bounds)
        value = f"{facts.byte_s.value * 1e9:.3g} ns"
        table.add_row("a byte, processor time", value, f"{low} to {high} ns")
    console.print(table)
    errors = [abs(one.residual) for one in facts.measured]
    console.print(
        f"{len(errors)} times, predicted back: half are within {statistics.median(errors):.0%}, "
        f"the worst is off by {max(errors):.0%}"
    )
    console.print(f"cluster file: {path}", soft_wrap=True)


def _rows_of(name: str, link: LinkFacts) -> list[tuple[str, str, str]]:
    if link.latency_s is None:
        return []
    rows = [(f"{name}, latency", *_in_us(link.latency_s))]
    for size, rate in link.rates or ():
        rows.append((f"{name}, messages of {size:,.0f} bytes", f"{rate / 1e9:.3g} GB/s", ""))
    return rows


def _in_us(fact: Fact) -> tuple[str, str]:
    low, high = fact.bounds
    return f"{fact.value * 1e6:.3g} us", f"{low * 1e6:.3g} to {high * 1e6:.3g} us"
