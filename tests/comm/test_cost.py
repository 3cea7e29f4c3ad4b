"""What a collective costs, against cases worked out by hand."""

from __future__ import annotations

import pytest

from syncline.cluster import Link
from syncline.comm import cost
from syncline.comm.cost import Phase, phases, plan, seconds
from syncline.comm.limits import SMALL_BYTES
from syncline.comm.shape import shape_of
from syncline.comm.volume import COLLECTIVES, Volume

INSIDE = Link(latency_s=2e-6, rate_bytes_per_s=1e10)
ACROSS = Link(latency_s=5e-5, rate_bytes_per_s=1e9)
KB, MB = 1e3, 1e6


def time_of(what, size_bytes, machines, ranks_per_machine, algorithm="direct"):
    phases = plan(
        what,
        size_bytes,
        machines=machines,
        ranks_per_machine=ranks_per_machine,
        algorithm=algorithm,
    )
    return seconds(phases, inside=INSIDE, across=ACROSS)


@pytest.mark.parametrize("n", [2, 3, 8, 100])
def test_a_ring_all_reduce_is_the_textbook_formula(n):
    alpha, beta = ACROSS.latency_s, 1 / ACROSS.rate_bytes_per_s
    expected = 2 * (n - 1) * alpha + 2 * (n - 1) / n * 8 * MB * beta
    assert time_of("all_reduce", 8 * MB, n, 1, "ring") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 8, 100])
def test_a_direct_all_reduce_has_two_rounds_whatever_the_number_of_ranks(n):
    alpha, beta = ACROSS.latency_s, 1 / ACROSS.rate_bytes_per_s
    expected = 2 * alpha + 2 * (n - 1) / n * 8 * MB * beta
    assert time_of("all_reduce", 8 * MB, n, 1) == pytest.approx(expected, rel=1e-12)


def test_four_machines_by_hand():
    # 8 MB over 4: strips of 2 MB, 3 of them each way: 6 MB at 1 GB/s = 6 ms.
    assert time_of("reduce_scatter", 8 * MB, 4, 1) == pytest.approx(0.05e-3 + 6e-3)
    assert time_of("all_gather", 8 * MB, 4, 1) == pytest.approx(0.05e-3 + 6e-3)
    # On a ring 3 rounds instead of 1.
    assert time_of("reduce_scatter", 8 * MB, 4, 1, "ring") == pytest.approx(0.15e-3 + 6e-3)
    # Reduce: the strips, then the root gets 3 of them. Broadcast: the other way round.
    assert time_of("reduce", 8 * MB, 4, 1) == pytest.approx(2 * 0.05e-3 + 12e-3)
    assert time_of("broadcast", 8 * MB, 4, 1) == pytest.approx(2 * 0.05e-3 + 12e-3)
    assert time_of("broadcast", 8 * MB, 4, 1, "ring") == pytest.approx((1 + 3) * 0.05e-3 + 12e-3)
    # Small: 40 kB to each of 3 peers = 120 kB = 0.12 ms, in one round.
    assert time_of("all_reduce", 40 * KB, 4, 1) == pytest.approx(0.05e-3 + 0.12e-3)
    assert time_of("broadcast", 40 * KB, 4, 1) == pytest.approx(0.05e-3 + 0.12e-3)
    # A barrier: 4 bytes to each of 3 peers.
    assert time_of("barrier", 0, 4, 1) == pytest.approx(0.05e-3 + 12e-9)


