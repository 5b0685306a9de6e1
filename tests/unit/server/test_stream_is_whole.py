"""The joined chunks of a stream equal the whole answer, for random answers, stops, log-probabilities and tools."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from soak import size

CASES = size(100, soak=20_000)
WORDS = [
    "the",
    "llama 🦙",
    " says",
    "naïve ",
    "café",
    "東京",
    "\n",
    "  ",
    "42",
    '{"a": 1}',
    "👩‍👩‍👧",
    "<tool",
    "\\",
    "e\u0301",
    "é",
]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "look_up")]


def random_text(draw: random.Random, *, words: int) -> str:
    return "".join(draw.choice(WORDS) for _ in range(draw.randint(1, words)))


def random_call(draw: random.Random) -> str:
    arguments = {random_text(draw, words=2): draw.choice([1, None, [True], random_text(draw, words=4)])}
    call = {"name": draw.choice(["f", "look_up", "unknown"]), "arguments": arguments}
    text = json.dumps(call, ensure_ascii=draw.random() < 0.5)
    if draw.random() < 0.2:
        text = text[: draw.randint(1, len(text))]
    return f"<tool_call>{text}</tool_call>"


def random_case(draw: random.Random) -> tuple[str, str, dict[str, Any]]:
    """What the model answers, the endpoint, and the request."""
    is_chat = draw.random() < 0.6
    answer = "".join(
        random_call(draw) if draw.random() < 0.3 else random_text(draw, words=8) for _ in range(draw.randint(1, 4))
    )
    fields: dict[str, Any] = {
        "model": "smollm2",
        "temperature": draw.choice([0, 0, 0, 0.8]),
        "seed": draw.getrandbits(40),
    }
    if draw.random() < 0.6:
        start = draw.randrange(len(answer))
        inside = answer[start : start + draw.randint(1, 6)]
        fields["stop"] = draw.choice([inside, [inside, "never"], ["zzz", random_text(draw, words=1)]])
        fields["include_stop_str_in_output"] = draw.random() < 0.3
    optional = {
        "max_tokens": lambda: draw.choice([1, 5, 200]),
        "min_tokens": lambda: draw.choice([1, 3]),
        "n": lambda: draw.choice([1, 2]),
        "stop_token_ids": lambda: [draw.randrange(49152) for _ in range(3)],
        "ignore_eos": lambda: True,
        "return_token_ids": lambda: True,
    }
    fields |= {name: value() for name, value in optional.items() if draw.random() < 0.25}
    if not is_chat:
        if draw.random() < 0.5:
            fields["logprobs"] = draw.choice([0, 2])
        prompt = draw.choice([random_text(draw, words=3), [5, 6, 7], [random_text(draw, words=2), "b"]])
        return answer, "completions", {**fields, "prompt": prompt, "echo": draw.random() < 0.3}
    if draw.random() < 0.5:
        fields |= {"logprobs": True, "top_logprobs": draw.choice([0, 3])}
    if draw.random() < 0.5:
        fields |= {"tools": TOOLS, "parallel_tool_calls": draw.random() < 0.8}
    return answer, "chat/completions", {**fields, "messages": [{"role": "user", "content": random_text(draw, words=3)}]}


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_random_streams_joined_equal_the_whole_answers(running: Any) -> None:
    tried = {"calls": 0, "log_probs": 0, "stopped": 0}
    for number in range(CASES):
        draw = random.Random(number)
        answer, path, body = random_case(draw)
        running.backend.answer = answer
        running.backend.forgets_log_probs_after = draw.choice([None, None, 0, 4])
        body["stream_options"] = {"include_usage": True}
        streamed = await running.post(f"/v1/{path}", {**body, "stream": True})
        del body["stream_options"]
        whole = await running.post(f"/v1/{path}", body)
        assert (whole.status_code, streamed.status_code) == (200, 200), (number, whole.text, streamed.text)
        choices, usage = joined(streamed.text, is_chat=path.startswith("chat"))
        expected = [comparable(choice) for choice in checked(whole.json(), path)["choices"]]
        assert choices == expected, f"case {number}: {body} answered {answer!r}"
        assert usage == whole.json()["usage"]
        tried["calls"] += any(choice.get("tool_calls") for choice in choices)
        tried["log_probs"] += any(choice["logprobs"] for choice in choices)
        tried["stopped"] += "stop" in body and any(choice["finish_reason"] == "stop" for choice in choices)
        running.backend.requests.clear()
    assert min(tried.values()) > CASES / 20, tried


def checked(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The SDK's own types accept the answer."""
    if path.startswith("chat"):
        ChatCompletion.model_validate(body)
    else:
        check_completion(body)
    return body


def check_completion(body: dict[str, Any]) -> None:
    """The SDK's type, unlike the API, wants a reason in every chunk, and knows no token that follows nothing."""
    body = copy.deepcopy(body)
    for choice in body["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        log_probs = choice["logprobs"]
        if log_probs and log_probs["token_logprobs"][:1] == [None]:
            log_probs["token_logprobs"][0] = 0.0
            log_probs["top_logprobs"][0] = {}
    Completion.model_validate(body)


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole choice as its chunks tell it; ids of calls are made up each time."""
    message = choice.get("message", {})
    flat = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
    if flat["logprobs"] == {"content": [], "refusal": None}:
        flat["logprobs"] = None  # chunks without a token have none
    flat["text"] = choice.get("text", message.get("content")) or ""
    flat["token_ids"] = choice.get("token_ids", [])
    flat["tool_calls"] = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return flat


def joined(stream: str, *, is_chat: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the joined choices of a stream, and its usage."""
    events = stream.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    for chunk in chunks:
        if is_chat:
            ChatCompletionChunk.model_validate(chunk)
        else:
            check_completion(chunk)
    assert chunks[-1]["choices"] == []
    choices: dict[int, dict[str, Any]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        empty = {"index": part["index"], "text": "", "logprobs": None, "token_ids": [], "tool_calls": []}
        choice = choices.setdefault(part["index"], empty)
        assert choice.get("finish_reason") is None, "nothing follows the reason"
        delta = part.get("delta", part)
        choice["text"] += delta.get("content") or delta.get("text") or ""
        choice["finish_reason"] = part["finish_reason"]
        choice["token_ids"] += part.get("token_ids", [])
        for name, values in (part["logprobs"] or {}).items():
            known = choice["logprobs"] = choice["logprobs"] or {}
            known[name] = None if values is None else (known.get(name) or []) + values
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(choice["tool_calls"])
                choice["tool_calls"].append((call["function"]["name"], ""))
            else:
                name, arguments = choice["tool_calls"][call["index"]]
                choice["tool_calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
    return [choices[index] for index in sorted(choices)], chunks[-1]["usage"]
