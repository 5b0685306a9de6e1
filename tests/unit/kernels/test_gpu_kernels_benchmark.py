"""bench/gpu_kernels.py: the kernels accept its cases, and without a GPU it exits with an error."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from bench.gpu_kernels import Ceilings, ModelShape, cases, difference, main
from megatron_kernels.registry import Backend, KernelConfig, select_kernels

SMALL = ModelShape(
    hidden=64, heads=4, kv_heads=2, head_dim=64, feed_forward=96, vocabulary=100, experts=8, top_k=2, page_size=16
)
CPU = torch.device("cpu")
CASES = list(cases(SMALL, CPU, torch.float32, tokens=[4], context=32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operation} {case.name}")
def test_each_case_runs_and_agrees(case):
    chosen = select_kernels(KernelConfig(**{case.operation: Backend.TRITON}), CPU)
    references = select_kernels(KernelConfig(), CPU)
    assert difference(case, getattr(chosen, case.operation), getattr(references, case.operation)) < 1e-5
    assert case.bytes_moved > 0


def test_every_operation_has_a_case():
    assert {case.operation for case in CASES} == set(select_kernels(KernelConfig(), CPU).backends)


def test_a_wrong_result_is_detected(generator):
    case = next(case for case in CASES if case.operation == "swiglu")
    reference = select_kernels(KernelConfig(), CPU).swiglu
    assert difference(case, lambda x: reference(x) + 1, reference) > 0.1


def test_the_larger_bound_applies():
    ceilings = Ceilings(bytes_per_second=1e9, flops_per_second=1e12)
    prefill = next(case for case in CASES if case.operation == "paged_prefill")
    assert ceilings.bound(prefill) == ("memory", prefill.bytes_moved / 1e9 * 1e6)
    assert Ceilings(1e30, 1e12).bound(prefill) == ("compute", prefill.flops / 1e12 * 1e6)


def test_without_a_device_it_exits_with_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output
