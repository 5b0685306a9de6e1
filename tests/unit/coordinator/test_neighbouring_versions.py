"""Peers one protocol version older or newer register and are answered; they may send keys that are unknown here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from megatron_runtime.protocol.headers import PROTOCOL_VERSION, Role
from megatron_runtime.protocol.messages import (
    ControlMessage,
    Heartbeat,
    Hello,
    HelloAck,
    Status,
    StatusReply,
    decode,
    pack,
)


@pytest.fixture
def dealer() -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context.socket(zmq.DEALER)
    context.destroy(linger=0)


async def ask(socket: zmq.Socket[bytes], frames: list[bytes]) -> ControlMessage:
    """Return the next message of the coordinator, except its heartbeats."""
    socket.send_multipart(frames)
    while True:
        while not socket.poll(0):  # noqa: ASYNC110 - a bare socket has no event
            await asyncio.sleep(0.005)
        answer = decode(socket.recv_multipart())
        assert isinstance(answer, ControlMessage)
        if not isinstance(answer, Heartbeat):  # sent at any time
            return answer


def of_another_release(message: Hello | Status) -> list[bytes]:
    """Return the frames of a message with a key that this version does not know."""
    (frame,) = message.to_frames()
    header, fields = msgpack.unpackb(frame, raw=False)
    return [pack([header, {**fields, "of_a_later_release": {"any": [1, 2]}}])]


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize("role", list(Role))
async def test_a_peer_of_a_neighbouring_version_registers(
    stage: Any, dealer: zmq.Socket[bytes], role: Role, version: int
) -> None:
    coordinator = stage.coordinator()
    dealer.connect(stage.address(role))
    hello = Hello(role=role, name="neighbour", incarnation=1, version=version)
    answer = await ask(dealer, of_another_release(hello))
    assert isinstance(answer, HelloAck)
    assert answer.version == PROTOCOL_VERSION
    assert sum(coordinator.core.counters.rejected.values()) == 0
    if role is Role.ADMIN:
        reply = await ask(dealer, of_another_release(Status()))
        assert isinstance(reply, StatusReply)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_an_engine_and_a_client_of_a_neighbouring_version_serve_a_request(
    stage: Any, params: Any, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    to_frames = Hello.to_frames
    sent: list[int] = []

    def of_the_neighbour(hello: Hello) -> list[bytes]:
        sent.append(version)
        return to_frames(hello.model_copy(update={"version": version}))

    monkeypatch.setattr(Hello, "to_frames", of_the_neighbour)
    _, _, client = await stage.all()
    assert (await client.add_request([1], params(3)))["status"] == "COMPLETED"
    assert len(sent) == 2
