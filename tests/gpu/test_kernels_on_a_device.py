"""The compiled kernels on a CUDA device equal their references at the shapes of an 8B Llama."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_kernels import ModelShape, cases, difference
from megatron_kernels.registry import Backend, KernelConfig, select_kernels

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
