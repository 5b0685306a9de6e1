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


def test_released_memory_returns_to_the_system() -> None:
    pool = make_pool(pages=2048)
    fill(pool)
    held = resident()
    pool.release(np.array([1]))
    freed = held - resident()
    assert freed > 50 * MEBIBYTES
    pool.allocate()
    assert resident() - (held - freed) < 10 * MEBIBYTES


def test_an_out_of_memory_error_keeps_the_kept_pages(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_pages_of_one_pool_are_written_to_others_as_they_were() -> None:
    source, target = make_pool(), make_pool()
    values, before = fill(source), fill(target)
    data = source.read(np.array([3, 9, 4], np.int32))
    assert len(data) == 3 * source.cache_LPXE[:, 0].nbytes
    target.write(np.array([5, 1, 60], np.int32), data)
    assert torch.equal(target.cache_LPXE[:, [5, 1, 60]], values[:, [3, 9, 4]])
    others = [page for page in range(64) if page not in (5, 1, 60)]
    assert torch.equal(target.cache_LPXE[:, others], before[:, others])
    target.release(None)
    with pytest.raises(MemoryShortError, match="RESUME"):
        target.read(np.array([1], np.int32))
