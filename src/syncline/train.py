"""The built-in training loop, read top to bottom.

With the synchronous strategy the result depends on the job alone: data order, dropout and the order
of summation follow from (seed, step, shard), so any number of ranks gives the same weights, bit for
bit, and a run that was killed and resumed gives those of one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch._dynamo  # the first optimizer loads it: here that is before ranks are forked
from torch import nn
from torch.nn import functional

from syncline import checkpoint, data, models
from syncline.comm.base import Partials, exchange_bytes, small_sum
from syncline.comm.tree import shard_range
from syncline.config import Job, OptimizerSettings
from syncline.data import DataSet, Split
from syncline.engine.replica import Replica
from syncline.errors import ConfigError, RankFailed
from syncline.faults import Conditions
from syncline.files import write_atomically
from syncline.launch.env import World, read_world
from syncline.loader import epoch_order, reseed
from syncline.perf.trace import Recorder, Trace
from syncline.report.progress import Progress
from syncline.seeds import seed_for
from syncline.session import Session, close_session, fail_session, open_session
from syncline.strategies import make_strategy

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Summary:
    """How a run went.

    With the synchronous strategy losses and accuracy do not depend on the number of ranks.
    """

    steps: int
    samples_per_s: float
    step_ms: float
    """Median time of a step."""
    loss: float
    """Mean training loss of the last step."""
    test_loss: float | None
    accuracy: float | None
    exposed_communication: float
    """Share of time that the compute lane waited for communication."""
    weights_sha256: str
    ranks: int
    shards: int
    communicator: str
    num_parameters: int
    seconds: float
    resumed_at: int
    run_folder: str
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the strategy has to tell, as rank 0 saw it."""
    gone: dict[int, str] = dataclasses.field(default_factory=dict)
    """Ranks that were lost on the way, and how."""

    def to_json_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def train(
    job: Job, out: Path, resume: bool, progress: Progress, trace: Path | None = None
) -> Summary:
    """Train as the job says, as one rank of the world this process was started in.

    Every rank calls it. Rank 0 writes the run folder `out`: metrics.jsonl, checkpoints and
    summary.json; and to `trace`, if asked for, when every rank did what. There each rank counts
    time from where it began its first step: clocks of different machines are not compared. The
    first shard of that step sets everything up, and its compute is left out.
    """
    torch.set_num_threads(job.run.threads)
    world = read_world()
    # Everything that can be refused is looked at before this rank meets the others.
    run = _Run(job, world, out, progress, resume, trace)
    session = open_session(job.strategy.comm, job.run.silent_s, job.run.hung_s, world)
    try:
        summary = run.go(session)
    except BaseException as error:
        fail_session(error)
        raise
    close_session()
    return summary


def build_model(job: Job, dataset: DataSet) -> nn.Module:
    """Build the job's network with its initial weights, which depend on the seed alone."""
    torch.manual_seed(seed_for(job.run.seed, "weights"))
    classes = job.model.classes or dataset.classes
    return models.build(job.model.name, dataset.sample_shape, classes, **job.model.options)


def load_data(job: Job) -> DataSet:
    """Load the job's data, at the image size the job asks for."""
    settings = {name: getattr(job.data, name) for name in ("path", "sample_shape")}
    return data.load(
        job.data.name,
        image_size=job.image_size,
        classes=job.data.classes,
        samples=job.data.samples,
        seed=job.run.seed,
        **settings,
    )


