"""Collectives over Unix sockets, between threads that take the place of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import scaled

from megatron_runtime.distributed.local_group import LARGE_BYTES, LocalGroup
from megatron_runtime.process.listening import private_folder

SECONDS = scaled(60.0)
SIZES = (1, 5, LARGE_BYTES // 4 + 3, 1_000_003)
"""Of float32 tensors: small, in parts of different sizes, and larger than what a socket holds."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with private_folder() as path:
        yield path


def on_all(folder: Path, count: int, run: Callable[[LocalGroup, int], Any]) -> list[Any]:
    """Run a function as each rank of a group. Ranks are not counted from 0."""
    ranks = range(3, 3 + count)

    def be(rank: int) -> Any:
        group = LocalGroup(folder, "tensor", ranks, rank=rank, timeout_seconds=SECONDS)
        try:
            return run(group, rank)
        finally:
            barrier.wait()
            group.close()

    barrier = threading.Barrier(count)
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(be, ranks))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_same_sums_and_gathered_tensors(folder: Path, count: int, dtype: torch.dtype) -> None:
    tensors = {
        (rank, size): torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(3, 3 + count)
        for size in SIZES
    }

    def run(group: LocalGroup, rank: int) -> list[torch.Tensor]:
        found = []
        for size in SIZES:
            total = tensors[rank, size].clone()
            group.all_reduce(total)
            gathered = torch.empty(count * size, dtype=dtype)
            group.all_gather(gathered, tensors[rank, size])
            found += [total, gathered]
        return found

    results = on_all(folder, count, run)
    for place, size in enumerate(SIZES):
        parts = [tensors[rank, size] for rank in range(3, 3 + count)]
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        for result in results:
            torch.testing.assert_close(result[2 * place], expected, rtol=0, atol=0)
            torch.testing.assert_close(result[2 * place + 1], torch.cat(parts), rtol=0, atol=0)


def test_a_stage_computes_while_its_tensors_are_sent(folder: Path) -> None:
    """The receiver begins when the sender has handed over more than the socket holds."""
    sent = threading.Event()
    tensors = [torch.full((1_000_003,), float(number)) for number in range(3)]

    def run(group: LocalGroup, rank: int) -> list[float]:
        if rank == 3:
            waits = [group.send(tensor, 4) for tensor in tensors]
            sent.set()
            for wait in waits:
                wait()
            return []
        assert sent.wait(SECONDS)
        found = []
        for tensor in tensors:
            received = torch.empty_like(tensor)
            group.receive(received, 3)
            found.append(float(received.mean()))
        return found

    assert on_all(folder, 2, run)[1] == [0.0, 1.0, 2.0]


def test_the_end_of_a_rank_ends_a_collective_of_the_others_with_its_number(folder: Path) -> None:
    def run(group: LocalGroup, rank: int) -> str:
        if rank == 4:
            group.close()
            return ""
        with pytest.raises(RuntimeError) as failed:
            group.all_reduce(torch.ones(5))
        return str(failed.value)

    assert on_all(folder, 2, run)[0].startswith("rank 4: ")


def test_a_missing_rank_is_reported_in_time(folder: Path) -> None:
    for rank in (3, 4):
        with pytest.raises(RuntimeError, match="the ranks of this host cannot connect"):
            LocalGroup(folder, f"absent-{rank}", (3, 4), rank=rank, timeout_seconds=0.2)


def test_a_rank_without_progress_is_reported_in_time(folder: Path) -> None:
    def run(group: LocalGroup, rank: int) -> str:
        if rank == 4:
            return ""
        group._timeout = 0.2
        with pytest.raises(RuntimeError) as failed:
            group.all_reduce(torch.ones(5))
        return str(failed.value)

    assert on_all(folder, 2, run)[0] == "no progress with rank 4 within 0.2 s"


def test_a_long_path_of_temporary_files_leaves_room_for_the_names_of_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with private_folder() as folder:
        assert len(str(folder)) < 80
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    assert list(long.iterdir()) == []
