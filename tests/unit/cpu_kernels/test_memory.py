"""The memory of packed weights: no overlap, transparent huge pages, and release of unused tensors."""

import mmap
import platform
import re
import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import pytest
import torch
from eventually import LONG_SECONDS

from megatron_kernels.cpu.memory import WeightMemory, interleave, online_nodes

_MIB = 1 << 20
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def filled(memory: WeightMemory, number: int, size: int) -> torch.Tensor:
    return memory.take(size).fill_(number)


def joins_pages() -> bool:
    """Return whether this machine's kernel supports it."""
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return release >= (6, 1) and _LARGE_PAGES.is_file() and "[never]" not in _LARGE_PAGES.read_text()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def large_pages_kib(address: int) -> int:
    """Return the size of the huge pages in the mapping that contains this address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_matrices_of_many_threads_do_not_overlap() -> None:
    memory = WeightMemory()
    sizes = [1, 4096, 5000, 3 * _MIB + 1, 70 * _MIB] * 4
    with ThreadPoolExecutor(4) as pool:
        pieces = list(pool.map(filled, [memory] * len(sizes), range(len(sizes)), sizes))
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.shape == (size,)
        assert piece.data_ptr() % 4096 == 0
        assert (piece == number).all()


@pytest.mark.parametrize("max_seconds", [0.0, inf], ids=["large pages come slowly", "fast"])
def test_joined_pages_are_large_and_keep_their_content(max_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_kernels.cpu.memory._MAX_SECONDS", max_seconds)
    memory = WeightMemory()
    values = torch.randint(256, (17 * _MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    piece = memory.take(len(values))
    piece.copy_(values)
    before = large_pages_kib(piece.data_ptr())
    memory.join_pages().join(LONG_SECONDS)
    assert torch.equal(piece, values)
    if joins_pages():
        # Slow ones: only those of the first 4 MiB.
        assert before <= 4 << 10 if max_seconds == 0 else before > 0
        assert large_pages_kib(piece.data_ptr()) >= 8 << 10


def test_unused_memory_is_released_while_pages_are_joined() -> None:
    memory = WeightMemory()
    kept, released = memory.take(70 * _MIB), memory.take(70 * _MIB)
    before = resident_bytes()
    thread = memory.join_pages()  # some tenths of a second for the first tensor
    del released
    for _ in range(5):  # the thread holds a reference while it joins a tensor
        if before - resident_bytes() > 60 * _MIB:
            break
        time.sleep(0.005)
    else:
        pytest.fail("unused memory was not released")
    thread.join(LONG_SECONDS)
    assert not thread.is_alive()
    assert not kept.count_nonzero()


@pytest.mark.parametrize(("text", "nodes"), [("0", [0]), ("0-1", [0, 1]), ("0-1,4,6-7", [0, 1, 4, 6, 7])])
def test_numa_nodes_are_read_from_the_kernels_list(text: str, nodes: list[int], tmp_path: Path) -> None:
    path = tmp_path / "online"
    assert online_nodes(path) == [0]
    path.write_text(text + "\n")
    assert online_nodes(path) == nodes


def test_memory_is_interleaved_only_over_several_nodes() -> None:
    mapping = mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    here = online_nodes()
    assert not interleave(address, 1 << 21, here[:1])
    # The kernel takes the nodes that exist out of the mask, and rejects a mask without any.
    assert interleave(address, 1 << 21, [here[0], 1000])
    assert not interleave(address, 1 << 21, [998, 999])
