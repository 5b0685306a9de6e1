"""SwiGLU and add+RMSNorm: the kernel equals its reference, also for widths that are no multiple of a tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_kernels import add_rms_norm, add_rms_norm_triton, swiglu, swiglu_triton

from .conftest import few


@given(
    tokens=st.integers(0, 3),
    width=st.sampled_from([1, 33, 64, 1100]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
)
@few
def test_swiglu(tokens, width, activation, dtype, tolerance, generator):
    # Rows are strided, as in a padded product.
    gate_up = torch.randn(tokens, 2 * width + 5, generator=generator).to(dtype)[:, : 2 * width]
    actual = swiglu_triton.swiglu(gate_up, activation=activation)
    tolerance.check(actual, swiglu.swiglu(gate_up, activation=activation))


def test_swiglu_into_a_given_tensor(generator):
    gate_up = torch.randn(2, 64, generator=generator)
    out = torch.zeros(2, 40)[:, :32]
    assert swiglu_triton.swiglu(gate_up, out_TF=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, swiglu.swiglu(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_swiglu_of_large_gates_is_finite():
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]])
    for activation in ("silu", "gelu_tanh"):
        result = swiglu_triton.swiglu(gate_up, activation=activation)
        torch.testing.assert_close(result, torch.tensor([[0.0, 3e4]]), atol=1e-6, rtol=1e-6)


@given(tokens=st.integers(0, 3), hidden=st.sampled_from([1, 31, 64, 576]), adds=st.booleans())
@few
def test_add_rms_norm(tokens, hidden, adds, dtype, tolerance, generator):
    x = torch.randn(tokens, hidden, generator=generator).to(dtype) if adds else None
    residual = torch.randn(tokens, hidden + 3, generator=generator).to(dtype)[:, :hidden]
    weight = torch.randn(hidden, generator=generator).to(dtype)
    expected_residual = residual.clone()
    expected = add_rms_norm.add_rms_norm(x, expected_residual, weight, epsilon=1e-5)
    tolerance.check(add_rms_norm_triton.add_rms_norm(x, residual, weight, epsilon=1e-5), expected)
    tolerance.check(residual, expected_residual)


@pytest.mark.parametrize("adds", [False, True])
def test_the_norm_of_zeros_is_zero(adds):
    zeros = torch.zeros(1, 40)
    result = add_rms_norm_triton.add_rms_norm(zeros.clone() if adds else None, zeros, torch.ones(40), epsilon=1e-6)
    assert torch.equal(result, torch.zeros(1, 40))


def test_the_reference_equals_torchs_norm(generator):
    x, residual = torch.randn(2, 3, 64, generator=generator)
    weight = torch.randn(64, generator=generator)
    expected = torch.nn.functional.rms_norm(x + residual, (64,), weight, 1e-5)
    torch.testing.assert_close(add_rms_norm.add_rms_norm(x, residual, weight, epsilon=1e-5), expected)
