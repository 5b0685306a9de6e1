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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(NIXL)))))
    await pool.start()
    cpus = sorted(os.sched_getaffinity(0))
    for number, role in enumerate(("prefill", "decode")):
        own = {"VLLM_CPU_OMP_THREADS_BIND": str(cpus[number % len(cpus)])}  # otherwise both use every CPU, and wait
        options = ("--role", role, "--vllm-allow-nixl", "--kv-cache-memory", "512Mi")
        await pool.engine(role, "vllm", *options, environment=own)
    await until_serving(pool.admin, ("prefill", "decode"), seconds=START_SECONDS)
    await until_status(
        pool.admin,
        lambda status: all(engine.digest and not engine.recomputes for engine in status.engines),
        what="the engines can exchange KV",
    )
    return pool


def prompts(count: int) -> list[list[int]]:
    """Each prompt takes 3 of the 90 blocks of the cache, of which exports may take a quarter."""
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


def streams(pool: Pool) -> Load:
    """Begin streams, whose prompts are all split."""
    load = Load([pool.client])
    for prompt in prompts(3):
        load.add(prompt, LENGTH, temperature=0.0, termination_id=IGNORE_EOS)
    return load


async def check(pool: Pool, load: Load) -> None:
    """Every stream ends with the answer that the engine that is left gives without a split."""
    await load.finish(seconds=START_SECONDS)
    expected = await undisturbed(pool, [record.prompt for record in load.records])
    for record, answer in zip(load.records, expected, strict=True):
        record.check(answer)
    names = ("split_requests", "kv_imports", "failed_kv_imports")
    counts = [f"{name} {await count(pool, name):g}" for name in names]
    print(f"\n{', '.join(counts)}, longest gap {max(record.longest_gap(since=0) for record in load.records):.1f} s")


async def test_split_answers_are_the_same(split: Pool) -> None:
    """Two requests have the same prompt and a grammar, as the answers of n = 2."""
    wanted = prompts(3)
    requests = [ask(split, prompt) for prompt in wanted]
    requests += [ask(split, wanted[0], **DIGITS, cache_salt="digits") for _ in range(2)]
    replies = await asyncio.gather(*requests)
    # No engine has measured its rates, so every prompt was split.
    assert await count(split, "split_requests") == await count(split, "kv_imports") == len(requests)
    assert await count(split, "kv_imported_bytes") > 0
    for prompt, reply in zip([*wanted, *wanted[:1] * 2], replies, strict=True):
        assert reply["num_cached_tokens"] == len(prompt) // 128 * 128, "the import was not a prefix hit"

    answers = [reply["generated_tokens"] for reply in replies]
    assert answers[:3] == await undisturbed(split, wanted)
    assert answers[3:] == await undisturbed(split, wanted[:1], **DIGITS) * 2


async def test_no_answer_changes_when_the_prefill_engine_is_lost_during_transfers(split: Pool) -> None:
    load = streams(split)
    await until_status(
        split.admin,
        lambda status: any(engine.in_flight for engine in status.engines if engine.name == "decode"),
        seconds=START_SECONDS,
        what="the decode engine imports a prompt",
    )
    await lose(split, "prefill")
    await check(split, load)


async def test_the_prefill_engine_answers_when_the_decode_engine_is_lost_in_mid_stream(split: Pool) -> None:
    load = streams(split)
    await load.until(len(load.records) * 4, seconds=START_SECONDS)
    assert await count(split, "kv_imports") > 0
    await lose(split, "decode")
    await check(split, load)
