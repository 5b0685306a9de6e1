"""The compiled kernels on a CUDA device equal their references at the shapes of an 8B Llama."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_kernels import ModelShape, cases, difference
from megatron_kernels.registry import Backend, KernelConfig, select_kernels
from megatron_kernels.sampling import NOT_FINITE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ERRORS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Norm of the difference over the norm of the reference: some roundings of the type. One of 64 sampled tokens that
differs would exceed it."""


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_every_kernel_equals_its_reference(dtype):
    device = torch.device("cuda")
    for case in cases(ModelShape(), device, dtype, tokens=[1, 7, 64], context=1040):
        own = select_kernels(KernelConfig(**{case.operation: Backend.TRITON}), device)
        reference = select_kernels(KernelConfig(**{case.operation: Backend.TORCH}), device)
        error = difference(case, getattr(own, case.operation), getattr(reference, case.operation))
        assert error <= ERRORS[dtype], f"{case.operation} {case.name}: {error}"


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_have_no_token(dtype, temperature):
    """The device's maximum ignores NaN, that of Triton's interpreter does not."""
    device = torch.device("cuda")
    logits = torch.randn(6, 128_256, device=device).to(dtype)
    logits[1, 5] = logits[2, -1] = float("nan")
    logits[3, 70_000] = float("inf")
    logits[4] = float("-inf")
    column = torch.zeros(6, dtype=torch.int64, device=device)
    arguments = {
        "temperature_N": column.float() + temperature,
        "top_k_N": column.int(),
        "top_p_N": column.float() + 0.9,
        "min_p_N": column.float(),
        "seeds_N": column,
        "positions_N": column,
    }
    for backend in (Backend.TRITON, Backend.TORCH):
        tokens, _ = select_kernels(KernelConfig(sample=backend), device).sample(logits, **arguments)
        assert tokens[1:5].tolist() == [NOT_FINITE] * 4
        assert (tokens[[0, 5]] >= 0).all()
