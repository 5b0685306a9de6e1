"""The built-in model's tokenizer, and a real HTTP server on loopback with a scripted client of the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import echo_serve
import httpx
import openai
import psutil
import pytest
import tokenizers
from eventually import LONG_SECONDS

from megatron_runtime.checkpoints.builtin import builtin_file
from megatron_runtime.server.app import create_app
from megatron_runtime.server.auth import Certificate
from megatron_runtime.server.formats.chat_format import ChatFormat, NativeChatFormat
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.process import HttpServer, drain
from megatron_runtime.server.settings import ServerSettings, listen
from megatron_runtime.tokenization import Tokenizer, load_tokenizer
from megatron_runtime.tokenization.loader import write_gguf_tokenizer
from megatron_runtime.tokenization.vocabulary import BYTE_OF_CHARACTER

from . import generator

MODEL = "smollm2"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("builtin:smollm2-135m")


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the built-in model's tokenizer in the files of a model."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_gguf_tokenizer(builtin_file("smollm2-135m"), directory)
    return directory


@pytest.fixture(scope="session")
def answer() -> str:
    """What the backend answers to greedy requests."""
    return generator.ANSWER


@pytest.fixture(scope="session")
def backend_log_prob() -> Callable[[int, int], float]:
    """log_prob(token, place) of the scripted backend."""
    return generator.log_prob


@pytest.fixture(scope="session")
def backend_top() -> Callable[[int, int, int], list[tuple[int, float]]]:
    """top(token, place, count) of the scripted backend."""
    return generator.top


@dataclass(slots=True)
class Running:
    """A server under test and its clients."""

    url: str
    tokenizer: Tokenizer
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


def plain_client(url: str = "") -> httpx.AsyncClient:
    """A client of plain HTTP. It reads no certificates, which takes as long as several requests."""
    return httpx.AsyncClient(base_url=url, timeout=LONG_SECONDS, verify=False, trust_env=False)


Start = Callable[..., Awaitable[Running]]


@lru_cache(maxsize=8)
def _format_of(tokenizer: Tokenizer, tool_call_parser: str, reasoning_parser: str) -> ChatFormat:
    """Return the format for a server's settings. Cached: it is recognised by rendering several conversations."""
    return NativeChatFormat(tokenizer, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)


@asynccontextmanager
async def _running(
    settings: ServerSettings,
    tokenizer: Tokenizer,
    backend: Any,
    certificate: Certificate | None,
    chat_format: ChatFormat | None,
) -> AsyncIterator[Running]:
    chat_format = chat_format or _format_of(tokenizer, settings.tool_call_parser, settings.reasoning_parser)
    app = create_app(settings, backend=backend, tokenizer=tokenizer, chat_format=chat_format)
    listener = listen(host="127.0.0.1", port=0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = HttpServer(app, limits=settings.connections, certificate=certificate)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with plain_client(url) as http, plain_client() as http_of_openai:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=http_of_openai)
        yield Running(url, tokenizer, backend, app.state.service, server, http, client)
    if isinstance(backend, generator.ScriptedBackend):
        backend.gate.set()
    server.should_exit = True
    await serving
    if isinstance(backend, generator.ScriptedBackend):
        assert backend.open == 0, "a request was left open"


@pytest.fixture
async def start(tokenizer: Tokenizer) -> AsyncIterator[Start]:
    """Start a server with other settings than the default."""
    contexts = []

    async def start_one(
        tokenizer: Tokenizer = tokenizer,
        *,
        backend: Any = None,
        certificate: Certificate | None = None,
        chat_format: ChatFormat | None = None,
        **changes: Any,
    ) -> Running:
        backend = backend or generator.ScriptedBackend(tokenizer)
        settings = replace(ServerSettings(model_name=MODEL), **changes)
        context = _running(settings, tokenizer, backend, certificate, chat_format)
        running = await context.__aenter__()
        contexts.append(context)
        return running

    yield start_one
    for context in contexts:
        await context.__aexit__(None, None, None)


@pytest.fixture
async def running(start: Start) -> Running:
    return await start()


@pytest.fixture
def start_with_template(start: Start, tmp_path: Path) -> Start:
    """Start a server whose model has another chat template, and maybe more special tokens."""

    async def start_one(template: str, *, special: Sequence[str] = (), **changes: Any) -> Running:
        return await start(_byte_tokenizer(tmp_path, template, special=special), **changes)

    return start_one


@pytest.fixture
def start_with_keys(start: Start, tmp_path: Path) -> Start:
    """Start a server with API keys, given as the text of their file."""

    async def start_one(keys: str, **changes: Any) -> Running:
        file = tmp_path / "keys"
        file.write_text(keys)
        return await start(api_keys_file=file, **changes)

    return start_one


def _byte_tokenizer(directory: Path, template: str, *, special: Sequence[str]) -> Tokenizer:
    """A vocabulary of single bytes, loaded from files as a Hugging Face model has them."""
    vocabulary = {character: id_ for id_, character in enumerate(sorted(BYTE_OF_CHARACTER))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>", *special])
    backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(str(directory))


@dataclass(slots=True)
class Served:
    """One `megatron serve`, its output line by line."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    url: str = ""

    async def until(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches."""
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            self.lines.append(line.rstrip())
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line matched {pattern!r}:\n" + "\n".join(self.lines))

    def children(self) -> dict[str, psutil.Process]:
        names = ("coordinator", "server")
        children = psutil.Process(self.process.pid).children()
        return {next((name for name in names if name in child.cmdline()), "engine"): child for child in children}

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, echo_serve.PROGRAM, "serve", "--port", "0"),
        *("--kv-cache-memory", "16Mi", "--adapter", "sql=hf:org/sql"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    served = Served(process)
    ready = await served.until(r"ready in [\d.]+ s: \S+ at (http://127\.0\.0\.1:\d+)/v1")
    served.url = ready[1]
    yield served
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.communicate()
