"""What requests hold until they are answered, and large bodies: fair between API keys, off the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from eventually import LONG_SECONDS, eventually

from megatron_runtime.server.openai import bodies, service
from megatron_runtime.server.openai.bodies import PARSED_IN_PLACE_BYTES, BodyBudget, Lease
from megatron_runtime.server.openai.schema import CompletionRequest
from megatron_runtime.server.streaming import WholeAnswer

CHAT = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi", "max_tokens": 1},
    "chat/completions": {"messages": CHAT, "max_tokens": 1},
    "responses": {"input": "Hi", "max_output_tokens": 1},
    "messages": {"messages": CHAT, "max_tokens": 1},
    "messages/count_tokens": {"messages": CHAT},
    "embeddings": {"input": "Hi"},
    "tokenize": {"prompt": "Hi"},
    "detokenize": {"tokens": [5, 6]},
}
"""A body for each route that reads one."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    return file


async def post(running: Any, path: str, body: Any, *, key: str = "first") -> Any:
    content = body if isinstance(body, bytes) or hasattr(body, "__aiter__") else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return await running.http.post(f"/v1/{path}", content=content, headers=headers)


async def test_every_route_counts_its_body(start: Any) -> None:
    running = await start(max_bodies_bytes=10)
    for path, body in BODIES.items():
        reply = await post(running, path, body)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1"), path
        assert running.service.bodies.total == 0
    running = await start()
    held: list[int] = []
    release = Lease.release

    def noted(lease: Lease) -> None:
        held.append(lease.size)
        release(lease)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "release", noted)
        for path, body in BODIES.items():
            assert (await post(running, path, body)).status_code == 200, path
    assert len(held) == len(BODIES)
    assert min(held) > 40, "the parsed body, its tokens and the answer"
    assert (running.service.bodies.total, running.service.bodies.held) == (0, {})


async def test_a_body_counts_while_it_arrives_and_until_it_is_answered(start: Any, keys: Path) -> None:
    running = await start(max_bodies_bytes=60_000, api_keys_file=keys)
    budget, backend, rest = running.service.bodies, running.backend, asyncio.Event()

    async def slow() -> Any:
        yield b" " * 9000
        await rest.wait()
        yield json.dumps({"prompt": [5] * 600, "temperature": 0}).encode()

    def holds(size: int) -> Any:
        async def check() -> bool:
            return bool(budget.total >= size)

        return check

    backend.gate.clear()
    tasks = [asyncio.create_task(post(running, "completions", slow()))]
    await eventually(holds(9000), what="the body is half received", look_seconds=0.01)
    rest.set()
    await backend.until(open_requests=1)
    assert budget.total > 600 * 44, "600 tokens in a list and as they are sent"
    assert (await post(running, "completions", {"prompt": [5] * 900})).status_code == 429, "of the same key"
    tasks.append(
        asyncio.create_task(post(running, "completions", {"prompt": [5] * 300, "temperature": 0}, key="second"))
    )
    await backend.until(open_requests=2)
    reply = await post(running, "completions", {"prompt": [5] * 900}, key="second")
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_many_requests")
    backend.gate.set()
    assert [reply.status_code for reply in await asyncio.gather(*tasks)] == [200, 200]
    assert (budget.total, budget.held) == (0, {})


def test_a_full_budget_accepts_tenants_below_their_share() -> None:
    budget = BodyBudget(100)
    first, second = Lease(budget, "first"), Lease(budget, "second")
    first.add(100)
    for lease, size in ((first, 1), (second, 51)):
        with pytest.raises(service.ApiError, match="try again"):
            lease.add(size)
    second.add(50)
    second.force(10)
    first.add(-40)
    assert (budget.total, dict(budget.held)) == (120, {"first": 60, "second": 60})
    first.release()
    second.release()
    assert (budget.total, dict(budget.held)) == (0, {})


async def test_a_whole_answer_is_held_until_its_client_has_read_it() -> None:
    read, sent = asyncio.Semaphore(0), []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(message.get("body", b"")) == WholeAnswer.PART_BYTES:
            await read.acquire()

    content = bytes(range(256)) * 1000
    answering = asyncio.create_task(WholeAnswer(content)({}, None, send))  # type: ignore[arg-type]
    for parts in range(1, 4):
        await asyncio.sleep(0)
        assert len(sent) == parts + 1
        assert not answering.done()
        read.release()
    await answering
    assert b"".join(message["body"] for message in sent[1:]) == content
    assert [message["more_body"] for message in sent[1:]] == [True, True, True, False]


