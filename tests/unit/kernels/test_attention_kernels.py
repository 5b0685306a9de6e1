"""Paged decode and prefill attention: the kernels equal their references, which equal torch's attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_kernels import paged_decode, paged_decode_triton, paged_prefill, paged_prefill_triton
from megatron_kernels.tuning import DecodeTuning, PrefillTuning

from .conftest import few

PAGE = 16
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 70]
SHAPES = [(1, 64), (3, 64), (2, 128), (5, 64), (1, 80)]
"""(query heads of a group, size of a head)"""


class Cache:
    """Pages in random order. Unwritten slots are NaN, so a read of one shows in the result."""

    def __init__(self, lengths, *, kv_heads, head_dim, dtype, generator):
        pages = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(pages) + 2, generator=generator)
        width = 2 * kv_heads * head_dim
        self.pages = torch.full((len(order), PAGE, width), float("nan"), dtype=dtype)
        # Unused entries of a table contain no valid page number.
        self.table = torch.full((len(lengths), max([1, *pages])), 2**30, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.kv = [torch.randn(length, width, generator=generator).to(dtype) for length in lengths]
        used = 0
        for row, (kv, count) in enumerate(zip(self.kv, pages, strict=True)):
            self.table[row, :count] = order[used : used + count]
            used += count
            for token, page in enumerate(kv):
                self.pages[self.table[row, token // PAGE], token % PAGE] = page


def strided_queries(tokens, heads, head_dim, *, dtype, generator):
    """Return queries as in the runtime: a view of the fused product's first columns."""
    fused = torch.randn(tokens, (heads + 4) * head_dim, generator=generator).to(dtype)
    return fused.unflatten(1, (-1, head_dim))[:, :heads]


@given(
    lengths=st.lists(st.sampled_from([0, *LENGTHS]), min_size=1, max_size=2),
    shape=st.sampled_from(SHAPES),
    kv_heads=st.sampled_from([1, 2]),
    splits=st.sampled_from([1, 3, 18]),
    window=st.sampled_from([None, 1, 20, 500]),
)
@few
def test_decode(lengths, shape, kv_heads, splits, window, dtype, tolerance, generator):
    group, head_dim = shape
    cache = Cache(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, generator=generator)
    q = strided_queries(len(lengths), group * kv_heads, head_dim, dtype=dtype, generator=generator)
    arguments = (q, cache.pages, cache.table, cache.lengths)
    tuning = DecodeTuning(block_tokens=32, splits=splits, split_tokens=32, num_warps=4, num_stages=1)
    actual = paged_decode_triton.paged_decode(*arguments, num_kv_heads=kv_heads, window=window, tuning=tuning)
    tolerance.check(actual, paged_decode.paged_decode(*arguments, num_kv_heads=kv_heads, window=window))


@given(
    queries=st.lists(st.sampled_from([0, 1, 7, 16, 33]), min_size=1, max_size=3),
    cached=st.sampled_from([0, 1, PAGE, 37]),
    shape=st.sampled_from(SHAPES),
    kv_heads=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 3]),
    window=st.sampled_from([None, 1, 20, 500]),
)
@few
def test_prefill(queries, cached, shape, kv_heads, padding, window, dtype, tolerance, generator):
    group, head_dim = shape
    lengths = [count + cached if count else 0 for count in queries]
    cache = Cache(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, generator=generator)
    q = strided_queries(sum(queries) + padding, group * kv_heads, head_dim, dtype=dtype, generator=generator)
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    arguments = (q, cache.pages, cache.table, cache.lengths, starts)
    tuning = PrefillTuning(block_queries=16, block_tokens=32, num_warps=4, num_stages=1)
    actual = paged_prefill_triton.paged_prefill(*arguments, num_kv_heads=kv_heads, window=window, tuning=tuning)
    tolerance.check(actual, paged_prefill.paged_prefill(*arguments, num_kv_heads=kv_heads, window=window))


@pytest.mark.parametrize("window", [None, 1, 12])
def test_the_references_equal_torchs_attention(window, generator):
    cache = Cache([37], kv_heads=2, head_dim=64, dtype=torch.float32, generator=generator)
    q = strided_queries(20, 6, 64, dtype=torch.float32, generator=generator)
    keys, values = cache.kv[0].unflatten(1, (2, 2, 64)).permute(1, 2, 0, 3)
    before = torch.arange(17, 37)[:, None] - torch.arange(37)
    mask = (before >= 0) & (before < (window or 37))
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True)
    starts = torch.tensor([0, 20], dtype=torch.int32)
    prefill = paged_prefill.paged_prefill(
        q, cache.pages, cache.table, cache.lengths, starts, num_kv_heads=2, window=window
    )
    torch.testing.assert_close(prefill, expected.transpose(0, 1))
    decode = paged_decode.paged_decode(q[-1:], cache.pages, cache.table, cache.lengths, num_kv_heads=2, window=window)
    torch.testing.assert_close(decode, prefill[-1:])


def test_a_given_scale_is_used(generator):
    cache = Cache([20], kv_heads=1, head_dim=64, dtype=torch.float32, generator=generator)
    q = strided_queries(1, 1, 64, dtype=torch.float32, generator=generator)
    arguments = (q, cache.pages, cache.table, cache.lengths)
    expected = paged_decode.paged_decode(*arguments, num_kv_heads=1, scale=0.0)
    torch.testing.assert_close(expected[0], cache.kv[0][:, 64:].mean(dim=0, keepdim=True))
    torch.testing.assert_close(paged_decode_triton.paged_decode(*arguments, num_kv_heads=1, scale=0.0), expected)


@pytest.mark.parametrize(
    ("kv_heads", "width", "dtype", "message"),
    [
        (2, 256, torch.float32, "num_kv_heads=2 does not divide the 3 heads"),
        (1, 120, torch.float32, "cache has 120 elements a token: must be 2 x 1 heads x 64"),
        (1, 128, torch.bfloat16, "must be of one type"),
    ],
)
def test_inconsistent_shapes_are_rejected(kv_heads, width, dtype, message):
    with pytest.raises(ValueError, match=message):
        paged_decode_triton.paged_decode(
            torch.zeros(1, 3, 64),
            torch.zeros(1, PAGE, width, dtype=dtype),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
            num_kv_heads=kv_heads,
        )
