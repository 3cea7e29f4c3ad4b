"""A small job to compare strategies on: a run of softmax regression takes a tenth of a second."""

from __future__ import annotations

from pathlib import Path

from syncline.compare.cell import Found
from syncline.compare.folder import Comparison, check_folder
from syncline.compare.grid import Plan
from syncline.compare.running import simulate_cell
from syncline.compare.study import check_study, read_study

JOB = """
[model]
name = "mlp"
options = { hidden = [] }
[data]
name = "digits"
batch = 24
[optimizer]
lr = 0.02
[run]
steps = 20
[cluster]
flops_per_s = 1e6
"""
SLOW = 'faults=[{rank=-1, step=0, kind="slow", factor=5.0, chance=0.2, steps=1000}]'
COMPARE = """
[compare]
target = 0.6
seeds = 2
samples = 480
evaluations = 4
ranks_per_machine = 2
[[compare.scenario]]
name = "calm"
[[compare.scenario]]
name = "straggling"
set = ['{slow}']
[[compare.variant]]
name = "local"
set = ["strategy.local.period=2"]
[[compare.variant]]
name = "served"
strategy = "server"
from_ranks = {{ "4" = ["strategy.server.servers=2"] }}
[[compare.grid]]
name = "first"
strategies = {strategies}
ranks = {ranks}
batch_per_rank = 6
"""
ALL = ("synchronous", "layered", "server", "served", "elastic", "gossip", "local")


def write_study(folder: Path, strategies=("synchronous", "gossip"), ranks=(4,), more="") -> Path:
    path = folder / "study.toml"
    compare = COMPARE.format(slow=SLOW, strategies=[*strategies], ranks=[*ranks])
    path.write_text(JOB + compare.replace("\nseeds", f"\n{more}\nseeds"))
    return path


def plan_of(path: Path) -> Plan:
    study = read_study(path)
    check_study(study.compare)
    samples = study.compare.samples
    assert samples is not None
    return Plan(study, samples, "virtual")


class Silent:
    """Counts the runs that have ended, and shows nothing."""

    def __init__(self) -> None:
        self.num_ended = 0

    def begin(self, what, cells, there):
        pass

    def ended(self, cell, seconds):
        self.num_ended += 1

    def tick(self):
        pass


def compare(path: Path, out: Path, run=simulate_cell, jobs=2):
    """Compare; return the summary and how many runs it took."""
    plan = plan_of(path)
    check_folder(out, plan.study)
    progress = Silent()
    summary = Comparison(plan, out, run, jobs).go(progress)
    return summary, progress.num_ended


def found_of(path: Path, scenario: str) -> dict[str, Found]:
    """Run the first seed of each variant of a scenario, in this process."""
    plan = plan_of(path)
    return {
        one.variant.name: simulate_cell(plan.cell(one, 0))
        for one in plan.places
        if one.scenario.name == scenario
    }
