"""The true tokenizer, and a real HTTP server on loopback in front of a scripted backend."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from megatron_runtime.text_generation_server.app import create_app
from megatron_runtime.text_generation_server.listener import listen
from megatron_runtime.text_generation_server.run import HttpServer, drain, http_server
from megatron_runtime.text_generation_server.service import Service
from megatron_runtime.text_generation_server.settings import ServerSettings
from megatron_runtime.tokenization import Tokenizer, load_tokenizer

MODEL = "smollm2"


def _sibling(name: str) -> ModuleType:
    """Import a helper of this folder; test folders are no packages."""
    full_name = f"server_tests_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full_name])
    return sys.modules[full_name]


generator = _sibling("generator")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("builtin:smollm2-135m")


@pytest.fixture(scope="session")
def answer() -> str:
    """What the backend answers to every greedy request."""
    return generator.ANSWER


@dataclass(slots=True)
class Running:
    """A server under test and its clients."""

    url: str
    backend: Any
    service: Service
    server: HttpServer
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def post(self, path: str, body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.post(
            "/v1/chat/completions", {"model": MODEL, "temperature": 0, "messages": messages, **fields}
        )

    async def drain(self) -> None:
        await drain(self.service, self.server)


Start = Callable[..., Awaitable[Running]]


@asynccontextmanager
async def _running(settings: ServerSettings, tokenizer: Tokenizer) -> AsyncIterator[Running]:
    backend = generator.ScriptedBackend(tokenizer)
    app = create_app(settings, backend=backend, tokenizer=tokenizer)
    listener = listen(host="127.0.0.1", port=0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = http_server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    async with httpx.AsyncClient(base_url=url, timeout=30) as http, client:
        yield Running(url, backend, app.state.service, server, http, client)
    backend.gate.set()
    server.should_exit = True
    await serving
    assert backend.open == 0, "a request was left open"


@pytest.fixture
async def start(tokenizer: Tokenizer) -> AsyncIterator[Start]:
    """Start a server with other settings than the default."""
    contexts = []

    async def start_one(**changes: Any) -> Running:
        context = _running(replace(ServerSettings(model_name=MODEL), **changes), tokenizer)
        running = await context.__aenter__()
        contexts.append(context)
        return running

    yield start_one
    for context in contexts:
        await context.__aexit__(None, None, None)


@pytest.fixture
async def running(start: Start) -> Running:
    return await start()
