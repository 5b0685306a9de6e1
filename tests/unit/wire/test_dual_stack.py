"""Every listener accepts clients of IPv4 and IPv6 on one port, and works on a system without IPv6."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator

import pytest
from eventually import LONG_SECONDS, eventually

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.distributed.preflight import MAGIC, PreflightSettings, preflight
from megatron_runtime.process.health import HealthServer
from megatron_runtime.process.listening import EVERY_ADDRESS, listening_socket
from megatron_runtime.server.settings import listen
from megatron_runtime.transport.zmtp.handshake import NullHandshake
from megatron_runtime.transport.zmtp.router import Router

HTTP = b"GET /livez HTTP/1.1\r\n\r\n"
ZMTP = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) in (0, errno.ECONNREFUSED)


@contextlib.asynccontextmanager
async def _health() -> AsyncIterator[int]:
    server = HealthServer(missing=tuple, port=0)
    await server.start()
    yield server.port
    await server.stop()


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    with listen(host=EVERY_ADDRESS, port=0) as listener:
        server = await asyncio.start_server(answer, sock=listener)
        yield listener.getsockname()[1]
        server.close()


@contextlib.asynccontextmanager
async def _coordinator() -> AsyncIterator[int]:
    router = Router(
        0,
        connections={},
        handshake=NullHandshake,
        on_message=lambda peer, frames: None,
        max_message_bytes=1000,
        send_buffer_bytes=1000,
        check_seconds=60.0,
    )
    address = router.bind(CoordinatorSettings().listen, 0)
    yield int(address.rpartition(":")[2])
    router.close()
    await router.closed()


@contextlib.asynccontextmanager
async def _preflight() -> AsyncIterator[int]:
    (port,) = free_ports(1)
    task = asyncio.create_task(preflight(PreflightSettings(node=0, names=("localhost", "127.0.77.9"), port=port)))

    async def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await eventually(listens, what="the check listens")
    yield port
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


LISTENERS = [(_health, HTTP), (_server, HTTP), (_coordinator, ZMTP), (_preflight, MAGIC)]


@pytest.mark.parametrize(("start", "greeting"), LISTENERS, ids=lambda each: getattr(each, "__name__", ""))
async def test_clients_of_both_protocols_are_answered_on_one_port(start, greeting: bytes) -> None:
    async with start() as port:
        for host in ("127.0.0.1", *(["::1"] if has_ipv6() else [])):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(greeting)
            assert await asyncio.wait_for(reader.read(1), LONG_SECONDS), f"no answer to {host}"
            writer.close()


def test_a_system_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listening_socket(EVERY_ADDRESS, 0) as listener:
        assert (listener.family, listener.getsockname()[0]) == (socket.AF_INET, "0.0.0.0")


def test_a_port_that_is_taken_is_named() -> None:
    with listen(host="127.0.0.1", port=0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port} \(Address already in use\)"):
            listen(host="127.0.0.1", port=port)
