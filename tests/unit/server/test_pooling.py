"""Routes of pooling models: HTTP, a real coordinator and echo engines that answer arrays."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from echo_engine import ECHO_LABELS, EchoBackend, echo_pooled
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, until_serving

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.worker import EngineWorker
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.requests.sampling_params import POOLING_TASKS

TIMING = Timing(heartbeat=0.1, recovery=0.5, recovery_settle=0.2)
LIMIT = 256
"""Tokens of a prompt; an echo engine has one for each byte."""
TEXTS = ["Hi", "What is the capital of France?", "naïve 🦙"]
TOKENS = sum(map(len, TEXTS))
QUERY, DOCUMENTS = "a llama", ["a llama!", "an alpaca", "a llama", "a very long text about other animals"]

Serve = Callable[..., Awaitable[Any]]


@pytest.fixture
async def serve(start: Any) -> AsyncIterator[Serve]:
    """Start a coordinator, an engine for each task (None: it generates) and a server."""
    async with AsyncExitStack() as stack:

        async def serve_tasks(*tasks: str | None, **server: Any) -> Any:
            ports = {"client_port": 0, "engine_port": 0, "admin_port": 0}
            coordinator = Coordinator(CoordinatorSettings(listen="127.0.0.1", timing=TIMING, **ports))
            coordinator.start()
            stack.callback(coordinator.stop)
            addresses = coordinator.transport.addresses
            for number, task in enumerate(tasks):
                settings = EngineSettings(
                    coordinator=addresses[Role.ENGINE],
                    name=f"engine-{number}",
                    max_requests=8,
                    kv_cache_memory=1 << 20,
                    max_sequence_length=LIMIT,
                )
                worker = EngineWorker(settings, EchoBackend(settings, task=task))
                serving = asyncio.create_task(worker.run())
                stack.push_async_callback(asyncio.wait, [serving])
                stack.callback(worker.ended.set)
            client = CoordinatorClient(addresses[Role.CLIENT])
            await client.start(connect_timeout_seconds=LONG_SECONDS)
            stack.callback(client.stop)

            async def have_begun() -> bool:
                status = await client.status()
                return [engine.serving for engine in status.engines] == [True] * len(tasks)

            await eventually(have_begun, what="the engines serve")
            return await start(backend=client, **server)

        yield serve_tasks


def vector(text: str | list[int], **pooling: Any) -> list[float]:
    return echo_pooled({"task": "embed", **pooling}, text).tolist()


async def test_each_input_has_the_vector_of_the_model(serve: Serve) -> None:
    running = await serve("embed")
    client: openai.AsyncOpenAI = running.openai
    for options in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
        reply = await client.embeddings.create(model="smollm2", input=TEXTS, user="someone", **options)
        assert [item.index for item in reply.data] == [0, 1, 2]
        assert [item.embedding for item in reply.data] == [vector(text) for text in TEXTS]
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, TEXTS))
    single = await client.embeddings.create(model="smollm2", input="Hi")
    ids = await client.embeddings.create(model="smollm2", input=[5, 6, 7])
    lists = await client.embeddings.create(model="smollm2", input=[[5, 6, 7], [8]])
    assert single.data[0].embedding == vector("Hi")
    assert [item.embedding for item in (*ids.data, *lists.data)] == [vector([5, 6, 7]), vector([5, 6, 7]), vector([8])]
    short = await client.embeddings.create(model="smollm2", input="Hi", dimensions=3)
    raw = await client.embeddings.create(model="smollm2", input="Hi", extra_body={"use_activation": False})
    cut = await client.embeddings.create(model="smollm2", input="Hi you", extra_body={"truncate_prompt_tokens": 2})
    assert short.data[0].embedding == vector("Hi", dimensions=3)
    assert raw.data[0].embedding == vector("Hi", use_activation=False)
    assert cut.data[0].embedding == vector("Hi")
    reply = await running.post("/embeddings", {"input": "Hi", "encoding_format": "base64", "color": "red"})
    assert reply.headers["x-ignored-fields"] == "color"
    bytes_of_vector = base64.b64decode(reply.json()["data"][0]["embedding"])
    assert np.frombuffer(bytes_of_vector, "<f4").tolist() == vector("Hi")


def cosine(first: str, second: str) -> float:
    return float(np.dot(vector(first), vector(second)))


def best_matches(first: str, second: str) -> float:
    query, document = (echo_pooled({"task": "token_embed"}, text) for text in (first, second))
    return float((query @ document.T).max(axis=1).sum())


def as_pair(first: str, second: str) -> float:
    return float(echo_pooled({"task": "classify", "pair": second}, first)[0])


@pytest.mark.parametrize(("task", "score"), [("classify", as_pair), ("embed", cosine), ("token_embed", best_matches)])
async def test_pairs_are_scored_as_the_model_does_it(serve: Serve, task: str, score: Any) -> None:
    running = await serve(task)
    expected = [score(QUERY, document) for document in DOCUMENTS]
    for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")):
        for path in ("/v1/score", "/score"):
            reply = await running.post(path, {"model": "smollm2", names[0]: QUERY, names[1]: DOCUMENTS})
            assert reply.status_code == 200, reply.text
            answer = reply.json()
            assert [item["score"] for item in answer["data"]] == pytest.approx(expected, rel=1e-6)
            assert [(item["index"], item["object"]) for item in answer["data"]] == [(n, "score") for n in range(4)]
            assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    as_many = await running.post("/v1/score", {"queries": DOCUMENTS, "documents": DOCUMENTS[::-1]})
    pairs = zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)
    assert [item["score"] for item in as_many.json()["data"]] == pytest.approx([score(*pair) for pair in pairs])
    order = sorted(range(4), key=lambda place: -expected[place])
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        reply = await running.post(path, {"model": "smollm2", "query": QUERY, "documents": DOCUMENTS})
        results = reply.json()["results"]
        assert [item["index"] for item in results] == order
        assert [item["relevance_score"] for item in results] == pytest.approx([expected[place] for place in order])
        assert [item["document"]["text"] for item in results] == [DOCUMENTS[place] for place in order]
    best = await running.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 2})
    assert [item["index"] for item in best.json()["results"]] == order[:2]
    (card,) = (await running.http.get("/v1/models")).json()["data"]
    assert card["tasks"] == [task]


async def test_each_text_has_its_class(serve: Serve) -> None:
    running = await serve("classify")
    for path in ("/v1/classify", "/classify"):
        answer = (await running.post(path, {"model": "smollm2", "input": TEXTS, "use_activation": False})).json()
        labels = [ECHO_LABELS[len(text.encode()) > 8] for text in TEXTS]
        assert [item.pop("label") for item in answer["data"]] == labels
        probs = [echo_pooled({"task": "classify"}, text).tolist() for text in TEXTS]
        assert answer["data"] == [
            {"index": index, "probs": values, "num_classes": 2} for index, values in enumerate(probs)
        ]
        assert answer["id"].startswith("classify-")
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, TEXTS))


@pytest.mark.parametrize("task", POOLING_TASKS)
async def test_pooling_returns_the_array_of_every_model_in_each_encoding(serve: Serve, task: str) -> None:
    running = await serve(task)
    expected = [echo_pooled({"task": task}, text) for text in TEXTS]
    for fields in ({}, {"encoding_format": "float", "task": task}):
        answer = (await running.post("/pooling", {"model": "smollm2", "input": TEXTS, **fields})).json()
        assert [item["data"] for item in answer["data"]] == [values.tolist() for values in expected]
        assert [(item["index"], item["object"]) for item in answer["data"]] == [(n, "pooling") for n in range(3)]
        assert (answer["object"], answer["model"], answer["usage"]["total_tokens"]) == ("list", "smollm2", TOKENS)
    answer = (await running.post("/v1/pooling", {"input": TEXTS, "encoding_format": "base64"})).json()
    assert [base64.b64decode(item["data"]) for item in answer["data"]] == [values.tobytes() for values in expected]
    only = await running.post("/v1/pooling", {"input": TEXTS, "encoding_format": "bytes_only"})
    reply = await running.post("/v1/pooling", {"input": TEXTS, "encoding_format": "bytes"})
    assert "metadata" not in only.headers
    assert only.content == reply.content == b"".join(values.tobytes() for values in expected)
    assert only.headers["content-type"] == reply.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(reply.headers["metadata"])
    assert metadata["usage"]["prompt_tokens"] == TOKENS
    for item, values in zip(metadata["data"], expected, strict=True):
        part = np.frombuffer(reply.content[item["start"] : item["end"]], "<f4").reshape(item["shape"])
        np.testing.assert_array_equal(part, values)
        assert (item["embed_dtype"], item["endianness"]) == ("float32", "native")


@pytest.mark.parametrize(
    ("path", "fields", "param", "told"),
    [
        ("embeddings", {"input": []}, "input", "list of texts"),
        ("embeddings", {"input": [[]]}, "input", "token ids"),
        ("embeddings", {"input": ["Hi"] * 1025}, "input", "1025 texts, at most 1024 are allowed"),
        ("embeddings", {"input": "Hi", "dimensions": 0}, "dimensions", "1"),
        ("embeddings", {"input": "Hi", "encoding_format": "int8"}, "encoding_format", "base64"),
        ("embeddings", {"input": "Hi", "priority": 3}, "priority", "--allow-priority"),
        ("embeddings", {"input": ["Hi", "a" * 300]}, "input[1]", "maximum context length is 256 tokens"),
        ("embeddings", {"input": "a" * 300}, "input", "300"),
        ("score", {"queries": "a", "documents": ["b", "c" * 300]}, "documents[1]", "256"),
        ("score", {"queries": ["a", "b"], "documents": ["c"] * 3}, "queries", "give one text, or as many"),
        ("score", {"queries": "a", "text_2": "b"}, "queries", "text_1 and text_2"),
        ("score", {"text_1": "a"}, "text_2", "the request has text_1"),
        ("score", {"queries": "a", "documents": []}, "documents", "0 texts, give at least one"),
        ("score", {"queries": "a", "documents": ["b"] * 1001}, "documents", "at most 1000"),
        ("score", {"queries": "a", "documents": "b", "instruction": "c"}, "instruction", "query"),
        ("pooling", {"input": "a", "task": "classify"}, "task", "'classify' is not a task of the model: use embed"),
        ("pooling", {"input": "a", "dimensions": 2}, "dimensions", "/v1/embeddings"),
        ("pooling", {"input": ["a", "b" * 300]}, "input[1]", "256"),
        ("rerank", {"query": "a", "documents": ["b", 3]}, "documents", "a list of texts"),
        ("rerank", {"documents": ["b"]}, "query", "Missing"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "0"),
    ],
)
async def test_wrong_requests_get_field_and_remedy(
    serve: Serve, path: str, fields: dict[str, Any], param: str, told: str
) -> None:
    running = await serve("embed")
    reply = await running.post(f"/v1/{path}", {"model": "smollm2", **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert error["param"].startswith(param), error
    assert told in error["message"]
    assert (error["code"] == "context_length_exceeded") == ("256" in told or "300" in told)


async def test_a_query_that_is_sent_with_each_document_is_limited(serve: Serve) -> None:
    running = await serve("classify")
    reply = await running.post("/v1/score", {"queries": "a" * 100_000, "documents": ["b"] * 500})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "documents", "request_too_large")
    assert "send several requests" in error["message"]


ROUTES: dict[str, dict[str, Any]] = {
    "embeddings": {"input": "a"},
    "classify": {"input": "a"},
    "pooling": {"input": "a"},
    "score": {"queries": "a", "documents": "b"},
    "rerank": {"query": "a", "documents": ["b"]},
    "completions": {"prompt": "a", "max_tokens": 2},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}


async def statuses(running: Any) -> dict[str, int]:
    replies: dict[str, httpx.Response] = {}
    for path, body in ROUTES.items():
        replies[path] = await running.post(f"/v1/{path}", {"model": "smollm2", **body})
    assert all(reply.json()["error"]["code"] == "not_offered" for reply in replies.values() if reply.is_error)
    return {path: reply.status_code for path, reply in replies.items()}


async def test_each_server_has_the_routes_of_its_model(serve: Serve) -> None:
    assert await statuses(await serve("embed")) == {
        **dict.fromkeys(ROUTES, 404),
        **dict.fromkeys(("embeddings", "pooling", "score", "rerank"), 200),
    }
    assert await statuses(await serve("classify")) == {
        **dict.fromkeys(ROUTES, 404),
        **dict.fromkeys(("classify", "pooling", "score", "rerank"), 200),
    }
    assert await statuses(await serve("token_classify")) == {**dict.fromkeys(ROUTES, 404), "pooling": 200}
    generates = await serve(None)
    assert await statuses(generates) == {**dict.fromkeys(ROUTES, 404), "completions": 200, "chat/completions": 200}
    for path in ("classify", "pooling", "score", "rerank"):
        assert (await generates.post(f"/v1/{path}", {})).status_code == 404, "whatever the body is"
    (card,) = (await generates.http.get("/v1/models")).json()["data"]
    assert card["tasks"] == ["generate"]


async def test_a_pool_of_both_kinds_answers_each_by_its_own(serve: Serve) -> None:
    running = await serve("embed", None, "embed")
    assert await statuses(running) == {**dict.fromkeys(ROUTES, 200), "classify": 404}
    texts = [f"text {number}" for number in range(40)]
    embeddings, *completions = await asyncio.gather(
        running.openai.embeddings.create(model="smollm2", input=texts),
        *(running.openai.completions.create(model="smollm2", prompt=text, max_tokens=3) for text in texts),
    )
    assert [item.embedding for item in embeddings.data] == [vector(text) for text in texts]
    assert {each.usage.completion_tokens for each in completions} == {3}


async def test_a_request_waits_for_the_first_engine_and_for_a_paused_one(start: Any, tmp_path: Path) -> None:
    """The server learns what the model does when an engine serves."""
    fleet = Fleet(tmp_path)
    await fleet.coordinator()
    client = CoordinatorClient(fleet.client_port, keys=fleet.keys(Role.CLIENT))
    try:
        await client.start(connect_timeout_seconds=LONG_SECONDS)
        running = await start(backend=client, coordinator_wait_seconds=LONG_SECONDS)
        first = asyncio.create_task(running.openai.embeddings.create(model="smollm2", input="Hi"))
        await fleet.engine("engine-0", "--echo-task", "embed")
        assert (await first).data[0].embedding == vector("Hi")
        admin = await fleet.admin()
        await admin.control(Header.PAUSE, operation_id="1", fence=1, timeout_seconds=LONG_SECONDS)
        second = asyncio.create_task(running.openai.embeddings.create(model="smollm2", input="you"))
        await until_in_flight(client, 0, queued=1)
        assert not second.done()
        await admin.control(Header.UNPAUSE, operation_id="2", fence=1, timeout_seconds=LONG_SECONDS)
        assert (await second).data[0].embedding == vector("you")
    finally:
        client.stop()
        await fleet.close()


async def until_in_flight(client: CoordinatorClient, number: int, *, queued: int = 0) -> None:
    async def is_so() -> bool:
        status = await client.status()
        return (status.in_flight, status.queued) == (number, queued)

    await eventually(is_so, what=f"{number} requests are in flight")


async def test_after_kill_9_of_an_engine_each_answer_comes_once(start: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    await fleet.coordinator()
    client = CoordinatorClient(fleet.client_port, keys=fleet.keys(Role.CLIENT))
    try:
        await fleet.engine("slow", "--echo-task", "embed", "--echo-step-seconds", "3600")
        await until_serving(await fleet.admin(), ["slow"])
        await client.start(connect_timeout_seconds=LONG_SECONDS)
        running = await start(backend=client)
        texts = [f"text {number}" for number in range(8)]
        asking = asyncio.create_task(running.openai.embeddings.create(model="smollm2", input=texts))
        ranking = asyncio.create_task(running.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}))
        await until_in_flight(client, 9)  # the query comes before the documents
        await fleet.engines["slow"].kill()
        await fleet.engine("other", "--echo-task", "embed")
        reply = await asking
        assert [item.embedding for item in reply.data] == [vector(text) for text in texts]
        assert reply.usage.prompt_tokens == sum(map(len, texts))
        assert sorted(item["index"] for item in (await ranking).json()["results"]) == [0, 1, 2, 3]
        await until_in_flight(client, 0)
    finally:
        client.stop()
        await fleet.close()


async def test_tokens_of_pooling_count_against_the_limit_of_a_key(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {name: tester, key: secret, tokensPerMinute: 100}\n")
    running = await serve("embed", api_keys_file=file)
    headers = {"Authorization": "Bearer secret"}
    for left, status in ((40, 200), (0, 200), (0, 429)):
        reply = await running.http.post("/v1/embeddings", json={"input": "a" * 60}, headers=headers)
        assert reply.status_code == status, reply.text
        assert reply.headers["x-ratelimit-remaining-tokens"] == str(left)


async def test_a_classifier_of_several_labels_scores_no_pairs(running: Any) -> None:
    """Its engine rejects the pair, whose name no client knows."""
    running.backend.tasks = ("classify",)
    running.backend.failure = {"code": 400, "type": "VllmRejectedError", "message": "give no pair", "field": "pair"}
    for path in ("score", "rerank"):
        reply = await running.post(f"/v1/{path}", {"model": "smollm2", **ROUTES[path]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_offered"), reply.text
