"""Before the ranks of an engine load: can every two of its pods talk? Seconds instead of a load and a rendezvous.

Each pod listens on the rendezvous port and on a port of the system's choice, as ranks do later, and exchanges a block
of data with every other pod on both. Who can be reached but does not take part (its image is still being pulled, or it
runs its ranks already) passes: the network lets the two talk. What fails is silence: packets that are dropped, a host
that is gone, a name service that does not answer. All ends by one deadline.
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
"""More than one packet and one socket buffer of small size, so that a wrong MTU shows."""
RETRY_SECONDS = 0.25
GREETING_SECONDS = 2.0
"""Who has taken a call and says nothing for so long speaks something else: the store of ranks that run waits, too."""
NAMED = 4
"""Pairs that a message names at most."""
SILENT_SHARE = 0.3
"""A call that is without an answer for this part of the time, when the time is over, counts as unanswered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightPlan:
    """node: this pod among `nodes`. names: host name of each pod, by number."""

    node: int
    names: tuple[str, ...]
    port: int
    timeout_seconds: float = 15.0
    listen: str = "0.0.0.0"


class PreflightError(RuntimeError):
    """Two pods cannot talk. The message names both, and what was seen."""

    reason = "RendezvousFailed"
    remedy = "see that NetworkPolicies and firewalls let pods of the engine reach each other on every port"

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Outcome(StrEnum):
    """What one pod knows of another."""

    ANSWERED = "answered"
    REACHABLE = "is reachable and takes no part"
    ABSENT = "has no address yet"


async def preflight(plan: PreflightPlan) -> dict[str, Outcome]:
    """What is known of every other pod.

    Raises:
        PreflightError: of some pod nothing was heard until the deadline, or no name can be resolved.
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
        silent = [words for words in found.values() if not isinstance(words, Outcome)]
        if silent:
            raise PreflightError("; ".join(silent[:NAMED]), rank=plan.node)
        outcomes = {number: outcome for number, outcome in found.items() if isinstance(outcome, Outcome)}
        # Those who take part need an answer from here as well; what they do not get they report themselves.
        partners = {number for number, outcome in outcomes.items() if outcome is Outcome.ANSWERED}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not partners <= heard:
                    changed.clear()
                    await changed.wait()
    return {plan.names[number]: outcome for number, outcome in outcomes.items()}


# --- the listening half --------------------------------------------------------------------------------------------


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


# --- the calling half ----------------------------------------------------------------------------------------------


async def _resolves_itself(plan: PreflightPlan, until: float) -> None:
    """This pod has an address, so its own name must resolve; of another's one cannot say."""
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
    """Call until it answers; at the deadline, judge by the last call that came to something. Words: what is wrong."""
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
    """One block to both ports of another pod, and back its digest."""
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
