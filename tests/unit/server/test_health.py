"""Probe endpoint of the coordinator and the engine, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from eventually import LONG_SECONDS, eventually
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_runtime.process import health
from megatron_runtime.process.health import HealthServer


class Probed:
    def __init__(self) -> None:
        self.missing: list[str] = ["coordinator"]
        self.registry = CollectorRegistry()
        self.server = HealthServer(missing=lambda: self.missing, registry=self.registry, host="127.0.0.1", port=0)


@pytest.fixture
async def probed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Probed]:
    monkeypatch.setattr(health, "REQUEST_TIMEOUT_SECONDS", LONG_SECONDS)  # a loaded machine sends a request late
    process = Probed()
    await process.server.start()
    yield process
    await process.server.stop()


async def _get(probed: Probed, path: str, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(timeout=LONG_SECONDS, verify=False, trust_env=False) as client:
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


def _connect(port: int, *, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), source_address=(source, 0))


async def _has_ended(connection: socket.socket) -> bool:
    """Whether the server has closed a connection on which nothing was sent."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def _is_alive(probed: Probed) -> bool:
    try:
        return (await _get(probed, "/livez")).status_code == 200
    except httpx.TransportError:
        return False


async def test_probes_are_answered_while_connections_without_requests_arrive(probed: Probed) -> None:
    """Each batch is larger than the limits, so a server that drops the newest connection answers no probe."""
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            for _ in range(health.MAX_CONNECTIONS + 50):
                stack.enter_context(_connect(probed.server.port))
            assert await _is_alive(probed)
        assert len(probed.server._open) <= health.MAX_PER_PEER


async def test_the_oldest_waiting_connection_is_dropped_first_of_its_own_address(
    probed: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(health, "MAX_PER_PEER", 3)
    port = probed.server.port
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(_connect(port, source="127.0.0.2"))
        flood = [stack.enter_context(_connect(port)) for _ in range(20)]
        assert await _is_alive(probed)
        assert [await _has_ended(connection) for connection in flood] == [True] * 18 + [False] * 2
        assert not await _has_ended(other)
        many = [stack.enter_context(_connect(port, source=f"127.0.1.{number}")) for number in range(1, 9)]
        assert await _is_alive(probed)
        assert await _has_ended(other), "it was the oldest of all"
        assert not await _has_ended(many[-1])


async def test_a_client_that_does_not_read_is_disconnected(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "REQUEST_TIMEOUT_SECONDS", 0.3)
    steps = Counter("steps", "Steps.", ["of"], registry=probed.registry)
    for number in range(200):
        steps.labels(f"{number:050000}")  # 20 MB: more than the kernel buffers
    with socket.socket() as stalled, _connect(probed.server.port):
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(stalled.connect, ("127.0.0.1", probed.server.port))
        stalled.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")

        async def all_are_gone() -> bool:
            return not probed.server._open

        await asyncio.sleep(0)
        await eventually(all_are_gone, what="both connections are ended")


class _Blocking(Collector):
    """A registry's part that is rendered only when the test allows."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.rendered = self.at_once = self.max_at_once = 0

    def collect(self) -> Iterator[Metric]:
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        assert self.allowed.acquire(timeout=LONG_SECONDS)
        self.rendered += 1
        self.at_once -= 1
        yield GaugeMetricFamily("rendered", "Times.", value=self.rendered)


async def test_metrics_are_rendered_one_at_a_time_off_the_loop_for_all_who_wait(probed: Probed) -> None:
    blocking = _Blocking()
    probed.registry.register(blocking)
    first = asyncio.create_task(_get(probed, "/metrics"))

    async def renders() -> bool:
        return blocking.at_once == 1

    await eventually(renders, what="the first is rendered")
    waiting = [asyncio.create_task(_get(probed, "/metrics")) for _ in range(health.MAX_SCRAPES + 4)]

    async def all_have_arrived() -> bool:
        return sum(task.done() for task in waiting) == 4

    await eventually(all_have_arrived, what="those beyond the limit are rejected, and the others wait")
    assert await _is_alive(probed), "while metrics are rendered"
    blocking.allowed.release(2)
    assert "rendered 1.0" in (await first).text
    answers = await asyncio.gather(*waiting)
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(served) == health.MAX_SCRAPES
    assert all("rendered 2.0" in answer.text for answer in served)
    assert {(answer.status_code, answer.headers.get("retry-after")) for answer in answers if answer not in served} == {
        (503, "1")
    }
    assert blocking.max_at_once == 1


MALFORMED = [
    b"GET /livez\r\n\r\n",
    b"GET /livez HTTP/1.1\r\n\r\n",
    b"GET /livez HTTP/2.0\r\nHost: x\r\n\r\n",
    b"GET  /livez HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET livez HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nA: b\rc\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
]


async def test_malformed_requests_get_400_and_nothing_after_them_is_answered(probed: Probed) -> None:
    for sent in MALFORMED:
        reader, writer = await asyncio.open_connection("127.0.0.1", probed.server.port)
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400"), sent
        assert answer.count(b"HTTP/1.1 ") == 1
