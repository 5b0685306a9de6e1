"""The SDKs of OpenAI and Anthropic against `megatron serve --backend vllm`: plain turns, and a forced call."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from .conftest import START_SECONDS

pytestmark = pytest.mark.timeout(START_SECONDS)

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
}
SHARED: dict[str, Any] = {"model": "m", "temperature": 0}


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """The base URL of the server, without /v1."""
    command = (
        *("-m", "megatron_runtime.cli", "serve", "--backend", "vllm", "--model", str(model), "--model-name", "m"),
        *("--dtype", "float32", "--max-sequence-length", "1024", "--kv-cache-memory", "256Mi"),
        *("--vllm-arguments", '{"enforce_eager": true}', "--port", "0"),
    )
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if ready := re.search(r"ready in .* at (http://\S+)/v1", line):
                break
        else:
            raise AssertionError("the server ended before it was ready")
        yield ready[1]
        server.terminate()
        server.stdout.read()


def test_openais_sdk_chats_and_forces_a_call(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    whole = client.chat.completions.create(messages=QUESTION, max_tokens=20, **SHARED).choices[0].message
    assert "Paris" in (whole.content or "")
    stream = client.chat.completions.create(messages=QUESTION, max_tokens=20, stream=True, **SHARED)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole.content
    response = client.responses.create(input=QUESTION, max_output_tokens=20, **SHARED)
    assert response.output_text == whole.content
    second = [*QUESTION, whole, {"role": "user", "content": "And of Italy?"}]
    assert client.chat.completions.create(messages=second, max_tokens=20, **SHARED).choices[0].message.content

    function = {"name": "weather", "description": "Look it up.", "parameters": CITY}
    forced: Any = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 60,
    }
    message = client.chat.completions.create(messages=WEATHER, **forced, **SHARED).choices[0].message
    (call,) = message.tool_calls or ()
    assert (call.function.name, list(json.loads(call.function.arguments))) == ("weather", ["city"])
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}
    answer = client.chat.completions.create(messages=[*WEATHER, message, result], max_tokens=20, **SHARED)
    assert answer.choices[0].message.content
    response = client.responses.create(
        input=WEATHER,
        tools=[{"type": "function", "strict": False, **function}],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=60,
        **SHARED,
    )
    (item,) = response.output
    assert (item.type, list(json.loads(item.arguments))) == ("function_call", ["city"])


def test_anthropics_sdk_chats_and_forces_a_call(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    shared: dict[str, Any] = {"model": "m", "extra_body": {"temperature": 0}}
    whole = client.messages.create(messages=QUESTION, max_tokens=20, **shared)
    assert "Paris" in whole.content[0].text
    with client.messages.stream(messages=QUESTION, max_tokens=20, **shared) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text

    forced: Any = {
        "tools": [{"name": "weather", "description": "Look it up.", "input_schema": CITY}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "max_tokens": 60,
    }
    reply = client.messages.create(messages=WEATHER, **forced, **shared)
    (call,) = reply.content
    assert (reply.stop_reason, call.name, list(call.input)) == ("tool_use", "weather", ["city"])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny."}
    history = [*WEATHER, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    options = {**forced, "tool_choice": {"type": "none"}}
    assert client.messages.create(messages=history, **options, **shared).content[0].text
