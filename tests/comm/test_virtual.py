"""When virtual ranks come out of their collectives, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from syncline.cluster import Link
from syncline.comm.base import Blocks, Partials, Strips
from syncline.comm.tree import Spread
from syncline.comm.virtual import VirtualWorld
from syncline.contract import UpdateSettings
from syncline.sim.timing import TimedOptimizer
from syncline.virtual.clock import Clock
from worlds import cluster

INSIDE = Link(latency_s=0.01, rate_bytes_per_s=1e6)


def run_timed(size, machines, work, has_fast_links=False, learns=True, **costs):
    """Run work(comm, clock) on virtual ranks whose network carries 1000 bytes a second."""
    clock = Clock()
    cluster_ = cluster(size, size // machines, rate=1000.0, inside=INSIDE, **costs)
    options = {"learns": learns, "algorithm": "direct", "has_fast_links": has_fast_links}
    world = VirtualWorld(clock, cluster_, **options)
    results = {}

    def run(rank):
        results[rank] = work(world.communicator(rank), clock)

    for rank in range(size):
        clock.spawn(f"rank {rank}", run, rank)
    clock.run()
    return [results[rank] for rank in range(size)]


def test_a_dedicated_server_takes_in_and_gives_out_what_every_worker_has():
    workers, num_elements = 4, 500  # 2000 bytes a worker, so 2 s of wire each

    def work(comm, clock):
        spread = Spread(workers, (*(((k, k + 1),) for k in range(workers)), ()))
        cuts = (0,) * (workers + 1) + (num_elements,)
        partials = Partials([comm.allocate(num_elements, torch.float32)], cuts, spread, 1.0)
        partials.sums[0].mine.fill_(1.0 + comm.position)
        comm.reduce_scatter(partials)
        reduced_s = clock.now_s
        memory = comm.allocate(num_elements, torch.float32)
        if comm.position == workers:
            memory.mine.copy_(partials.sums[0].mine)
        comm.all_gather(Strips(memory, cuts))
        return reduced_s, clock.now_s, memory.mine.unique().tolist()

    n_s_beta = workers * 2.0
    total = [1.0 + 2.0 + 3.0 + 4.0]
    expected = (pytest.approx(n_s_beta), pytest.approx(2 * n_s_beta), total)
    assert run_timed(workers + 1, workers + 1, work) == [expected] * (workers + 1)


def test_the_end_of_lending_is_a_meeting_of_the_machine_s_ranks():
    def work(comm, clock):
        clock.sleep(float(comm.endpoint.rank))
        comm.end_lending()
        return clock.now_s

    # Rank r comes after r seconds. On one machine all wait for the last.
    assert run_timed(4, 1, work) == pytest.approx([3.01] * 4)
    # On two machines those of the first do not wait for the second.
    assert run_timed(4, 2, work) == pytest.approx([1.01, 1.01, 3.01, 3.01])
    # Where each has its own, nobody waits.
    assert run_timed(4, 4, work) == pytest.approx([0.0, 1.0, 2.0, 3.0])


def test_collectives_of_two_channels_may_overtake_each_other():
    def work(comm, clock):
        found = []
        for channel in (1, 2) if comm.position else (2, 1):
            comm.endpoint.channel = channel
            clock.spawn(f"channel {channel}", broadcast_on, comm, channel, found)
            clock.sleep(0.1)
        clock.sleep(5.0)
        return found

    def broadcast_on(comm, channel, found):
        tensor = torch.tensor([float(channel)])
        comm.broadcast(tensor, 0)
        found.append((channel, tensor.item()))

    assert [sorted(found) for found in run_timed(2, 2, work)] == [[(1, 1.0), (2, 2.0)]] * 2


@pytest.mark.parametrize("learns", [True, False])
def test_an_exchange_of_blocks_takes_its_time_with_and_without_numbers(learns):
    device = "cpu" if learns else "meta"

    def work(comm, clock):
        blocks, ends = Blocks((500,) * 3, (1,) * 3), []
        for is_gather in (False, True):
            sends = [torch.full((125,), 1.0 + comm.position, device=device) for _ in range(3)]
            receives = [torch.zeros(5, 25, device=device) for _ in range(3)]
            clock.sleep(float(comm.position))
            comm.all_to_all(sends[:1] * 3 if is_gather else sends, receives, blocks)
            ends.append(clock.now_s)
            peer = (comm.position + 1) % 3
            assert not learns or receives[peer].unique().tolist() == [1.0 + peer]
        return [ends[0], ends[1] - ends[0]]

    # The last rank comes after 2 s. On three machines 1000 bytes leave each of them in 1 s.
    assert run_timed(3, 3, work, learns=learns) == [pytest.approx([3.0, 3.0])] * 3
    # On one machine a rank stages 1000 bytes, or 500 that are for both peers, and reads 1000.
    found = run_timed(3, 1, work, learns=learns)
    assert found == [pytest.approx([2.0 + 0.012, 2.0 + 0.0115], rel=1e-9)] * 3


COSTS = {"message_s": 0.25, "collective_s": 2.0}


def test_messages_and_collectives_cost_their_time():
    def work(comm, clock):
        comm.broadcast(torch.zeros(250), 0)  # 1000 bytes to each of two peers: 2 s of wire
        return clock.now_s

    assert run_timed(3, 3, work, **COSTS) == pytest.approx([2.0 + 2 * 0.25 + 2.0] * 3)


def test_a_rank_sends_the_messages_of_its_calls_one_after_the_other():
    served = {}

    def work(comm, clock):
        window = comm.window(
            0, torch.float32, {"note": lambda call: served.setdefault(comm.position, clock.now_s)}
        )
        comm.barrier()
        began_s = clock.now_s
        if comm.position == 0:
            for pending in [window.call(position, "note") for position in (1, 2, 3)]:
                pending.wait()
        return began_s, clock.now_s

    found = run_timed(4, 4, work, **COSTS)
    began_s, ended_s = found[0]
    assert [served[at] - began_s for at in (1, 2, 3)] == pytest.approx([0.25, 0.5, 0.75])
    assert ended_s - began_s == pytest.approx(0.75 + 0.25)  # the answer to the last is one, too


@pytest.mark.parametrize("is_fast", [False, True])
def test_messages_to_a_rank_keep_their_order_those_to_several_share_the_link(is_fast):
    def work(comm, clock):
        window = comm.window(0, torch.float32, {"take": lambda call: 0})
        values, ends = comm.allocate(250, torch.float32), []
        comm.barrier()
        began_s = clock.now_s
        if comm.position == 0:
            for pending in [window.call(position, "take", values) for position in (1, 1, 2)]:
                pending.wait()
                ends.append(clock.now_s - began_s)
        return ends

    # 1000 bytes a second. The first to rank 1 and the one to rank 2 share the link for 2 s; then
    # the second to rank 1 has it alone.
    found = run_timed(3, 3, work, is_fast, latency_s=0.0, update_bytes_per_s=float("inf"))
    assert found[0] == pytest.approx([2.0, 3.0, 3.0])


def test_serving_and_the_owner_s_own_work_take_turns_on_its_comm_lane():
    def work(comm, clock):
        window = comm.window(0, torch.float32, {"take": lambda call: 0})
        comm.barrier()
        began_s, ends = clock.now_s, []
        if comm.position == 0:
            update = TimedOptimizer(comm.endpoint, None, 5.0)
            for _ in range(2):
                update.run(UpdateSettings([], frozenset()))
                ends.append(clock.now_s - began_s)
        else:
            clock.sleep(1.0)
            window.call(0, "take", comm.allocate(250, torch.float32)).wait()
            ends.append(clock.now_s - began_s)
        return ends

    # The call leaves at 1 s, its 1000 bytes have arrived at 2 s. Rank 0 is busy until 5 s, then
    # reads them for 2 s; only then it begins its second update.
    assert run_timed(2, 2, work, update_bytes_per_s=500.0) == [
        pytest.approx([5.0, 12.0], abs=0.01),
        pytest.approx([7.0], abs=0.01),
    ]
    # On one machine it reads the caller's memory, 10^6 bytes a second, after 10 ms of latency each.
    found = run_timed(2, 1, work)
    assert found == [pytest.approx([5.0, 10.001]), pytest.approx([5.011])]


def test_a_get_keeps_its_owner_busy_across_machines_only():
    def work(comm, clock):
        window = comm.window(250, torch.float32, {})
        window.publish(torch.zeros(250))
        comm.barrier()
        began_s = clock.now_s
        if comm.position == 0:
            for pending in [window.get(1), window.get(1)]:
                pending.wait()
        return clock.now_s - began_s

    # Each is served for 2 s, and the first one's answer is on the wire while the second is served.
    found = run_timed(2, 2, work, update_bytes_per_s=500.0)
    assert found[0] == pytest.approx(2 * 2.0 + 1.0, abs=0.01)
    found = run_timed(2, 1, work, update_bytes_per_s=500.0)
    assert found[0] == pytest.approx(0.02 + 2 * 0.001)
