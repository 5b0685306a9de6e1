"""Malformed and illegal messages are counted and answered, and affect no other peer."""

import asyncio
import random
from collections import deque

import pytest
import zmq
from echo_executor import echo_answer
from hostile_frames import HostileFrames
from vectors import VECTORS

from megatron_runtime.coordinator.core.context import SHARED_PORT
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.messages import (
    Control,
    Error,
    Hello,
    MalformedMessageError,
    RequestMeta,
    Submit,
    decode,
    pack,
)

from .simulated_fleet import SimulatedFleet

FRAMES = 3_000


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


def test_malformed_frames_on_the_shared_port_affect_no_other_peer() -> None:
    """All roles at once, in the core alone; with three ports, keys and processes it is a survival test."""
    fleet = SimulatedFleet(single_port=True)
    fleet.engine("engine-0")
    attackers = [(SHARED_PORT, name) for name in (b"client", b"engine", b"stranger")]
    fleet.inboxes.update((attacker, deque()) for attacker in attackers)
    for role, attacker in zip((Role.CLIENT, Role.ENGINE), attackers, strict=False):
        fleet.say(attacker, Hello(role=role, name=f"attacker-{role.name}", incarnation=1))
    rng = random.Random(20240601)
    source = HostileFrames(rng)
    for number in range(FRAMES):
        frames = source.next()
        while is_by_right(frames):
            frames = source.next()
        fleet.driver.receive(rng.choice(attackers), frames)
        if number % 150 == 0:
            fleet.ask(1 + number, tokens=10)
        if number % 50 == 0:
            fleet.turn()
    fleet.finish(*fleet.asked.values())
    assert fleet.core.counters.rejected.total() > FRAMES / 10
    assert fleet.core.verbs.epoch == fleet.core.verbs.fence == 0
    assert fleet.core.engines.named("engine-0").state == "RUNNING"


def is_by_right(frames: list[bytes]) -> bool:
    """What a peer of the one port may say: a verb, or the registration of an engine of Megatron-Core."""
    if frames[0] == b"":
        return True
    try:
        return isinstance(decode(frames), Control)
    except MalformedMessageError:
        return False


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
        *(
            (
                Role.CLIENT,
                Hello(role=Role.CLIENT, name="x", incarnation=1, version=version).to_frames(),
                ErrorCode.VERSION,
                "version",
            )
            for version in (1, 9)  # 1 spoke in several frames
        ),
    ],
)
async def test_an_unregistered_peer_gets_an_error(stage, sockets, role, frames, code, reason) -> None:
    coordinator = stage.coordinator()
    error = await ask(sockets(stage.address(role)), frames)
    assert error.code is code
    assert error.incarnation == coordinator.core.context.incarnation
    assert coordinator.core.counters.rejected[reason] == 1
    assert len(coordinator.core.engines) == len(coordinator.core.clients) == 0


async def test_a_role_may_send_only_its_own_messages(stage) -> None:
    coordinator = stage.coordinator()
    engine, client, link = await stage.engine(), await stage.client(), await stage.admin()
    engine.socket.send(VECTORS["SUBMIT"].to_frames())
    await engine.until(lambda: engine.errors)
    assert engine.errors[-1].code is ErrorCode.WRONG_ROLE
    client.native._link.send(VECTORS["FINAL"].to_frames())
    link._link.send(VECTORS["SUBMIT"].to_frames())
    await stage.until(lambda: coordinator.core.counters.rejected["wrong_role"] == 3)
    assert len(coordinator.core.dispatcher.journal) == 0


async def test_a_clusters_coordinator_is_not_ended_by_its_clients(stage) -> None:
    coordinator = stage.coordinator()
    client, link = await stage.client(), await stage.admin()
    client.shutdown_coordinator()
    link._link.send([pack([int(Header.SHUTDOWN)])])
    await stage.until(lambda: coordinator.core.counters.rejected["wrong_role"] == 2)
    assert not coordinator.ended.is_set()


async def test_an_oversized_message_ends_the_connection_and_its_peer_may_reconnect(stage, params) -> None:
    coordinator, _, client = await stage.all()
    connection = coordinator.core.clients.named(Role.CLIENT, client.native.name).peer
    body = bytes(3 << 20)
    client.native._link._socket.send(Submit(bytes(16), RequestMeta(), body, body, body).to_frames())
    await stage.until(lambda: coordinator.core.clients.named(Role.CLIENT, client.native.name).peer != connection)
    assert len(coordinator.core.dispatcher.journal) == 0
    assert (await client.add_request([1], params(3)))["generated_tokens"] == echo_answer([1], 3)


