"""The KV cache's memory goes and comes back; what was kept comes back with it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_runtime.backends.native import memory
from megatron_runtime.backends.native.memory import KVPool, MemoryShortError, require_memory

MEBIBYTES = 1 << 20


def make_pool(pages: int = 64) -> KVPool:
    pool = KVPool((2, pages, 16, 256), dtype=torch.float32, device=torch.device("cpu"))
    pool.allocate()
    return pool


@torch.inference_mode()
def fill(pool: KVPool) -> torch.Tensor:
    assert pool.cache_LPXE is not None
    pool.cache_LPXE.copy_(torch.arange(pool.cache_LPXE.numel(), dtype=torch.float32).view_as(pool.cache_LPXE))
    return pool.cache_LPXE.clone()


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def test_kept_pages_come_back_and_others_are_zero() -> None:
    pool = make_pool()
    before = fill(pool)
    pool.release(np.array([3, 9, 10]))
    assert pool.cache_LPXE is None
    pool.release(None)
    pool.allocate()
    after = pool.cache_LPXE
    assert after is not None
    assert torch.equal(after[:, [3, 9, 10]], before[:, [3, 9, 10]])
    rest = [page for page in range(64) if page not in (3, 9, 10)]
    assert not after[:, rest].any()


def test_memory_that_is_given_back_is_the_systems() -> None:
    pool = make_pool(pages=2048)
    fill(pool)
    held = resident()
    pool.release(np.array([1]))
    freed = held - resident()
    assert freed > 50 * MEBIBYTES
    pool.allocate()
    assert resident() - (held - freed) < 10 * MEBIBYTES


def test_too_little_memory_leaves_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    before = fill(pool)
    pool.release(np.array([5]))

    def short(needed: int, *, what: str) -> None:
        require_memory(needed, what=what, available=0)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "require_memory", short)
        with pytest.raises(MemoryShortError, match="KV cache"):
            pool.allocate()
    pool.allocate()
    assert pool.cache_LPXE is not None
    assert torch.equal(pool.cache_LPXE[:, 5], before[:, 5])
