"""Clients of one resource that stream request after request, and every status that the resource has meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import httpx
from echo_executor import echo_answer
from eventually import LONG_SECONDS, eventually
from fleet import Record
from soak import size

from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.kinds import RESOURCE
from megatron_operator.cluster.watching import watch
from megatron_operator.resource.names import SERVER
from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.protocol.headers import Role
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.security import PeerKeys

from .fake_node import FakeNode

L = TypeVar("L", bound="ClientLoad")
Answer = Callable[[list[int]], Awaitable[Record]]
LENGTH = 24
"""Tokens of each answer."""
PACE = ("--echo-step-seconds", "0.04")
"""Arguments of echo engines. A stream takes a second: each fault interrupts streams, which cost little CPU time."""


class ClientLoad(ABC):
    """Each client has one stream open at a time, with a prompt of its own.

    answers: number of complete answers that are those of an undisturbed engine.
    failed:  the errors of all other requests.
    """

    def __init__(self) -> None:
        self._clients = size(3, soak=6)
        self._ending = False
        self.answers = 0
        self.failed: list[str] = []
        self.longest = 0.0
        """Seconds of the slowest answer."""

    @abstractmethod
    def client(self) -> AbstractAsyncContextManager[Answer]:
        """Connect a client. It gives a function that streams the answer of LENGTH tokens to a prompt."""

    def prompt(self, number: int, sequence: int) -> list[int]:
        """Return the prompt of a client's next request."""
        return [number, sequence, 2, 3]

    async def run(self) -> None:
        """Stream until end()."""
        await asyncio.gather(*(self._stream(number) for number in range(self._clients)))

    def end(self) -> None:
        """Start no more requests. run() returns when the open ones are complete."""
        self._ending = True

    async def answered(self, more: int | None = None) -> None:
        """Wait for this many more answers, by default two for each client."""
        wanted = self.answers + (more or 2 * self._clients)

        async def enough() -> bool:
            assert not self.failed, self.failed[0]
            return self.answers >= wanted

        await eventually(enough, what=f"{wanted} answers, {self.answers} so far")

    async def _stream(self, number: int) -> None:
        sequence = 0
        async with self.client() as answer:
            while not self._ending:
                sequence += 1
                prompt = self.prompt(number, sequence)
                began = time.monotonic()
                try:
                    (await answer(prompt)).check(echo_answer(prompt, LENGTH))
                except Exception as error:
                    self.failed.append(f"request {sequence} of client {number}: {error!r}")
                    return
                self.longest = max(self.longest, time.monotonic() - began)
                self.answers += 1


class CoordinatorLoad(ClientLoad):
    """Clients of the coordinator."""

    def __init__(self, node: FakeNode, name: str) -> None:
        super().__init__()
        self._address = f"tcp://{node.coordinator_host}:{node.ports.client}"
        self._keys = PeerKeys.load(node.keys_folder(name), Role.CLIENT)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Answer]:
        client = CoordinatorClient(self._address, keys=self._keys)
        await client.start(connect_timeout_seconds=LONG_SECONDS)

        async def answer(prompt: list[int]) -> Record:
            record = Record(prompt, LENGTH)
            async for item in client.add_request_streaming(prompt, SamplingParams(num_tokens_to_generate=LENGTH)):
                if "final" in item:
                    record.final = item["final"]
                else:
                    record.streamed += item["partial"]["new_tokens"]
            return record

        try:
            yield answer
        finally:
            client.stop()


class HttpLoad(ClientLoad):
    """Clients of the servers, each of whose connections is to one of those that are ready. A client whose connection
    breaks sends the request again, as a user of the Service would."""

    def __init__(self, node: FakeNode, name: str) -> None:
        super().__init__()
        self._node, self._name = node, name
        self.again = 0
        """Requests that were sent again."""

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Answer]:
        async with httpx.AsyncClient(timeout=LONG_SECONDS, verify=False, trust_env=False) as http:

            async def answer(prompt: list[int]) -> Record:
                while True:
                    try:
                        return await self._answer(http, prompt)
                    except httpx.TransportError:
                        self.again += 1
                        await asyncio.sleep(0.1)

            yield answer

    async def _answer(self, http: httpx.AsyncClient, prompt: list[int]) -> Record:
        servers = [entry for entry in self._node.containers.values() if entry.component == SERVER and entry.ready]
        if not servers:
            raise httpx.ConnectError("no server is ready")
        url = f"http://127.0.0.1:{random.choice(servers).http_port}/v1/completions"
        body = {"model": self._name, "prompt": prompt, "max_tokens": LENGTH, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        record = Record(prompt, LENGTH)
        async with http.stream("POST", url, json=body) as response:
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        assert response.status_code == httpx.codes.OK, f"{response.status_code}: {lines}"
        assert lines[-1] == "[DONE]", f"the stream has no end: {lines}"
        for line in lines[:-1]:
            (choice,) = json.loads(line)["choices"]
            record.streamed += choice["token_ids"]
        record.final = {"status": "COMPLETED", "generated_tokens": record.streamed}
        return record


@asynccontextmanager
async def client_load(load: L) -> AsyncIterator[L]:
    """Stream requests to the resource; at the end, wait for the open ones, of which none may have failed."""
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
