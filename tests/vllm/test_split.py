"""Prompts that one vLLM engine computes and another one answers, by NIXL: answers, and the loss of either engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import eventually
from fleet import Load, until_serving, until_status

from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

from .conftest import START_SECONDS, Pool, has_formats

NIXL = Path(__file__).parents[2] / "build" / "nixl"
LENGTH = 24
GREEDY = {"temperature": 0.0, "num_tokens_to_generate": LENGTH, "termination_id": IGNORE_EOS}
DIGITS = {"structured_output": {"type": "regex", "value": "[0-9]{3}( [0-9]{2}){4}"}}

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_formats(), reason="NIXL is tested with the newest version of vLLM only"),
]


@pytest.fixture
async def split(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """An engine that computes prompts, and one that generates."""
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{NIXL}")
    await pool.start()
    cpus = sorted(os.sched_getaffinity(0))
    for number, role in enumerate(("prefill", "decode")):
        own = {"VLLM_CPU_OMP_THREADS_BIND": str(cpus[number % len(cpus)])}  # otherwise both use every CPU, and wait
        await pool.engine(role, "vllm", "--role", role, "--vllm-allow-nixl", environment=own)
    await until_serving(pool.admin, ("prefill", "decode"), seconds=START_SECONDS)
    await until_status(
        pool.admin,
        lambda status: all(engine.digest and not engine.recomputes for engine in status.engines),
        what="the engines can exchange KV",
    )
    return pool


def prompts(count: int) -> list[list[int]]:
    """Three of these prompts take nine of the 45 blocks of the cache, of which exports may take a quarter."""
    rng = random.Random(7)
    return [rng.choices(range(100, 40_000), k=rng.randint(300, 380)) for _ in range(count)]


async def ask(pool: Pool, prompt: list[int], **params: Any) -> dict[str, Any]:
    return await pool.client.add_request(prompt, SamplingParams(**{**GREEDY, **params}))


async def undisturbed(pool: Pool, wanted: list[list[int]], **params: Any) -> list[list[int]]:
    """Return the answers of one engine. A request for the log-probabilities of its prompt is not split."""
    whole = {"return_log_probs": True, "skip_prompt_log_probs": False, "cache_salt": "undisturbed"}
    replies = await asyncio.gather(*(ask(pool, prompt, **whole, **params) for prompt in wanted))
    return [reply["generated_tokens"] for reply in replies]


async def count(pool: Pool, name: str) -> float:
    return (await pool.coordinator.metrics())[f"megatron_coordinator_{name}_total"]


async def lose(pool: Pool, name: str) -> None:
    """Kill every process of an engine at once, as the loss of its node does."""
    engine = pool.fleet.engines.pop(name)
    for process in [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]:
        process.send_signal(signal.SIGKILL)
    await engine.ended()


async def check(load: Load, expected: list[list[int]]) -> None:
    await load.finish(seconds=START_SECONDS)
    for record, answer in zip(load.records, expected, strict=True):
        record.check(answer)


async def test_split_answers_are_the_same_and_survive_the_loss_of_the_prefill_engine(split: Pool) -> None:
    wanted = prompts(3)
    expected = await undisturbed(split, wanted)
    digits = await undisturbed(split, wanted[:1], **DIGITS)
    assert await count(split, "split_requests") == 0

    replies = await asyncio.gather(*(ask(split, prompt) for prompt in wanted))
    assert [reply["generated_tokens"] for reply in replies] == expected
    assert await count(split, "kv_imports") == len(wanted)
    assert await count(split, "kv_imported_bytes") > 0
    for prompt, reply in zip(wanted, replies, strict=True):
        assert reply["num_cached_tokens"] >= len(prompt) // 128 * 128, "the import was not a prefix hit"

    several = await asyncio.gather(*(ask(split, wanted[0], **DIGITS, cache_salt="digits") for _ in range(2)))
    assert [reply["generated_tokens"] for reply in several] == digits * 2
    assert await count(split, "kv_imports") > len(wanted)

    before = await count(split, "split_requests")
    load = Load([split.client])
    for prompt in wanted:
        load.add(prompt, LENGTH, temperature=0.0, termination_id=IGNORE_EOS, cache_salt="lost")

    async def has_begun() -> bool:
        return await count(split, "split_requests") > before

    await eventually(has_begun, what="a prompt is sent to the prefill engine", look_seconds=0.01)
    await lose(split, "prefill")
    await check(load, expected)


async def test_the_prefill_engine_answers_when_the_decode_engine_is_lost_in_mid_stream(split: Pool) -> None:
    wanted = prompts(3)
    expected = await undisturbed(split, wanted)
    load = Load([split.client])
    for prompt in wanted:
        load.add(prompt, LENGTH, temperature=0.0, termination_id=IGNORE_EOS)
    await load.until(len(wanted) * 4, seconds=START_SECONDS)
    assert await count(split, "kv_imports") > 0
    await lose(split, "decode")
    await check(load, expected)
