"""The engine on a CUDA device, with decode steps replayed from CUDA graphs, gives the CPU's answers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from small_engine import GEMMA, MIXTURE, SMALL, answers, engine_on

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.requests.config import KVCacheManagementMode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
@pytest.mark.parametrize("graph_rows", [0, 3, 4])
@pytest.mark.parametrize("model", [SMALL, MIXTURE, GEMMA], ids=lambda model: model.family)
def test_answers_equal_the_cpus(mode, graph_rows, model):
    on_device = partial(CudaExecutor, max_rows=4, max_tokens=48, graph_rows=graph_rows)
    expected = answers(engine_on(CpuExecutor, mode, model))
    assert answers(engine_on(on_device, mode, model)) == expected
    assert answers(engine_on(on_device, mode, model), suspend_after=6) == expected


def test_profiling_changes_no_answer():
    on_device = partial(CudaExecutor, max_rows=4, max_tokens=48, graph_rows=4)
    engine = engine_on(on_device, KVCacheManagementMode.PERSIST)
    engine.executor.profile(True)
    profiled = answers(engine)
    engine.executor.profile(False)
    assert profiled == answers(engine_on(on_device, KVCacheManagementMode.PERSIST))
