"""Strategies by hand: a few ranks in virtual time, one bucket of a few numbers, given gradients."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from syncline.comm.base import Partials, Strips
from syncline.comm.virtual import VirtualWorld
from syncline.contract import Saved, UpdateSettings
from syncline.engine.bucket import Bucket, Slot
from syncline.engine.optimizer import OptimizerOnStrip, Reach, snapshot
from syncline.engine.share import Share, make_plan, world_of
from syncline.engine.state import gather_optimizer_state
from syncline.engine.strip_state import spread_keys
from syncline.virtual.clock import Clock
from worlds import cluster

START_S = 10.0
ROUND_S = 1.0
LATENCY_S = 1e-3


class Toy:
    """What a strategy sees of a replica: buckets with one parameter each, "x" if there is one."""

    def __init__(self, comm, plan, start, optimizer, total_steps, split=None):
        self.total_steps = total_steps
        names = [f"x{number}" for number in range(len(split))] if split else ["x"]
        parameters = [Parameter(part) for part in torch.tensor(start).split(split or len(start))]
        self._optimizer = optimizer(parameters)
        self.settings = snapshot(self._optimizer)
        part = Share(plan, comm).families[0]
        self.buckets = []
        for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            size = parameter.numel()
            memory, slot = comm.allocate(size, torch.float32), comm.allocate(size, torch.float32)
            memory.mine.copy_(parameter.detach())
            cuts = (0, *[size] * part.comm.size)
            bucket = Bucket(
                number,
                [Slot(name, parameter, number)],
                size,
                torch.float32,
                family=plan.families[0],
                channel=0,
                part=part,
                parameters=Strips(memory, cuts),
                gradient=Partials([slot], cuts, part.spread, 1.0),
                ready=None,
            )
            bucket.optimizer = self.optimizer_of(bucket, memory.mine, slot.mine, 0, size)
            self.buckets.append(bucket)
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]

    def optimizer_of(self, bucket, parameters, gradient, low, high):
        memory = (parameters, gradient)
        return OptimizerOnStrip(
            self._optimizer, bucket, memory, low, high, Reach.ELEMENT, lambda slot: 0
        )

    def cut(self, bucket, owns):
        # Real strips end at whole blocks, so all of this small one would be one rank's.
        size, num_owners = bucket.num_elements, sum(owns)
        cuts = [size * number // num_owners for number in range(num_owners + 1)]
        return tuple(cuts[sum(owns[:position])] for position in range(len(owns) + 1))

    def flat_buffers(self):
        return torch.empty(0, dtype=torch.float64)

    @property
    def bucket(self):
        return self.buckets[0]

    @property
    def values(self):
        return torch.cat([bucket.parameters.memory.mine for bucket in self.buckets])

    def step(self, strategy, number, gradient):
        """Take one step, as the engine does."""
        sizes = [bucket.num_elements for bucket in self.buckets]
        for bucket, part in zip(self.buckets, gradient.split(sizes), strict=True):
            bucket.gradient.sums[0].mine.copy_(part)
        for bucket in reversed(self.buckets):
            strategy.gradient_ready(bucket)
        strategy.step_entered(number)
        for bucket in self.buckets:
            strategy.before_use(bucket, UpdateSettings(self.settings, frozenset()))
            bucket.step += 1


def play(
    make,
    starts,
    gradients,
    lr=1.0,
    momentum=0.0,
    delays=None,
    round_s=ROUND_S,
    rate=1e9,
    death=None,
    keeps_state=False,
    saved=None,
    optimizer=None,
    split=None,
    first=0,
    total_steps=None,
    states=None,
    gathers=(),
):
    """Let ranks take steps, one round each second; return all values after each round.

    `gradients[rank][step]` is a list of numbers, or a function of the rank's present values.
    `lr` may be a list, by rank. `delays[rank]` is how much later in each round a rank acts.
    Messages take `LATENCY_S`, and what their bytes take at `rate`. `death` is a rank, and when it
    dies after the first round began. Returns the values of every rank after each
    round, by round, and the strategies; with `keeps_state` these have the optimizer's last state.
    `saved` is what each rank goes on from, `states` the optimizer's state on each, `first` the
    number of its next step; the run has `total_steps`, if it does not end here. `optimizer(lr)`
    returns a function of parameters, instead of SGD. `split` are the sizes of several buckets.
    After the rounds in `gathers` the ranks gather what represents the run: `strategy.gathered`. A
    rank that only serves takes no steps.
    """

    def sgd(lr):
        return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)

    clock = Clock()
    size, steps = len(starts), len(gradients[0])
    links = cluster(size, rate=rate, latency_s=LATENCY_S)
    world = VirtualWorld(clock, links, learns=True, algorithm="direct")
    rounds = [[None] * size for _ in range(steps)]
    strategies = [make() for _ in range(size)]

    def run(rank):
        comm, strategy = world.communicator(rank), strategies[rank]
        plan = make_plan(strategy, world_of(comm), [], strategy.settings.num_workers(size))
        of_rank = lr[rank] if isinstance(lr, list) else lr
        make_optimizer = (optimizer or sgd)(of_rank)
        toy = Toy(comm, plan, starts[rank], make_optimizer, total_steps or first + steps, split)
        for bucket in toy.buckets:
            bucket.step = first
        whole = strategy.whole = strategy.start(toy, comm, saved[rank] if saved else Saved())
        strategy.gathered = []
        for bucket in toy.buckets:
            if states and states[rank]:
                spread = spread_keys(states[rank], bucket.slots)
                bucket.optimizer.load_state(states[rank], spread)
        if whole is not None:
            whole.open()
        clock.sleep(START_S - clock.now_s)
        for step in range(steps):
            if plan.shards[rank]:
                begins_s = START_S + step * round_s + (delays or [0.0] * size)[rank]
                clock.sleep(max(0.0, begins_s - clock.now_s))
                given = gradients[rank][step]
                gradient = given(toy.values) if callable(given) else torch.tensor(given)
                toy.step(strategy, first + step, gradient)
                rounds[step][rank] = toy.values.tolist()
            if step in gathers:
                strategy.gathered.append(whole.gather(is_wanted=True))
        if keeps_state:
            state = whole.gather_state(is_wanted=True)
            strategy.last_state = state or gather_optimizer_state(toy.slots, toy.buckets)
        strategy.last = whole.gather(is_wanted=True)

    processes = [clock.spawn(f"rank {rank}", run, rank) for rank in range(size)]

    def die(rank):
        clock.kill(processes[rank])
        world.die(world.endpoints[rank], " (died)")

    if death is not None:
        rank, after_s = death
        clock.at(START_S + after_s, die, rank)
    clock.run()
    return rounds, strategies
