"""What bad input prints, case by case: docs/mistakes.md is the expectation.

Each case is tried as a user would, in processes of its own, and what it prints must be the
document's row. After a deliberate change `python tests/test_mistakes.py` writes the table anew:
read it.
"""

from __future__ import annotations

import gzip
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command import Started, fork_scripts, start_script
from training import MLP_ON_DIGITS, ranks_of
from worlds import untraced

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "mistakes.md"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

JOB = f"""\
{MLP_ON_DIGITS}
[run]
ranks = 2
steps = 6
checkpoint_every = 2
"""


_finished: list[tempfile.TemporaryDirectory[str]] = []


class Trial:
    """A folder of its own, a job file in it, and what commands printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "job.toml").write_text(JOB)

    def run(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        timeout_s: float = 60,
        first: Callable[[], None] | None = None,
    ) -> str:
        """Run `syncline ARGUMENTS`; return what it said and its exit code."""
        environ = clean_environment() | (env or {})
        started = Started(*arguments, cwd=self.folder, env=environ, traced=False, first=first)
        _, said = started.communicate(timeout_s)
        return self.said(said, started.returncode)

    def train(self, *sets: str, more: tuple[str, ...] = ()) -> str:
        words = [word for one in sets for word in ("--set", one)]
        return self.run("train", "job.toml", *words, *more)

    def said(self, stderr: str, code: int) -> str:
        """Keep our own lines, without what differs from run to run; `|` would end a table cell."""
        lines = []
        for line in stderr.splitlines():
            if not re.match(r"(syncline|rank \d+): ", line):
                continue
            line = line.replace(str(self.folder), "FOLDER").replace("|", "/")
            line = re.sub(r"at step \d+ \([^)]*\)", "at step N (PHASE)", line)
            line = re.sub(r"\d+\.\d GB are free", "X GB are free", line)
            line = re.sub(r"for \d s: frozen", "for T s: frozen", line)
            line = re.sub(r"process \d+ of user \d+", "process P of user U", line)
            line = re.sub(r"got \d+ \(address", "got PORT (address", line)
            line = re.sub(r"\(memory \d+, size \d+\)", "(memory M, size S)", line)
            line = re.sub(r"digest [0-9a-f]{16}", "digest D", line)
            line = re.sub(r"in use by process \d+ on \S+,", "in use by process P on HOST,", line)
            line = re.sub(r"(\.invalid') \([^)]*\)", r"\1 (REASON)", line)
            lines.append(line)
        # Ranks speak in any order.
        return " <br> ".join([f"`{line}`" for line in sorted(lines)] + [f"exit {code}"])

    def finished_run(self) -> Path:
        """A run of six steps, with its checkpoints: made once, copied for each case."""
        if not _finished:
            made = tempfile.TemporaryDirectory()
            text = Trial(Path(made.name)).train(more=("--out", "run"))
            assert text.endswith("exit 0"), text
            _finished.append(made)
        shutil.copytree(Path(_finished[0].name) / "run", self.folder / "run")
        return max((self.folder / "run" / "checkpoints").iterdir())


def clean_environment() -> dict[str, str]:
    return untraced("RANK", "WORLD_SIZE", "LOCAL_RANK", "SYNCLINE_", "SLURM_", "MASTER_", "GROUP_")


CASES: dict[str, Callable[[Trial], str]] = {}


def case(what: str) -> Callable[[Callable[[Trial], str]], Callable[[Trial], str]]:
    def add(function: Callable[[Trial], str]) -> Callable[[Trial], str]:
        CASES[what] = function
        return function

    return add


def with_sets(what: str, *sets: str, more: tuple[str, ...] = ()) -> None:
    CASES[what] = lambda trial: trial.train(*sets, more=more)


with_sets("a misspelt key", "run.stesp=30")
with_sets("a misspelt table", "runn.steps=30")
with_sets("text for a number", "run.steps=many")
with_sets("a learning rate below zero", "optimizer.lr=-1")
with_sets("a setting without effect", "optimizer.betas=[0.9, 0.99]")
with_sets("an unknown model", "model.name=resnt-18")
with_sets("an unknown option of a model", "model.options.dropuot=0.5")
with_sets("an unknown data set", "data.name=mnist")
with_sets("an unknown loss", "model.loss=cross_entrpy")
with_sets("an unknown logger", 'run.log=["tensorbord"]')
with_sets("a loss that does not fit the data", "model.loss=mse")
with_sets("a file in the place of a module", "model.name=nets.py:make")
with_sets("classes for a network of one's own", "model.name=nets:make", "model.classes=10")
with_sets("a path for data of one's own", "data.name=nets:load", "data.path=x")
with_sets("options for data that has none", "data.options.size=8")
with_sets("fewer batches ahead than workers", "data.workers=2", "data.prefetch=1")
with_sets("a thread that reads data of one's own", "data.name=nets:load", "data.prefetch=2")
with_sets("an unknown strategy", "strategy.name=synchronos")
with_sets("images too small for the network", "model.name=alexnet", "model.image_size=32")
with_sets("a batch that does not divide into shards", "data.batch=66")
with_sets("more shards than samples in a batch", "strategy.shards=128")
with_sets("fewer shards than ranks", "strategy.shards=1")
with_sets("no ranks at all", more=("--ranks", "0"))
with_sets("a batch larger than the data", "data.batch=4096")
with_sets("--set without a value", "run.steps")
with_sets("shared memory switched to something unknown", "strategy.comm=mpi")
with_sets(
    "a bucket size where the strategy fixes the buckets",
    "strategy.name=wait_free",
    "strategy.bucket_bytes=4096",
)
with_sets(
    "a strategy as published, with another optimizer",
    "strategy.name=gossip",
    "strategy.gossip.as_published=true",
    "optimizer.name=adamw",
)
with_sets(
    "a strategy as published, with a setting that was not",
    "strategy.name=elastic",
    "strategy.elastic.as_published=true",
    "strategy.elastic.early=true",
)
with_sets(
    "early exchanges of ranks that push",
    "strategy.name=gossip",
    "strategy.gossip.rule=push",
    "strategy.gossip.early=true",
)
with_sets(
    "more servers than ranks",
    "strategy.name=elastic",
    "strategy.elastic.servers=2",
)
with_sets("a schedule of milestones without any", "optimizer.schedule=milestones")
with_sets("milestones out of order", "optimizer.schedule=milestones", "optimizer.milestones=[5, 2]")
with_sets("a GPU, which this version does not train on", "run.device=cuda")
with_sets("--resume with no run there", more=("--resume", "--out", "nowhere"))
with_sets("--resume without saying which run", more=("--resume",))
with_sets(
    "Fashion-MNIST in a folder that does not hold it", "data.name=fashion-mnist", "data.path=."
)


def import_of(what: str, text: str, *options: str) -> None:
    """Add a case: a file that is imported as a workload."""

    def work(trial: Trial) -> str:
        (trial.folder / "layers").write_text(text)
        return trial.run("measure", "import", "layers", "--out", "x.json", *options)

    CASES[what] = work


TABLE = "Id Name Forward Backward Comm Size\n0 conv1 5120.5 9870.2 310 139776\n"

import_of("an imported table with a damaged number", TABLE.replace("9870.2", "98x"))
import_of("an imported table without sizes", TABLE.replace("Size", "Bytes"))
import_of("an imported log that was cut short", "112] [0, 94, 5.5, 4]\n112] [1, 64, 5.")
import_of("an imported trace that was cut short", '{"traceEvents": [\n{"ph": "X", "na')
import_of("an imported file of no known format", "name,forward\n")
import_of("a unit for a format that has its own", '{"traceEvents": []}', "--unit", "ms")


@case("a job file that is not there")
def _(trial: Trial) -> str:
    return trial.run("train", "jobb.toml")


@case("a folder instead of a job file")
def _(trial: Trial) -> str:
    return trial.run("train", ".")


@case("a job file with a syntax error")
def _(trial: Trial) -> str:
    (trial.folder / "job.toml").write_text(JOB.replace("[run]", "[run"))
    return trial.train()


@case("a job file that is not text")
def _(trial: Trial) -> str:
    (trial.folder / "job.toml").write_bytes(b"[model]\nname = '\xff'\n")
    return trial.train()


@case("a job without a model")
def _(trial: Trial) -> str:
    (trial.folder / "job.toml").write_text(JOB.replace('[model]\nname = "mlp"\n', ""))
    return trial.train()


@case("steps and epochs at once")
def _(trial: Trial) -> str:
    (trial.folder / "job.toml").write_text(JOB + "epochs = 3\n")
    return trial.train()


@case("damaged Fashion-MNIST files")
def _(trial: Trial) -> str:
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (trial.folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03 cut short"))
    return trial.train("data.name=fashion-mnist", "data.path=.")


@case("an image folder without images")
def _(trial: Trial) -> str:
    (trial.folder / "pictures" / "train" / "cats").mkdir(parents=True)
    return trial.train("data.name=folder", "data.path=pictures", "model.name=cnn")


@case("a run folder that already holds a run")
def _(trial: Trial) -> str:
    trial.finished_run()
    return trial.train(more=("--out", "run"))


@case("a checkpoint that was cut short")
def _(trial: Trial) -> str:
    path = trial.finished_run()
    path.write_bytes(path.read_bytes()[:1000])
    before = path.read_bytes()
    text = trial.train("run.steps=9", more=("--out", "run", "--resume"))
    assert path.read_bytes() == before, "it must be left alone"
    return text


@case("a checkpoint with a flipped bit")
def _(trial: Trial) -> str:
    path = trial.finished_run()
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    return trial.train("run.steps=9", more=("--out", "run", "--resume"))


@case("a rank's own checkpoint in the place of the run's")
def _(trial: Trial) -> str:
    import dataclasses

    from syncline import checkpoint

    path = trial.finished_run()
    own = dataclasses.replace(checkpoint.load(path), rank=1)
    checkpoint.save(path.parent, own)
    return trial.train("run.steps=9", more=("--out", "run", "--resume"))


@case("a file of somebody else among the checkpoints")
def _(trial: Trial) -> str:
    import torch
    from safetensors.torch import save_file

    trial.finished_run()
    save_file({"x": torch.zeros(2)}, trial.folder / "run/checkpoints/step-00000099.safetensors")
    return trial.train("run.steps=9", more=("--out", "run", "--resume"))


@case("a FIFO among the checkpoints")
def _(trial: Trial) -> str:
    trial.finished_run()
    os.mkfifo(trial.folder / "run/checkpoints/step-00000099.safetensors")
    return trial.train("run.steps=9", more=("--out", "run", "--resume"))


@case("a checkpoint of version 0.1.0, which is read")
def _(trial: Trial) -> str:
    import json

    from safetensors import safe_open
    from safetensors.torch import save_file

    from syncline.checkpoint import digest_of

    path = trial.finished_run()
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = json.loads(file.metadata()["syncline"])
    old = meta | {"format": 1, "digest": digest_of(tensors)}
    save_file(tensors, path, {"syncline": json.dumps(old)})
    return trial.train("run.steps=9", more=("--out", "run", "--resume"))


@case("run folders that are not copies of each other")
def _(trial: Trial) -> str:
    path = trial.finished_run()
    shutil.copytree(trial.folder / "run", trial.folder / "copy")
    (trial.folder / "copy" / "checkpoints" / path.name).unlink()
    started = [
        Started(
            *("train", "job.toml", "--set", "run.steps=9", "--out", out, "--resume"),
            cwd=trial.folder,
            env=clean_environment()
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29502"},
            traced=False,
        )
        for rank, out in enumerate(("run", "copy"))
    ]
    texts = [process.communicate(timeout=60)[1] for process in started]
    return trial.said("".join(texts), max(process.wait() for process in started))


@case("--resume with fewer steps than were taken")
def _(trial: Trial) -> str:
    trial.finished_run()
    return trial.train("run.steps=5", more=("--out", "run", "--resume"))


@case("--resume while the run is still running")
def _(trial: Trial) -> str:
    words = ("train", "job.toml", "--set", "run.steps=100000", "--out", "run")
    first = Started(*words, cwd=trial.folder, env=clean_environment(), traced=False)
    deadline = time.monotonic() + 40
    while not list(trial.folder.glob("run/checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    text = trial.run(*words, "--resume")
    first.kill()
    return text


@case("a learning rate with which the loss is not finite")
def _(trial: Trial) -> str:
    sets = ("optimizer.schedule=step", "optimizer.decay_steps=4", "optimizer.decay_factor=1e36")
    return trial.train(*sets, "run.steps=1000", "run.checkpoint_every=4", more=("--out", "nan"))


@case("files that may not be as large as a checkpoint (ulimit -f)")
def _(trial: Trial) -> str:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    return trial.run("train", "job.toml", "--ranks", "1", "--out", "run", first=limit)


@case("an address that does not resolve")
def _(trial: Trial) -> str:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}
    return trial.run("train", "job.toml", "--set", "strategy.comm=network", env=place)


@case("--resume with another learning rate")
def _(trial: Trial) -> str:
    trial.finished_run()
    return trial.train("optimizer.lr=0.1", "run.steps=9", more=("--out", "run", "--resume"))


@case("--resume of a run with a cosine schedule, with more steps")
def _(trial: Trial) -> str:
    trial.train("optimizer.schedule=cosine", more=("--out", "run"))
    sets = ("optimizer.schedule=cosine", "run.steps=9")
    return trial.train(*sets, more=("--out", "run", "--resume"))


NETS = """\
from torch import nn


