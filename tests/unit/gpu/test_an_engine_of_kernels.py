"""The engine with the GPU forward pass, run on the CPU by torch's references: scheduling, prefix cache, sampling on
the "device", suspend and resume. And small cases of the benchmark."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from small_engine import CPU, GEMMA, MIXTURE, SMALL, answers, engine_on

from bench.gpu_engine import OURS, RUNS, Options, Rate, bounds, measure, our_engine, row_of
from bench.gpu_kernels import Ceilings
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.executor import NoCudaProfilerError
from megatron_runtime.requests.config import KVCacheManagementMode

ON_KERNELS = partial(CudaExecutor, max_rows=4, max_tokens=48, graph_rows=0, device=CPU)


@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
def test_answers_equal_the_cpus(mode):
    expected = answers(engine_on(CpuExecutor, mode))
    assert all(len(tokens) == 12 for tokens in expected.values())
    assert answers(engine_on(ON_KERNELS, mode)) == expected
    assert answers(engine_on(ON_KERNELS, mode), suspend_after=6) == expected


def test_profiling_synchronises_the_device_and_starts_and_stops_the_profiler(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"wait for {device}"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: done.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: done.append("stop"))
    executor = engine_on(ON_KERNELS, KVCacheManagementMode.PERSIST).executor
    executor.device = torch.device("cuda", 1)
    executor.profile(True)
    executor.profile(False)
    assert done == ["wait for cuda:1", "start", "wait for cuda:1", "stop"]


@pytest.mark.parametrize("make_executor", [CpuExecutor, ON_KERNELS])
def test_the_cpu_reports_that_it_has_no_cuda_profiler(make_executor):
    with pytest.raises(NoCudaProfilerError, match="the CPU has no CUDA profiler"):
        engine_on(make_executor, KVCacheManagementMode.PERSIST).executor.profile(True)


@pytest.mark.parametrize("model", [MIXTURE, GEMMA], ids=lambda model: model.family)
def test_answers_of_other_families_equal_the_cpus(model):
    mode = KVCacheManagementMode.OFFLOAD
    expected = answers(engine_on(CpuExecutor, mode, model))
    assert answers(engine_on(ON_KERNELS, mode, model), suspend_after=6) == expected


def test_the_benchmark_measures_the_engine():
    options = Options(
        batch=(1, 3), prompt_tokens=20, new_tokens=6, prefill_tokens=40, dtype=torch.float32, device=CPU, config=SMALL
    )
    engine, now = our_engine(options), 0.0

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        """Generate, in 10 ms of the benchmark's clock for each token of an answer."""
        nonlocal now
        engine(prompts, new_tokens)
        now += new_tokens / 100

    def twice_as_fast(prompts: list[list[int]], new_tokens: int) -> None:
        nonlocal now
        now += new_tokens / 200

    cells = dict(measure({OURS: generate, "peer": twice_as_fast}, options, clock=lambda: now))
    expected = {"decode b1": 100, "decode b3": 300, "prefill 40": 4000}
    assert {cell: turns[OURS] for cell, turns in cells.items()} == {
        cell: pytest.approx([tokens] * RUNS) for cell, tokens in expected.items()
    }
    assert not list(measure({OURS: generate}, options, until=time.monotonic()))
    maximum = bounds(options, Ceilings(1e9, 1e9))
    for cell, turns in cells.items():
        row = row_of(cell, turns, maximum[cell])
        assert row.ours == Rate(expected[cell], expected[cell], expected[cell])
        assert row.ratios == {"peer": 0.5}
        assert row.percent_of_bound > 0
