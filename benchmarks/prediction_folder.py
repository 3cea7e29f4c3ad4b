"""What `benchmarks.prediction` has measured: a folder with jobs, calibration, runs and traces."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import msgspec
from lab.network import rate_bytes_per_s

from benchmarks.clocks import PAYLOAD_SHARE
from benchmarks.prediction_cases import CALIBRATED_ON, Case, calibration_of, network
from syncline import workload as workloads
from syncline.cluster_facts import ClusterFacts, Fact, LinkFacts
from syncline.cluster_file import read_cluster
from syncline.config import Job, read_job
from syncline.dataset import (
    BUSY,
    LATENCY,
    LINKS,
    RUNS,
    Run,
    read_busy,
    read_latency,
    read_runs,
)
from syncline.files import write_atomically
from syncline.measure.as_run import as_run
from syncline.perf.trace import Trace
from syncline.workload import Workload

LATENCY_RANGE = 0.2
BUSY_RANGE = 0.3
RATE_RANGE = 0.02
"""Of the lab's links: judgements, from before the first run."""


class Folder:
    """What was measured: jobs, calibration, runs and traces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._runs = path / RUNS

    def job_file(self, case: Case) -> Path:
        path = self.path / case.job_name
        if not path.exists():
            path.write_text(network(case.network, case.rate).job)
        return path

    def job(self, case: Case) -> Job:
        return read_job(self.job_file(case), case.sets(10))

    def workload(self, case: Case) -> Workload:
        """Return the layers' times; of a real network as a traced run of two ranks has them."""
        found = workloads.read(self.layers(case))
        if not network(case.network, case.rate).is_real:
            return found
        known = calibration_of(case.network)
        steps_s = [run.step_s for run in self.runs() if run.case == known]
        step_s = statistics.median(steps_s) if steps_s else None
        return as_run(found, Trace.read(self.trace(known)), step_s)

    def layers(self, case: Case) -> Path:
        real, sleeping = case.layers_names
        return self.path / (real if network(case.network, case.rate).is_real else sleeping)

    @property
    def links(self) -> Path:
        return self.path / LINKS

    @property
    def busy(self) -> Path:
        return self.path / BUSY

    @property
    def latency(self) -> Path:
        return self.path / LATENCY

    def facts(self, case: Case) -> ClusterFacts:
        """Return what is known of the place of a case."""
        known = read_cluster(self.links)
        if not case.rate:
            return known
        rate = rate_bytes_per_s(case.rate) * PAYLOAD_SHARE
        latency = read_latency(self.latency.read_bytes(), str(self.latency))
        network_facts = LinkFacts(
            latency_s=Fact(
                latency, latency * (1 - LATENCY_RANGE), latency * (1 + LATENCY_RANGE), "measured"
            ),
            rate_bytes_per_s=Fact(rate, rate * (1 - RATE_RANGE), rate, "set"),
        )
        computes = network(case.network, case.rate).is_real
        return msgspec.structs.replace(
            known,
            network=network_facts,
            one_computer=True,
            cores=known.cores if computes else None,
            byte_s=self._byte_s(case) if computes else known.byte_s,
            measured=(),
        )

    def _byte_s(self, case: Case) -> Fact:
        """Return the processor time of a byte: that of a step in the lab beyond one without."""
        busy = read_busy(self.busy.read_bytes(), str(self.busy))
        here, there = (busy[calibration_of(case.network, rate).key] for rate in ("", case.rate))
        sent = [
            one.sent_bytes
            for one in self.runs()
            if one.case == calibration_of(case.network, case.rate)
        ]
        found = max(0.0, there - here) / CALIBRATED_ON / (2 * statistics.median(sent))
        return Fact(found, found * (1 - BUSY_RANGE), found * (1 + BUSY_RANGE), "measured")

    def runs(self) -> list[Run]:
        """Return what was measured so far. A line that was cut off in the middle is dropped."""
        if not self._runs.exists():
            return []
        data = self._runs.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            write_atomically(self._runs, whole)
        return list(read_runs(whole, str(self._runs)))

    def add(self, run: Run) -> None:
        with self._runs.open("a") as file:
            file.write(json.dumps(run) + "\n")

    def trace(self, case: Case) -> Path:
        path = self.path / case.trace_name
        path.parent.mkdir(exist_ok=True)
        return path