def make(width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(8, 10))


def load():
    return 1 / 0


def load_width():
    return 8


def load_anew():
    import os, torch
    return (torch.full((64, 64), float(os.getpid())), torch.zeros(64, 10)), None
"""


def with_nets(what: str, *sets: str) -> None:
    """Train with functions of the module nets.py."""

    def try_it(trial: Trial) -> str:
        (trial.folder / "nets.py").write_text(NETS)
        return trial.train(*sets)

    CASES[what] = try_it


with_nets("a module that is not there", "model.name=nest:make")
with_nets("a function that is not there", "model.name=nets:mkae")
with_nets("a keyword that the function does not have", "model.name=nets:make", "model.options.w=3")
with_nets("a function that returns no network", "model.name=nets:load_width")
with_nets("a function that fails", "data.name=nets:load")
with_nets("a network that does not fit", "model.name=nets:make", "model.options.width=9")
with_nets(
    "data that every loader process draws anew",
    *("data.name=nets:load_anew", "model.name=nets:make", "model.loss=mse", "data.workers=1"),
    *("run.ranks=1", "data.batch=16"),
)


@case("verify with a strategy whose ranks differ")
def _(trial: Trial) -> str:
    return trial.run(
        *("verify", "job.toml", "--set", "strategy.name=gossip", "--set", "strategy.shards=")
    )


@case("verify with numbers of ranks that are none")
def _(trial: Trial) -> str:
    return trial.run("verify", "job.toml", "--ranks", "1-4")


@case("verify a script that takes no step")
def _(trial: Trial) -> str:
    (trial.folder / "script.py").write_text("import syncline; syncline.init()\n")
    return trial.run("verify", "script.py", "--ranks", "1", first=fork_scripts)


@case("verify a script that fails")
def _(trial: Trial) -> str:
    (trial.folder / "script.py").write_text("import syncline; syncline.init(); 1 / 0\n")
    return trial.run("verify", "script.py", "--ranks", "1", first=fork_scripts)


def simulate_with(trial: Trial, text: str, *sets: str) -> str:
    """Simulate the job with a workload file that holds this text."""
    (trial.folder / "net.json").write_text(text)
    words = [word for one in sets for word in ("--set", one)]
    return trial.run("simulate", "job.toml", "--workload", "net.json", *words)


LAYER = '{"name": "a", "size_bytes": 4, "forward_s": 0.1, "backward_s": 0.2}'
WORKLOAD = f'{{"format": "syncline-workload", "version": 1, "name": "x", "layers": [{LAYER}]'


@case("a workload file that was cut short")
def _(trial: Trial) -> str:
    return simulate_with(trial, WORKLOAD)


@case("a workload file of a newer version")
def _(trial: Trial) -> str:
    return simulate_with(trial, WORKLOAD.replace("1,", "3,", 1) + "}")


@case("a workload file with a field that its version does not have")
def _(trial: Trial) -> str:
    return simulate_with(trial, WORKLOAD + ', "samples": 16, "update_s": 0.1}')


@case("a workload file for shards of another size")
def _(trial: Trial) -> str:
    return simulate_with(trial, WORKLOAD + ', "samples": 8}')


@case("a rate of operations beside a workload file")
def _(trial: Trial) -> str:
    return simulate_with(trial, WORKLOAD + ', "samples": 16}', "cluster.flops_per_s=1e12")


@case("a device beside a workload file")
def _(trial: Trial) -> str:
    return simulate_with(trial, WORKLOAD + ', "samples": 16}', "cluster.device=v100")


@case("a rate of operations beside a device")
def _(trial: Trial) -> str:
    sets = ("--set", "cluster.device=v100", "--set", "cluster.flops_per_s=1e12")
    return trial.run("simulate", "job.toml", *sets)


@case("an unknown device")
def _(trial: Trial) -> str:
    return trial.run("simulate", "job.toml", "--set", "cluster.device=v1000")


@case("measuring with numbers of samples that are none")
def _(trial: Trial) -> str:
    return trial.run("measure", "layers", "job.toml", "--samples", "1,2,all")


@case("measuring with more samples than there are")
def _(trial: Trial) -> str:
    return trial.run("measure", "layers", "job.toml", "--samples", "4096")


@case("learning with the workload file of another model")
def _(trial: Trial) -> str:
    (trial.folder / "net.json").write_text(WORKLOAD + ', "samples": 16}')
    return trial.run("simulate", "job.toml", "--workload", "net.json", "--learn")


@case("explaining a file that is no trace")
def _(trial: Trial) -> str:
    return trial.run("explain", "job.toml")


@case("explaining a run folder without a trace")
def _(trial: Trial) -> str:
    (trial.folder / "run").mkdir()
    return trial.run("explain", "run")


@case("explaining a trace of lanes that do two things at once")
def _(trial: Trial) -> str:
    head = '{"format":"syncline-trace","version":2}\n'
    tasks = [f'[0,{at},"compute","forward",0,0,{at}.0,5.0]\n' for at in range(2)]
    (trial.folder / "run.trace").write_text(head + "".join(tasks))
    return trial.run("explain", "run.trace")


@case("a report about what is not there")
def _(trial: Trial) -> str:
    return trial.run("report", "job.toml", "run.trace")


@case("a report about a folder without a trace and without a run that has ended")
def _(trial: Trial) -> str:
    (trial.folder / "run").mkdir()
    return trial.run("report", "run")


@case("a report at the end of a run, in a folder that is not there")
def _(trial: Trial) -> str:
    return trial.run("train", "job.toml", "--report", "pages/run.html")


@case("a cluster that is no preset")
def _(trial: Trial) -> str:
    return trial.run("simulate", "job.toml", "--cluster", "k80-10gb")


@case("this machine as a cluster, before it was measured")
def _(trial: Trial) -> str:
    return trial.run("simulate", "job.toml", "--cluster", "this-machine")


def simulate_on(trial: Trial, text: str) -> str:
    """Simulate the job on a cluster file with these facts."""
    head = 'format = "syncline-cluster"\nversion = 1\n[network]\n'
    (trial.folder / "mine.toml").write_text(head + text)
    return trial.run("simulate", "job.toml", "--cluster", "mine.toml")


@case("a misspelt fact in a cluster file")
def _(trial: Trial) -> str:
    return simulate_on(trial, "rate_byte_per_s = 1e9")


@case("a cluster file with a link faster than its nominal rate")
def _(trial: Trial) -> str:
    return simulate_on(trial, "rate_bytes_per_s = 2e9\nnominal_bytes_per_s = 1.25e9")


@case("the links of a rank alone")
def _(trial: Trial) -> str:
    return trial.run("measure", "links", "--ranks", "1")


@case("a script that is not there")
def _(trial: Trial) -> str:
    return trial.run("run", "--ranks", "2", "scrpt.py")


@case("a job in the place of a script")
def _(trial: Trial) -> str:
    return trial.run("run", "--ranks", "2", "job.toml")


@case("a script in the place of a job")
def _(trial: Trial) -> str:
    return trial.run("train", "script.py")


@case("a module to run that is not there")
def _(trial: Trial) -> str:
    return trial.run("run", "--ranks", "2", "-m", "scrpt.loop")


@case("a port that is in use")
def _(trial: Trial) -> str:
    (trial.folder / "script.py").write_text("import syncline; syncline.init(comm='network')\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        return trial.run("run", "--ranks", "2", "--port", port, "script.py")


@case("contradicting variables of a launcher")
def _(trial: Trial) -> str:
    place = {"RANK": "5", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    return trial.run("train", "job.toml", env=place)


@case("variables of a launcher that do not say which rank this is")
def _(trial: Trial) -> str:
    return trial.run("train", "job.toml", env={"PMIX_RANK": "1", "PMIX_NAMESPACE": "prte-1@1"})


@case("mpirun on several machines without an address")
def _(trial: Trial) -> str:
    place = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    return trial.run("train", "job.toml", env=place | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


@case("several machines without a key")
def _(trial: Trial) -> str:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return trial.run("train", "job.toml", env=place | {"MASTER_PORT": "29500"})


def run_script(trial: Trial, text: str, ranks: int, keys: list[str]) -> str:
    """Start a script on ranks by hand, as a launcher would, with a key for each."""
    (trial.folder / "script.py").write_text(text)
    job = secrets.token_hex(4)
    started = [
        start_script(
            trial.folder / "script.py",
            cwd=trial.folder,
            env=clean_environment()
            | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            | {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
            | {"SYNCLINE_JOB": job, "SYNCLINE_KEY": keys[rank]},
        )
        for rank in range(ranks)
    ]
    texts = [process.communicate()[1] for process in started]
    return trial.said("".join(texts), max(process.wait() for process in started))


SAY_IT = """
import logging, sys, syncline, syncline.session
logging.basicConfig(format="syncline: %(message)s")
try:
    rank = syncline.init(meet_s=4.0)
    {body}
