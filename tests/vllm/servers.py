"""Servers of a model as processes: vLLM's own and `megatron serve`, with the same dtype and size of the KV cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from eventually import eventually

from megatron_runtime.cli.processes import free_ports

from .conftest import START_SECONDS

_COMMANDS: Mapping[str, Sequence[str]] = {
    "vllm": (
        *("vllm.entrypoints.openai.api_server", "--served-model-name", "m", "--dtype", "float32", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--generation-config", "vllm"),
    ),
    "megatron": (
        *("megatron_runtime.cli", "serve", "--backend", "vllm", "--model-name", "m", "--dtype", "float32"),
        *("--kv-cache-memory", "256Mi"),
    ),
}
EAGER = ("--vllm-arguments", '{"enforce_eager": true}')
"""Of `megatron serve`: as vLLM's own server is started here."""


@contextmanager
def started(model: Path, **arguments: Sequence[str]) -> Iterator[dict[str, str]]:
    """Start servers of a model, which is called "m". Yield their URLs by their names.

    arguments: further ones of each server, "vllm" or "megatron".
    """
    with ExitStack() as stack:
        urls = {}
        for (name, more), port in zip(arguments.items(), free_ports(len(arguments)), strict=True):
            command = ("-m", *_COMMANDS[name], "--model", str(model), "--port", str(port), *more)
            process = stack.enter_context(subprocess.Popen([sys.executable, *command]))
            stack.callback(process.terminate)
            urls[name] = f"http://127.0.0.1:{port}"
        yield urls


def openai_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=START_SECONDS)


async def until_ready(
    urls: Mapping[str, str], path: str = "/v1/completions", body: Mapping[str, Any] | None = None
) -> None:
    """Wait until each server answers this request. body: None: a completion."""
    async with httpx.AsyncClient(timeout=START_SECONDS) as http:
        for name, url in urls.items():

            async def answers(url: str = url) -> bool:
                try:
                    reply = await http.post(url + path, json=body or {"model": "m", "prompt": "a", "max_tokens": 1})
                except httpx.HTTPError:
                    return False
                return reply.status_code == 200

            await eventually(answers, what=f"{name} serves", seconds=START_SECONDS, look_seconds=1)