def test_one_machine_of_four_by_hand():
    # 8 MB over 4: each reads 3 strips of 2 MB at 10 GB/s = 0.6 ms, after a meeting of 2 us.
    assert time_of("reduce_scatter", 8 * MB, 1, 4) == pytest.approx(2e-6 + 0.6e-3)
    # Parameters are common memory.
    assert time_of("all_gather", 8 * MB, 1, 4) == pytest.approx(2e-6)
    assert time_of("barrier", 0, 1, 4) == pytest.approx(2e-6)
    # What was summed is not: the strips are copied.
    assert time_of("all_reduce", 8 * MB, 1, 4) == pytest.approx(2 * (2e-6 + 0.6e-3))
    assert time_of("reduce", 8 * MB, 1, 4) == pytest.approx(2 * (2e-6 + 0.6e-3))
    # Small: each reads 40 kB from 3 peers = 12 us.
    assert time_of("all_reduce", 40 * KB, 1, 4) == pytest.approx(2e-6 + 12e-6)
    # Broadcast: 8 pieces of 2**20 bytes (7.63 rounded up), written, then read: 0.8 ms each.
    assert time_of("broadcast", 8 * MB, 1, 4) == pytest.approx(2 * (8 * 2e-6 + 0.8e-3))
    assert time_of("broadcast", 0, 1, 4) == 0.0


def test_two_machines_of_four_term_by_term():
    # S = 8 MB, g = 4, m = 2. Inside: a column is 2 MB, 3 peers' of it are read: 6 MB.
    # Across: a rank sends half its column, 1 MB; 4 ranks share the port: 4 MB.
    # A rank reads 2 MB of each peer; it sends 1 MB to its one peer on the other machine.
    columns = Phase("inside", 1, 6 * MB, 0, 6 * MB, 2 * MB)
    strips = Phase("across", 1, 4 * MB, 1, 8 * MB, 1 * MB)
    meeting = Phase("inside", 1, 0.0)
    two_by_four = {"machines": 2, "ranks_per_machine": 4}
    assert plan("reduce_scatter", 8 * MB, **two_by_four) == (columns, strips)
    assert plan("all_gather", 8 * MB, **two_by_four) == (strips, meeting)
    assert plan("all_reduce", 8 * MB, **two_by_four) == (columns, strips, strips, columns)
    assert plan("reduce", 8 * MB, **two_by_four) == (columns, strips, strips, columns)
    # 2 us + 6 MB / 10 GB/s + 50 us + 4 MB / 1 GB/s, twice.
    assert time_of("all_reduce", 8 * MB, 2, 4) == pytest.approx(2 * (2e-6 + 0.6e-3 + 50e-6 + 4e-3))
    # Broadcast: the root deals 4 MB to the other machine, they gather 4 MB, each machine copies.
    copies = Phase("inside", 8, 8 * MB, 0, 8 * MB, 8 * MB)
    dealt = Phase("across", 1, 4 * MB, 1, 4 * MB, 4 * MB)
    gathered = Phase("across", 1, 4 * MB, 1, 8 * MB, 4 * MB)
    assert plan("broadcast", 8 * MB, **two_by_four) == (dealt, gathered, copies, copies)
    # Barrier: 4 ranks send 4 bytes to their one peer each.
    tokens = Phase("across", 1, 16, 1, 32, 4)
    assert plan("barrier", 0, **two_by_four) == (meeting, tokens, meeting)


def time_with(what, machines, strips, sums, machine_sums=(), algorithm="direct"):
    work = Volume(strips, sums, machine_sums)
    found = phases(what, shape_of(machines), work, algorithm)
    return seconds(found, inside=INSIDE, across=ACROSS)


def one_each(size):
    """Return machines with one rank each."""
    return tuple((rank,) for rank in range(size))


@pytest.mark.parametrize("n", [1, 4, 30])
def test_one_server_of_n_workers_costs_2_n_s(n):
    # n workers with a gradient of S = 8 MB each, and a server that owns all of it and computes
    # nothing: n S come in, n S go out.
    strips, sums = (0,) * n + (8 * MB,), (1,) * n + (0,)
    both = sum(
        time_with(what, one_each(n + 1), strips, sums) for what in ("reduce_scatter", "all_gather")
    )
    alpha, beta = ACROSS.latency_s, 1 / ACROSS.rate_bytes_per_s
    assert both == pytest.approx(2 * alpha + 2 * n * 8 * MB * beta, rel=1e-12)


