"""The built-in training loop.

With the synchronous strategy the result depends on the job alone: data order, dropout and the order
of summation follow from (seed, step, shard), so any number of ranks gives the same weights, bit for
bit, and a run that was killed and resumed gives those of one that was not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch._dynamo  # building an optimizer imports it: do so once, before ranks are forked

from syncline.checkpoint import digest_of
from syncline.config import Job
from syncline.engine.parts import Options
from syncline.engine.replica import Replica
from syncline.errors import RunStopped, SynclineError
from syncline.evaluation import SharedEvaluation, evaluate_alone
from syncline.files import explained, make_folder
from syncline.injected_faults import InjectedFaults
from syncline.input import Input
from syncline.launch.env import LaunchedRank, read_world
from syncline.leaders_report import LeadersReport
from syncline.losses import loss_of
from syncline.not_finite import NotFinite, mean_loss
from syncline.perf.pace import Pace
from syncline.recipe import build_model, build_optimizer, learning_rate, set_learning_rate
from syncline.report.progress import Progress
from syncline.run_checkpoints import RunCheckpoints
from syncline.run_figures import RunFigures
from syncline.run_folder import (
    Summary,
    is_finished,
    remove_summary,
    write_job,
    write_summary,
)
from syncline.run_log import RunLog
from syncline.run_ranks import RunRanks
from syncline.run_trace import NotTraced, RunTrace
from syncline.session import Session, close_session, fail_session, open_session_of
from syncline.settings_choice import Choose, with_chosen_settings
from syncline.strategies import make_strategy
from syncline.verify.recording import record_if_verifying


def train(
    job: Job,
    out: Path,
    resume: bool,
    progress: Progress,
    trace: Path | None = None,
    choose: Choose | None = None,
) -> Summary:
    """Train as the job says, as one rank of the world this process was started in.

    `choose` returns the settings of a strategy that leaves some to measured times.
    Every rank calls it. Rank 0 writes the run folder `out`: metrics.jsonl, checkpoints and
    summary.json. It also writes the file `trace`, if one is named: the tasks of every rank, on one
    clock (docs/traces.md).
    """
    torch.set_num_threads(job.run.threads)
    world = read_world()
    job = job.resolved(world.size, world.machines)
    with Input(job, world) as batches:
        # Whatever can be refused is refused here, before this rank connects to the others.
        run = _Run(job, world, out, progress, resume, trace, batches, choose)
        session = open_session_of(job, world)
        try:
            summary = run.run_in(session)
        except BaseException as error:
            if isinstance(error, SynclineError) and error.is_orderly:
                close_session()
            else:
                fail_session(error)
            run.log.close(failed=True)
            raise
        close_session()
        run.log.close()
        return summary


class _Run:
    """One rank's run."""

    session: Session
    replica: Replica
    ranks: RunRanks
    not_finite: NotFinite
    shared_evaluation: SharedEvaluation

    def __init__(
        self,
        job: Job,
        world: LaunchedRank,
        out: Path,
        progress: Progress,
        resume: bool,
        trace: Path | None,
        batches: Input,
        choose: Choose | None,
    ) -> None:
        self.job, self.world, self.input, self.choose = job, world, batches, choose
        self.out, self.trace, self.progress = out, trace, progress
        self.log = RunLog(out, job, None if world.rank else progress.note)
        self.data, self.order, self.total = batches.data, batches.order, batches.order.total
        self.pace = Pace(self.order.batch)
        self.model = build_model(job, self.data)
        self.loss = loss_of(job.model.loss)
        self.optimizer = build_optimizer(job.optimizer, self.model)
        self.faults = InjectedFaults(job, world)
        self.checkpoints = RunCheckpoints(out, job, self.model, world.rank)
        self.resume, self.start = resume, 0
        may_defer = world.rank > 0 and world.machine != 0
        self._chosen = self.checkpoints.choose(may_defer=may_defer) if resume else None

    def run_in(self, session: Session) -> Summary:
        """Train in a session that is open, from the checkpoint if the run is resumed."""
        self.session, saved = session, None
        comm, lane = session.comm, session.lane
        if self.resume:
            saved, summary = self.checkpoints.agree(self._chosen, self.total, comm, lane)
            self.start, self._chosen = saved.step, None
            if summary is not None:
                self.progress.note(f"this run is finished: it has taken its {self.total} steps")
                return summary
        self.shared_evaluation = SharedEvaluation(comm, lane)
        self.input.check_data(comm, lane)
        if self.choose is not None and self.job.strategy.own.must_choose:
            self.job = self.checkpoints.job = with_chosen_settings(
                *(self.job, self.choose, self.model, self.loss, self.input, session, self.progress)
            )
            if self.world.rank == 0:
                write_job(self.out, self.job)
        settings = self.job.strategy
        strategy = make_strategy(settings.name, settings.settings, self.job.run.seed)
        options = Options(
            shards=self.order.shards,
            bucket_bytes=None if settings.bucket_bytes == "auto" else settings.bucket_bytes,
            overlap=None if settings.overlap == "auto" else settings.overlap,
            total_steps=self.total,
        )
        self.replica = Replica(
            self.model, self.optimizer, strategy, comm, session.control, lane, options
        )
        self.note_step = record_if_verifying(self.replica)
        self.tracing: RunTrace | NotTraced = NotTraced()
        if self.trace is not None:
            steps = range(self.start, self.total)
            self.tracing = RunTrace(self.trace, self.replica, session, self.job, steps)
        self.replica.run.may_leave_early = self.job.run.stop_when_not_finite
        self.ranks = RunRanks(settings.own, session, self.replica)
        self.leaders = LeadersReport(self.job, self.replica, self.input)
        if saved is not None:
            self.checkpoints.restore(self.replica, saved)
            if session.control is not None:
                session.control.progress.step = self.start
                self.ranks.show_phase("start")
            del saved  # it holds a copy of the model
        self.not_finite = NotFinite(
            self.job, self.replica, lane, self.progress, self.checkpoints, self.ranks
        )
        if self.ranks.writes_folder:
            with explained(self.out):
                make_folder(self.out)
            self.log.keep_until(self.start)
            remove_summary(self.out, self.total)
        try:
            return self._loop() if self.replica.my_shards else self._serve()
        except RunStopped:
            self.ranks.end_early()
            raise

    def _loop(self) -> Summary:
        job, replica = self.job, self.replica
        self.model.train()
        started = self.log.begin()
        loss: float | None = None
        steps = range(self.start, self.total)
        self.input.begin((step, shard) for step in steps for shard in replica.my_shards)
        for step in steps:
            set_learning_rate(self.optimizer, job.optimizer, step, self.total)
            self.faults.begin_step(step)
            began, waited_s = time.perf_counter(), replica.waited_s + self.input.waited_s
            for shard in replica.my_shards:
                self.ranks.show_phase("input")
                with self.tracing.task("input", step):
                    images, labels = self.input.take(step, shard)
                self.ranks.show_phase("forward")
                replica.begin_shard(shard)
                shard_loss = self.loss(self.model(images), labels)
                if shard == replica.my_shards[0] and step > self.start:
                    # Other ranks' losses of the previous step arrive while forward runs.
                    loss = self._report_step(step)
                self.ranks.show_phase("backward")
                shard_loss.backward()
                replica.tell_loss(shard_loss.item())
            waited_s = replica.waited_s + self.input.waited_s - waited_s
            self.faults.slow_down(step, time.perf_counter() - began - waited_s)
            if job.optimizer.clip_norm is not None:
                replica.clip_grad_norm_(job.optimizer.clip_norm)
            self.optimizer.step()
            self.ranks.end_step(self.pace, time.perf_counter(), self.total)
            for one in (self.input, self.leaders):
                one.end_step(is_first=step == self.start)
            if step == self.start:
                with self.tracing.task("report", step):
                    self.progress.start(job, replica.describe())
                replica.waited_s = 0.0  # the first step also waits until every rank is set up
            done = step + 1
            self.not_finite.end_step(done)
            if done < self.total:
                self._evaluate_and_save_if_due(done)
        replica.synchronize()
        seconds = time.perf_counter() - started
        if self.total > self.start:
            loss = self._report_step(self.total)
        summary = self._finish(seconds, loss)
        self.tracing.write(self.ranks)
        self.leaders.say(self.progress, summary.step_s)
        self.progress.finish(summary)
        return summary

    def _serve(self) -> Summary:
        """Serve the ranks that compute, on a rank that has no shards, until they are done."""
        self.model.train()
        self.replica.serve()
        for done in range(self.start + 1, self.total + 1):
            self.replica.serve_step(self.job.optimizer.clip_norm)
            self.note_step()
            if done < self.total:
                self._evaluate_and_save_if_due(done)
            if self.replica.is_served:
                self.not_finite.look_at_loss(done, mean_loss(self.replica.losses))
        summary = self._finish(0.0, None)
        self.tracing.write(self.ranks)
        return summary

    def _report_step(self, done: int) -> float:
        """Show and record the last of `done` steps, whose losses have arrived; return its loss."""
        loss = mean_loss(self.replica.losses)
        exposed = self.pace.exposed(self.replica.waited_s)
        exposed_input = self.pace.exposed(self.input.steps_waited_s)
        self.progress.step(done, self.total, loss, self.pace.samples_per_s, exposed, exposed_input)
        if self.ranks.writes_folder:
            self._write_metrics(done)
        self.not_finite.look_at_loss(done, loss)
        return loss

    def _write_metrics(self, done: int) -> None:
        loss = mean_loss(self.replica.losses)
        lr = learning_rate(self.job.optimizer, done - 1, self.total)
        pace = self.pace.to_json_dict(self.replica.waited_s, self.input.steps_waited_s)
        pace["input_wait_s"] = round(self.input.step_waited_s, 6)
        self.log.append({"step": done, "loss": loss, "lr": lr, **pace})

    def _evaluate_and_save_if_due(self, done: int) -> None:
        """Evaluate and save the parameters that represent the run, if the job wants it now."""
        run, is_writer = self.job.run, self.ranks.writes_folder
        evaluates = run.evaluate_every and done % run.evaluate_every == 0
        saves = run.checkpoint_every and done % run.checkpoint_every == 0
        if not (evaluates or saves):
            return
        if saves:
            self._save_own(done)
        with self._whole(done, is_wanted=is_writer):
            self.ranks.check_workers()
            if saves:
                if is_writer and self.replica.my_shards:
                    self._write_metrics(done)  # a run that resumes here does not take it again
                self._save(done, is_wanted=is_writer)
            if evaluates:
                self._evaluate(done, is_wanted=is_writer)

    @contextlib.contextmanager
    def _whole(self, done: int, *, is_wanted: bool) -> Iterator[None]:
        """Put the parameters that represent the run into the model; a trace has that as a task."""
        self.replica.synchronize()
        with contextlib.ExitStack() as stack:
            with self.tracing.task("whole", done - 1):
                stack.enter_context(self.replica.whole(is_wanted=is_wanted))
            yield

    def _finish(self, seconds: float, loss: float | None) -> Summary:
        """Save and evaluate the parameters that represent the run, and write the summary.

        Every rank calls it. With strategies that continue without a lost rank, every rank holds
        these parameters and stays until the summary is written: if the rank that writes it is lost
        meanwhile, the next one saves, evaluates and writes.
        """
        has_own, self.ranks.is_ending = self.replica.has_own, True
        self.replica.serve()  # does nothing, unless the run had no step left to take
        figures = RunFigures(self.replica, self.session, self.pace, self.order, self.start)
        self._save_own(self.total)
        with self.replica.whole():
            self.ranks.check_workers()
            while True:
                is_writer = self.ranks.writes_folder
                self._save(self.total, is_wanted=is_writer, all_hold=True)
                test_loss, accuracy = self._evaluate(self.total, is_wanted=is_writer)
                summary = self._summarize(seconds, figures, (loss, test_loss, accuracy))
                if self.ranks.writes_folder:
                    write_summary(self.out, summary)
                if not has_own:
                    return summary
                # Twice: a rank that has stopped and stays joins meetings in pairs, as in a gather.
                self.replica.run.meet()
                self.replica.run.meet()
                may_be_elsewhere = self.session.world.num_machines != 1
                if is_writer or may_be_elsewhere or is_finished(self.out, self.total):
                    return summary

    def _summarize(
        self, seconds: float, figures: RunFigures, losses: tuple[float | None, ...]
    ) -> Summary:
        """Return the summary; `losses` are the training loss, the test loss and the accuracy."""
        step_s = self.pace.median_step_s()
        loss, test_loss, accuracy = losses
        return Summary(
            steps=self.total,
            step_s=seconds if step_s is None else step_s,
            loss=loss,
            test_loss=test_loss,
            accuracy=accuracy,
            exposed_communication=self.pace.exposed(self.replica.waited_s),
            exposed_input=self.pace.exposed(self.input.steps_waited_s),
            input_wait_s=self.input.steps_waited_s / max(1, self.total - self.start - 1),
            layout=self.replica.layout.to_json_dict(),
            **figures.together(self.ranks),
            weights_sha256=digest_of(self.model.state_dict()),
            ranks=self.world.size,
            shards=self.order.shards,
            communicator=self.session.comm.name,
            num_parameters=sum(p.numel() for p in self.model.parameters()),
            seconds=seconds,
            resumed_at=self.start,
            run_folder=str(self.out),
            strategy=self.replica.plan.report()
            | self.replica.run.report()
            | self.leaders.figures(),
            gone=self.ranks.describe_absent(),
        )

    def _evaluate(self, step: int, *, is_wanted: bool) -> tuple[float | None, float | None]:
        """Return test loss and accuracy of what the model holds now; None without test samples.

        All ranks share the work and get the result. With asynchronous strategies ranks do not wait
        for each other: the one that wants the result computes it alone, the others get None.
        """
        is_shared = not self.replica.has_own
        if self.data.test is None or not (is_shared or is_wanted):
            return None, None
        self.ranks.show_phase("evaluate")
        how = self.shared_evaluation.evaluate if is_shared else evaluate_alone
        with self.tracing.task("evaluate", step - 1), self.log.apart():
            loss, accuracy = how(self.model, self.data.test, self.loss)
        self.progress.evaluated(step, loss, accuracy)
        if is_wanted and self.ranks.writes_folder:
            self.log.evaluated(step, loss, accuracy)
        return loss, accuracy

    def _save(self, step: int, *, is_wanted: bool, all_hold: bool = False) -> None:
        """Write a checkpoint of what the model holds now. Every rank calls it.

        `all_hold` says that every rank's model holds it, also where ranks' own models differ.
        """
        self.ranks.show_phase("save")
        all_hold = all_hold or not self.replica.has_own
        if is_wanted or all_hold:
            is_wanted &= self.not_finite.may_save(step, all_hold=all_hold)
        with self.tracing.task("checkpoint", step - 1):
            self.checkpoints.save(self.replica, step, is_wanted=is_wanted)

    def _save_own(self, step: int) -> None:
        """Write this rank's own checkpoint, if the strategy needs one to resume.

        The run's own follows when all ranks have met again: without it, none of these counts.
        """
        if self.replica.plan.keeps_own:
            with self._whole(step, is_wanted=False):
                self.ranks.show_phase("save")  # what other ranks sent before has arrived
            if self.not_finite.may_save(step, all_hold=False):
                with self.tracing.task("checkpoint", step - 1):
                    self.checkpoints.save_own(self.replica, step)
