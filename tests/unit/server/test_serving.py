"""Disconnects, silent streams, shutdown, probes, metrics."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

import megatron_runtime

CHAT: dict[str, Any] = {"model": "smollm2", "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}


def metric(text: str, name: str) -> float:
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)]
    assert values, f"{name} is not exposed"
    return sum(values)


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_a_stream_aborts_every_choice(running: Any, n: int) -> None:
    running.backend.gate.clear()
    async with running.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True, "n": n}) as reply:
        await anext(reply.aiter_lines())
        await running.backend.until(open_requests=n)
    await running.backend.until(open_requests=0, aborted=n)


async def test_disconnecting_while_the_answer_is_generated_aborts_it(running: Any) -> None:
    running.backend.gate.clear()
    waiting = asyncio.create_task(running.chat(n=2))
    await running.backend.until(open_requests=2)
    waiting.cancel()
    await running.backend.until(open_requests=0, aborted=2)


async def test_disconnecting_before_the_first_token_aborts(running: Any) -> None:
    running.backend.gate.clear()
    running.backend.free_tokens = 0
    waiting = asyncio.create_task(running.chat(stream=True))
    await running.backend.until(open_requests=1)
    waiting.cancel()
    await running.backend.until(open_requests=0, aborted=1)


async def test_comments_keep_a_silent_stream_open(start: Any, answer: str) -> None:
    running = await start(keep_alive_seconds=0.05)
    running.backend.gate.clear()
    running.backend.free_tokens = 0
    texts, comments = [], 0
    async with running.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            comments += line == ": keep-alive"
            if comments == 2:
                running.backend.gate.set()
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
    assert comments >= 2
    assert "".join(texts) == answer


async def test_drain_finishes_open_requests(start: Any, answer: str) -> None:
    running = await start(drain_seconds=30)
    running.backend.gate.clear()
    waiting = asyncio.create_task(running.chat())
    await running.backend.until(open_requests=1)
    draining = asyncio.create_task(running.drain())
    reply = await running.http.get("/readyz")
    assert reply.status_code == 503
    assert reply.json()["missing"] == ["the server is shutting down"]
    assert reply.headers["connection"] == "close"
    running.backend.gate.set()
    assert (await waiting).json()["choices"][0]["message"]["content"] == answer
    await draining


async def test_drain_continues_while_requests_arrive(start: Any, answer: str) -> None:
    running = await start(drain_seconds=60, linger_seconds=2.0)
    draining = asyncio.create_task(running.drain())
    until = time.monotonic() + 1.25 * running.service.settings.linger_seconds
    while time.monotonic() < until:
        reply = await running.chat()
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        assert reply.json()["choices"][0]["message"]["content"] == answer
    assert not draining.done()
    await draining


async def test_drain_deadline_answers_the_rest_with_an_error(start: Any) -> None:
    running = await start(drain_seconds=0.05)
    running.backend.gate.clear()
    whole = asyncio.create_task(running.chat())
    stream = asyncio.create_task(running.chat(stream=True))
    await running.backend.until(open_requests=2)
    await running.drain()
    reply = await whole
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "shutting_down"
    assert '"shutting_down"' in (await stream).text
    assert running.backend.aborted == 2


async def test_readiness_names_the_coordinator(start: Any) -> None:
    running = await start(coordinator="tcp://coordinator:5555")
    assert (await running.http.get("/livez")).status_code == 200
    assert (await running.http.get("/readyz")).json() == {"ready": True, "missing": []}
    running.backend.connected = False
    for path in ("/readyz", "/health", "/v1/health"):
        assert (await running.http.head(path)).status_code == 503
        reply = await running.http.get(path)
        assert reply.status_code == 503
        assert reply.json()["missing"] == ["connection to the coordinator at tcp://coordinator:5555"]
    assert (await running.http.get("/livez")).status_code == 200


async def test_requests_wait_for_an_unreachable_coordinator(start: Any, answer: str) -> None:
    running = await start(coordinator_wait_seconds=30)
    running.backend.connected = False
    waiting = [asyncio.create_task(running.chat(stream=stream)) for stream in (True, False)]
    while running.service.in_flight < 2:  # noqa: ASYNC110 - the requests are on their way
        await asyncio.sleep(0)
    assert running.backend.requests == []
    running.backend.connected = True
    assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_coordinator_that_stays_unreachable_is_a_503(start: Any, stream: bool) -> None:
    running = await start(coordinator_wait_seconds=0.1)
    running.backend.connected = False
    reply = await running.chat(stream=stream)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    assert reply.json()["error"]["code"] == "coordinator_unreachable"


async def test_metrics_count_requests_tokens_times_and_routes(running: Any) -> None:
    await running.chat()
    running.backend.times = {"queue_seconds": 0.5, "prefill_seconds": 0.25, "decode_seconds": 2.0}
    await running.chat(stream=True)
    await running.chat(temperature=-1)
    await running.http.get("/no/such/page")
    text = (await running.http.get("/metrics")).text
    for prefix in ("megatron_", "vllm:"):
        assert metric(text, f'{prefix}request_success_total{{finished_reason="stop"') == 2
        assert metric(text, f"{prefix}generation_tokens_total") > 40
        assert metric(text, f"{prefix}prompt_tokens_total") > 40
        assert metric(text, f"{prefix}request_prompt_tokens_count") == 2
        assert metric(text, f"{prefix}request_generation_tokens_count") == 2
        assert metric(text, f"{prefix}prefix_cache_queries_total") > 40
        assert metric(text, f"{prefix}prefix_cache_hits_total") == 6
        assert metric(text, f"{prefix}time_to_first_token_seconds_count") == 1
        assert metric(text, f"{prefix}inter_token_latency_seconds_count") > 5
        assert metric(text, f"{prefix}e2e_request_latency_seconds_count") == 2
        assert metric(text, f"{prefix}request_queue_time_seconds_sum") == 0.5
        assert metric(text, f"{prefix}request_prefill_time_seconds_sum") == 0.25
        assert metric(text, f"{prefix}request_decode_time_seconds_sum") == 2.0
        assert metric(text, f"{prefix}request_inference_time_seconds_sum") == 2.25
    assert metric(text, 'megatron_http_responses_total{route="/v1/chat/completions",status="400"}') == 1
    assert metric(text, 'megatron_http_responses_total{route="unknown",status="404"}') == 1
    assert metric(text, "process_resident_memory_bytes") > 1e6


async def test_metrics_count_waiting_and_running_choices(running: Any) -> None:
    running.backend.gate.clear()
    running.backend.free_tokens = 0
    waiting = [asyncio.create_task(running.chat(stream=stream)) for stream in (True, True, False)]
    await running.backend.until(open_requests=3)
    text = (await running.http.get("/metrics")).text
    for prefix in ("megatron_", "vllm:"):
        assert metric(text, f"{prefix}num_requests_waiting") == 2
        assert metric(text, f"{prefix}num_requests_running") == 1
    waiting[0].cancel()
    await running.backend.until(open_requests=2, aborted=1)
    running.backend.gate.set()
    await asyncio.gather(*waiting[1:])
    text = (await running.http.get("/metrics")).text
    for name in ("num_requests_waiting", "num_requests_running"):
        assert metric(text, f"megatron_{name}") == 0
    assert metric(text, "megatron_requests_aborted_total") == 1


async def test_vllm_metric_names_can_be_left_out(start: Any) -> None:
    running = await start(vllm_metrics=False)
    assert "vllm:" not in (await running.http.get("/metrics")).text


async def test_more_open_requests_than_allowed_get_429(start: Any) -> None:
    running = await start(max_open_requests=3)
    running.backend.gate.clear()
    waiting = asyncio.create_task(running.chat(n=2))
    await running.backend.until(open_requests=2)
    rejected = await running.chat(n=2)
    assert (rejected.status_code, rejected.headers["retry-after"]) == (429, "1")
    assert rejected.json()["error"]["code"] == "too_many_requests"
    running.backend.gate.set()
    assert (await waiting).status_code == 200
    assert (await running.chat(n=2)).status_code == 200


async def test_requests_that_wait_for_a_coordinator_count_as_open(start: Any) -> None:
    running = await start(max_open_requests=1, coordinator_wait_seconds=30)
    running.backend.connected = False
    waiting = asyncio.create_task(running.chat())
    while running.service.in_flight < 1:  # noqa: ASYNC110 - the request is on its way
        await asyncio.sleep(0)
    assert (await running.chat()).status_code == 429
    running.backend.connected = True
    assert (await waiting).status_code == 200


async def test_version_is_reported(running: Any) -> None:
    assert (await running.http.get("/version")).json() == {"version": megatron_runtime.__version__}


async def test_requests_run_at_the_same_time(running: Any, answer: str) -> None:
    running.backend.gate.clear()
    waiting = [asyncio.create_task(running.chat(f"question {i}", stream=i % 2 == 0)) for i in range(20)]
    await running.backend.until(open_requests=20)
    running.backend.gate.set()
    replies = await asyncio.gather(*waiting)
    assert all(reply.status_code == 200 for reply in replies)


async def test_a_long_prompt_is_tokenized_whole(running: Any, tokenizer: Any) -> None:
    text = "naïve 🦙 words " * 500
    await running.post("/v1/completions", {"model": "smollm2", "prompt": text, "temperature": 0})
    assert running.backend.requests[0][0] == tokenizer.encode(text)
