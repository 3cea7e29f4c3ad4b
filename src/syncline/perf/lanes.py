"""What ties a rank's tasks together: the order of its lanes, and what each lane waits for.

`after` in a trace names what a task did wait for. With other costs it may have to wait for
something else: a forward for a bucket that was ready, a hook for the one before it. These ties are
added here.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

from syncline.perf.drafts import HOOKS, Draft, class_of_task
from syncline.perf.moments import NUMBER
from syncline.perf.trace import Task

_WAITED_S = 1e-4
"""A batch that was taken in less time was there before."""


class Lanes:
    """The tasks of one rank, in order."""

    def __init__(self, draft: Draft, places: Sequence[int]) -> None:
        """`places` are those of the rank's tasks in the trace."""
        tasks = draft.tasks
        self.draft = draft
        self.compute = [at for at in places if tasks[at].lane == "compute"]
        self.comm = [at for at in places if tasks[at].lane != "compute"]
        self.hooks = [at for at in self.comm if tasks[at].kind in HOOKS]

    def tie(self) -> None:
        """Add what each task of the rank comes after."""
        draft = self.draft
        self._tie_recorded()
        self._tie_waits()
        self._tie_use()
        self._tie_step()
        if draft.ahead:
            self._tie_input(draft.ahead)
        if draft.trace.header.clock == "virtual":
            self._tie_queue()
            self._tie_requests()
        else:
            self._tie_activations()

    def _after(self, at: int, moment: int) -> None:
        """Let a task begin after a moment that was recorded before it."""
        builder, start = self.draft.builder, self.draft.starts[at]
        if builder.time_s[moment] <= builder.time_s[start] and moment not in builder.before[start]:
            builder.before[start].append(moment)

    def _tie_recorded(self) -> None:
        """Add what the trace says. A lane's own order holds whatever the clock says."""
        draft, before = self.draft, self.draft.builder.before
        for at in (*self.compute, *self.comm):
            for one in draft.tasks[at].after:
                if draft.tasks[draft.place[one]].lane == "compute" == draft.tasks[at].lane:
                    before[draft.starts[at]].append(draft.end_of(one))
                else:
                    self._after(at, draft.end_of(one))

    def _tie_waits(self) -> None:
        """Let each wait of the compute lane end with what it waited for.

        The next task names that; where there is none, the buckets' last tasks do.
        """
        draft = self.draft
        gathers = [at for at in self.hooks if draft.tasks[at].kind == "gather"]
        last = {draft.tasks[at].bucket: at for at in gathers}
        for at, later in itertools.zip_longest(self.compute, self.compute[1:], fillvalue=-1):
            task = draft.tasks[at]
            if task.kind != "wait":
                continue
            known = [draft.place[one] for one in draft.tasks[later].after] if later >= 0 else []
            if later < 0:
                known = [last[task.bucket]] if task.bucket in last else list(last.values())
            self._end_with(at, [one for one in known if draft.tasks[one].lane != "compute"])

    def _end_with(self, at: int, known: Sequence[int]) -> None:
        draft, end = self.draft, self.draft.ends[at]
        for one in known:
            if draft.tasks[one].end_s <= draft.tasks[at].end_s:
                draft.builder.before[end].append(draft.ends[one])

    def _tie_use(self) -> None:
        """Let forward use a bucket after the step before has made it ready."""
        draft, seen = self.draft, set[tuple[int, int]]()
        gathers: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for at in self.hooks:
            if draft.tasks[at].kind == "gather":
                gathers[draft.tasks[at].step][draft.tasks[at].bucket] = at
        for at in self.compute:
            task = draft.tasks[at]
            key = (task.step, task.bucket)
            if task.kind == "forward" and key not in seen:
                seen.add(key)
                ready = gathers.get(task.step - 1, {})
                known = ready if task.bucket < 0 else {task.bucket} & ready.keys()
                for bucket in known:
                    self._after(at, draft.ends[ready[bucket]])

    def _tie_step(self) -> None:
        """Let what `step()` hands over come after that: in line, or when it is told."""
        draft = self.draft
        handed: dict[int, int] = {}
        in_line: dict[int, int] = {}
        for at in self.compute:
            task = draft.tasks[at]
            if task.kind == "submit":
                handed[task.step] = at
            elif task.kind == "wait" and task.bucket < 0:
                in_line.setdefault(task.step, at)
        for at in self.hooks:
            task = draft.tasks[at]
            if task.step in handed and task.kind in ("step", "gather"):
                self._after(at, draft.starts[handed[task.step]])
            elif task.step in in_line and task.bucket >= 0:
                self._after_wait(at, in_line[task.step])

    def _after_wait(self, at: int, wait: int) -> None:
        """Let a hook that runs inside a wait of the compute lane begin after the wait."""
        task, outer = self.draft.tasks[at], self.draft.tasks[wait]
        if outer.start_s <= task.start_s and task.end_s <= outer.end_s:
            self._after(at, self.draft.starts[wait])

    def _tie_input(self, num_loaders: int) -> None:
        """Let batches that are loaded ahead of use come from loaders, which go on meanwhile.

        A batch that was waited for is ready so long after the same loader's last one, or after the
        batch before it was taken if that one was not waited for.
        """
        draft, builder = self.draft, self.draft.builder
        inputs = [at for at in self.compute if draft.tasks[at].kind == "input"]
        in_step = Counter(draft.tasks[at].step for at in inputs)
        apart = -(-num_loaders // max(in_step.values(), default=1)) if num_loaders > 1 else 0
        ready: list[tuple[int, int]] = []
        before = 0
        for at in inputs:
            task = draft.tasks[at]
            known = [one for step, one in ready if 0 <= task.step - apart - step <= 1]
            after, before = known[-1] if known else before, draft.starts[at]
            if task.end_s - task.start_s >= _WAITED_S:
                ready.append((task.step, builder.add(task.end_s, NUMBER["input"], at, [after])))
                builder.classes[draft.ends[at]] = NUMBER["between"]
                builder.before[draft.ends[at]].append(ready[-1][1])
            ready = ready[-num_loaders - 2 :]

    def _tie_queue(self) -> None:
        """On the virtual clock the comm lane runs one hook after the other."""
        for at, later in zip(self.hooks, self.hooks[1:], strict=False):
            self._after(later, self.draft.ends[at])

    def _tie_requests(self) -> None:
        """On the virtual clock a task that nothing else has held up was asked for at that moment.

        Exchanges of activations always begin when the compute lane asks for them.
        """
        draft, time_s = self.draft, self.draft.builder.time_s
        number, last = 0, -1
        for at in sorted(self.comm, key=lambda at: _begun(draft.tasks[at])):
            task, start = draft.tasks[at], draft.starts[at]
            while number < len(self.compute) and self._is_before(self.compute[number], task):
                last = draft.ends[self.compute[number]]
                number += 1
            held_s = max((time_s[one] for one in draft.builder.before[start]), default=-1.0)
            is_asked = task.kind == "activations" or held_s < task.start_s
            if last >= 0 and is_asked and task.kind != "serve":
                self._after(at, last)

    def _tie_activations(self) -> None:
        """On real lanes exchanges of activations begin in the middle of a compute task.

        What the task had done by then is a cost of its own; the rest goes on beside the exchange.
        """
        draft, builder, tasks = self.draft, self.draft.builder, self.draft.tasks
        works = [at for at in self.compute if tasks[at].kind != "wait"]
        number, last = 0, 0
        for at in sorted(self.comm, key=lambda at: _begun(tasks[at])):
            start_s = tasks[at].start_s
            if tasks[at].kind != "activations":
                continue
            while number < len(works) and tasks[works[number]].start_s <= start_s:
                last = draft.starts[works[number]]
                number += 1
            if not number:
                continue
            work = works[number - 1]
            if tasks[work].end_s > start_s:
                last = builder.add(start_s, class_of_task(tasks[work]), work, [last])
                builder.before[draft.ends[work]].append(last)
            else:
                last = draft.ends[work]
            self._after(at, last)

    def _is_before(self, compute: int, task: Task) -> bool:
        found = self.draft.tasks[compute]
        return found.end_s <= task.start_s and found.number < task.number


def _begun(task: Task) -> tuple[float, int]:
    return task.start_s, task.number
