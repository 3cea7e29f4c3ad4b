"""The built-in training loop, read top to bottom.

With the synchronous strategy the result depends on the job alone: data order, dropout and the order
of summation follow from (seed, step, shard), so any number of ranks gives the same weights, bit for
bit, and a run that was killed and resumed gives those of one that was not.
"""

from __future__ import annotations

import functools
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer loads it: here that is before ranks are forked
from torch.nn import functional

from syncline.checkpoint import digest_of
from syncline.comm.base import exchange_bytes
from syncline.config import Job
from syncline.engine.replica import Replica
from syncline.errors import RankFailed
from syncline.evaluation import SharedEvaluation, evaluate_alone
from syncline.faults import Conditions
from syncline.launch.env import World, read_world
from syncline.loader import reseed
from syncline.perf.pace import Pace
from syncline.perf.trace import Recorder, Trace
from syncline.recipe import Order, batch_of, build_model, build_optimizer, learning_rate, load_data
from syncline.report.progress import Progress
from syncline.run_checkpoints import RunCheckpoints
from syncline.run_folder import Metrics, Summary, is_finished, keep_metrics_until, write_summary
from syncline.session import Session, close_session, fail_session, open_session
from syncline.strategies import make_strategy


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


class _Run:
    """One rank's run."""

    session: Session
    replica: Replica
    shared_evaluation: SharedEvaluation

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
        self.metrics = Metrics(out)
        self.data = load_data(job)
        self.order = Order(job, self.data)
        self.total = self.order.total
        self.pace = Pace(self.order.batch)
        self.model = build_model(job, self.data)
        self.optimizer = build_optimizer(job.optimizer, self.model)
        self._conditions = Conditions(faults=job.faults, seed=job.run.seed)
        workers = job.strategy.num_workers(world.size)
        self._conditions.check(world.size, world.num_machines, "faults", workers)
        self.checkpoints = RunCheckpoints(out, job, self.model, world.rank)
        self._saved = self.checkpoints.load() if resume else None
        self.start = 0 if self._saved is None else self._saved.step

    def go(self, session: Session) -> Summary:
        self.session = session
        self.shared_evaluation = SharedEvaluation(session.comm, session.lane)
        settings = self.job.strategy
        self.replica = Replica(
            self.model,
            self.optimizer,
            make_strategy(settings.name, settings.settings, self.job.run.seed),
            self.session.comm,
            self.session.control,
            self.session.lane,
            shards=self.order.shards,
            bucket_bytes=None if settings.bucket_bytes == "auto" else settings.bucket_bytes,
            overlap=None if settings.overlap == "auto" else settings.overlap,
        )
        if self.trace is not None:
            self.replica.recorder = Recorder(self.world.rank)
        if self._saved is not None:
            self.checkpoints.restore(self.replica, self._saved)
            if session.control is not None:
                session.control.progress.step = self.start
                self._note("start")
            self._saved = None
        if self.is_first:
            self.out.mkdir(parents=True, exist_ok=True)
            keep_metrics_until(self.metrics.path, self.start)
        return self._loop()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run folder: rank 0, or the next if that is gone."""
        gone = self._gone()
        return all(rank in gone for rank in range(self.world.rank))

    def _loop(self) -> Summary:
        job, replica = self.job, self.replica
        self.model.train()
        started = time.perf_counter()
        loss = float("nan")
        if not replica.my_shards:
            return self._serve()
        for step in range(self.start, self.total):
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
                if shard == replica.my_shards[0] and step > self.start:
                    loss = self._finish_step(step)
                self._note("backward")
                shard_loss.backward()
                replica.tell_loss(shard_loss.item())
            self._slow_down(step, time.perf_counter() - began - (replica.waited_s - waited_s))
            if job.optimizer.clip_norm is not None:
                replica.clip_grad_norm_(job.optimizer.clip_norm)
            self.optimizer.step()
            self.pace.end_step(time.perf_counter(), self._count_steps())
            if step == self.start:
                self.progress.start(job, replica.describe())
                replica.waited_s = 0.0  # the first step waits for everybody's set-up
            done = step + 1
            if done < self.total:
                self._look_at_whole(done)
        replica.synchronize()
        seconds = time.perf_counter() - started
        if self.total > self.start:
            loss = self._finish_step(self.total)
        put_down = functools.partial(self._put_down, seconds, loss)
        summary = self._end(put_down)
        self._write_trace(started)
        self.progress.finish(summary)
        return summary

    def _put_down(
        self, seconds: float, loss: float, test_loss: float | None, accuracy: float | None
    ) -> Summary:
        """Say how the run went; the first rank writes it into the run folder."""
        step_s = self.pace.median_step_s()
        summary = Summary(
            steps=self.total,
            samples_per_s=self.pace.samples_per_s,
            step_ms=1e3 * (seconds if step_s is None else step_s),
            loss=loss,
            test_loss=test_loss,
            accuracy=accuracy,
            exposed_communication=self.pace.exposed(self.replica.waited_s),
            weights_sha256=digest_of(self.model.state_dict()),
            ranks=self.world.size,
            shards=self.order.shards,
            communicator=self.session.comm.name,
            num_parameters=sum(p.numel() for p in self.model.parameters()),
            seconds=seconds,
            resumed_at=self.start,
            run_folder=str(self.out),
            strategy=self.replica.strategy.report(),
            gone={rank: str(failure) for rank, failure in self._gone().items()},
        )
        if self.is_first:
            write_summary(self.out, summary)
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

    def _count_steps(self) -> float:
        """Steps taken by now: where each rank has a pace of its own, the mean over ranks."""
        control, strategy = self.session.control, self.replica.strategy
        if control is None or not strategy.is_apart:
            return float(self.replica.step_number)
        steps = control.steps()
        workers = range(strategy.num_workers(self.world.size))
        return statistics.fmean(steps.get(rank, 0) for rank in workers)

    def _finish_step(self, done: int) -> float:
        """Report the step before, whose losses have arrived; return its loss."""
        loss = statistics.fmean(self.replica.losses)
        samples_per_s, exposed = self.pace.samples_per_s, self.pace.exposed(self.replica.waited_s)
        self.progress.step(done, self.total, loss, samples_per_s, exposed)
        if self.is_first:
            self.metrics.append(
                {
                    "step": done,
                    "loss": loss,
                    "lr": learning_rate(self.job.optimizer, done - 1, self.total),
                    "samples_per_s": round(samples_per_s, 3),
                    "exposed_communication": round(exposed, 5),
                }
            )
        return loss

    def _serve(self) -> Summary:
        """Be there for those who compute, until they are done."""
        self.replica.serve()
        for done in range(self.start + 1, self.total):
            self._look_at_whole(done)
        summary = self._end(functools.partial(self._put_down, 0.0, float("nan")))
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
                self._save(done, is_wanted=is_first)
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
                self._save(self.total, is_wanted=is_first)
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
        return is_finished(self.out, self.total)

    def _evaluate(self, step: int, *, is_wanted: bool) -> tuple[float | None, float | None]:
        """Test on data kept apart, spread over ranks in fixed parts: all of them get the result.

        Where ranks do not wait for each other the one who wants it does it alone.
        """
        spread = not self.replica.strategy.is_apart
        if self.data.test is None or not (spread or is_wanted):
            return None, None
        self._note("evaluate")
        how = self.shared_evaluation.evaluate if spread else evaluate_alone
        loss, accuracy = how(self.model, self.data.test)
        self.progress.evaluated(step, loss, accuracy)
        return loss, accuracy

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

    def _save(self, step: int, *, is_wanted: bool) -> None:
        """Write a checkpoint of what the model holds now. Every rank calls it."""
        self._note("save")
        self.checkpoints.save(self.replica, step, is_wanted=is_wanted)

    def _save_own(self, step: int) -> None:
        """Write what is this rank's own, where ranks differ."""
        if self.replica.strategy.keeps_own:
            self._note("save")
            self.checkpoints.save_own(self.replica, step)
