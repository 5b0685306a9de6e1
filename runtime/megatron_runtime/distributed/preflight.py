"""The network check of an engine's pods, before its ranks load: every two pods must reach each other.

Each pod listens on the rendezvous port and on a port that the system chooses, as ranks do later, and exchanges a block
of data with every other pod on both. A pod that is reachable but takes no part passes: its image may still be pulled,
or its ranks may run already. Silence fails: dropped packets, a lost host, or a name service that does not answer. One
deadline bounds everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum

MAGIC = b"megatron-preflight-1\n"
BLOCK_BYTES = 1 << 18
"""Larger than a packet and than a small socket buffer, so that a wrong MTU is found."""
RETRY_SECONDS = 0.25
GREETING_SECONDS = 2.0
"""A peer that accepts a connection and is silent for so long is another program, such as the store of running ranks."""
NAMED = 4
"""The most pairs that an error message names."""
SILENT_SHARE = 0.3
"""A connection attempt that is open for this share of the timeout at the deadline counts as unanswered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightPlan:
    """node: this pod among `nodes`. names: host name of each pod, by number."""

    node: int
    names: tuple[str, ...]
    port: int
    timeout_seconds: float = 15.0
    listen: str = "0.0.0.0"


class PreflightError(RuntimeError):
    """Two pods cannot reach each other. The message names both and what was observed."""

    reason = "RendezvousFailed"
    remedy = "see that NetworkPolicies and firewalls let pods of the engine reach each other on every port"

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Outcome(StrEnum):
    """The result of one pod's attempt to reach another."""

    ANSWERED = "answered"
    REACHABLE = "is reachable and takes no part"
    ABSENT = "has no address yet"


async def preflight(plan: PreflightPlan) -> dict[str, Outcome]:
    """Try to reach every other pod. Returns the outcomes by host name.

    Raises:
        PreflightError: a pod was silent until the deadline, or this pod's own name does not resolve.
        OSError: the port is taken.
    """
    heard: set[int] = set()
    changed = asyncio.Event()
    until = asyncio.get_running_loop().time() + plan.timeout_seconds
    async with _listening(plan, heard, changed):
        await _resolves_itself(plan, until)
        others = [number for number in range(len(plan.names)) if number != plan.node]
        async with asyncio.TaskGroup() as calls:
            tasks = [calls.create_task(_reach(plan, number, until)) for number in others]
        found = {number: task.result() for number, task in zip(others, tasks, strict=True)}
        silent = [error for error in found.values() if not isinstance(error, Outcome)]
        if silent:
            raise PreflightError("; ".join(silent[:NAMED]), rank=plan.node)
        outcomes = {number: outcome for number, outcome in found.items() if isinstance(outcome, Outcome)}
        # Pods that take part need an answer of this one as well; if it does not come they report that themselves.
        partners = {number for number, outcome in outcomes.items() if outcome is Outcome.ANSWERED}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not partners <= heard:
                    changed.clear()
                    await changed.wait()
    return {plan.names[number]: outcome for number, outcome in outcomes.items()}


@contextlib.asynccontextmanager
async def _listening(plan: PreflightPlan, heard: set[int], changed: asyncio.Event) -> AsyncIterator[None]:
    async def data(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _answer(reader, writer)
        writer.close()

    side = await asyncio.start_server(data, plan.listen, 0)
    side_port: int = side.sockets[0].getsockname()[1]

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            if await reader.readexactly(len(MAGIC)) == MAGIC:
                writer.write(MAGIC + f"{side_port:08}".encode())
                await _answer(reader, writer)
                number = int(await reader.readexactly(8))
                heard.add(number)
                changed.set()
        writer.close()

    main = await asyncio.start_server(control, plan.listen, plan.port, reuse_address=True)
    try:
        yield
    finally:
        for server in (main, side):
            server.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    block = await reader.readexactly(BLOCK_BYTES)
    writer.write(hashlib.sha256(block).digest())
    await writer.drain()


async def _resolves_itself(plan: PreflightPlan, until: float) -> None:
    """Wait until this pod's own name resolves. It has an address; another pod may not have one yet."""
    name, loop = plan.names[plan.node], asyncio.get_running_loop()
    error: object = "no answer"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            while True:
                try:
                    await loop.getaddrinfo(name, plan.port, type=socket.SOCK_STREAM)
                    return
                except OSError as failure:
                    error = failure
                await asyncio.sleep(RETRY_SECONDS)
    raise PreflightError(
        f"{name} does not find its own name within {plan.timeout_seconds:g} s ({error}): the cluster's DNS does not "
        "work for it, so no rank would find another",
        rank=plan.node,
    )


async def _reach(plan: PreflightPlan, number: int, until: float) -> Outcome | str:
    """Connect until the pod answers. At the deadline the last completed attempt counts. A string names the error."""
    loop, name = asyncio.get_running_loop(), plan.names[number]
    seen: Outcome | None = None
    what = ""
    called: float | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            while True:
                try:
                    await loop.getaddrinfo(name, plan.port, type=socket.SOCK_STREAM)
                    called = loop.time()
                    await _exchange(plan, number)
                    return Outcome.ANSWERED
                except socket.gaierror:
                    seen = Outcome.ABSENT
                except (ConnectionRefusedError, ConnectionResetError, asyncio.IncompleteReadError):
                    seen = Outcome.REACHABLE
                except OSError as error:
                    seen, what = None, str(error)
                called = None
                await asyncio.sleep(RETRY_SECONDS)
    if called is not None and loop.time() - called > plan.timeout_seconds * SILENT_SHARE:
        seen, what = None, "no answer"
    if seen is None:
        what = what or ("no answer" if called is not None else "the look-up of its name did not end")
        return (
            f"{plan.names[plan.node]} cannot reach {name} on port {plan.port}: {what} within {plan.timeout_seconds:g} s"
        )
    return seen


async def _exchange(plan: PreflightPlan, number: int) -> None:
    """Send a block to both ports of another pod and check the digests that it returns."""
    host, block = plan.names[number], os.urandom(BLOCK_BYTES)
    reader, writer = await asyncio.open_connection(host, plan.port)
    try:
        writer.write(MAGIC)
        try:
            greeting = await asyncio.wait_for(reader.readexactly(len(MAGIC) + 8), GREETING_SECONDS)
        except TimeoutError as error:
            raise ConnectionResetError(f"{host} takes calls on port {plan.port} and does not answer") from error
        if not greeting.startswith(MAGIC):
            raise ConnectionResetError(f"{host} speaks something else on port {plan.port}")
        await _send(reader, writer, block, host)
        side_reader, side_writer = await asyncio.open_connection(host, int(greeting[len(MAGIC) :]))
        try:
            await _send(side_reader, side_writer, block, host)
        finally:
            side_writer.close()
        writer.write(f"{plan.node:08}".encode())
        await writer.drain()
    finally:
        writer.close()


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, block: bytes, host: str) -> None:
    writer.write(block)
    await writer.drain()
    if await reader.readexactly(hashlib.sha256().digest_size) != hashlib.sha256(block).digest():
        raise OSError(f"{host} received other data than was sent")
