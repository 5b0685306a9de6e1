"""Anthropic's SDK: two turns with a call by /v1/messages, whole, streamed and by its tool runner."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic, beta_tool

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


@pytest.fixture
def client(url: str) -> Anthropic:
    return Anthropic(base_url=url.removesuffix("/v1"), api_key="any", max_retries=0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_messages(client: Anthropic, is_streamed: bool) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 200,
        "tools": [{"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}],
    }

    def ask(messages: list[Any]) -> Any:
        if not is_streamed:
            return client.messages.create(messages=messages, **options)
        with client.messages.stream(messages=messages, **options) as stream:
            return stream.get_final_message()

    messages: list[Any] = [{"role": "user", "content": FIRST}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=options["tools"])
    reply = ask(messages)
    assert reply.usage.input_tokens == counted.input_tokens
    (call,) = reply.content
    assert (reply.stop_reason, call.name, call.input) == ("tool_use", NAME, ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    reply = ask(messages)
    assert (reply.stop_reason, reply.content[0].text) == ("end_turn", FIRST_ANSWER)
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": SECOND}]
    assert ask(messages).content[0].text == SECOND_ANSWER


def test_the_tool_runner_calls_the_function(client: Anthropic) -> None:
    cities = []

    @beta_tool
    def weather(city: str) -> str:
        """Look up the weather."""
        cities.append(city)
        return RESULT

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, tools=[weather], messages=[{"role": "user", "content": FIRST}]
    )
    assert runner.until_done().content[0].text == FIRST_ANSWER
    assert cities == ["Paris"]
