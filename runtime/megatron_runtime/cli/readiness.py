"""Waits until all processes of `megatron serve` are ready.

`serve` starts the processes before it imports this module, so that the slow import runs at the same time as their
start.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import click

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.protocol.adapters import AdapterList
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.messages import Control, Hello
from megatron_runtime.transport.addresses import CoordinatorAddresses
from megatron_runtime.transport.control_calls import ControlCalls, ControlRejectedError
from megatron_runtime.transport.peer_link import PeerLink

_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 60.0
_ADAPTER_SECONDS = 3600.0
"""Timeout for fetching and loading the adapters, in seconds."""


async def until_ready(options: SimpleNamespace, *, url: str, coordinator: str, admin: str, say: Any) -> None:
    """Wait until all engines have their weights and LoRA adapters, and the server is connected to the coordinator.

    Call `say` with a line for each engine that has its weights, and with a line that lists the adapters.
    """
    client = CoordinatorClient(coordinator)
    await client.start(connect_timeout_seconds=_CONNECT_SECONDS)
    try:
        serving: set[str] = set()
        while len(serving) < options.engines:
            status = await client.status()
            for engine in status.engines:
                if engine.serving and engine.name not in serving:
                    serving.add(engine.name)
                    say(None, f"{engine.name} has its weights ({len(serving)} of {options.engines})")
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        client.stop()
    if options.adapters.adapters:
        await _set_adapters(options.adapters, admin=admin)
        say(None, f"adapters: {', '.join(adapter.name for adapter in options.adapters.adapters)}")
    # The socket already listens. The server process answers the first request when it has started.
    while not await _is_ready(url):  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(_POLL_SECONDS)


async def _is_ready(url: str) -> bool:
    """Return whether the readiness probe of the server at `url` answers with status 200.

    The function uses a raw connection, because importing an HTTP client would take CPU time from the starting
    processes.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
        return (await reader.readline()).split()[1:2] == [b"200"]
    finally:
        writer.close()


async def _set_adapters(adapters: AdapterList, *, admin: str) -> None:
    """Make every engine load the adapters. Raises ClickException with the engine, the adapter and the cause."""
    link = PeerLink(
        CoordinatorAddresses(admin),
        keys=None,
        hello=lambda incarnation: Hello(role=Role.ADMIN, name="megatron-serve", incarnation=incarnation),
        on_ack=lambda ack, forgotten: None,
        on_message=lambda message: calls.handle(message),
    )
    calls = ControlCalls(link.send, address=admin)
    await link.start(connect_timeout_seconds=_CONNECT_SECONDS)
    try:
        await calls.control(
            Control(
                kind=Header.SET_ADAPTERS,
                operation_id="adapters",
                fence=1,
                timeout_seconds=_ADAPTER_SECONDS,
                adapters=adapters,
            )
        )
    except ControlRejectedError as error:
        raise click.ClickException(str(error)) from error
    finally:
        calls.close()
        link.close("adapters are set")
