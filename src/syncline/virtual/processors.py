"""Cores in virtual time: lanes that compute share them, and work of comm lanes takes from them.

Lanes that compute at the same time get equal parts of the cores (processor sharing: Kleinrock,
"Queueing Systems" II, section 4.4), never more than their own threads use. Work of a comm lane
comes first, as a thread that wakes does: while it needs a core that is not free, the lanes that
compute lose it. So it is charged to them at once, and takes no time of its own here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.virtual.clock import Clock, Signal

if TYPE_CHECKING:
    from syncline.cluster import Cluster


class Cores:
    """The cores of all machines of a cluster, by the ranks that compute on them."""

    def __init__(self, clock: Clock, cluster: Cluster, threads: int) -> None:
        """Each rank computes with so many threads. Without a number of cores none is waited for."""
        self._clock, self._cluster = clock, cluster
        self._by_rank: list[Processors] = []
        if cluster.shares_cores and cluster.cores is not None:
            computers = 1 if cluster.one_computer else cluster.machines
            found = [Processors(clock, cluster.cores, threads) for _ in range(computers)]
            machines = (rank // cluster.ranks_per_machine for rank in range(cluster.ranks))
            self._by_rank = [found[machine % computers] for machine in machines]

    def compute(self, rank: int, seconds: float) -> None:
        """Let a rank compute inside a process, for so many seconds if each thread has a core."""
        if not seconds:
            return
        if self._by_rank:
            self._by_rank[rank].compute(seconds)
        else:
            self._clock.sleep(seconds)

    def take(self, rank: int, core_s: float) -> None:
        """Let a rank's comm lane use a core for so long, which lanes that compute may lose."""
        if self._by_rank and not self._clock.is_measuring:
            self._by_rank[rank].take(core_s)

    def take_for_call(self, caller: int, num_bytes: float, *, is_answer: bool) -> None:
        """Let the caller of a window function use a core for a message across machines.

        `message_s` is of both ways. What the owner does for the call is its time to serve it.
        """
        message_s = 0.0 if is_answer else self._cluster.message_s
        self.take(caller, message_s + num_bytes * self._cluster.byte_s)


class _Work:
    __slots__ = ("done", "left_s")

    def __init__(self, seconds: float, done: Signal) -> None:
        self.left_s = seconds
        """With a core for each thread."""
        self.done = done


class Processors:
    """The cores of a computer, on which lanes compute with some threads each."""

    def __init__(self, clock: Clock, cores: int, threads: int) -> None:
        self._clock = clock
        self._cores = cores
        self._threads = threads
        self._works: list[_Work] = []
        """What is computed now."""
        self._since_s = 0.0
        """When what is left was known."""
        self._plan = 0
        """Counts plans for the next end: an older one is void."""

    def compute(self, seconds: float) -> None:
        """Compute inside a process, for so many seconds if it alone has the cores."""
        self._settle()
        work = _Work(seconds, Signal(self._clock))
        self._works.append(work)
        self._plan_end()
        work.done.wait(lambda: "computes")

    def take(self, core_s: float) -> None:
        """Let another thread work for so long."""
        if not self._works or not core_s:
            return
        self._settle()
        wanted = len(self._works) * self._threads
        lost_s = core_s * min(1, max(0, wanted + 1 - self._cores))
        for work in self._works:
            work.left_s += lost_s / wanted
        self._plan_end()

    @property
    def _rate(self) -> float:
        """The part of its full speed at which each lane computes."""
        return min(1.0, self._cores / (len(self._works) * self._threads))

    def _settle(self) -> None:
        """Take off what was computed since the last time."""
        now_s = self._clock.now_s
        if self._works:
            done_s = (now_s - self._since_s) * self._rate
            for work in self._works:
                work.left_s = max(0.0, work.left_s - done_s)
        self._since_s = now_s

    def _plan_end(self) -> None:
        """Plan the end of what ends first."""
        self._plan += 1
        if self._works:
            after_s = min(work.left_s for work in self._works) / self._rate
            self._clock.after(after_s, self._end, self._plan)

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        # What was planned to end ends, whatever rounding would leave of it.
        least_s = min(work.left_s for work in self._works)
        ended = [work for work in self._works if work.left_s <= least_s + 1e-12]
        self._settle()
        self._works = [work for work in self._works if work not in ended]
        for work in ended:
            work.done.set()
        self._plan_end()
