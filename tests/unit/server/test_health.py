"""Probe endpoint of the coordinator and the engine, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from eventually import eventually
from prometheus_client import CollectorRegistry, Counter

from megatron_runtime.process.health import HealthServer


class Probed:
    def __init__(self) -> None:
        self.missing: list[str] = ["coordinator"]
        self.registry = CollectorRegistry()
        self.server = HealthServer(missing=lambda: self.missing, registry=self.registry, host="127.0.0.1", port=0)


@pytest.fixture
async def probed() -> AsyncIterator[Probed]:
    process = Probed()
    await process.server.start()
    yield process
    await process.server.stop()


async def _get(probed: Probed, path: str, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.request(method, f"http://127.0.0.1:{probed.server.port}{path}")


async def test_readyz_names_what_is_missing_until_the_process_is_ready(probed: Probed) -> None:
    answer = await _get(probed, "/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "missing": ["coordinator"]}
    probed.missing = []
    answer = await _get(probed, "/readyz?verbose")
    assert answer.status_code == 200
    assert answer.json() == {"ready": True, "missing": []}


async def test_livez_answers_before_the_process_is_ready(probed: Probed) -> None:
    answer = await _get(probed, "/livez")
    assert (answer.status_code, answer.json()) == (200, {"alive": True})


async def test_metrics_come_from_the_registry(probed: Probed) -> None:
    Counter("steps", "Steps.", registry=probed.registry).inc(3)
    answer = await _get(probed, "/metrics")
    assert "steps_total 3.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


async def test_head_has_no_body_and_other_methods_are_rejected(probed: Probed) -> None:
    answer = await _get(probed, "/livez", "HEAD")
    assert (answer.status_code, answer.content) == (200, b"")
    assert (await _get(probed, "/livez", "POST")).status_code == 405
    assert (await _get(probed, "/nothing")).status_code == 404


@pytest.mark.parametrize("junk", [b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"x" * 40_000, b""])
async def test_malformed_bytes_end_only_their_own_connection(probed: Probed, junk: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", probed.server.port)
    writer.write(junk)
    writer.write_eof()
    try:
        answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    writer.close()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert (await _get(probed, "/livez")).status_code == 200


async def test_a_port_in_use_names_the_flag_to_change(probed: Probed) -> None:
    second = HealthServer(missing=list, host="127.0.0.1", port=probed.server.port)
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{probed.server.port} .*--health-port"):
        await second.start()


async def test_connections_are_limited_and_a_client_that_does_not_read_is_disconnected(
    probed: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_runtime.process.health.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("megatron_runtime.process.health.REQUEST_TIMEOUT_SECONDS", 0.3)
    steps = Counter("steps", "Steps.", ["of"], registry=probed.registry)
    for number in range(200):
        steps.labels(f"{number:050000}")  # 20 MB: more than the kernel buffers
    port = probed.server.port
    with socket.socket() as stalled, socket.socket() as silent:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for one in (stalled, silent):
            await asyncio.to_thread(one.connect, ("127.0.0.1", port))
        stalled.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()

        async def answers() -> bool:
            try:
                return (await _get(probed, "/livez")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(answers, what="the two connections are ended")