except syncline.SynclineError as error:
    print("syncline:", error, file=sys.stderr)
    syncline.session.fail_session(error)
    sys.exit(1)
"""


@case("a rank with the wrong key")
def _(trial: Trial) -> str:
    return run_script(trial, SAY_IT.format(body="pass"), 2, ["aa" * 16, "bb" * 16])


def alone_says(trial: Trial, body: str) -> str:
    """Run a script on one rank without a launcher."""
    (trial.folder / "script.py").write_text(SAY_IT.format(body=body))
    script = trial.folder / "script.py"
    started = start_script(script, cwd=trial.folder, env=clean_environment())
    return trial.said(started.communicate()[1], started.wait())


@case("a model on a device")
def _(trial: Trial) -> str:
    body = "import torch; model = torch.nn.Linear(2, 2, device='meta'); "
    body += "syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))"
    return alone_says(trial, body)


@case("init() again with other settings")
def _(trial: Trial) -> str:
    return alone_says(trial, "syncline.init(meet_s=5.0)")


@case("more shared memory than there is")
def _(trial: Trial) -> str:
    body = "syncline.session.current_session().comm.allocate(10**12, __import__('torch').float32)"
    body += " if rank == 0 else syncline.session.current_session().comm.barrier()"
    return run_script(trial, SAY_IT.format(body=body), 2, ["aa" * 16] * 2)


OWN_LOOP = """
import logging, sys, time, torch, syncline, syncline.session
logging.disable()  # ranks also log what they hear of each other, or have ended before
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    rank = syncline.init()
    {distribute}
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8, dtype=model.weight.dtype)).sum().backward()
        if step == 1:
            {between}
        optimizer.step()
        if step == 1:
            {after}
