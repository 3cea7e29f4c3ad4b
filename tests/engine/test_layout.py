"""A layout is a pure function of sizes, plan and groups."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.comm.hub import ALONE
from syncline.contract import Family, Plan, World, deal
from syncline.engine.bucket import is_dense
from syncline.engine.clip import block_squares
from syncline.engine.layout import (
    BLOCK_ELEMENTS,
    INLINE_BYTES,
    Shape,
    Wishes,
    choose,
    cut,
    lay_out,
)
from syncline.sizes import BY_SIZE, ByLayer, InOne, Size, aligned_elements

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
FOUR = World(((0, 1, 2, 3),))


def plan_of(*families, overlap=None):
    return Plan(families or (Family(FOUR.everybody),), deal(4, 4, 4), overlap=overlap)


def sizes_of(numbers, **settings):
    return tuple(Size(f"layer{i // 2}.p{i}", i, n, **settings) for i, n in enumerate(numbers))


def laid_out(given_sizes, plan=None, shapes=None, **settings):
    plan = plan or plan_of()
    settings = {
        "overlap": True,
        "bucket_bytes": 1 << 30,
        "cores": 8,
        "inside_parameters": True,
    } | settings
    return lay_out(tuple(given_sizes), plan, shapes or (Shape(4),) * len(plan.families), **settings)


def spans_of(place, given_sizes):
    by_number = {size.number: size for size in given_sizes}
    return list(zip(place.offsets, (by_number[n].num_elements for n in place.numbers), strict=True))


@given(sizes, st.integers(1, 100_000))
def test_every_parameter_lies_in_one_bucket_aligned_and_apart(numbers, bucket_bytes):
    layout = laid_out(sizes_of(numbers), bucket_bytes=bucket_bytes)
    assert [n for place in layout.places for n in place.numbers] == list(range(len(numbers)))
    for index, place in enumerate(layout.places):
        assert place.index == index
        end = 0
        for offset, length in spans_of(place, sizes_of(numbers)):
            assert offset * 4 % 128 == 0
            assert offset >= end
            end = offset + length
        assert place.num_elements >= end
        payload = sum(numbers[number] for number in place.numbers) * 4
        assert payload <= bucket_bytes + 128 * len(place.numbers) or len(place.numbers) == 1


@given(sizes, st.lists(st.booleans(), min_size=1, max_size=9).filter(any), st.booleans())
def test_strips_cover_the_bucket_and_end_at_blocks(numbers, owns, inside):
    (place,) = laid_out(sizes_of(numbers)).places
    spans = tuple(spans_of(place, sizes_of(numbers)))
    cuts = cut(spans, place.num_elements, tuple(owns), inside_parameters=inside)
    assert len(cuts) == len(owns) + 1
    assert (cuts[0], cuts[-1]) == (0, place.num_elements)
    assert list(cuts) == sorted(cuts)
    pieces = 0
    for (low, high), owner in zip(itertools.pairwise(cuts), owns, strict=True):
        assert owner or low == high
        for offset, length in spans:
            start, stop = max(low, offset), min(high, offset + length)
            if start < stop:
                pieces += stop - start
                assert (start - offset) % BLOCK_ELEMENTS == 0
                assert inside or stop - start == length
    assert pieces == sum(numbers)


def test_strips_are_nearly_equal_where_they_may_be_cut_anywhere():
    cuts = cut(((0, 1_000_000),), 1_000_000, (True,) * 7, inside_parameters=True)
    lengths = [high - low for low, high in itertools.pairwise(cuts)]
    assert max(lengths) - min(lengths) <= 2 * BLOCK_ELEMENTS


@pytest.mark.parametrize("rule", [BY_SIZE, ByLayer(), InOne()])
def test_types_are_kept_apart(rule):
    half = Size("layer1.p2", 2, 5, element_bytes=2, dtype="bfloat16")
    layout = laid_out([*sizes_of([5, 5]), half], plan_of(Family(FOUR.everybody, buckets=rule)))
    assert [place.numbers for place in layout.places] == [(0, 1), (2,)]


def test_parameters_without_use_are_sent_last():
    idle = Size("layer9.p4", 4, 7, is_used=False)
    layout = laid_out([*sizes_of([40, 40, 40, 40]), idle], bucket_bytes=420)
    assert [place.numbers for place in layout.places] == [(0, 1), (2, 3), (4,)]
    assert layout.send_order == (1, 0, 2)


def test_families_share_one_order_and_each_has_its_own_strips():
    pairs = ((0, 2), (1, 3))
    odd = Family(pairs, parameters=frozenset({1, 3}))
    layout = laid_out(
        sizes_of([2000] * 4), plan_of(odd, Family(FOUR.everybody)), (Shape(2), Shape(4))
    )
    assert [(place.family, place.numbers) for place in layout.places] == [(1, (0, 2)), (0, (1, 3))]
    assert [len(place.cuts) for place in layout.places] == [5, 3]


def test_inline_a_machine_has_no_more_owners_than_cores():
    inline = laid_out(sizes_of([100_000]), overlap=False, cores=2)
    assert [high > low for low, high in itertools.pairwise(inline.places[0].cuts)] == [
        True,
        True,
        False,
        False,
    ]
    overlapped = laid_out(sizes_of([100_000]), cores=2)
    assert all(high > low for low, high in itertools.pairwise(overlapped.places[0].cuts))


def test_neighbours_get_different_channels_where_there_are_several():
    layout = laid_out(sizes_of([100] * 6), shapes=(Shape(4, num_channels=5),), bucket_bytes=1)
    assert [place.channel for place in layout.places] == [1, 2, 3, 4, 1, 2]
    assert layout.step_channel == 0
    assert laid_out(sizes_of([100])).step_channel == ALONE


@given(st.integers(1, 1 << 30), st.sampled_from([None, True, False]), st.sampled_from([None, 4096]))
def test_wishes_are_granted_unless_the_plan_says_otherwise(total, overlap, bucket_bytes):
    wishes = Wishes(overlap, bucket_bytes)
    found = choose(total, plan_of(), wishes)
    assert found[0] == (total >= INLINE_BYTES if overlap is None else overlap)
    assert bucket_bytes in (None, found[1])
    assert choose(total, plan_of(overlap=True), wishes)[0] is True
    assert choose(total, plan_of(overlap=False), wishes)[0] is False


@given(st.integers(1, 20_000), st.integers(0, 5), st.integers(0, 2**31))
def test_block_norms_do_not_depend_on_where_a_strip_is_cut(length, at_block, seed):
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    at = min(at_block * BLOCK_ELEMENTS, length)
    parts = [part for part in (values[:at], values[at:]) if part.numel()]
    assert torch.equal(torch.cat([block_squares(part) for part in parts]), block_squares(values))


def test_dense_means_no_holes_and_no_overlap_in_any_order():
    assert is_dense(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert is_dense(torch.zeros(3, 4).t())
    assert not is_dense(torch.zeros(3, 4)[:, :2])
    assert not is_dense(torch.zeros(1).expand(3))


@given(st.integers(1, 5000), st.sampled_from([2, 4, 8]))
def test_a_parameter_takes_up_whole_lines(num_elements, element_bytes):
    taken = aligned_elements(Size("p", 0, num_elements, element_bytes))
    assert taken * element_bytes % 128 == 0
    assert num_elements <= taken < num_elements + 128
