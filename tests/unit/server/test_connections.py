"""Slow, malformed and too many connections: real sockets against the server, with short deadlines."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from eventually import LONG_SECONDS, eventually

from megatron_runtime.server.auth import Certificate
from megatron_runtime.server.settings import ConnectionLimits

SHORT = ConnectionLimits(
    header_seconds=0.6, body_seconds=1.5, body_idle_seconds=0.6, stall_seconds=0.6, handshake_seconds=0.6
)
"""Deadlines for tests, each of which shortens one."""
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": "smollm2", "prompt": "x", "temperature": 0}).encode()
WHOLE = b"%bContent-Length: %d\r\n\r\n%b" % (REQUEST, len(BODY), BODY)

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


def limits(*names: str, **changes: Any) -> ConnectionLimits:
    """The default limits with the named ones short."""
    return replace(ConnectionLimits(), **{name: getattr(SHORT, name) for name in names}, **changes)


@asynccontextmanager
async def connection(running: Any, **options: Any) -> AsyncIterator[tuple[Reader, Writer]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rsplit(":", 1)[1]), **options)
    try:
        yield reader, writer
    finally:
        writer.close()


async def to_the_end(reader: Reader) -> bytes:
    """What comes until the server closes the connection, which it must."""
    async with asyncio.timeout(LONG_SECONDS):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def drip(writer: Writer, data: bytes) -> None:
    """Send byte after byte until the connection is gone."""
    try:
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)
    except ConnectionError:
        pass


def status_and_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


async def works(running: Any) -> bool:
    return (await running.http.post("/v1/completions", json=json.loads(BODY))).status_code == 200


@pytest.mark.parametrize(
    ("short", "start_of_request", "dripped"),
    [
        ("header_seconds", b"GET /livez HTTP/1.1\r\n", b"A: " + b"x" * 400),
        ("body_seconds", REQUEST + b"Content-Length: 100000\r\n\r\n", b" " * 400),
        ("body_idle_seconds", REQUEST + b"Content-Length: 100000\r\n\r\n{", b""),
    ],
)
async def test_a_slow_request_gets_408(start: Any, short: str, start_of_request: bytes, dripped: bytes) -> None:
    running = await start(connections=limits(short))
    async with connection(running) as (reader, writer):
        writer.write(start_of_request)
        dripping = asyncio.create_task(drip(writer, dripped))
        assert status_and_code(await to_the_end(reader)) == (408, "request_timeout")
        dripping.cancel()
    assert await works(running)


async def test_a_connection_without_a_request_is_closed_silently(start: Any) -> None:
    running = await start(connections=limits("header_seconds"))
    async with connection(running) as (reader, _):
        assert await to_the_end(reader) == b""


async def test_a_rejected_request_cannot_keep_sending_its_body(start: Any) -> None:
    running = await start(connections=limits("body_seconds"))
    async with connection(running) as (reader, writer):
        writer.write(b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        dripping = asyncio.create_task(drip(writer, b" " * 400))
        assert b" 404 " in await to_the_end(reader)
        dripping.cancel()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_disconnected(start: Any, stream: bool) -> None:
    running = await start(connections=limits("stall_seconds"))
    running.backend.answer = "many words " * 2000
    connections = running.server.server_state.connections
    body = json.dumps({**json.loads(BODY), "stream": stream, "max_tokens": 4000, "logprobs": 5}).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(raw.connect, ("127.0.0.1", int(running.url.rsplit(":", 1)[1])))

        async def accepted() -> bool:
            return bool(connections)

        await eventually(accepted, what="the server accepts the connection")
        (one,) = connections
        one.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        raw.sendall(b"%bConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (REQUEST, len(body), body))

        async def gone() -> bool:
            return not connections

        await eventually(gone, what="the connection is gone")
        assert len(running.backend.requests) == 1
        assert await asyncio.to_thread(_received, raw) < 1 << 20
    await running.backend.until(open_requests=0)


def _received(raw: socket.socket) -> int:
    """How many bytes come before the end of the connection."""
    count = 0
    try:
        while piece := raw.recv(1 << 16):
            count += len(piece)
    except ConnectionResetError:
        pass
    return count


async def test_connection_deadlines_do_not_end_a_waiting_stream(start: Any) -> None:
    running = await start(
        connections=replace(SHORT, header_seconds=0.2, body_seconds=0.2, body_idle_seconds=0.2, stall_seconds=0.2),
        keep_alive_seconds=0.3,
    )
    running.backend.gate.clear()
    async with connection(running) as (reader, writer):
        body = json.dumps({**json.loads(BODY), "stream": True}).encode()
        writer.write(b"%bConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (REQUEST, len(body), body))
        async with asyncio.timeout(LONG_SECONDS):
            for _ in range(6):
                await reader.readuntil(b": keep-alive\n\n")
        running.backend.gate.set()
        assert (await to_the_end(reader)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_pipelined_requests_are_answered_in_order(running: Any) -> None:
    async with connection(running) as (reader, writer):
        writer.write(WHOLE * 3 + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = await to_the_end(reader)
    assert answers.count(b"HTTP/1.1 200") == 4
    assert answers.rindex(b'"text_completion"') < answers.index(b'"version"')


async def test_a_body_of_tiny_chunks_is_parsed_between_other_requests(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser gets no further in one go when it is slow: with no time at all, one slice in each iteration."""
    monkeypatch.setattr("megatron_runtime.server.connections._PARSE_SECONDS", 0.0)
    data = REQUEST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 40_000
    parsed: list[int] = []

    async def watch() -> None:
        while True:
            if connections := running.server.server_state.connections:
                (one,) = connections
                parsed.append(len(one._backlog))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    async with connection(running) as (reader, writer):
        writer.write(data + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) + b"GET / HTTP/x\r\n\r\n")
        answer = await to_the_end(reader)
    watching.cancel()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert max(parsed) > 1 << 15, "the server never has much to parse"
    steps = [before - after for before, after in itertools.pairwise(parsed)]
    assert max(steps) <= 8 * 1024


async def test_malformed_bytes_after_a_request_do_not_break_its_answer(running: Any) -> None:
    async with connection(running) as (reader, writer):
        writer.write(WHOLE + b"\x00\x01 garbage\r\n\r\n")
        answers = await to_the_end(reader)
    assert answers.index(b"HTTP/1.1 200") < answers.index(b"HTTP/1.1 400")


async def test_a_new_connection_beyond_the_limit_closes_an_idle_one(start: Any) -> None:
    running = await start(connections=limits(max_connections=3))
    async with connection(running) as (first, _), connection(running), connection(running):
        assert await works(running)
        assert await to_the_end(first) == b""


async def test_a_connection_beyond_the_limit_gets_503_if_all_others_are_busy(start: Any) -> None:
    running = await start(connections=limits(max_connections=2))
    running.backend.gate.clear()
    async with connection(running) as (first, one), connection(running) as (second, two):
        for writer in (one, two):
            writer.write(WHOLE)
        await running.backend.until(open_requests=2)
        async with connection(running) as (third, _):
            assert status_and_code(await to_the_end(third)) == (503, "too_many_connections")
        running.backend.gate.set()
        for reader in (first, second):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_tls_handshake_has_a_deadline(start: Any, tmp_path: Path) -> None:
    leaf = trustme.CA().issue_cert("localhost")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    running = await start(connections=limits("handshake_seconds"), certificate=Certificate(certificate, key))
    async with connection(running) as (reader, writer):
        writer.write(b"\x16\x03\x01")
        assert await to_the_end(reader) == b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with connection(running, ssl=context) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b" 200 " in await to_the_end(reader)
