"""The network check of an engine's pods, which runs before the ranks load. Every two pods must reach each other.

Each pod listens on the rendezvous port and on a port that the system chooses, as ranks do later. It exchanges a block
of data with every other pod on both ports. A pod that is reachable but does not run the check passes, because its image
may still be pulled, or its ranks may already run. A pod that does not answer fails the check. Possible causes are
dropped packets, a lost host, and a name service that does not answer. The whole check has one deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatron_runtime.process.listening import EVERY_ADDRESS, listening_socket

MAGIC = b"megatron-preflight-1\n"
BLOCK_BYTES = 1 << 18
"""Number of bytes that two pods exchange. It exceeds a packet and a small socket buffer, to detect a wrong MTU."""
RETRY_SECONDS = 0.25
GREETING_SECONDS = 2.0
"""Seconds after which a peer that accepts a connection but sends nothing counts as another program, such as the store.
"""
NAMED = 4
"""Maximum number of pairs in an error message."""
SILENT_SHARE = 0.3
"""Fraction of the timeout. If the last connection attempt has taken longer than this fraction at the deadline, the peer
counts as silent.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightSettings:
    """Settings of the network check between the pods of an engine.

    node:  index of this pod.
    names: host names of all pods, by index.
    """

    node: int
    names: tuple[str, ...]
    port: int
    timeout_seconds: float = 15.0
    listen: str = EVERY_ADDRESS


class PreflightError(RuntimeError):
    """Two pods cannot reach each other. The message names both pods and the cause."""

    reason = "RendezvousFailed"
    remedy = "check that NetworkPolicies and firewalls let pods of the engine reach each other on every port"

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Outcome(StrEnum):
    """The outcome of one pod's attempts to reach another pod."""

    ANSWERED = "answered"
    REACHABLE = "is reachable and takes no part"
    ABSENT = "has no address yet"


async def preflight(settings: PreflightSettings) -> dict[str, Outcome]:
    """Try to reach every other pod. Return the outcome for each pod, by host name.

    Raises:
        PreflightError: a pod did not answer until the deadline, or this pod's own name does not resolve.
        OSError: the rendezvous port is in use.
    """
    until = asyncio.get_running_loop().time() + settings.timeout_seconds
    others = [number for number in range(len(settings.names)) if number != settings.node]
    called = {number: asyncio.Event() for number in others}
    async with _listening(settings, called):
        await _resolve_own_name(settings, until)
        results = await asyncio.gather(*(_reach(settings, number, until) for number in others))
        outcomes = {number: each for number, each in zip(others, results, strict=True) if isinstance(each, Outcome)}
        if len(outcomes) < len(others):
            errors = [each for each in results if not isinstance(each, Outcome)]
            raise PreflightError("; ".join(errors[:NAMED]), rank=settings.node)
        # Wait until the other pods have reached this pod. A pod that cannot reach it reports the failure itself.
        partners = [number for number, outcome in outcomes.items() if outcome is Outcome.ANSWERED]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                for number in partners:
                    await called[number].wait()
    return {settings.names[number]: outcome for number, outcome in outcomes.items()}


