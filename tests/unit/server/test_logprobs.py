"""Log-probabilities in the format of the OpenAI API: aligned with the text, streamed or whole, and of the prompt."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_runtime.server.openai.answer import finite_log_prob

CHAT: dict[str, Any] = {"model": "smollm2", "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "smollm2", "temperature": 0, "prompt": "Once 🦙", "max_tokens": 100}


async def test_chat_log_probs_name_each_token_and_its_alternatives(
    running: Any, tokenizer: Any, answer: str, backend_log_prob: Any, backend_top: Any
) -> None:
    reply = await running.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    tokens = tokenizer.encode(answer)
    assert [entry.logprob for entry in content] == [backend_log_prob(token, at) for at, token in enumerate(tokens)]
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == answer
    for at, (entry, token) in enumerate(zip(content, tokens, strict=True)):
        rivals = backend_top(token, at, 3)
        assert [rival.logprob for rival in entry.top_logprobs] == [log_prob for _, log_prob in rivals]
        assert [bytes(rival.bytes) for rival in entry.top_logprobs] == [tokenizer.token_bytes(id_) for id_, _ in rivals]
    parts = [entry for entry in content if entry.token.startswith("\\x")]
    assert parts[0].token == "".join(f"\\x{byte:02x}" for byte in parts[0].bytes)
    plain = await running.openai.chat.completions.create(**CHAT, logprobs=True)
    assert all(entry.top_logprobs == [] for entry in plain.choices[0].logprobs.content)
    assert (await running.openai.chat.completions.create(**CHAT)).choices[0].logprobs is None


async def test_completion_log_probs_have_offsets_into_the_text(
    running: Any, tokenizer: Any, answer: str, backend_log_prob: Any
) -> None:
    reply = await running.openai.completions.create(**COMPLETION, logprobs=2)
    choice = reply.choices[0]
    tokens = tokenizer.encode(answer)
    assert choice.logprobs.token_logprobs == [backend_log_prob(token, at) for at, token in enumerate(tokens)]
    assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)
    whole_characters = [
        (text, offset)
        for text, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        if not text.startswith("bytes:")
    ]
    assert len(whole_characters) > 15
    assert all(choice.text[offset:].startswith(text) for text, offset in whole_characters)
    for text, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        assert text in top


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_and_its_log_probs_first(
    running: Any, tokenizer: Any, answer: str, backend_log_prob: Any, stream: bool
) -> None:
    fields = {**COMPLETION, "logprobs": 1, "echo": True}
    choice = await _joined(running, fields) if stream else (await _whole(running, fields))
    prompt, tokens = tokenizer.encode(COMPLETION["prompt"]), tokenizer.encode(answer)
    assert choice["text"] == COMPLETION["prompt"] + answer
    expected = [backend_log_prob(token, at) for at, token in enumerate(prompt)]
    expected[0] = None
    assert choice["token_logprobs"] == [*expected, *(backend_log_prob(token, at) for at, token in enumerate(tokens))]
    assert choice["top_logprobs"][0] is None
    assert choice["text_offset"][0] == 0
    assert choice["text_offset"][len(prompt)] == len(COMPLETION["prompt"])
    assert choice["text_offset"] == sorted(choice["text_offset"])


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_zero_tokens_returns_the_prompt_alone(running: Any, tokenizer: Any, stream: bool) -> None:
    fields = {**COMPLETION, "logprobs": 0, "echo": True, "max_tokens": 0}
    choice = await _joined(running, fields) if stream else (await _whole(running, fields))
    assert choice["text"] == COMPLETION["prompt"]
    assert len(choice["token_logprobs"]) == len(tokenizer.encode(COMPLETION["prompt"]))
    assert choice["finish_reason"] == "length"
    usage = (await running.post("/v1/completions", fields)).json()["usage"]
    assert usage["completion_tokens"] == 0
    rejected = await running.post("/v1/completions", {**COMPLETION, "max_tokens": 0})
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("forgotten_after", [None, 0, 7])
@pytest.mark.parametrize("stop", [None, "café", ["東", "nothing"], "🦙", "The"])
async def test_streamed_log_probs_equal_those_of_the_whole_answer(
    running: Any, forgotten_after: int | None, stop: Any
) -> None:
    """Also where partials come without them, as after a failover."""
    running.backend.forgets_log_probs_after = forgotten_after
    for fields in ({}, {"include_stop_str_in_output": True}):
        body = {**COMPLETION, "logprobs": 2, "stop": stop, **fields}
        whole, joined = await _whole(running, body), await _joined(running, body)
        assert joined == whole
        assert whole["text_offset"] == sorted(whole["text_offset"])
        assert len(whole["tokens"]) == len(whole["token_logprobs"]) == len(whole["top_logprobs"])
        if stop is not None:
            matched = stop if isinstance(stop, str) else stop[0]
            assert whole["text"].endswith(matched) is bool(fields)


async def test_the_tokens_of_a_stop_text_have_no_log_probs(running: Any, answer: str) -> None:
    """Where the stop text begins with a token of its own, the answer's tokens are its text and no more."""
    for stop in (" says", ",", "The"):
        choice = (await running.openai.chat.completions.create(**CHAT, logprobs=True, stop=stop)).choices[0]
        assert choice.message.content == answer[: answer.index(stop)]
        assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == choice.message.content


async def test_log_probs_beyond_the_range_of_json_are_finite(running: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(type(running.backend).generate.__globals__, "log_prob", lambda token, place: float("-inf"))
    reply = await running.chat(logprobs=True)
    assert {entry["logprob"] for entry in reply.json()["choices"][0]["logprobs"]["content"]} == {-9999.0}


async def test_token_ids_are_returned_on_request(running: Any, tokenizer: Any, answer: str) -> None:
    reply = await running.chat(return_token_ids=True)
    assert reply.json()["choices"][0]["token_ids"] == tokenizer.encode(answer)
    assert "token_ids" not in (await running.chat()).json()["choices"][0]


async def _whole(running: Any, fields: dict[str, Any]) -> dict[str, Any]:
    choice = (await running.openai.completions.create(**_split(fields))).choices[0]
    return {"text": choice.text, "finish_reason": choice.finish_reason, **choice.logprobs.model_dump()}


async def _joined(running: Any, fields: dict[str, Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {"text": ""}
    async for chunk in await running.openai.completions.create(**_split(fields), stream=True):
        choice = chunk.choices[0]
        joined["text"] += choice.text
        joined["finish_reason"] = choice.finish_reason
        for name, values in choice.logprobs.model_dump().items():
            joined.setdefault(name, []).extend(values)
    return joined


def _split(fields: dict[str, Any]) -> dict[str, Any]:
    """The SDK takes fields that it does not know apart."""
    extra = {name: value for name, value in fields.items() if name == "include_stop_str_in_output"}
    return {**{name: value for name, value in fields.items() if name not in extra}, "extra_body": extra}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e30])
def test_a_log_probability_is_always_a_number_that_json_has(value: float) -> None:
    assert finite_log_prob(value) == -9999.0
    assert finite_log_prob(-1.5) == -1.5
