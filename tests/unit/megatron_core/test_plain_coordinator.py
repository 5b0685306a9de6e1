"""A coordinator that answers CONNECT without a protocol version speaks Megatron-Core's messages only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio
from eventually import LONG_SECONDS

from megatron_runtime.client.rejection import RequestRejectedError
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import PROTOCOL_VERSION, Header
from megatron_runtime.protocol.messages import pack, unpack


class Coordinator:
    """A ROUTER that answers CONNECT, keeps all other messages, and sends what the test says."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.connects: list[list[Any]] = []
        self._received: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._peer = b""
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            self._peer, frame = await self._socket.recv_multipart()
            items = unpack(frame)
            if items[0] == Header.CONNECT:
                self.connects.append(items)
                await self.say(Header.CONNECT_ACK)
            else:
                self._received.put_nowait(items)

    async def hear(self) -> list[Any]:
        return await asyncio.wait_for(self._received.get(), LONG_SECONDS)

    async def say(self, *items: Any) -> None:
        await self._socket.send_multipart([self._peer, pack(list(items))])

    def close(self) -> None:
        self._task.cancel()
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator()
    yield coordinator
    coordinator.close()


@pytest.fixture
async def theirs(coordinator: Coordinator) -> AsyncIterator[InferenceClient]:
    client = InferenceClient(coordinator.port, deserialize=False)
    await client.start(connect_timeout_seconds=LONG_SECONDS)
    yield client
    client.stop()


async def test_connect_comes_first_with_the_protocol_version(coordinator, theirs) -> None:
    assert theirs.connected
    assert coordinator.connects[0] == [Header.CONNECT, PROTOCOL_VERSION]


async def test_a_request_is_streamed(coordinator, theirs, params) -> None:
    stream = theirs.add_request_streaming([1, 2], params(3))
    header, number, prompt, sampling = await coordinator.hear()
    assert (header, prompt, sampling["streaming"]) == (Header.SUBMIT_REQUEST, [1, 2], True)
    for tokens in ([5, 6], [7]):
        frame = {"request_id": number, "new_tokens": tokens, "new_log_probs": [-0.5] * len(tokens)}
        await coordinator.say(Header.ENGINE_REPLY_PARTIAL, number, frame)
        partial = (await anext(stream))["partial"]
        assert (partial["new_tokens"], partial["new_log_probs"]) == (tokens, [-0.5] * len(tokens))
    spans = [[0, 0], [1, 4]]
    reply = {"request_id": number, "generated_tokens": [5, 6, 7], "status": "COMPLETED", "policy_epoch": spans}
    await coordinator.say(Header.ENGINE_REPLY, number, reply)
    final = (await anext(stream))["final"]
    assert (final["generated_tokens"], final["policy_epoch"]) == ([5, 6, 7], spans)


async def test_a_coordinator_that_streams_gets_aborts_by_the_number_of_the_request(coordinator, theirs, params) -> None:
    future = theirs.add_request("some text", params(3))
    _, number, prompt, _ = await coordinator.hear()
    assert prompt == "some text"
    future.cancel()
    stream = theirs.add_request_streaming([1], params(3))
    header, number, *_ = await coordinator.hear()
    assert header == Header.SUBMIT_REQUEST, "a release without streams would end at an abort"
    await coordinator.say(Header.ENGINE_REPLY_PARTIAL, number, {"request_id": number, "new_tokens": [5]})
    await anext(stream)
    await stream.aclose()
    assert await coordinator.hear() == [Header.ABORT_REQUEST, number]


async def test_signals_are_sent_without_a_map(coordinator, theirs) -> None:
    await theirs.set_generation_epoch(4)
    assert await coordinator.hear() == [Header.SET_GENERATION_EPOCH, 4]
    for verb in ("pause", "suspend", "resume", "unpause", "stop"):
        await getattr(theirs, f"{verb}_engines")()
        assert await coordinator.hear() == [Header[verb.upper()]]


@pytest.mark.parametrize("reply", [7, {"generated_tokens": ["a"]}, {"requests": []}])
async def test_an_unreadable_answer_fails_its_request(coordinator, theirs, params, reply) -> None:
    future = theirs.add_request([1], params(3))
    number = (await coordinator.hear())[1]
    await coordinator.say(Header.ENGINE_REPLY, 999, {})
    await coordinator.say(Header.ENGINE_REPLY, number, reply)
    with pytest.raises(RequestRejectedError, match="unreadable answer"):
        await future