except syncline.SynclineError as error:
    print("syncline:", error, file=sys.stderr)
    time.sleep(2)  # by then the other rank has found its own error
    syncline.session.fail_session(error)
    sys.exit(1)
"""


def own_loop(trial: Trial, distribute: str = "", between: str = "pass", after: str = "pass") -> str:
    """Run a loop of three steps on two ranks, with lines of the case's own in the second step."""
    start = distribute or "syncline.distribute(model, optimizer)"
    text = OWN_LOOP.format(distribute=start, between=between, after=after)
    return run_script(trial, text, 2, ["aa" * 16] * 2)


@case("distribute() twice")
def _(trial: Trial) -> str:
    twice = "[syncline.distribute(model, optimizer) for _ in range(2)]"
    return own_loop(trial, twice)


@case("models that are not the same on every rank")
def _(trial: Trial) -> str:
    other = "model.bias = torch.nn.Parameter(torch.zeros(4 + 2 * rank)); "
    other += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1); "
    return own_loop(trial, f"{other}syncline.distribute(model, optimizer)")


@case("a cast after the first step")
def _(trial: Trial) -> str:
    return own_loop(trial, after="model.bfloat16()")


@case("load_state_dict() on one rank, then a step on all")
def _(trial: Trial) -> str:
    load = "rank == 1 and model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})"
    return own_loop(trial, after=load)


