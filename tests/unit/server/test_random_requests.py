"""Random requests to `megatron serve`: a bad request gets a 400 with its field, no process ends, no memory leaks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest
from eventually import LONG_SECONDS
from soak import size

REQUESTS = size(200, soak=20_000)
AT_ONCE = 8
MODEL = "smollm2-135m"
GROWTH_BYTES = 64 << 20
"""Growth that allocators may cause. The soak run of 20,000 requests detects a leak of 4 KiB per request."""
PROMPT_CHARACTERS = 2_000

Draw = random.Random
Maker = Callable[[Draw], Any]


def _text(draw: Draw) -> str:
    return "".join(
        draw.choice(["word ", "🦙", "é", "\n", "0", "<|im_end|>", "\x00"]) for _ in range(draw.randint(1, 40))
    )


def _messages(draw: Draw) -> Any:
    return [
        {"role": draw.choice(["system", "user", "assistant"]), "content": _text(draw)}
        for _ in range(draw.randint(1, 3))
    ]


def _tools(draw: Draw) -> Any:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(draw.randint(1, 3))]


GOOD: dict[str, Maker] = {
    "max_tokens": lambda draw: draw.randint(1, 12),
    "temperature": lambda draw: draw.choice([0, 0.5, 2]),
    "top_p": lambda draw: draw.random(),
    "top_k": lambda draw: draw.choice([-1, 0, 5]),
    "min_p": lambda draw: draw.random(),
    "seed": lambda draw: draw.getrandbits(60),
    "n": lambda draw: draw.randint(1, 3),
    "stop": lambda draw: draw.choice([None, []]),
    "stop_token_ids": lambda draw: [draw.randrange(49152)],
    "presence_penalty": lambda draw: draw.uniform(-2, 2),
    "frequency_penalty": lambda draw: draw.uniform(-2, 2),
    "repetition_penalty": lambda draw: draw.uniform(0.5, 2),
    "logit_bias": lambda draw: {str(draw.randrange(49152)): draw.uniform(-100, 100)},
    "bad_words": lambda draw: ["the", f"🦙{_text(draw)}"],
    "ignore_eos": lambda draw: draw.random() < 0.5,
    "min_tokens": lambda draw: draw.randint(0, 4),
    "priority": lambda draw: 0,
    "cache_salt": lambda draw: draw.choice(["a", "b"]),
    "user": lambda draw: _text(draw),
    "unknown_field": lambda draw: draw.choice([1, None, {"a": [{}] * 100}, _text(draw)]),
    "skip_special_tokens": lambda draw: draw.random() < 0.5,
    "truncate_prompt_tokens": lambda draw: draw.choice([-1, 5, 1000]),
    "allowed_token_ids": lambda draw: [draw.randrange(49152) for _ in range(draw.randint(1, 5))],
}
GOOD_CHAT: dict[str, Maker] = {
    **GOOD,
    "max_completion_tokens": lambda draw: draw.randint(1, 12),
    "tools": _tools,
    "metadata": lambda draw: {"a": "b"},
}
GOOD_COMPLETION: dict[str, Maker] = {**GOOD, "echo": lambda draw: draw.random() < 0.5}

IDLE = [f'megatron_num_requests_{state}{{model_name="{MODEL}"}} 0.0' for state in ("running", "waiting")]

BAD: dict[str, tuple[Any, ...]] = {
    "max_tokens": (-1, "x", 1.5, [], {}, True),
    "temperature": (-1, "hot", [], 1e9),
    "top_p": (-0.1, 1.1, "x", {}),
    "top_k": (-2, 1.5, "x", 1 << 40),
    "min_p": (-1, 2, "x"),
    "seed": (1 << 70, 1.5, "x"),
    "n": (0, -1, 1.5, "x", 1000),
    "stop": (5, [""], ["x"] * 100, {"a": 1}, [5], "x" * 2000),
    "stop_token_ids": ([49152], "x", 5),
    "presence_penalty": (3, "x", -2.5),
    "frequency_penalty": (3, "x", -2.5),
    "repetition_penalty": (0, -1, "x"),
    "logit_bias": ({"x": 1}, {"5": 101}, {"49152": 1}, [], 5, {"-1": 1}),
    "bad_words": ("x", [""], [" "], [5], ["x"] * 200, ["x" * 5000]),
    "ignore_eos": (1, "yes", []),
    "min_tokens": (-1, "x"),
    "priority": ("x", 1.5, -3, 3),
    "cache_salt": ("", 5),
    "stream": ("x", 5),
    "stream_options": ({"include_usage": True}, 5),
    "model": (5, ["x"]),
    "guided_regex": (5, ""),
    "guided_choice": ([], 5, [5]),
    "guided_json": ("{", 5),
    "structured_outputs": ({}, {"regex": "a", "json_object": True}, 5),
    "response_format": (5, "json"),
    "allowed_token_ids": ([], [49152], [-1], "x"),
    "truncate_prompt_tokens": (-2, "x"),
    "prompt_logprobs": (-1, 21, "x"),
    "kv_transfer_params": ({"a": 1}, 5),
    "best_of": (3,),
    "streaming_interval": (0,),
}
BAD_CHAT: dict[str, tuple[Any, ...]] = {
    **BAD,
    "chat_template_kwargs": (5,),
    "messages": ([], "x", None, 5),
    "max_completion_tokens": (0, "x"),
    "logprobs": (5, "x"),
    "top_logprobs": (5, 21, "x"),
    "tools": (5, [{"type": "function", "function": {"name": "f"}}] * 2),
    "tool_choice": ("required", "x", 5),
    "reasoning_effort": ("highest", 5),
    "functions": ([{"name": "f"}],),
}
BAD_COMPLETION: dict[str, tuple[Any, ...]] = {
    **BAD,
    "prompt": ("", [], [[]], ["a", [1]], [49152], [-1], None, 5, [5] * 9000, "word " * 9000),
    "logprobs": (-1, 21, True, "x"),
    "echo": (5, "x"),
    "suffix": ("x",),
}


def random_request(draw: Draw) -> tuple[str, dict[str, Any], str | None]:
    """An endpoint, a request, and the field that is wrong in it, if any is."""
    is_chat = draw.random() < 0.5
    good, bad = (GOOD_CHAT, BAD_CHAT) if is_chat else (GOOD_COMPLETION, BAD_COMPLETION)
    names = draw.sample(sorted(good), draw.randint(0, 5))
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, **{name: good[name](draw) for name in names}}
    if is_chat:
        body["messages"] = _messages(draw)
    else:
        body["prompt"] = draw.choice([_text(draw), [_text(draw), "x"], [5, 6, 7], "p" * PROMPT_CHARACTERS])
    body["stream"] = draw.random() < 0.4
    wrong = None
    if draw.random() < 0.5:
        wrong = draw.choice(sorted(bad))
        if wrong in ("stream", "stream_options"):
            body["stream"] = False
        body[wrong] = draw.choice(bad[wrong])
        if wrong == "tool_choice":
            body.pop("tools", None)
    return ("/v1/chat/completions" if is_chat else "/v1/completions"), body, wrong


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_every_bad_request_names_its_field_and_no_process_dies_or_grows(served: Any) -> None:
    server = served.children()["server"]
    engine = served.children()["engine"]
    seen: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    async with httpx.AsyncClient(base_url=served.url, timeout=LONG_SECONDS, limits=limits, trust_env=False) as http:
        # What a process needs once, such as tokenizer caches and connections, is there after these.
        await _run(http, range(REQUESTS // 4), Counter())
        before = [_memory(server), _memory(engine)]
        await _run(http, range(REQUESTS // 4, REQUESTS), seen)
        assert (await http.get("/readyz")).status_code == 200
        # The server is done with a stream a moment after its client is.
        async with asyncio.timeout(LONG_SECONDS):
            while await _missing(http, IDLE):  # noqa: ASYNC110 - a metric offers no event
                await asyncio.sleep(0.1)
    grown = [after - size for after, size in zip([_memory(server), _memory(engine)], before, strict=True)]
    assert max(grown) < GROWTH_BYTES, grown
    assert min(seen["good"], seen["bad"], seen["left"]) > REQUESTS / 20, seen
    assert {server.pid, engine.pid} <= {child.pid for child in served.children().values()}


async def _run(http: httpx.AsyncClient, numbers: range, seen: Counter[str]) -> None:
    waiting = iter(numbers)

    async def ask() -> None:
        for number in waiting:
            await _one(http, number, seen)

    await asyncio.gather(*(ask() for _ in range(AT_ONCE)))


async def _one(http: httpx.AsyncClient, number: int, seen: Counter[str]) -> None:
    draw = random.Random(number)
    path, body, wrong = random_request(draw)
    if wrong is None and draw.random() < 0.2:
        seen["left"] += 1
        await _leave(http, path, {**body, "max_tokens": 500, "ignore_eos": True}, draw)
        return
    reply = await http.post(path, json=body)
    if wrong is None:
        assert reply.status_code == 200, (number, body, reply.text)
        assert 'data: {"error"' not in reply.text
        seen["good"] += 1
        return
    assert reply.status_code == 400, (number, wrong, body, reply.text)
    error = reply.json()["error"]
    assert (error["param"] or "").split(".")[0].split("[")[0] == wrong, (number, wrong, body, error)
    assert wrong in error["message"] or "context length" in error["message"], (wrong, error)
    seen["bad"] += 1


async def _leave(http: httpx.AsyncClient, path: str, body: dict[str, Any], draw: Draw) -> None:
    """Break the connection early."""
    try:
        async with asyncio.timeout(draw.random() * 0.05), http.stream("POST", path, json=body) as reply:
            async for _ in reply.aiter_bytes():
                break
    except TimeoutError:
        return


async def _missing(http: httpx.AsyncClient, lines: list[str]) -> list[str]:
    """Those that /metrics does not have."""
    metrics = (await http.get("/metrics")).text
    return [line for line in lines if line not in metrics]


def _memory(process: psutil.Process) -> int:
    return process.memory_info().rss