@contextlib.asynccontextmanager
async def _listening(settings: PreflightSettings, called: Mapping[int, asyncio.Event]) -> AsyncIterator[None]:
    """Return a context manager that answers the checks of other pods while its `with` block runs.

    It listens on the rendezvous port and on a second port that the system chooses.

    called: one event for each other pod, by pod index. An event is set when its pod has exchanged data with this pod.
    """

    async def on_second_port(reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _answer(reader, writer)
        writer.close()

    async def on_port(reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, KeyError, ValueError):
            if await reader.readexactly(len(MAGIC)) == MAGIC:
                writer.write(MAGIC + f"{second.sockets[0].getsockname()[1]:08}".encode())
                await _answer(reader, writer)
                called[int(await reader.readexactly(8))].set()
        writer.close()

    second = await asyncio.start_server(on_second_port, sock=listening_socket(settings.listen, 0))
    first = await asyncio.start_server(on_port, sock=listening_socket(settings.listen, settings.port))
    try:
        yield
    finally:
        for server in (first, second):
            server.close()


async def _answer(reader: StreamReader, writer: StreamWriter) -> None:
    block = await reader.readexactly(BLOCK_BYTES)
    writer.write(hashlib.sha256(block).digest())
    await writer.drain()


async def _resolve_own_name(settings: PreflightSettings, until: float) -> None:
    """Wait until this pod's own name resolves.

    This pod has an address, so a failure to resolve its name is an error of the name service.
    """
    name, loop = settings.names[settings.node], asyncio.get_running_loop()
    cause: object = "no answer"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            while True:
                try:
                    await loop.getaddrinfo(name, settings.port, type=socket.SOCK_STREAM)
                    return
                except OSError as error:
                    cause = error
                await asyncio.sleep(RETRY_SECONDS)
    raise PreflightError(
        f"{name} cannot resolve its own name within {settings.timeout_seconds:g} s ({cause}): the cluster's DNS does "
        "not work for it, so no rank could find another",
        rank=settings.node,
    )


async def _reach(settings: PreflightSettings, number: int, until: float) -> Outcome | str:
    """Try to connect to pod `number` until it answers, at most until `until`.

    Return the outcome, or the error as text. At the deadline, this is the result of the last completed attempt.
    """
    loop, name = asyncio.get_running_loop(), settings.names[number]
    result: Outcome | str | None = None
    connecting_since: float | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            while True:
                try:
                    await loop.getaddrinfo(name, settings.port, type=socket.SOCK_STREAM)
                    connecting_since = loop.time()
                    await _exchange(settings, name)
                    return Outcome.ANSWERED
                except socket.gaierror:
                    result = Outcome.ABSENT
                except (ConnectionError, asyncio.IncompleteReadError):
                    result = Outcome.REACHABLE
                except OSError as error:
                    result = str(error)
                connecting_since = None
                await asyncio.sleep(RETRY_SECONDS)
    is_silent = (
        connecting_since is not None and loop.time() - connecting_since > settings.timeout_seconds * SILENT_SHARE
    )
    if is_silent or (result is None and connecting_since is not None):
        result = "no answer"
    if isinstance(result, Outcome):
        return result
    cause = result or "the lookup of its name did not end"
    own, seconds = settings.names[settings.node], settings.timeout_seconds
    return f"{own} cannot reach {name} on port {settings.port}: {cause} within {seconds:g} s"


async def _exchange(settings: PreflightSettings, host: str) -> None:
    """Send a random block to another pod on the rendezvous port, and then on the second port that the pod names.

    Raises OSError if a digest that the pod returns does not match the block.
    """
    block = os.urandom(BLOCK_BYTES)
    reader, writer = await asyncio.open_connection(host, settings.port)
    with contextlib.closing(writer):
        writer.write(MAGIC)
        try:
            greeting = await asyncio.wait_for(reader.readexactly(len(MAGIC) + 8), GREETING_SECONDS)
        except TimeoutError as error:
            raise ConnectionResetError(
                f"{host} accepts connections on port {settings.port} and sends nothing"
            ) from error
        if not greeting.startswith(MAGIC):
            raise ConnectionResetError(f"{host} uses another protocol on port {settings.port}")
        await _send(reader, writer, block, host)
        second_reader, second_writer = await asyncio.open_connection(host, int(greeting[len(MAGIC) :]))
        with contextlib.closing(second_writer):
            await _send(second_reader, second_writer, block, host)
        writer.write(f"{settings.node:08}".encode())
        await writer.drain()


async def _send(reader: StreamReader, writer: StreamWriter, block: bytes, host: str) -> None:
    writer.write(block)
    await writer.drain()
    if await reader.readexactly(hashlib.sha256().digest_size) != hashlib.sha256(block).digest():
        raise OSError(f"{host} received other data than was sent")