@case("a layer that is thawed after the first step")
def _(trial: Trial) -> str:
    frozen = "model.bias.requires_grad_(False); syncline.distribute(model, optimizer)"
    return own_loop(trial, frozen, after="model.bias.requires_grad_(True)")


@case("check_every where ranks hold different parameters")
def _(trial: Trial) -> str:
    return own_loop(trial, "syncline.distribute(model, optimizer, 'gossip', check_every=10)")


@case("a collective call that only one rank makes")
def _(trial: Trial) -> str:
    return own_loop(trial, between="rank == 0 and syncline.clip_grad_norm_(model, 1.0)")


LOOP_ALONE = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def backward():
    model(torch.ones(3, 4)).square().mean().backward()
def one_step():
    backward()
    optimizer.step()
"""


def loop_alone(what: str, body: str, settings: str = "") -> None:
    """Add a case: a loop of one's own, on one rank, that makes a mistake."""
    start = (
        f"{LOOP_ALONE}syncline.distribute(model, optimizer{settings})\n" if settings else LOOP_ALONE
    )
    text = SAY_IT.format(body=textwrap.indent(start + body, "    ").strip())
    CASES[what] = lambda trial: run_script(trial, text, 1, ["aa" * 16])


loop_alone("model and optimizer in the wrong order", "syncline.distribute(optimizer, model)")
loop_alone("a misspelt strategy in a script", "pass", ", 'gosip'")
loop_alone("no shards", "pass", ", shards=0")
loop_alone(
    "shard() of a data set",
    "syncline.shard(torch.utils.data.TensorDataset(torch.ones(3, 4)))",
    ", shards=1",
)
loop_alone("a forgotten zero_grad()", "one_step()\none_step()", ", shards=1")
loop_alone("reading .grad after step()", "one_step()\nprint(model.weight.grad)", ", shards=1")
loop_alone(
    "weights tied by .data",
    "model = torch.nn.Sequential(model, torch.nn.Linear(4, 2))\n"
    "model[1].weight.data = model[0].weight.data\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "syncline.distribute(model, optimizer)",
)
loop_alone(
    "a lazy module that has seen no batch",
    "model = torch.nn.LazyLinear(2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "syncline.distribute(model, optimizer)",
)
loop_alone(
    "a parameter that moves to another group of the optimizer",
    "optimizer = torch.optim.SGD([{'params': [p]} for p in model.parameters()], lr=0.1)\n"
    "syncline.distribute(model, optimizer)\n"
    "one_step()\n"
    "first, second = optimizer.param_groups\n"
    "second['params'].insert(0, first['params'].pop())\n"
    "optimizer.zero_grad()\n"
    "one_step()",
)
loop_alone(
    "torch's own clipping",
    "backward()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ", shards=1",
)
loop_alone(
    "a model that was compiled in place",
    "model.compile(backend='eager')\nsyncline.distribute(model, optimizer)",
)
loop_alone(
    "a function that draws two batches for one seed",
    "calls = iter(range(9))\nlist(next(syncline.shards(lambda: torch.tensor([next(calls)]))))",
    ", shards=1",
)
loop_alone(
    "reading parameters in the middle of a step",
    "replica = syncline.session.current_session().replicas[0]\n"
    "replica.begin_shard(0)\none_step()\nprint(model.weight)",
    ", shards=4",
)
loop_alone(
    "step() after every second batch, with several shards a rank",
    "replica = syncline.session.current_session().replicas[0]\n"
    "replica.begin_shard(0)\nbackward()\nreplica.begin_shard(1)\none_step()",
    ", shards=4",
)
loop_alone(
    "an optimizer that draws random numbers",
    "class Noisy(torch.optim.SGD):\n"
    "    def step(self, closure=None):\n"
    "        for group in self.param_groups:\n"
    "            for p in group['params']: p.data.add_(torch.randn(p.shape), alpha=0.01)\n"
    "syncline.distribute(model, Noisy(model.parameters(), lr=0.1))",
)


