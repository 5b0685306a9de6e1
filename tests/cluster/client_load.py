"""Clients of one resource that stream request after request, and every status that the resource has meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from echo_executor import echo_answer
from eventually import LONG_SECONDS, eventually
from fleet import Record

from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.kinds import RESOURCE
from megatron_operator.cluster.watching import watch
from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.protocol.headers import Role
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.security import PeerKeys

from .fake_node import FakeNode

LENGTH = 24
"""Tokens of each answer."""


class ClientLoad:
    """Each client has one stream open at a time, with a prompt of its own.

    answers: number of complete answers that are those of an undisturbed engine.
    failed:  the errors of all other requests.
    """

    def __init__(self, node: FakeNode, name: str, clients: int) -> None:
        address = f"tcp://{node.coordinator_host}:{node.ports.client}"
        keys = PeerKeys.load(node.keys_folder(name), Role.CLIENT)
        self._clients = [CoordinatorClient(address, keys=keys) for _ in range(clients)]
        self._open: dict[int, float] = {}
        self._ending = False
        self.answers = 0
        self.failed: list[str] = []
        self.longest = 0.0
        """Seconds of the slowest answer."""

    async def run(self) -> None:
        """Stream until end()."""
        try:
            await asyncio.gather(*(self._stream(*entry) for entry in enumerate(self._clients)))
        finally:
            for client in self._clients:
                client.stop()

    def end(self) -> None:
        """Start no more requests. run() returns when the open ones are complete."""
        self._ending = True

    async def answered(self, more: int | None = None, *, seconds: float = 60) -> None:
        """Wait for this many more answers, by default two for each client."""
        wanted = self.answers + (more or 2 * len(self._clients))

        async def enough() -> bool:
            assert not self.failed, self.failed[0]
            return self.answers >= wanted

        await eventually(enough, seconds=seconds, what=f"{wanted} answers, {self.answers} so far")

    async def _stream(self, number: int, client: CoordinatorClient) -> None:
        await client.start(connect_timeout_seconds=LONG_SECONDS)
        sequence = 0
        while not self._ending:
            sequence += 1
            prompt = [number, sequence, 2, 3]
            record, began = Record(prompt, LENGTH), time.monotonic()
            try:
                async for item in client.add_request_streaming(prompt, SamplingParams(num_tokens_to_generate=LENGTH)):
                    if "final" in item:
                        record.final = item["final"]
                    else:
                        record.streamed += item["partial"]["new_tokens"]
                record.check(echo_answer(prompt, LENGTH))
            except Exception as error:
                self.failed.append(f"request {sequence} of client {number}: {error!r}")
                return
            self.longest = max(self.longest, time.monotonic() - began)
            self.answers += 1


@asynccontextmanager
async def client_load(node: FakeNode, name: str, *, clients: int = 6) -> AsyncIterator[ClientLoad]:
    """Stream requests to the resource; at the end, wait for the open ones, of which none may have failed."""
    load = ClientLoad(node, name, clients)
    task = asyncio.create_task(load.run())
    try:
        await load.answered()
        yield load
        load.end()
        await asyncio.wait_for(task, LONG_SECONDS)
        assert load.failed == []
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def every_status(api: KubeApi, namespace: str, name: str) -> AsyncIterator[list[tuple[float, dict[str, Any]]]]:
    """Collect each status of a resource, with the monotonic time of its arrival, oldest first."""
    found: list[tuple[float, dict[str, Any]]] = []

    async def follow() -> None:
        query = {"fieldSelector": f"metadata.name={name}"}
        async for change in watch(api, RESOURCE.path(namespace), query):
            found.extend((time.monotonic(), item["status"]) for item in change.objects if "status" in item)

    task = asyncio.create_task(follow())
    try:
        yield found
        assert not task.done(), "the statuses were not followed to the end"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
