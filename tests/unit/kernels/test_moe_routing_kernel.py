"""Expert routing: the kernel equals its reference, and the order groups the tokens by expert."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_kernels import moe_routing, moe_routing_triton

from .conftest import few


@given(
    tokens=st.sampled_from([0, 1, 5, 16, 17, 64, 65, 150]),
    shape=st.sampled_from([(1, 1), (5, 2), (8, 8), (64, 4), (60, 3)]),
    normalize=st.booleans(),
    alignment=st.sampled_from([1, 16]),
)
@few
def test_routing(tokens, shape, normalize, alignment, dtype, generator):
    num_experts, top_k = shape
    # Few distinct values, so that many experts have equal probability.
    logits = torch.randint(-3, 4, (tokens, num_experts + 1), generator=generator).to(dtype)[:, :num_experts]
    arguments = {"top_k": top_k, "normalize": normalize, "alignment": alignment}
    expected = moe_routing.moe_routing(logits, **arguments)
    actual = moe_routing_triton.moe_routing(logits, **arguments)
    for field in fields(moe_routing.Routing):
        torch.testing.assert_close(getattr(actual, field.name), getattr(expected, field.name), msg=field.name)


@given(tokens=st.integers(0, 40), alignment=st.sampled_from([1, 4, 16]), top_k=st.integers(1, 6))
@few
def test_the_order_contains_every_pair_once_in_its_experts_range(tokens, alignment, top_k, generator):
    routing = moe_routing.moe_routing(torch.randn(tokens, 6, generator=generator), top_k=top_k, alignment=alignment)
    starts, order = routing.starts_M.tolist(), routing.order_R.tolist()
    assert sorted(pair for pair in order if pair >= 0) == list(range(tokens * top_k))
    for expert in range(6):
        part = order[starts[expert] : starts[expert + 1]]
        pairs = [pair for pair in part if pair >= 0]
        assert len(part) % alignment == 0
        assert len(pairs) == routing.counts_N[expert]
        assert pairs == sorted(pairs)
        assert part[len(pairs) :] == [-1] * (len(part) - len(pairs))
        assert all(routing.experts_TJ.flatten()[pair] == expert for pair in pairs)
    assert [order[place] for place in routing.places_TJ.flatten()] == list(range(tokens * top_k))
    if tokens:
        torch.testing.assert_close(routing.weights_TJ.sum(dim=-1), torch.ones(tokens))


def test_more_choices_than_experts_are_rejected():
    with pytest.raises(ValueError, match="top_k=3: must be from 1 to the 2 experts"):
        moe_routing_triton.moe_routing(torch.zeros(1, 2), top_k=3)