LOOP_OVER_SHARDS = [
    "import torch",
    "from torch.utils.data import DataLoader, DistributedSampler",
    "model = torch.nn.Linear(4, 4)",
    "optimizer = torch.optim.AdamW(model.parameters())",
    "other = torch.optim.SGD(model.parameters(), momentum=0.9)",
    "syncline.distribute(model, optimizer, shards=4)",
    "data = torch.ones(32, 4)",
    "batches = syncline.shards(DataLoader(data, batch_size=2))",
    "for step in batches:",
    "    [model(x).sum().backward() for x in step]",
    "    optimizer.step()",
    "    optimizer.zero_grad()",
    "state = optimizer.state_dict()",
]


def after_a_loop(what: str, *lines: str) -> None:
    """Add a case: lines behind a small loop of a script, on one rank."""
    text = SAY_IT.format(body="\n    ".join([*LOOP_OVER_SHARDS, *lines]))
    case(what)(lambda trial: run_script(trial, text, 1, ["aa" * 16]))


after_a_loop(
    "optimizer state of another model",
    "state['state'][0]['exp_avg'] = torch.zeros(3, 3)",
    "optimizer.load_state_dict(state)",
)
after_a_loop(
    "optimizer state of another optimizer",
    "other.state[model.weight]['momentum_buffer'] = torch.zeros(4, 4)",
    "optimizer.load_state_dict({**state, 'state': other.state_dict()['state']})",
)
after_a_loop(
    "optimizer state under a wrong name",
    "syncline.load_optimizer_state(model, {'body.weight': state['state'][0]})",
)
after_a_loop("no optimizer state", "syncline.load_optimizer_state(model, {})")
after_a_loop(
    "a loader's position from another number of shards",
    "batches.load_state_dict({**batches.state_dict(), 'shards': 8})",
)
after_a_loop(
    "a loader's position in the middle of a step",
    "steps = iter(batches)",
    "[model(x).sum().backward() for x in next(steps)]",
    "batches.state_dict()",
)
after_a_loop(
    "a DistributedSampler and shard()",
    "sampler = DistributedSampler(data, num_replicas=2, rank=0)",
    "syncline.shard(DataLoader(data, batch_size=2, sampler=sampler))",
)


