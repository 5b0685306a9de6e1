"""Whatever anyone sends: it is counted and answered, the coordinator goes on, and nobody else notices."""

import asyncio
import random

import pytest
import zmq

from megatron_runtime.engines.echo_executor import echo_answer
from megatron_runtime.wire.headers import ErrorCode, Header, Role
from megatron_runtime.wire.messages import (
    Control,
    Error,
    Hello,
    MalformedMessageError,
    Plain,
    RequestMeta,
    Submit,
    decode,
    pack,
)
from megatron_runtime.wire.vectors import VECTORS

FRAMES = 10_000


def mutated(rng: random.Random) -> list[bytes]:
    """A real message with some damage, or noise. Never the empty frame: alone it registers a plain engine."""
    frames = [bytearray(frame) for frame in rng.choice(list(VECTORS.values())).to_frames()]
    damage = rng.randrange(6)
    frame = rng.choice(frames)
    if damage == 0:
        frame[:] = rng.randbytes(rng.randrange(1, 40))
    elif damage == 1 and frame:
        del frame[rng.randrange(len(frame)) :]
    elif damage == 2 and frame:
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
    elif damage == 3:
        frames.insert(rng.randrange(len(frames) + 1), bytearray(rng.randbytes(rng.randrange(8))))
    elif damage == 4:
        rng.shuffle(frames)
    else:
        frames = [bytearray(rng.randbytes(rng.randrange(1, 60))) for _ in range(rng.randrange(1, 12))]
    result = [bytes(frame) for frame in frames]
    return result if result != [b""] else [b"\xc1"]


@pytest.fixture
def sockets():
    context = zmq.Context()

    def connect(address: str) -> zmq.Socket:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(address)
        return socket

    yield connect
    context.destroy(linger=0)


@pytest.mark.parametrize("single_port", [False, True], ids=["three ports", "one port"])
async def test_ten_thousand_broken_frames_disturb_nobody(stage, params, collect, sockets, single_port) -> None:
    stage.coordinator(single_port=single_port)
    await stage.engine(step_seconds=0.002)
    client, link = await stage.client(), await stage.admin()
    attackers = []
    for role in (Role.CLIENT, Role.ENGINE, None):
        socket = sockets(stage.address(role if role is not None else Role.CLIENT))
        if role is not None:
            hello = Hello(role=role, name=f"attacker-{role.name}", incarnation=1)
            socket.send_multipart(hello.to_frames())
        attackers.append(socket)
    rng = random.Random(20240601)
    streams = []
    for number in range(FRAMES):
        frames = mutated(rng)
        while is_order(frames):
            frames = mutated(rng)
        rng.choice(attackers).send_multipart(frames)
        if number % 500 == 0:
            streams.append(client.add_request_streaming([1 + len(streams)], params(10)))
        if number % 50 == 0:
            await asyncio.sleep(0)
    for number, stream in enumerate(streams, start=1):
        tokens, final = await collect(stream)
        assert tokens == final["generated_tokens"] == echo_answer([number], 10)
    status = await link.status()
    assert status.rejected_frames > FRAMES / 10
    assert (status.state, status.epoch) == ("RUNNING", 0)
    for socket in attackers:
        socket.close(linger=0)


def is_order(frames: list[bytes]) -> bool:
    """Valid, and of a kind that changes the state of the coordinator by right: a verb, a registration, work."""
    try:
        message = decode(frames)
    except MalformedMessageError:
        return False
    if isinstance(message, Plain):
        return not message.items or message.items[0] == Header.SHUTDOWN
    return isinstance(message, Control | Hello)


async def ask(socket: zmq.Socket, frames: list[bytes]) -> Error:
    socket.send_multipart(frames)
    while not socket.poll(0):  # noqa: ASYNC110 - a bare socket has no event
        await asyncio.sleep(0.005)
    message = decode(socket.recv_multipart())
    assert isinstance(message, Error)
    return message


@pytest.mark.parametrize(
    ("role", "frames", "code", "reason"),
    [
        (Role.CLIENT, [b"\xc1"], ErrorCode.MALFORMED, "malformed"),
        (Role.CLIENT, [pack([999])], ErrorCode.MALFORMED, "malformed"),
        (Role.CLIENT, VECTORS["STATUS"].to_frames(), ErrorCode.UNKNOWN_PEER, "unknown_peer"),
        (Role.CLIENT, VECTORS["SUBMIT"].to_frames(), ErrorCode.UNKNOWN_PEER, "unknown_peer"),
        (Role.ENGINE, [b""], ErrorCode.UNKNOWN_PEER, "unknown_peer"),
        (Role.CLIENT, VECTORS["CONNECT"].to_frames(), ErrorCode.UNKNOWN_PEER, "unknown_peer"),
        (Role.CLIENT, VECTORS["HELLO, engine"].to_frames(), ErrorCode.WRONG_ROLE, "wrong_role"),
        (Role.ENGINE, VECTORS["HELLO, client"].to_frames(), ErrorCode.WRONG_ROLE, "wrong_role"),
        (
            Role.CLIENT,
            Hello(role=Role.CLIENT, name="x", incarnation=1, version=9).to_frames(),
            ErrorCode.VERSION,
            "version",
        ),
    ],
)
async def test_what_a_stranger_is_told(stage, sockets, role, frames, code, reason) -> None:
    coordinator = stage.coordinator()
    error = await ask(sockets(stage.address(role)), frames)
    assert error.code is code
    assert error.incarnation == coordinator.incarnation
    assert coordinator.counters.rejected[reason] == 1
    assert len(coordinator.engines) == len(coordinator.clients) == 0


async def test_a_role_may_say_only_what_belongs_to_it(stage) -> None:
    coordinator = stage.coordinator()
    engine, client, link = await stage.engine(), await stage.client(), await stage.admin()
    engine.socket.send(VECTORS["SUBMIT"].to_frames())
    await engine.until(lambda: engine.errors)
    assert engine.errors[-1].code is ErrorCode.WRONG_ROLE
    client._link.send(VECTORS["FINAL"].to_frames())
    link._link.send(VECTORS["SUBMIT"].to_frames())
    await stage.until(lambda: coordinator.counters.rejected["wrong_role"] == 3)
    assert len(coordinator.dispatcher.journal) == 0


async def test_a_clusters_coordinator_is_not_ended_by_its_clients(stage) -> None:
    coordinator = stage.coordinator()
    client, link = await stage.client(), await stage.admin()
    client.shutdown_coordinator()
    link._link.send([pack([int(Header.SHUTDOWN)])])
    await stage.until(lambda: coordinator.counters.rejected["wrong_role"] == 2)
    assert not coordinator.ended.is_set()


async def test_an_oversized_message_is_refused(stage, params) -> None:
    coordinator = stage.coordinator()
    client = await stage.client()
    body = bytes(3 << 20)
    client._link._socket.send(Submit(bytes(16), RequestMeta(), body, body, body).to_frames())
    await stage.until(lambda: coordinator.counters.rejected["too_large"] == 1)


async def test_bodies_that_are_not_what_they_should_be_reach_the_engine_and_no_further(stage, params) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine(step_seconds=None)
    client = await stage.client()
    engine._dispatch = lambda dispatch: engine.dispatches.append(dispatch)
    client._link.send(Submit(bytes(16), RequestMeta(), b"", b"", b"\xc1 not msgpack").to_frames())
    await engine.until(lambda: engine.dispatches)
    assert engine.dispatches[0].params == b"\xc1 not msgpack"
    assert len(coordinator.dispatcher.journal) == 1
