"""Clients that are killed, and many clients at once."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from echo_executor import echo_answer
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, Load, until_serving, until_status
from soak import repeated, size

from megatron_runtime.requests.sampling_params import SamplingParams

ENGINE_OPTIONS = ("--max-requests", "400", "--echo-step-seconds", "0.01", "--kv-cache-memory", "16Mi")

pytestmark = pytest.mark.timeout(300)


@repeated()
async def test_requests_of_a_killed_client_are_aborted_and_their_blocks_freed(fleet: Fleet, seed: int) -> None:
    await fleet.coordinator()
    engine = await fleet.engine("engine-0", *ENGINE_OPTIONS)
    link = await fleet.admin()
    await until_serving(link, fleet.engines)
    arguments = (str(fleet.client_port), str(fleet.keys_dir), size("40", soak="100"), "4000")
    vanishing = await fleet.run_python(Path(__file__).with_name("killed_client.py"), *arguments)
    assert vanishing.stdout is not None
    assert await asyncio.wait_for(vanishing.stdout.readline(), LONG_SECONDS) == b"started\n"
    assert (await engine.metrics())["megatron_kv_cache_usage_perc"] > 0, "its streams have begun"
    staying = Load([await fleet.client()])
    for number in range(20):
        staying.add([seed, number], size(100, soak=600))
    vanishing.kill()
    await until_status(link, lambda status: status.in_flight <= 20, what="its requests are aborted")
    await staying.check()

    async def freed() -> bool:
        metrics = await engine.metrics()
        return metrics["megatron_kv_cache_usage_perc"] == metrics["megatron_num_requests_running"] == 0

    await eventually(freed, what="the engine has freed all KV blocks")


@repeated(soak=5)
async def test_ten_clients_with_many_requests_each_at_once(
    fleet: Fleet, seed: int, report: Callable[[str], None]
) -> None:
    coordinator, link = await fleet.serve(3, "--max-requests", size("100", soak="500"), "--kv-cache-memory", "16Mi")
    clients = [await fleet.client() for _ in range(10)]
    prompts = [[client, number, seed] for number in range(size(40, soak=1000)) for client in range(10)]
    params = SamplingParams(num_tokens_to_generate=4)
    futures = [clients[prompt[0]].add_request(prompt, params) for prompt in prompts]
    answers = await asyncio.wait_for(asyncio.gather(*futures), 2 * LONG_SECONDS)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["generated_tokens"] == echo_answer(prompt, 4)
    await until_status(link, lambda status: status.queued == status.in_flight == 0, what="no request is left")
    metrics = await coordinator.metrics()
    assert metrics["megatron_coordinator_completed_requests_total"] == len(prompts)
    assert metrics["megatron_coordinator_journal_bytes"] == 0
    report(f"{len(prompts):,} requests at once: slowest {max(answer['latency'] for answer in answers):.2f} s")
