"""POST /v1/embeddings with OpenAI's client: vectors of length 1, both encodings, usage, limits, other engines."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from megatron_runtime.client.rejection import InvalidRequestError, RequestRejectedError


def unit(*values: float) -> list[float]:
    length = math.hypot(*values)
    return [value / length for value in values]


async def test_each_text_has_a_vector_of_length_one(running: Any) -> None:
    texts = ["Hi", "What is the capital of France?", "Hi"]
    prompts = [running.tokenizer.encode(text) for text in texts]
    expected = [pytest.approx(unit(len(prompt), sum(prompt) % 7, -1.0), rel=1e-6) for prompt in prompts]
    for options in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
        reply = await running.openai.embeddings.create(model="smollm2", input=texts, **options)
        assert [item.index for item in reply.data] == [0, 1, 2]
        assert [item.embedding for item in reply.data] == expected
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, prompts))
        assert reply.model == "smollm2"
    for _, params in running.backend.requests:
        assert params.return_hidden_state
        assert params.num_tokens_to_generate == 1
    single = await running.openai.embeddings.create(model="smollm2", input="Hi")
    of_tokens = await running.openai.embeddings.create(model="smollm2", input=[prompts[0], prompts[1]])
    assert [single.data[0].embedding] == expected[:1]
    assert [item.embedding for item in of_tokens.data] == expected[:2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["Hi", [1]]}, "input"),
        ({"input": "Hi", "dimensions": 3}, "dimensions"),
        ({"input": "Hi", "use_activation": False}, "use_activation"),
        ({"input": ["Hi"] * 1025}, "input"),
        ({"input": "Hi", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [[10**9]]}, "input"),
    ],
)
async def test_wrong_fields_are_named(running: Any, fields: dict[str, Any], param: str) -> None:
    reply = await running.post("/v1/embeddings", {"model": "smollm2", **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param)
    assert not running.backend.requests


async def test_engines_without_hidden_states_are_named(running: Any) -> None:
    """The coordinator or an engine rejects the parameter. Engines of an earlier release ignore it."""
    running.backend.failure = {"code": 400, "message": "no hidden states", "field": "return_hidden_state"}
    for _ in range(2):
        with pytest.raises(openai.APIStatusError, match="native engines return hidden states") as raised:
            await running.openai.embeddings.create(model="smollm2", input="Hi")
        assert (raised.value.status_code, raised.value.code) == (404, "not_offered")
        running.backend.failure, running.backend.has_hidden_states = None, False
    running.backend.reject = InvalidRequestError(400, "no engine supports it", field="return_hidden_state")
    with pytest.raises(openai.APIStatusError, match="native engines return hidden states") as raised:
        await running.openai.embeddings.create(model="smollm2", input="Hi")
    assert raised.value.status_code == 404
    running.backend.reject = RequestRejectedError(503, "the engines are stopped", 2.0)
    with pytest.raises(openai.APIStatusError) as raised:
        await running.openai.embeddings.create(model="smollm2", input="Hi")
    assert raised.value.status_code == 503


@pytest.mark.parametrize("number", [math.nan, math.inf])
async def test_a_hidden_state_that_is_not_finite_is_an_error(running: Any, number: float) -> None:
    running.backend.hidden_states_end_with = number
    for encoding in ("float", "base64"):
        reply = await running.post("/v1/embeddings", {"input": "Hi", "encoding_format": encoding})
        assert (reply.status_code, "not finite" in reply.json()["error"]["message"]) == (500, True)
    running.backend.hidden_states_end_with = 3e38  # its square exceeds float32
    reply = await running.post("/v1/embeddings", {"input": "Hi"})
    assert reply.json()["data"][0]["embedding"][2] == pytest.approx(1.0)