def test_one_owner_that_computes_too_spares_its_own_gradient():
    # 4 machines, all owned by one: 3 x 8 MB come in; of a machine of 4 the owner reads 3 x 8 MB.
    strips, sums = (0, 8 * MB, 0, 0), (1, 1, 1, 1)
    assert time_with("reduce_scatter", one_each(4), strips, sums) == pytest.approx(0.05e-3 + 24e-3)
    assert time_with("all_gather", one_each(4), strips, sums) == pytest.approx(0.05e-3 + 24e-3)
    one = (tuple(range(4)),)
    assert time_with("reduce_scatter", one, strips, sums) == pytest.approx(2e-6 + 2.4e-3)
    # A ring cuts evenly whoever owns what: 3 rounds of 2 MB.
    ring = time_with("reduce_scatter", one_each(4), strips, sums, algorithm="ring")
    assert ring == pytest.approx(3 * 0.05e-3 + 6e-3)


def test_each_partial_sum_is_charged_as_often_as_it_is_sent():
    # 3 machines own 2 MB each; the first holds two partial sums, and sends 2 x 4 MB. The others
    # get 3 strips each, of 2 MB: 6 MB. So the first one's way out is the busiest.
    strips, sums = (2 * MB,) * 3, (2, 1, 1)
    assert time_with("reduce_scatter", one_each(3), strips, sums) == pytest.approx(0.05e-3 + 8e-3)
    # A gather is of results: one of each.
    assert time_with("all_gather", one_each(3), strips, sums) == pytest.approx(0.05e-3 + 4e-3)


def test_uneven_columns_of_two_machines_by_hand():
    # 2 machines of 2 ranks; positions 0 and 1 carry column 0 (6 MB), 2 and 3 column 1 (2 MB).
    machines = ((0, 1), (2, 3))
    strips, sums, left = (5 * MB, 1 * MB, 2 * MB, 0), (1, 1, 1, 1), (1, 2)
    # Inside, ranks of column 0 read 6 MB of their one peer. The second machine has two sums left,
    # and sends twice what the first one owns: 2 x 7 MB.
    expected = 2e-6 + 0.6e-3 + 0.05e-3 + 14e-3
    assert time_with("reduce_scatter", machines, strips, sums, left) == pytest.approx(expected)
    # 7 MB go from the first machine to the second; into memory of their own, columns are copied.
    expected = 0.05e-3 + 7e-3 + 2e-6 + 0.6e-3
    assert time_with("all_gather", machines, strips, sums, left) == pytest.approx(expected)


def test_machines_with_different_numbers_of_ranks_share_their_port():
    # Ranks 0 and 1 on one machine, 2 on another, 3 MB for each: each sends 3 MB to each peer. From
    # the first machine to the second go 2 x 3 MB; inside it 3 MB each way, through its memory.
    strips, sums = (3 * MB,) * 3, (1, 1, 1)
    expected = 0.05e-3 + 6e-3 + 0.3e-3
    assert time_with("reduce_scatter", ((0, 1), (2,)), strips, sums) == pytest.approx(expected)


def test_a_ring_across_leaves_the_inside_alone():
    ring = plan("all_reduce", 9 * MB, machines=3, ranks_per_machine=3, algorithm="ring")
    # m - 1 = 2 rounds and 2/3 of 9 MB for each half.
    half = Phase("across", 2, 6 * MB, 2, 12 * MB, 3 * MB)
    columns = Phase("inside", 1, 6 * MB, 0, 6 * MB, 3 * MB)
    assert ring == (columns, half, half, columns)


@pytest.mark.parametrize("algorithm", cost.ALGORITHMS)
@pytest.mark.parametrize("what", COLLECTIVES)
def test_a_world_of_one_pays_nothing(what, algorithm):
    assert plan(what, MB, machines=1, ranks_per_machine=1, algorithm=algorithm) == ()


