"""An engine over two pods: vLLM starts, ends and fails in both together."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.distributed.errors import RankLostError
from megatron_runtime.distributed.shard import ParallelSizes

from .conftest import Running, Start, lines

OTHER_POD = """
import asyncio, sys
from megatron_runtime.backends.vllm.nodes import follow
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.engine.settings import EngineSettings

sizes = ParallelSizes(pipeline=2)
asyncio.run(follow(EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", model=sys.argv[1], parallel=sizes)))
"""
WORKERS_START = "workers of pod 1 start"


@pytest.fixture
async def pods(
    start: Start, model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Running, asyncio.subprocess.Process]]:
    """The first pod, in this process, and the other one. Both wait for load()."""
    (port,) = free_ports(1)
    shared = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**shared, "NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OTHER_POD, str(model)), stderr=asyncio.subprocess.PIPE
    )
    monkeypatch.setenv("NODE_RANK", "0")
    yield await start(parallel=ParallelSizes(pipeline=2)), other
    if other.returncode is None:
        other.kill()
    await other.communicate()


async def until_logged(log: Path, line: str, *, times: int) -> None:
    async def is_logged() -> bool:
        return lines(log, line) == times

    await eventually(is_logged, what=f"{times} times {line!r}")


async def test_a_suspend_ends_vllm_in_both_pods_and_a_resume_starts_both(pods: Any, fake_vllm: Path) -> None:
    running, _ = pods
    assert running.backend.info.ranks == 2
    assert lines(fake_vllm, WORKERS_START) == 0
    await running.backend.load()
    await until_logged(fake_vllm, WORKERS_START, times=1)
    assert not (await running.backend.release_memory()).failed
    assert not (await running.backend.restore_memory()).failed
    await until_logged(fake_vllm, WORKERS_START, times=2)
    await running.backend.unpause()
    running.submit(1, [11, 12], num_tokens_to_generate=5)
    await running.listener.end_of(1)


@pytest.mark.parametrize("lost", ["pod", "rank"])
async def test_the_loss_of_a_pod_or_of_its_rank_ends_the_engine_with_the_cause(
    pods: Any, fake_vllm: Path, lost: str
) -> None:
    running, other = pods
    await running.backend.load()
    await until_logged(fake_vllm, WORKERS_START, times=1)
    if lost == "pod":
        other.kill()
    else:
        fake_vllm.with_suffix(".log.end").touch()

    async def has_failed() -> bool:
        return bool(running.listener.failures)

    await eventually(has_failed, what="the engine fails")
    [failure] = running.listener.failures
    assert isinstance(failure, RankLostError)
    assert "pod 1 of the engine is lost: it closed its connection" in str(failure)
    _, log = await other.communicate()
    assert lost == "pod" or b"rank 1: vLLM failed: RuntimeError: a rank of the fake ended" in log


async def test_the_other_pod_ends_with_the_first_one(pods: Any, fake_vllm: Path) -> None:
    running, other = pods
    await running.backend.load()
    await until_logged(fake_vllm, WORKERS_START, times=1)
    await running.backend.stop()
    _, log = await other.communicate()
    assert b"the first pod of the engine is lost: it closed its connection" in log


async def test_sigterm_in_the_other_pod_drains_the_engine(pods: Any, fake_vllm: Path) -> None:
    running, other = pods
    await running.backend.load()
    await until_logged(fake_vllm, WORKERS_START, times=1)
    other.terminate()

    async def is_leaving() -> bool:
        return running.listener.leaves

    await eventually(is_leaving, what="the first pod hears of it")
    assert other.returncode is None, "its ranks serve while the engine drains"
    await running.backend.stop()
    await other.communicate()
    assert other.returncode == 0
