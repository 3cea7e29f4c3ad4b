"""Layout is a pure function of sizes."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from syncline.engine.bucket import (
    BLOCK_ELEMENTS,
    Slot,
    cut_buckets,
    cut_strips,
    is_dense,
    pieces_of,
)
from syncline.engine.clip import block_squares

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=12)


def slots_of(numbers, dtype=torch.float32):
    return [Slot(f"p{i}", Parameter(torch.zeros(n, dtype=dtype)), i) for i, n in enumerate(numbers)]


@given(sizes, st.integers(1, 100_000))
def test_every_parameter_lies_in_one_bucket_aligned_and_apart(numbers, bucket_bytes):
    buckets = cut_buckets(slots_of(numbers), bucket_bytes)
    names = [slot.name for bucket in buckets for slot in bucket.slots]
    assert names == [f"p{i}" for i in range(len(numbers))]
    for number, bucket in enumerate(buckets):
        assert bucket.index == number
        end = 0
        for slot in bucket.slots:
            assert slot.bucket is bucket
            assert slot.offset * 4 % 128 == 0
            assert slot.offset >= end
            end = slot.offset + slot.num_elements
        assert bucket.num_elements >= end
        payload = sum(slot.num_elements for slot in bucket.slots) * 4
        assert payload <= bucket_bytes + 128 * len(bucket.slots) or len(bucket.slots) == 1


@given(sizes, st.integers(1, 9), st.integers(0, 8), st.booleans())
def test_strips_cover_the_bucket_and_end_at_blocks(numbers, owners, others, inside):
    (bucket,) = cut_buckets(slots_of(numbers), 1 << 30)
    size = owners + others
    cuts = cut_strips(bucket, size, inside_parameters=inside, num_owners=owners)
    assert len(cuts) == size + 1
    assert set(cuts[owners:]) == {bucket.num_elements}
    assert (cuts[0], cuts[-1]) == (0, bucket.num_elements)
    assert list(cuts) == sorted(cuts)
    pieces = [
        piece for low, high in itertools.pairwise(cuts) for piece in pieces_of(bucket, low, high)
    ]
    assert sum(piece.stop - piece.start for piece in pieces) == sum(numbers)
    for piece in pieces:
        assert (piece.start - piece.slot.offset) % BLOCK_ELEMENTS == 0
        if not inside:
            assert piece.stop - piece.start == piece.slot.num_elements


def test_strips_are_nearly_equal_where_they_may_be_cut_anywhere():
    (bucket,) = cut_buckets(slots_of([1_000_000]), 1 << 30)
    cuts = cut_strips(bucket, 7, inside_parameters=True)
    lengths = [high - low for low, high in itertools.pairwise(cuts)]
    assert max(lengths) - min(lengths) <= 2 * BLOCK_ELEMENTS


def test_types_are_kept_apart():
    slots = [*slots_of([5, 5]), *slots_of([5], torch.bfloat16)]
    assert [bucket.dtype for bucket in cut_buckets(slots, 1 << 20)] == [
        torch.float32,
        torch.bfloat16,
    ]


@given(st.integers(1, 20_000), st.integers(0, 5), st.integers(0, 2**31))
def test_block_norms_do_not_depend_on_where_a_strip_is_cut(length, cut, seed):
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    at = min(cut * BLOCK_ELEMENTS, length)
    parts = [part for part in (values[:at], values[at:]) if part.numel()]
    assert torch.equal(torch.cat([block_squares(part) for part in parts]), block_squares(values))


def test_dense_means_no_holes_and_no_overlap_in_any_order():
    assert is_dense(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert is_dense(torch.zeros(3, 4).t())
    assert not is_dense(torch.zeros(3, 4)[:, :2])
    assert not is_dense(torch.zeros(1).expand(3))