def build_optimizer(settings: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer with a resolved job's settings."""
    chosen = settings.resolved()
    common: dict[str, Any] = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
    if chosen.name == "sgd":
        common |= {"momentum": chosen.momentum, "nesterov": chosen.nesterov}
        return torch.optim.SGD(model.parameters(), **common)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[chosen.name]
    return kind(model.parameters(), betas=chosen.betas, **common)


def learning_rate(settings: OptimizerSettings, step: int, total: int) -> float:
    """Return the learning rate of a step: a function of the step alone, so nothing to save.

    >>> settings = OptimizerSettings(lr=0.4, warmup_steps=4)
    >>> [learning_rate(settings, step, 10) for step in (0, 1, 3, 9)]
    [0.1, 0.2, 0.4, 0.4]
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "cosine":
        through = (step - settings.warmup_steps) / max(1, total - settings.warmup_steps)
        return settings.lr * 0.5 * (1 + math.cos(math.pi * through))
    if settings.schedule == "step" and settings.decay_steps:
        factor = settings.decay_factor or 0.1
        return float(settings.lr * factor ** (step // settings.decay_steps))
    return settings.lr


def batch_of(split: Split, indices: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Read samples into memory of their own: results may depend on how an input is aligned."""
    samples, labels = split.batch(indices)
    images = torch.empty(samples.shape, dtype=torch.float32)
    return images.copy_(torch.from_numpy(samples)), torch.from_numpy(labels)


class Order:
    """Which samples a shard of a step gets, and how many steps there are."""

    def __init__(self, job: Job, dataset: DataSet) -> None:
        """`job` is resolved."""
        assert job.strategy.shards is not None
        self.batch = job.data.batch
        self.shards = job.strategy.shards
        self.num_samples = len(dataset.train)
        self.per_epoch = self.num_samples // self.batch
        if self.per_epoch == 0:
            raise ConfigError(
                "data.batch",
                f"got {self.batch}",
                f"{dataset.name} has {self.num_samples} samples to train on",
                f"Use at most {self.num_samples}.",
            )
        self.total = job.run.steps or (job.run.epochs or 0) * self.per_epoch
        self._seed = job.run.seed
        self._epoch = (-1, torch.empty(0, dtype=torch.int64))

    def indices(self, step: int, shard: int) -> np.ndarray[Any, Any]:
        """Return the samples of one shard of one step."""
        epoch, within = divmod(step, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, epoch_order(self.num_samples, self._seed, epoch))
        size = self.batch // self.shards
        first = within * self.batch + shard * size
        return self._epoch[1][first : first + size].numpy()


def evaluate(model: nn.Module, split: Split, numbers: range | None) -> np.ndarray[Any, Any]:
    """Test some of the fixed parts of a data set, or all: loss and hits of each, others zero."""
    num_samples = len(split)
    parts = range(0, num_samples, EVALUATION_BATCH)
    results = np.zeros((len(parts), 2))
    model.eval()
    with torch.no_grad():
        for number in range(len(parts)) if numbers is None else numbers:
            rows = np.arange(parts[number], min(parts[number] + EVALUATION_BATCH, num_samples))
            images, labels = batch_of(split, rows)
            scores = model(images)
            results[number, 0] = functional.cross_entropy(scores, labels, reduction="sum").item()
            results[number, 1] = (scores.argmax(dim=1) == labels).sum().item()
    model.train()
    return results


class _Run:
    """One rank's run."""

    session: Session
    replica: Replica

    def __init__(
        self,
        job: Job,
        world: World,
        out: Path,
        progress: Progress,
        resume: bool,
        trace: Path | None,
    ) -> None:
        self.job = job = job.resolved(world.size)
        self.world = world
        self.out = out
        self.trace = trace
        self.progress = progress
        self._written: int | None = None
        self._first_steps = self._steps_of_all = 0.0
        """Steps of all ranks when this one had taken its first, and its last."""
        self._table: Partials | None = None
        self.data = load_data(job)
        self.order = Order(job, self.data)
        self.batch, self.shards = self.order.batch, self.order.shards
        self.total = self.order.total
        self.model = build_model(job, self.data)
        self.optimizer = build_optimizer(job.optimizer, self.model)
        self._conditions = Conditions(faults=job.faults, seed=job.run.seed)
        workers = job.strategy.num_workers(world.size)
        self._conditions.check(world.size, world.num_machines, "faults", workers)
        self._saved = self._load() if resume else None

    def go(self, session: Session) -> Summary:
        self.session = session
        settings = self.job.strategy
        self.replica = Replica(
            self.model,
            self.optimizer,
            make_strategy(settings.name, settings.settings, self.job.run.seed),
            self.session.comm,
            self.session.control,
            self.session.lane,
            shards=self.shards,
            bucket_bytes=None if settings.bucket_bytes == "auto" else settings.bucket_bytes,
            overlap=None if settings.overlap == "auto" else settings.overlap,
        )
        if self.trace is not None:
            self.replica.recorder = Recorder(self.world.rank)
        start = 0
        if self._saved is not None:
            start = self._saved.step
            own = self._load_own(start) or self._saved
            if own is not self._saved:
                self.replica.load_own(own.model)
            self.replica.load_optimizer_state(own.optimizer)
            # A rank that is new begins with the whole, and with nothing that was another's own.
            is_new = self.replica.strategy.keeps_own and own is self._saved
            state = {} if is_new else own.strategy
            self.replica.strategy.load_state(state, self._saved.model)
            self.replica.step_number = start
            if session.control is not None:
                session.control.progress.step = start
                self._note("start")
            self._saved = None
        metrics = self.out / "metrics.jsonl"
        if self.is_first:
            self.out.mkdir(parents=True, exist_ok=True)
            keep_metrics_until(metrics, start)
        return self._loop(start, metrics)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run folder: rank 0, or the next if that is gone."""
        gone = self._gone()
        return all(rank in gone for rank in range(self.world.rank))

    def _load(self) -> checkpoint.Checkpoint:
        """Load the newest checkpoint, its model into ours; refuse one of another job."""
        path = checkpoint.newest(self.out / "checkpoints")
        if path is None:
            raise ConfigError(
                "--resume",
                f"there is no checkpoint in {self.out}",
                "a run resumes from one",
                "Start without --resume.",
            )
        saved = checkpoint.load(path)
        checkpoint.check_same_job(path, saved.job.resolved(), self.job)
        self.model.load_state_dict(saved.model)
        return saved

    def _own_checkpoints(self) -> Path:
        return self.out / "checkpoints" / f"rank-{self.world.rank}"

    def _load_own(self, step: int) -> checkpoint.Checkpoint | None:
        """Load what was this rank's own at a step, where ranks differ and there is such a file."""
        path = checkpoint.path_of(self._own_checkpoints(), step)
        if not self.replica.strategy.keeps_own or not path.exists():
            return None
        return checkpoint.load(path)

    def _loop(self, start: int, metrics: Path) -> Summary:
        job, replica = self.job, self.replica
        self.model.train()
        started = time.perf_counter()
        step_ends: list[float] = []
        loss = float("nan")
        if not replica.my_shards:
            return self._serve(start)
        for step in range(start, self.total):
            lr = learning_rate(job.optimizer, step, self.total)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            began, waited_s = self._suffer(step), replica.waited_s
            for shard in replica.my_shards:
                self._note("forward")
                replica.begin_shard(shard)
                images, labels = batch_of(self.data.train, self.order.indices(step, shard))
                reseed(job.run.seed, step, shard)
                shard_loss = functional.cross_entropy(self.model(images), labels)
                if shard == replica.my_shards[0] and step > start:
                    loss = self._finish_step(metrics, step, step_ends)
                self._note("backward")
                shard_loss.backward()
                replica.tell_loss(shard_loss.item())
            self._slow_down(step, time.perf_counter() - began - (replica.waited_s - waited_s))
            if job.optimizer.clip_norm is not None:
                replica.clip_grad_norm_(job.optimizer.clip_norm)
            self.optimizer.step()
            step_ends.append(time.perf_counter())
            self._steps_of_all = self._count_steps()
            if step == start:
                self._first_steps = self._steps_of_all
                self.progress.start(job, replica.describe())
                replica.waited_s = 0.0  # the first step waits for everybody's set-up
            done = step + 1
            if done < self.total:
                self._look_at_whole(done)
        replica.synchronize()
        seconds = time.perf_counter() - started
        if self.total > start:
            loss = self._finish_step(metrics, self.total, step_ends)
        put_down = functools.partial(self._put_down, start, step_ends, seconds, loss)
        summary = self._end(put_down)
        self._write_trace(started)
        self.progress.finish(summary)
        return summary

    def _put_down(
        self,
        start: int,
        step_ends: list[float],
        seconds: float,
        loss: float,
        test_loss: float | None,
        accuracy: float | None,
    ) -> Summary:
        """Say how the run went; the first rank writes it into the run folder."""
        gaps = [end - start for start, end in itertools.pairwise(step_ends)]
        summary = Summary(
            steps=self.total,
            samples_per_s=self._pace(step_ends),
            step_ms=1e3 * statistics.median(gaps) if gaps else 1e3 * seconds,
            loss=loss,
            test_loss=test_loss,
            accuracy=accuracy,
            exposed_communication=self._exposed(step_ends),
            weights_sha256=checkpoint.digest_of(self.model.state_dict()),
            ranks=self.world.size,
            shards=self.shards,
            communicator=self.session.comm.name,
            num_parameters=sum(p.numel() for p in self.model.parameters()),
            seconds=seconds,
            resumed_at=start,
            run_folder=str(self.out),
            strategy=self.replica.strategy.report(),
            gone={rank: str(failure) for rank, failure in self._gone().items()},
        )
        if self.is_first:
            text = json.dumps(summary.to_json_dict(), indent=2) + "\n"
            write_atomically(self.out / "summary.json", text.encode())
        return summary

    def _gone(self) -> dict[int, RankFailed]:
        return {} if self.session.control is None else self.session.control.gone

    def _suffer(self, step: int) -> float:
        """Die or stand still, if the job wants that now; return when the step begins."""
        if self._conditions.dies(self.world.rank, step):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._conditions.pause_s(self.world.rank, step))
        return time.perf_counter()

    def _slow_down(self, step: int, compute_s: float) -> None:
        """Make this step's compute as much longer as the job wants."""
        factor = self._conditions.factor(self.world.rank, step)
        if factor > 1:
            time.sleep((factor - 1) * compute_s)

    def _note(self, phase: str) -> None:
        if self.session.control is not None:
            self.session.control.progress.write(phase)

    def _pace(self, step_ends: list[float]) -> float:
        """Samples per second of all ranks, since the first step, which also sets up."""
        if len(step_ends) < 2:
            return 0.0
        steps = self._steps_of_all - self._first_steps
        return self.batch * steps / (step_ends[-1] - step_ends[0])

    def _count_steps(self) -> float:
        """Steps taken by now: where each rank has a pace of its own, the mean over ranks."""
        control, strategy = self.session.control, self.replica.strategy
        if control is None or not strategy.is_apart:
            return float(self.replica.step_number)
        steps = control.steps()
        workers = range(strategy.num_workers(self.world.size))
        return statistics.fmean(steps.get(rank, 0) for rank in workers)

    def _exposed(self, step_ends: list[float]) -> float:
        if len(step_ends) < 2:
            return 0.0
        return min(1.0, self.replica.waited_s / (step_ends[-1] - step_ends[0]))

    def _finish_step(self, metrics: Path, done: int, step_ends: list[float]) -> float:
        """Report the step before, whose losses have arrived; return its loss."""
        loss = statistics.fmean(self.replica.losses)
        self.progress.step(done, self.total, loss, self._pace(step_ends), self._exposed(step_ends))
        line = {
            "step": done,
            "loss": loss,
            "lr": learning_rate(self.job.optimizer, done - 1, self.total),
            "samples_per_s": round(self._pace(step_ends), 3),
            "exposed_communication": round(self._exposed(step_ends), 5),
        }
        if self.is_first:
            if self._written is None:
                # Rank 0's from the start; another's from where the one before it was gone.
                self._written = last_step(metrics)
            if done > self._written:
                with open(metrics, "a") as file:
                    file.write(json.dumps(line) + "\n")
                self._written = done
        return loss

    def _serve(self, start: int) -> Summary:
        """Be there for those who compute, until they are done."""
        self.replica.serve()
        for done in range(start + 1, self.total):
            self._look_at_whole(done)
        summary = self._end(functools.partial(self._put_down, start, [], 0.0, float("nan")))
        self._write_trace(0.0)
        return summary

    def _look_at_whole(self, done: int) -> None:
        """Test and save what stands for the run as a whole, as far as it is time for that."""
        run, is_first = self.job.run, self.is_first
        evaluates = run.evaluate_every and done % run.evaluate_every == 0
        saves = run.checkpoint_every and done % run.checkpoint_every == 0
        if not (evaluates or saves):
            return
        with self.replica.whole(is_wanted=is_first):
            self.replica.check_workers()
            if saves:
                self._save(done, self.out / "checkpoints", is_wanted=is_first)
            if evaluates:
                self._evaluate(done, is_wanted=is_first)
        if saves:
            self._save_own(done)

    def _end(self, put_down: Callable[[float | None, float | None], Summary]) -> Summary:
        """Save, test and put down what the run has come to; on every rank.

        Where ranks may be lost every one of them has the whole, and all stay until one has put it
        down: the next, should the first be lost over it.
        """
        is_apart = self.replica.strategy.is_apart
        if is_apart:
            self.replica.serve()  # it is built by now, unless there was no step left to take
        with self.replica.whole():
            self.replica.check_workers()
            while True:
                is_first = self.is_first
                self._save(self.total, self.out / "checkpoints", is_wanted=is_first)
                found = self._evaluate(self.total, is_wanted=is_first)
                summary = put_down(*found)
                if not is_apart:
                    return summary
                self.replica.meet()
                if is_first or self._is_put_down():
                    break
        self._save_own(self.total)
        return summary

    def _is_put_down(self) -> bool:
        """Whether the run folder says how this run went; on other machines nobody can tell."""
        if self.world.num_machines > 1:
            return True
        try:
            text = (self.out / "summary.json").read_bytes()
            return bool(msgspec.json.decode(text)["steps"] == self.total)
        except (OSError, msgspec.DecodeError, KeyError):
            return False

    def _evaluate(self, step: int, *, is_wanted: bool) -> tuple[float | None, float | None]:
        """Test on data kept apart, spread over ranks in fixed parts: all of them get the result.

        Where ranks do not wait for each other the one who wants it does it alone.
        """
        spread = not self.replica.strategy.is_apart
        if self.data.test is None or not (spread or is_wanted):
            return None, None
        self._note("evaluate")
        num_samples = len(self.data.test)
        num_parts = -(-num_samples // EVALUATION_BATCH)
        place = (self.world.size, self.world.rank) if spread else (1, 0)
        mine = range(*shard_range(num_parts, *place))
        results = torch.from_numpy(evaluate(self.model, self.data.test, mine))
        loss, correct = (self._sum(results) if spread else results).sum(dim=0).tolist()
        self.progress.evaluated(step, loss / num_samples, correct / num_samples)
        return loss / num_samples, correct / num_samples

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Add up small tables over ranks; where all but one hold zero, the sum is exact."""
        comm = self.session.comm
        if self._table is None:
            self._table = small_sum(comm, numbers.numel(), numbers.dtype)
        partials = self._table
        partials.slots[0].mine.copy_(numbers.reshape(-1))
        self.session.lane.submit(comm.all_reduce, partials)
        self.session.lane.drain()
        return partials.result.view(numbers.shape).clone()

    def _write_trace(self, zero_s: float) -> None:
        """Collect all ranks' tasks and write them, each rank's times from its `zero_s` on.

        Where ranks are gone, those of the rank that writes the run folder.
        """
        if self.trace is None:
            return
        recorder, self.replica.recorder = self.replica.recorder, None
        assert recorder is not None
        mine = Trace(tuple(task.earlier_by(zero_s) for task in recorder.tasks))
        everybody = [mine.to_bytes()]
        if not self._gone():
            lane, comm = self.session.lane, self.session.comm
            everybody = lane.call(exchange_bytes, comm, mine.to_bytes())
        if self.is_first:
            ranks = [Trace.from_bytes(each) for each in everybody]
            Trace(tuple(task for rank in ranks for task in rank.tasks)).write(self.trace)

    def _save(self, step: int, folder: Path, *, is_wanted: bool) -> None:
        """Write a checkpoint of what the model holds now. Every rank calls it."""
        self._note("save")
        optimizer_state = self.replica.optimizer_state(is_wanted=is_wanted)
        if is_wanted:
            model, strategy = self.model.state_dict(), self.replica.strategy.state()
            saved = checkpoint.Checkpoint(step, self.job, model, optimizer_state, strategy)
            checkpoint.save(folder, saved)

    def _save_own(self, step: int) -> None:
        """Write what is this rank's own, where ranks differ."""
        if self.replica.strategy.keeps_own:
            self._save(step, self._own_checkpoints(), is_wanted=True)


def last_step(path: Path) -> int:
    """Return the last step that a file of metrics tells of; 0 if it tells of none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in reversed(lines):
        with contextlib.suppress(msgspec.DecodeError, KeyError):  # cut short by a kill
            return int(msgspec.json.decode(line)["step"])
    return 0


def keep_metrics_until(path: Path, step: int) -> None:
    """Drop lines of steps that a resumed run will take again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if msgspec.json.decode(line)["step"] <= step:
                kept.append(line)
        except (msgspec.DecodeError, KeyError, TypeError):
            break  # a line cut short by the kill
    write_atomically(path, b"".join(kept))