@pytest.mark.parametrize("algorithm", cost.ALGORITHMS)
@pytest.mark.parametrize("machines", [2, 5])
def test_halves_of_an_all_reduce_add_up_to_it_across_machines(machines, algorithm):
    world = {"machines": machines, "ranks_per_machine": 1, "algorithm": algorithm}
    halves = plan("reduce_scatter", MB, **world) + plan("all_gather", MB, **world)
    assert plan("all_reduce", MB, **world) == halves


def test_what_is_small_takes_one_round_and_more_takes_two():
    two = {"machines": 2, "ranks_per_machine": 1}
    assert len(plan("all_reduce", SMALL_BYTES, **two)) == 1
    assert len(plan("all_reduce", SMALL_BYTES + 4, **two)) == 2


def test_unknown_names_are_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"'scan'; there are all_gather, all_reduce, all_to_all"):
        plan("scan", MB, machines=2, ranks_per_machine=1)
    with pytest.raises(ValueError, match=r"'tree'; there are direct, ring"):
        plan("reduce", MB, machines=2, ranks_per_machine=1, algorithm="tree")


# -- messages --------------------------------------------------------------------------------------

MESSAGE_S, EACH_S = 3e-6, 7e-6


def with_messages(found):
    return seconds(found, inside=INSIDE, across=ACROSS, message_s=MESSAGE_S, collective_s=EACH_S)


@pytest.mark.parametrize("n", [2, 3, 8, 1024])
def test_a_direct_collective_pays_n_minus_1_messages_and_once_for_itself(n):
    world = {"machines": n, "ranks_per_machine": 1}
    alpha, beta = ACROSS.latency_s, 1 / ACROSS.rate_bytes_per_s
    half = alpha + (n - 1) * MESSAGE_S + (n - 1) / n * 8 * MB * beta
    for what in ("reduce_scatter", "all_gather"):
        assert with_messages(plan(what, 8 * MB, **world)) == pytest.approx(EACH_S + half)
    assert with_messages(plan("all_reduce", 8 * MB, **world)) == pytest.approx(EACH_S + 2 * half)
    # A small vector: one message with all of it to each peer.
    small = EACH_S + alpha + (n - 1) * (MESSAGE_S + 40 * KB * beta)
    assert with_messages(plan("all_reduce", 40 * KB, **world)) == pytest.approx(small)
    # On a ring a rank sends one message in each of n - 1 rounds.
    ring = plan("reduce_scatter", 8 * MB, **world, algorithm="ring")
    expected = EACH_S + (n - 1) * (alpha + MESSAGE_S) + (n - 1) / n * 8 * MB * beta
    assert with_messages(ring) == pytest.approx(expected)


def test_only_messages_to_other_machines_cost():
    assert with_messages(plan("all_reduce", 8 * MB, machines=1, ranks_per_machine=4)) == (
        time_of("all_reduce", 8 * MB, 1, 4)
    )
    # 3 machines of 4: a rank exchanges with its column's two others, twice.
    found = with_messages(plan("all_reduce", 9 * MB, machines=3, ranks_per_machine=4))
    assert found == pytest.approx(time_of("all_reduce", 9 * MB, 3, 4) + EACH_S + 2 * 2 * MESSAGE_S)


@pytest.mark.parametrize("n", [1, 4, 30])
def test_one_server_handles_a_message_of_each_worker(n):
    strips, sums = (0,) * n + (8 * MB,), (1,) * n + (0,)
    for what in ("reduce_scatter", "all_gather"):
        found = phases(what, shape_of(one_each(n + 1)), Volume(strips, sums))
        assert [phase.messages for phase in found] == [n]


def test_ranks_of_one_machine_in_a_network_group_send_each_other_no_messages():
    found = phases("reduce_scatter", shape_of(((0, 1), (2,))), Volume((3 * MB,) * 3, (1, 1, 1)))
    # Rank 2 sends to two ranks of the other machine; these send to rank 2 alone.
    assert [phase.messages for phase in found if phase.where == "across"] == [2]


