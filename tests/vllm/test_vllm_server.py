"""`megatron serve --backend vllm` beside vLLM's own OpenAI server: the same answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from eventually import eventually

from megatron_runtime.cli.processes import free_ports

from .conftest import START_SECONDS, has_formats

pytestmark = pytest.mark.timeout(1800)

PROMPTS = [
    f"{opening} {subject}"
    for opening in ("The history of", "A recipe for", "Once upon a time,", "In physics,")
    for subject in ("bread", "the moon", "a small town", "music", "water")
]


@pytest.fixture
def servers(model: Path) -> Iterator[dict[str, str]]:
    """Base URLs of both servers, by "megatron" and "vllm"."""
    shared = ("--max-model-len", "1024", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64")
    vllm_port, megatron_port = free_ports(2)
    commands = {
        "vllm": (
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m", *shared),
            *("--kv-cache-memory-bytes", str(256 << 20), "--generation-config", "vllm", "--port", str(vllm_port)),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        ),
        "megatron": (
            *("-m", "megatron_runtime.cli", "serve", "--backend", "vllm", "--model", str(model), "--model-name", "m"),
            *("--dtype", "float32", "--max-sequence-length", "1024", "--kv-cache-memory", "256Mi"),
            *("--vllm-arguments", '{"enforce_eager": true}', "--port", str(megatron_port)),
        ),
    }
    with ExitStack() as stack:
        for command in commands.values():
            process = stack.enter_context(subprocess.Popen([sys.executable, *command]))
            stack.callback(process.terminate)
        yield {
            "vllm": f"http://127.0.0.1:{vllm_port}/v1",
            "megatron": f"http://127.0.0.1:{megatron_port}/v1",
        }


async def until_ready(client: openai.AsyncOpenAI) -> None:
    async def is_ready() -> bool:
        try:
            await client.completions.create(model="m", prompt="a", max_tokens=1)
        except (openai.APIConnectionError, openai.InternalServerError, httpx.HTTPError):
            return False
        return True

    await eventually(is_ready, what=f"{client.base_url} serves", seconds=START_SECONDS, look_seconds=1)


async def complete(client: openai.AsyncOpenAI, prompt: str, **options: Any) -> Any:
    return await client.completions.create(model="m", prompt=prompt, max_tokens=32, temperature=0, **options)


async def chat(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(
        model="m", messages=messages, max_tokens=32, temperature=0, seed=1, **options
    )


async def chats_are_equal(clients: dict[str, openai.AsyncOpenAI]) -> None:
    """Compare whole and streamed answers of both servers to conversations."""
    for prompt in PROMPTS[::4]:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{prompt} 🦙?"}]
        theirs, ours = await asyncio.gather(*(chat(clients[name], messages) for name in ("vllm", "megatron")))
        assert ours.choices[0].message.content == theirs.choices[0].message.content
        assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason
        assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
        stream = await chat(clients["megatron"], messages, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(parts) == theirs.choices[0].message.content
    (card,) = (await clients["megatron"].models.list()).data
    assert card.tool_call_format == "vllm:hermes"  # type: ignore[attr-defined]


async def test_greedy_answers_streams_and_log_probabilities_equal_vllms_server(servers: dict[str, str]) -> None:
    clients = {name: openai.AsyncOpenAI(base_url=url, api_key="none") for name, url in servers.items()}
    for client in clients.values():
        await until_ready(client)
    for prompt in PROMPTS:
        theirs, ours = await asyncio.gather(
            *(complete(clients[name], prompt, logprobs=3) for name in ("vllm", "megatron"))
        )
        assert ours.choices[0].text == theirs.choices[0].text
        assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason
        assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
        assert ours.choices[0].logprobs.token_logprobs == pytest.approx(
            theirs.choices[0].logprobs.token_logprobs, abs=1e-3
        )
        stream = await complete(clients["megatron"], prompt, stream=True)
        parts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
        assert "".join(parts) == theirs.choices[0].text
        assert len(parts) > 5
        first, second, *_ = theirs.choices[0].text.split()
        words = {"bad_words": [first, f"{first} {second}", second[:2]]}
        theirs, ours = await asyncio.gather(
            *(complete(clients[name], prompt, logprobs=3, extra_body=words) for name in ("vllm", "megatron"))
        )
        assert ours.choices[0].text == theirs.choices[0].text
        expected = theirs.choices[0].logprobs.token_logprobs
        if theirs.choices[0].finish_reason == "stop":
            expected.pop()  # of the end-of-sequence token, which has no text
        assert ours.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-3)
    if has_formats():
        await chats_are_equal(clients)
