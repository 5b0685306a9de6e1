"""litellm: two turns with a call, by each of its providers that reach the server's interfaces."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

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

TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS},
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_completion(url: str, provider: str, is_streamed: bool) -> None:
    base = url.removesuffix("/v1") if provider == "anthropic" else url

    def ask(messages: list[Any]) -> Any:
        reply = litellm.completion(
            model=f"{provider}/{MODEL}",
            api_base=base,
            api_key="any",
            messages=messages,
            tools=[TOOL],
            max_tokens=200,
            stream=is_streamed,
            num_retries=0,
        )
        if is_streamed:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        return reply.choices[0].message

    messages: list[Any] = [{"role": "user", "content": FIRST}]
    message = ask(messages)
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (NAME, ARGUMENTS)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    message = ask(messages)
    assert message.content == FIRST_ANSWER
    assert ask([*messages, message, {"role": "user", "content": SECOND}]).content == SECOND_ANSWER


def test_responses(url: str) -> None:
    reply = litellm.responses(model=f"openai/{MODEL}", api_base=url, api_key="any", input=SECOND)
    assert reply.output[-1].content[0].text == SECOND_ANSWER