# -- levels ----------------------------------------------------------------------------------------


def test_a_half_duplex_link_carries_both_ways_one_after_the_other():
    # 8 MB on 4 machines: each sends 6 MB and gets 6 MB. A server of 3 workers gets 3 x 8 MB only.
    half = Link(latency_s=5e-5, rate_bytes_per_s=1e9, duplex="half")
    found = plan("reduce_scatter", 8 * MB, machines=4, ranks_per_machine=1)
    assert seconds(found, inside=INSIDE, across=half) == pytest.approx(0.05e-3 + 12e-3)
    assert seconds(found, inside=half, across=ACROSS) == pytest.approx(0.05e-3 + 6e-3)
    served = phases(
        "reduce_scatter", shape_of(one_each(4)), Volume((0, 0, 0, 8 * MB), (1, 1, 1, 0))
    )
    assert seconds(served, inside=INSIDE, across=half) == pytest.approx(0.05e-3 + 24e-3)


def test_small_messages_move_at_the_rate_of_their_size():
    # 1 MB messages at 0.5 GB/s, larger ones at 1 GB/s: 8 MB on 8 machines is 7 messages of 1 MB.
    by_size = Link(latency_s=0, rate_bytes_per_s=1e9, rates=((1 * MB, 0.5e9), (4 * MB, 1e9)))
    for size, expected in ((8 * MB, 14e-3), (32 * MB, 28e-3), (64 * MB, 56e-3)):
        found = plan("all_gather", size, machines=8, ranks_per_machine=1)
        assert seconds(found, inside=INSIDE, across=by_size) == pytest.approx(expected)


COPIES = Link(latency_s=1e-5, rate_bytes_per_s=1e10)


@pytest.mark.parametrize(
    ("what", "machines", "ranks_per_machine", "copied"),
    [
        # 8 MB to the host, a strip of 2 MB back; then the other way round.
        ("reduce_scatter", 4, 1, (8 * MB, 2 * MB)),
        ("all_gather", 4, 1, (2 * MB, 8 * MB)),
        ("all_reduce", 4, 1, (8 * MB, 8 * MB)),
        ("broadcast", 4, 1, (8 * MB, 8 * MB)),
        # Four ranks of a machine carry 2 MB each, on two machines 1 MB for each rank.
        ("reduce_scatter", 2, 4, (2 * MB, 1 * MB)),
        ("all_reduce", 2, 4, (2 * MB, 2 * MB)),
        # Each rank sends 2 MB to each of 3 peers.
        ("all_to_all", 4, 1, (6 * MB, 6 * MB)),
    ],
)
def test_ranks_with_a_device_copy_before_and_after_an_exchange(
    what, machines, ranks_per_machine, copied
):
    world = {"machines": machines, "ranks_per_machine": ranks_per_machine}
    without = plan(what, 8 * MB, **world)
    found = plan(what, 8 * MB, **world, has_copies=True)
    assert [one for one in found if one.where != "copy"] == list(without)
    across = [at for at, one in enumerate(found) if one.where == "across"]
    copies = [at for at, one in enumerate(found) if one.where == "copy"]
    assert copies == [across[0] - 1, across[-1] + 1]
    assert tuple(found[at].num_bytes for at in copies) == copied
    links = {"inside": INSIDE, "across": ACROSS}
    more_s = seconds(found, **links, copies=COPIES) - seconds(without, **links)
    assert more_s == pytest.approx(2 * 1e-5 + sum(copied) / 1e10)


def test_nothing_is_copied_for_barriers_or_inside_a_machine():
    barrier = plan("barrier", 8 * MB, machines=4, ranks_per_machine=1, has_copies=True)
    inside = plan("all_reduce", 8 * MB, machines=1, ranks_per_machine=4, has_copies=True)
    assert {one.where for one in barrier} == {"across"}
    assert {one.where for one in inside} == {"inside"}
