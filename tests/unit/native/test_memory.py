"""Where packed weights lie: apart from each other, in pages that the system may join, and only as long as they do."""

import platform
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from eventually import LONG_SECONDS

from megatron_kernels.cpu.memory import PAGES_THREAD, WeightMemory
from megatron_kernels.cpu.switches import Switch
from megatron_runtime.models.layers.compiled_linear import NativeLinears

_MIB = 1 << 20
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def filled(memory: WeightMemory, number: int, size: int) -> torch.Tensor:
    return memory.take(size).fill_(number)


def joins_pages() -> bool:
    """Whether this machine's system does it."""
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return release >= (6, 1) and _LARGE_PAGES.is_file() and "[never]" not in _LARGE_PAGES.read_text()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def large_pages_kib(address: int) -> int:
    """Of the mapping that has this address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_matrices_of_many_threads_lie_apart() -> None:
    memory = WeightMemory()
    sizes = [1, 4096, 5000, 3 * _MIB + 1, 70 * _MIB] * 4
    with ThreadPoolExecutor(4) as pool:
        pieces = list(pool.map(filled, [memory] * len(sizes), range(len(sizes)), sizes))
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.shape == (size,)
        assert piece.data_ptr() % 4096 == 0
        assert (piece == number).all()


def test_joined_pages_hold_what_they_held() -> None:
    memory = WeightMemory()
    values = torch.randint(256, (9 * _MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    piece = memory.take(len(values))
    piece.copy_(values)
    before = large_pages_kib(piece.data_ptr())
    memory.join_pages().join(LONG_SECONDS)
    assert torch.equal(piece, values)
    if joins_pages():
        assert large_pages_kib(piece.data_ptr()) - before >= 2 << 10


def test_what_nobody_uses_goes_and_is_not_kept_by_the_thread_that_joins() -> None:
    memory = WeightMemory()
    kept, given_back = memory.take(70 * _MIB), memory.take(70 * _MIB)
    before = resident_bytes()
    thread = memory.join_pages()  # takes some tenths of a second for the first
    del given_back
    for _ in range(5):  # a piece is held while it is joined
        if before - resident_bytes() > 60 * _MIB:
            break
        time.sleep(0.005)
    else:
        pytest.fail("what nobody uses was kept")
    thread.join(LONG_SECONDS)
    assert not thread.is_alive()
    assert not kept.count_nonzero()


@pytest.mark.parametrize(("value", "expected"), [("1", 1), ("0", 0)])
def test_a_switch_leaves_pages_as_they_are(value: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread), start(thread)))
    monkeypatch.setenv(Switch.LARGE_PAGES, value)
    NativeLinears("int4").settle()
    assert [thread.name for thread in begun] == [PAGES_THREAD] * expected
