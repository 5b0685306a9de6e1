"""The KV cache of a native engine for which no size is set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.memory import unset_cache_bytes
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.settings import DEFAULT_CPU_CACHE_BYTES

GIB = 1 << 30


def test_on_a_gpu_it_is_what_the_weights_leave_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    assert unset_cache_bytes(cuda, weights=16 * GIB) == (70 - 16 - 8) * GIB
    assert unset_cache_bytes(cuda, weights=75 * GIB) == 0
    assert unset_cache_bytes(torch.device("cpu"), weights=16 * GIB) == DEFAULT_CPU_CACHE_BYTES


def test_a_rank_uses_as_many_pages_as_the_rank_with_the_least_room(
    make_tiny: Callable[..., tuple[Path, nn.Module]],
) -> None:
    directory, _ = make_tiny()
    executor = CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=8 << 20)
    assert executor.num_pages > 5
    executor.use_pages(5)
    executor.load()
    assert (executor.num_pages, executor.cache_LPXE.shape[1]) == (5, 5)
