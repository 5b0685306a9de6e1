"""OpenAI's SDK: two turns with a call by /v1/chat/completions and /v1/responses, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from .conversation import (
    ARGUMENTS,
    DESCRIPTION,
    FIRST,
    FIRST_ANSWER,
    MODEL,
    NAME,
    PARAMETERS,
    RESULT,
    SECOND,
    SECOND_ANSWER,
)

FUNCTION = {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="any", max_retries=0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_chat(client: OpenAI, is_streamed: bool) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]

    def ask(messages: list[Any]) -> Any:
        if not is_streamed:
            return client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion().choices[0].message

    messages: list[Any] = [{"role": "user", "content": FIRST}]
    message = ask(messages)
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (NAME, ARGUMENTS)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    message = ask(messages)
    assert (message.content, message.tool_calls) == (FIRST_ANSWER, None)
    assert ask([*messages, message, {"role": "user", "content": SECOND}]).content == SECOND_ANSWER


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses(client: OpenAI, is_streamed: bool) -> None:
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]

    def ask(items: list[Any]) -> Any:
        if not is_streamed:
            return client.responses.create(model=MODEL, input=items, tools=tools)
        with client.responses.stream(model=MODEL, input=items, tools=tools) as stream:
            for _ in stream:
                pass
            return stream.get_final_response()

    items: list[Any] = [{"role": "user", "content": FIRST}]
    response = ask(items)
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", NAME, ARGUMENTS)
    items += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    response = ask(items)
    assert response.output_text == FIRST_ANSWER
    assert ask([*items, *response.output, {"role": "user", "content": SECOND}]).output_text == SECOND_ANSWER
