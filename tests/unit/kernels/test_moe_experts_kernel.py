"""Mixture of experts: the kernel equals its reference, which equals applying the chosen experts to each token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_kernels import moe_experts, moe_experts_triton, moe_routing
from megatron_kernels.swiglu import swiglu
from megatron_kernels.tuning import expert_places

from .conftest import few

# SwiGLU also computes unwritten slots, which contain arbitrary values and are not read.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

ERRORS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}
"""Norm of the difference over the norm of the result: the hidden layer is rounded twice, and the interpreter truncates
to bfloat16."""


def case(tokens, shape, *, dtype, generator, held=None, alignment=16):
    """Return (x, gate and up, down, routing) and the keywords of a call."""
    num_experts, top_k, hidden, width = shape
    held = held or range(num_experts)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    gate_up = torch.randn(len(held), 2 * width, hidden, generator=generator).mul_(hidden**-0.5).to(dtype)
    down = torch.randn(len(held), hidden, width, generator=generator).mul_(width**-0.5).to(dtype)
    logits = torch.randn(tokens, num_experts, generator=generator)
    routing = moe_routing.moe_routing(logits, top_k=top_k, alignment=alignment)
    return (x, gate_up, down, routing), {"first": held.start, "alignment": alignment}


@given(
    tokens=st.sampled_from([0, 1, 5, 40]),
    shape=st.sampled_from([(1, 1, 32, 16), (4, 2, 72, 40), (9, 3, 160, 24)]),
    held=st.sampled_from([None, "first", "last"]),
    alignment=st.sampled_from([16, 64]),
)
@few
def test_experts(tokens, shape, held, alignment, dtype, generator):
    middle = (shape[0] + 1) // 2
    part = {None: range(shape[0]), "first": range(middle), "last": range(min(middle, shape[0] - 1), shape[0])}[held]
    arguments, keywords = case(tokens, shape, dtype=dtype, generator=generator, held=part, alignment=alignment)
    expected = moe_experts.moe_experts(*arguments, **keywords)
    actual = moe_experts_triton.moe_experts(*arguments, **keywords)
    assert actual.shape == expected.shape == (tokens, shape[2])
    assert (actual - expected).float().norm() <= ERRORS[dtype] * expected.float().norm()


def test_a_token_is_computed_by_its_experts_only(generator):
    (x, gate_up, down, routing), keywords = case(7, (5, 2, 24, 16), dtype=torch.float32, generator=generator)
    expected = torch.stack(
        [
            sum(
                weight * (swiglu((x[token] @ gate_up[expert].T)[None])[0] @ down[expert].T)
                for weight, expert in zip(routing.weights_TJ[token], routing.experts_TJ[token].tolist(), strict=True)
            )
            for token in range(7)
        ]
    )
    torch.testing.assert_close(moe_experts.moe_experts(x, gate_up, down, routing, **keywords), expected)


def test_the_results_of_all_ranks_add_up_to_the_mixture(generator):
    """Each rank computes the contribution of its experts for every token."""
    (x, gate_up, down, routing), keywords = case(9, (6, 2, 32, 16), dtype=torch.float32, generator=generator)
    whole = moe_experts_triton.moe_experts(x, gate_up, down, routing, **keywords)
    parts = [
        moe_experts_triton.moe_experts(
            x, gate_up[first : first + 2].clone(), down[first : first + 2].clone(), routing, first=first, alignment=16
        )
        for first in (0, 2, 4)
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("tokens", [1, 8, 64, 4096])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8)])
def test_tiles_fit_the_tokens_of_an_expert(tokens, num_experts, top_k):
    places = expert_places(tokens=tokens, top_k=top_k, num_experts=num_experts)
    assert places == (64 if tokens * top_k / num_experts >= 32 else 16)


def test_unsupported_alignment_and_strides_are_rejected(generator):
    (x, gate_up, down, routing), _ = case(2, (4, 2, 32, 16), dtype=torch.float32, generator=generator)
    with pytest.raises(ValueError, match="alignment=1: must be a power of 2 from 16 on"):
        moe_experts_triton.moe_experts(x, gate_up, down, routing, alignment=1)
    with pytest.raises(ValueError, match="must be contiguous"):
        moe_experts_triton.moe_experts(x, gate_up.mT.contiguous().mT, down, routing, alignment=16)
