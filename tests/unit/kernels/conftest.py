"""Triton's interpreter runs the kernels here (tests/unit/conftest.py): on the CPU, in NumPy, without a GPU.

This tests the arithmetic and the addressing of a kernel, not its speed. The interpreter differs from a device in two
ways: it truncates float32 to bfloat16 where a GPU rounds to nearest (the tolerances allow for it), and it has no
products of bfloat16 matrices (the kernels convert them to float32, which is exact).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings
from one_thread import one_thread as one_thread  # the fixture
from soak import size

few = settings(max_examples=size(4, soak=200), suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Examples of kernels: the interpreter takes a second for some."""


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of a value computed in float32 and rounded once: half a unit in the last place is 2^-9 (bfloat16) or
    2^-12 (float16) of it; the interpreter's truncation makes the first 2^-7, and intermediate roundings double it."""

    rtol: float
    atol: float

    def check(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual.float(), expected.float(), rtol=self.rtol, atol=self.atol)


TOLERANCES = {
    torch.float32: Tolerance(rtol=2e-5, atol=2e-6),
    torch.float16: Tolerance(rtol=2**-9, atol=1e-3),
    torch.bfloat16: Tolerance(rtol=2**-6, atol=8e-3),
}


@pytest.fixture(params=TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def tolerance(dtype: torch.dtype) -> Tolerance:
    return TOLERANCES[dtype]


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    import triton

    assert triton.knobs.runtime.interpret, (
        "triton was imported before TRITON_INTERPRET=1 was set: run tests/unit/kernels alone"
    )


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