async def test_lists_longer_than_a_prompt_may_be_are_rejected_before_they_are_parsed(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(max_sequence_length=5000)
    tokens = [5] * 5001
    longest = await post(running, "detokenize", {"tokens": tokens[:5000]})
    assert longest.status_code == 200
    assert (await post(running, "completions", {"prompt": [tokens[:4990]] * 3, "max_tokens": 1})).status_code == 200
    monkeypatch.setattr(service, "parse", None)
    monkeypatch.setattr(service, "parse_in_child", None)
    for path, body, param in (
        ("completions", {"prompt": tokens}, "prompt"),
        ("completions", {"prompt": [[5], tokens], "n": 2}, "prompt"),
        ("embeddings", {"input": tokens}, "input"),
        ("detokenize", {"tokens": tokens * 50}, "tokens"),
        ("chat/completions", {"messages": [{**CHAT[0], "prompt_token_ids": tokens}]}, None),
    ):
        reply = await post(running, path, body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "5000 tokens" in error["message"]


async def test_a_rejected_body_counts_against_the_tokens_of_its_key(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "keys:\n- {name: a, key: first, tokensPerMinute: 1000}\n- {name: b, key: second, tokensPerMinute: 1000}\n"
    )
    running = await start(api_keys_file=file, max_body_bytes=3000)

    async def remaining(path: str, body: Any, status: int) -> int:
        reply = await post(running, path, body)
        assert reply.status_code == status, reply.text
        return int(reply.headers["x-ratelimit-remaining-tokens"])

    assert await remaining("completions", b"{" + b" " * 399, 400) == 900
    assert await remaining("detokenize", b'{"tokens": "%b"}' % (b"a" * 386), 400) == 800
    assert await remaining("completions", {"prompt": "Hi", "temperature": 9, "user": "a" * 355}, 400) == 700
    assert await remaining("completions", b" " * 3001, 413) == 700, "nothing was read"
    assert await remaining("completions", {"prompt": [5] * 10, "max_tokens": 1, "temperature": 0}, 200) == 689
    assert await remaining("chat/completions", b"[" * 2756, 400) == 0
    assert (await post(running, "completions", {"prompt": "Hi"})).status_code == 429
    assert (await post(running, "completions", {"prompt": "Hi"}, key="second")).status_code == 200


LARGE = PARSED_IN_PLACE_BYTES + 1


async def test_large_bodies_are_parsed_by_another_process(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start()
    text = "word " * (LARGE // 5 + 1)
    wanted = {path: (await post(running, path, body)).json() for path, body in BODIES.items()}
    monkeypatch.setattr(service, "parse", None)
    for path, body in BODIES.items():
        reply = await post(running, path, json.dumps(body).encode() + b" " * LARGE)
        assert reply.status_code == 200, reply.text
        assert reply.json().keys() == wanted[path].keys(), path
    for path, body, code, param in (
        ("completions", {"prompt": text, "temperature": "hot"}, "invalid_value", "temperature"),
        ("completions", {"prompt": text, "best_of": 2}, "invalid_value", "best_of"),
        ("responses", {"input": [{"role": "user", "content": 5}], "instructions": text}, "invalid_value", "input"),
        (
            "messages",
            {"messages": CHAT, "system": text, "max_tokens": 1, "tool_choice": {"type": "any"}},
            None,
            None,
        ),
        ("embeddings", {"input": [], "model": "smollm2"}, "invalid_value", "input"),
        ("completions", b"{" + b" " * LARGE, "invalid_json", None),
    ):
        content = body if isinstance(body, bytes) else json.dumps(body).encode() + b" " * LARGE
        reply = await post(running, path, content)
        error = reply.json()["error"]
        assert (reply.status_code, error.get("code"), error.get("param")) == (400, code, param), error


async def test_a_body_that_takes_the_parser_too_long_is_an_error_of_its_request(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()
    large = b'{"prompt": "Hi", "max_tokens": 1, "user": "%b"}' % (b"\\u00e9" * 600_000)
    assert (await post(running, "completions", large)).status_code == 200
    before = bodies._child.pid
    with monkeypatch.context() as patch:
        patch.setattr(bodies, "PARSE_SECONDS", 1e-3)
        reply = await post(running, "completions", large)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "body_too_complex")
    assert (await post(running, "completions", large)).status_code == 200
    assert bodies._child.pid not in (None, before)


async def test_large_bodies_of_keys_are_parsed_in_turns(
    start: Any, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(api_keys_file=keys)
    release, begun = threading.Event(), list[str]()

    def held(model: type[CompletionRequest], parts: list[bytes], scan: Any) -> CompletionRequest:
        parsed = bodies.parse(model, b"".join(parts), scan)
        begun.append(str(parsed.prompt[0]))
        release.wait(LONG_SECONDS)
        return parsed

    monkeypatch.setattr(service, "parse_in_child", held)

    def large(name: str) -> bytes:
        return json.dumps({"prompt": name, "max_tokens": 1}).encode() + b" " * LARGE

    def held_bodies(count: int) -> Any:
        async def check() -> bool:
            return bool(running.service.bodies.total >= count * LARGE)

        return check

    async def has_begun() -> bool:
        return bool(begun)

    tasks = [asyncio.create_task(post(running, "completions", large(f"first {n}"))) for n in range(4)]
    await eventually(held_bodies(8), what="four bodies wait", look_seconds=0.01)
    await eventually(has_begun, what="one of them is parsed", look_seconds=0.01)
    assert len(begun) == 1
    assert (await post(running, "completions", BODIES["completions"])).status_code == 200, "small ones do not wait"
    tasks.append(asyncio.create_task(post(running, "completions", large("second"), key="second")))
    await eventually(held_bodies(10), what="five bodies wait", look_seconds=0.01)
    release.set()
    assert [reply.status_code for reply in await asyncio.gather(*tasks)] == [200] * 5
    assert begun[1] == "second"
    assert len(begun) == 5
