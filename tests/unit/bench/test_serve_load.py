"""Clients of `megatron bench serve` with servers that close connections."""

import asyncio
import json
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from functools import partial

import click
import httpx
import pytest
from serve_versions import chat

from megatron_runtime.cli.bench.serve import run

CHUNKS = (
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": "b"}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
)


@asynccontextmanager
async def server(
    *, drops: Container[int] = (), status: str = "200 OK", requests: list[tuple[str, bytes]] | None = None
) -> AsyncIterator[tuple[str, list[int]]]:
    """A keep-alive server that closes the connections with the numbers `drops` without an answer.

    Yields its URL and the number of requests of each connection.
    """
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(connections)
        connections.append(0)
        is_open = True
        while is_open:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            (size,) = [line for line in head.splitlines() if line.startswith("content-length:")]
            body = await reader.readexactly(int(size.split(":")[1]))
            if requests is not None:
                requests.append((head.split()[1], body))
            connections[number] += 1
            is_open = number not in drops and "connection: close" not in head
            if number not in drops:
                events = [f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS]
                answer = "".join([*events, "data: [DONE]\n\n"])
                writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(answer)}\r\n\r\n{answer}".encode())
                await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", connections


async def figures_of(url: str, **options: int) -> dict[str, float]:
    sizes = {"concurrency": (2,), "requests": 4, "prompt_words": 3, "new_tokens": 2, **options}
    figures = await asyncio.to_thread(run, url=url, model="m", api_key=None, **sizes)
    return {figure.key: figure.value for figure in figures}


async def test_every_request_has_its_own_connection() -> None:
    async with server() as (url, connections):
        figures = await figures_of(url)
    assert figures["c2_retries"] == 0
    # With the warm-up request.
    assert connections == [1] * 5


async def test_a_request_without_an_answer_is_sent_again_and_counted() -> None:
    async with server(drops=(0, 1, 3)) as (url, connections):
        figures = await figures_of(url)
    assert figures["c2_retries"] == 3
    assert figures["c2_tokens_per_s"] > 0
    assert len(connections) == 5 + 3


async def test_a_server_that_drops_every_request_is_an_error() -> None:
    async with server(drops=range(1000)) as (url, connections):
        with pytest.raises(httpx.RemoteProtocolError):
            await figures_of(url)
    assert len(connections) == 4


async def test_a_rejected_request_is_not_sent_again() -> None:
    async with server(status="503 Service Unavailable") as (url, connections):
        with pytest.raises(click.ClickException, match="503"):
            await figures_of(url)
    assert len(connections) == 1


async def test_with_tools_the_requests_are_chats_that_a_model_may_answer_with_a_call() -> None:
    requests: list[tuple[str, bytes]] = []
    async with server(requests=requests) as (url, _):
        await figures_of(url, path="/v1/chat/completions", prompt=partial(chat, tools=3))
        assert {path for path, _ in requests} == {"/v1/chat/completions"}
        bodies = [json.loads(body) for _, body in requests]
        requests.clear()
        await figures_of(url)
        assert {path for path, _ in requests} == {"/v1/completions"}
    assert all(len(body["tools"]) == 3 and "tool_choice" not in body for body in bodies)
    assert len({body["messages"][-1]["content"] for body in bodies}) > 1