def disturbed_run(trial: Trial, number: int, *sets: str) -> str:
    """Send a signal to one rank of a run that is under way."""
    words = [word for one in ("run.steps=100000", *sets) for word in ("--set", one)]
    where = ("--ranks", "3", "--out", "run")
    started = Started(
        *("train", "job.toml", *where, *words),
        cwd=trial.folder,
        env=clean_environment(),
        traced=False,
    )
    metrics = trial.folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 40
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(ranks_of(started)[2], number)
    timer = threading.Timer(30.0, started.kill)
    timer.start()
    _, text = started.communicate(timeout=60)
    timer.cancel()
    # Whether the victim itself gets to speak, once it is thawed to be ended, is a matter of luck.
    others = [line for line in text.splitlines() if not re.match(r"(syncline: )?rank 2: ", line)]
    return trial.said("\n".join(others), started.returncode)


@case("a rank that is killed")
def _(trial: Trial) -> str:
    return disturbed_run(trial, signal.SIGKILL)


@case("a rank that is stopped (SIGSTOP), with run.silent_s = 3")
def _(trial: Trial) -> str:
    return disturbed_run(trial, signal.SIGSTOP, "run.silent_s=3")


HEADER = """\
# What bad input prints

Each row was tried as a new user would and is a test (`tests/test_mistakes.py`, which also writes
this table): what was tried, what was printed, the exit code. 2 means that nothing was started. Step
numbers, ports and the like are replaced by letters.

| tried | printed |
|---|---|
"""


def try_out(what: str, folder: Path) -> str:
    return CASES[what](Trial(folder))


def documented() -> dict[str, str]:
    _, *rows = re.findall(r"^\| (.+?) \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return dict(rows)


def test_at_least_25_cases_are_documented():
    assert len(CASES) >= 25
    assert documented().keys() == CASES.keys()


@pytest.mark.parametrize("what", CASES)
def test_a_mistake_prints_what_the_document_says(what, tmp_path):
    assert try_out(what, tmp_path) == documented()[what]


def main() -> None:
    rows = []
    for what in CASES:
        folder = Path(tempfile.mkdtemp())
        rows.append(f"| {what} | {try_out(what, folder)} |\n")
        print(rows[-1], end="", flush=True)
        shutil.rmtree(folder)
    DOCUMENT.write_text(HEADER + "".join(rows))


if __name__ == "__main__":
    main()
