"""Strategies by hand: a few ranks in virtual time, one bucket of a few numbers, given gradients."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from syncline.comm.base import small_sum
from syncline.comm.tree import Spread
from syncline.comm.virtual import VirtualWorld
from syncline.engine.bucket import Bucket, Slot, Step, place
from syncline.engine.update import Reach, StripUpdate, snapshot
from syncline.virtual.clock import Clock
from worlds import cluster

START_S = 10.0
ROUND_S = 1.0
LATENCY_S = 1e-3


class Toy:
    """What a strategy sees of a replica: one bucket with one parameter."""

    def __init__(self, comm, group, start, optimizer):
        parameter = Parameter(torch.tensor(start))
        self._optimizer = optimizer([parameter])
        self.hyper = snapshot(self._optimizer)
        size = len(start)
        self.bucket = Bucket(0, [Slot("x", parameter, 0)], size, torch.float32)
        self.bucket.slots[0].bucket = self.bucket
        self.buckets, self.slots = [self.bucket], self.bucket.slots
        memory, slot = comm.allocate(size, torch.float32), comm.allocate(size, torch.float32)
        memory.mine.copy_(parameter.detach())
        cuts = (0, *[size] * group.size)
        place(self.bucket, memory, [slot], cuts, Spread.even(1, group.ranks))
        self.bucket.update = self.update_of(self.bucket, memory.mine, slot.mine, 0, size)
        self.flags = small_sum(group, 1, torch.float32)

    def update_of(self, bucket, parameters, gradient, low, high):
        memory = (parameters, gradient)
        return StripUpdate(
            self._optimizer, bucket, memory, low, high, Reach.ELEMENT, lambda slot: 0
        )

    def cut(self, bucket, comm, num_owners):
        # Real strips end at whole blocks, so all of this small one would be one rank's.
        size = bucket.num_elements
        cuts = [size * position // num_owners for position in range(num_owners)]
        return (*cuts, *[size] * (1 + comm.size - num_owners))

    def flat_buffers(self):
        return torch.empty(0, dtype=torch.float64)

    @property
    def values(self):
        return self.bucket.parameters.memory.mine


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
):
    """Let ranks take steps, one round each second; return all values after each round.

    `gradients[rank][step]` is a list of numbers, or a function of the rank's present values.
    `lr` may be a list, by rank. `delays[rank]` is how much later in each round a rank acts.
    Messages take `LATENCY_S`, and what their bytes take at `rate`. `death` is a rank, and when it
    dies after the first round began. Returns the values of every rank after each
    round, by round, and the strategies; with `keeps_state` these have the optimizer's last state.
    """
    clock = Clock()
    size, steps = len(starts), len(gradients[0])
    links = cluster(size, rate=rate, latency_s=LATENCY_S)
    world = VirtualWorld(clock, links, learns=True, algorithm="direct")
    rounds = [[None] * size for _ in range(steps)]
    strategies = [make() for _ in range(size)]

    def live(rank):
        comm, strategy = world.communicator(rank), strategies[rank]
        group = strategy.group(comm)
        toy = Toy(
            comm,
            group,
            starts[rank],
            lambda parameters: torch.optim.SGD(
                parameters, lr=lr[rank] if isinstance(lr, list) else lr, momentum=momentum
            ),
        )
        strategy.start(toy, comm)
        strategy.admit()
        clock.sleep(START_S - clock.now_s)
        for step in range(steps):
            begins_s = START_S + step * round_s + (delays or [0.0] * size)[rank]
            clock.sleep(max(0.0, begins_s - clock.now_s))
            given = gradients[rank][step]
            gradient = given(toy.values.clone()) if callable(given) else torch.tensor(given)
            toy.bucket.gradient.slots[0].mine.copy_(gradient)
            strategy.gradient_ready(toy.bucket)
            strategy.step_entered(Step(step, toy.flags, None))
            toy.bucket.update.hyper = toy.hyper
            strategy.before_use(toy.bucket)
            toy.bucket.step += 1
            rounds[step][rank] = toy.values.tolist()
        if keeps_state:
            strategy.last_state = strategy.gather_state(toy, comm, is_wanted=True)
        strategy.last = strategy.gather(is_wanted=True)

    processes = [clock.spawn(f"rank {rank}", live, rank) for rank in range(size)]

    def die(rank):
        clock.kill(processes[rank])
        world.die(world.endpoints[rank], " (died)")

    if death is not None:
        rank, after_s = death
        clock.at(START_S + after_s, die, rank)
    clock.run()
    return rounds, strategies
