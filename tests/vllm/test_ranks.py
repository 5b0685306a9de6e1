"""Engines of several ranks: two in one pod, and one in each of two pods."""

from __future__ import annotations

import pytest
from fleet import until_serving

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.protocol.headers import Header

from .conftest import START_SECONDS, Pool
from .test_engine import answers, check, load_of, prompts

pytestmark = pytest.mark.timeout(1800)

STAGES = ("--pipeline-parallel", "2")


async def test_two_pipeline_stages_in_one_pod_answer_as_one_rank(pool: Pool) -> None:
    await pool.start(one="vllm")
    wanted = prompts(4)
    expected = await answers(pool, wanted)
    await pool.fleet.engines.pop("one").kill()
    await pool.engine("two", "vllm", *STAGES)
    await until_serving(pool.admin, ["two"], seconds=START_SECONDS)
    assert await answers(pool, wanted) == expected
    load = load_of(pool, wanted)
    await load.until(20)
    await pool.control(Header.PAUSE)
    await pool.control(Header.SUSPEND)
    await pool.control(Header.RESUME)
    await pool.control(Header.UNPAUSE)
    await check(load, expected)


async def test_two_pods_answer_as_one_rank_and_fail_together(pool: Pool) -> None:
    await pool.start(one="vllm")
    wanted = prompts(4)
    expected = await answers(pool, wanted)
    await pool.fleet.engines.pop("one").kill()

    (port,) = free_ports(1)
    variables = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for number, name in enumerate(("two", "follower")):
        await pool.engine(name, "vllm", *STAGES, environment={**variables, "NODE_RANK": str(number)})
    await until_serving(pool.admin, ["two"], seconds=START_SECONDS)
    assert await answers(pool, wanted) == expected
    load = load_of(pool, wanted)
    await load.until(20)
    await pool.control(Header.PAUSE)
    await pool.control(Header.SUSPEND)
    await pool.control(Header.RESUME)
    await pool.control(Header.UNPAUSE)
    await check(load, expected)

    await pool.fleet.engines.pop("follower").kill()
    assert await pool.fleet.engines.pop("two").ended() == 1