async def test_a_message_of_several_frames_is_malformed(stage, sockets) -> None:
    coordinator = stage.coordinator()
    for frames in ([b"", pack([int(Header.STATUS)])], [pack([int(Header.STATUS)]), b""]):
        error = await ask(sockets(stage.address(Role.CLIENT)), frames)
        assert error.code is ErrorCode.MALFORMED
    assert coordinator.core.counters.rejected["malformed"] == 2


async def test_malformed_bodies_reach_the_engine_and_no_client(stage, params) -> None:
    coordinator, engine, client = await stage.all(step_seconds=None)
    engine._dispatch = lambda dispatch: engine.dispatches.append(dispatch)
    client.native._link.send(Submit(bytes(16), RequestMeta(), b"", b"", b"\xc1 not msgpack").to_frames())
    await engine.until(lambda: engine.dispatches)
    assert engine.dispatches[0].params == b"\xc1 not msgpack"
    assert len(coordinator.core.dispatcher.journal) == 1


ABSURD = [
    (Role.ENGINE, "fence", (1 << 53) + 1),
    (Role.ENGINE, "fence", (1 << 64) - 1),
    (Role.ENGINE, "fence", -1),
    (Role.ENGINE, "epoch", 1 << 63),
    (Role.ENGINE, "epoch", (1 << 53) + 1),
    (Role.ENGINE, "epoch", -1),
    (Role.ENGINE, "ranks", 1 << 31),
    (Role.ENGINE, "max_requests", -1),
    (Role.ENGINE, "block_size_tokens", 1 << 40),
    (Role.ENGINE, "revision", "r" * 5000),
    (Role.CLIENT, "model", "m" * 200),
]


@pytest.mark.parametrize(("role", "field", "value"), ABSURD)
async def test_a_hello_with_an_absurd_value_is_malformed(stage, sockets, role, field, value) -> None:
    """A recovering coordinator would take a fence or epoch of 2**63 from an engine, and then reject all verbs."""
    coordinator = stage.coordinator()
    hello = {"role": int(role), "name": "absurd", "incarnation": 1, "serving": True, "state": "RUNNING", field: value}
    error = await ask(sockets(stage.address(role)), [pack([int(Header.HELLO), hello])])
    assert error.code is ErrorCode.MALFORMED
    assert f"field {field}" in error.message
    assert coordinator.core.counters.rejected["malformed"] == 1
    assert len(coordinator.core.engines) == len(coordinator.core.clients) == 0
    assert (coordinator.core.verbs.fence, coordinator.core.verbs.epoch) == (0, 0)


@pytest.mark.parametrize("heartbeat", [{"epoch": 1 << 63}, {"busy_for": float("inf")}, {"steps": -1}])
async def test_a_heartbeat_with_an_absurd_value_changes_nothing(stage, heartbeat) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine()
    engine.socket.send([pack([int(Header.HEARTBEAT), {"incarnation": 1, **heartbeat}])])
    await engine.until(lambda: engine.errors)
    assert engine.errors[-1].code is ErrorCode.MALFORMED
    assert coordinator.core.engines.named("engine-0").epoch == 0


async def test_an_admins_fence_above_the_maximum_is_rejected_and_the_next_is_not(stage) -> None:
    coordinator = stage.coordinator()
    await stage.engine()
    link = await stage.admin()
    for fence in ((1 << 53) + 1, (1 << 64) - 1):
        body = {"operation_id": "o", "fence": fence}
        link._link.send([pack([int(Header.PAUSE), body])])
    await stage.until(lambda: len(link.errors) == 2)  # one that arrives later ends the verb
    assert coordinator.core.counters.rejected["malformed"] == 2
    assert coordinator.core.verbs.fence == 0
    assert (await link.control(Header.PAUSE, operation_id="p", fence=1)).ok


async def test_engines_are_bounded_in_number(stage, sockets, monkeypatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENGINES", 1)
    coordinator = stage.coordinator()
    engine = await stage.engine("first")
    error = await ask(
        sockets(stage.address(Role.ENGINE)), Hello(role=Role.ENGINE, name="second", incarnation=2).to_frames()
    )
    assert error.code is ErrorCode.UNAVAILABLE
    assert [one.name for one in coordinator.core.engines] == ["first"]
    assert engine.errors == []
