"""The DEALER of engines, servers and the operator, with ROUTERs of this runtime and of ZeroMQ: bounded memory."""

from __future__ import annotations

import asyncio
import logging
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from eventually import LONG_SECONDS

from megatron_runtime.protocol.headers import Role
from megatron_runtime.transport.security import KeyPair, PeerKeys
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.dealer import AddressError, Dealer, addresses_of, parse_address
from megatron_runtime.transport.zmtp.frames import COMMAND, MORE

LIMIT = 1 << 16
READY = frames.frame(COMMAND, frames.command(b"READY", frames.properties([(b"Socket-Type", b"ROUTER")])))


class Heard(asyncio.Queue):
    async def next(self) -> list[bytes]:
        return await asyncio.wait_for(self.get(), LONG_SECONDS)


@pytest.fixture
async def dealer() -> AsyncIterator[Callable[..., tuple[Dealer, Heard]]]:
    made: list[Dealer] = []

    def make(address: str, **options) -> tuple[Dealer, Heard]:
        heard = Heard()
        made.append(Dealer(address, heard.put_nowait, max_message_bytes=LIMIT, **options))
        return made[-1], heard

    yield make
    for one in made:
        one.close()


async def say(one: Dealer, message: list[bytes]) -> None:
    async with asyncio.timeout(LONG_SECONDS):
        while not one.send(message):  # noqa: ASYNC110 - a connection that opens has no event
            await asyncio.sleep(0.01)


async def test_messages_both_ways_with_a_router_of_ours(either, keys, dealer) -> None:
    own = PeerKeys.load(keys, Role.CLIENT) if either.keys is not None else None
    one, heard = dealer(either.address, keys=own)
    assert not one.send([b"too early"])
    for message in ([b"one"], [b"two", b"", b"frames"], [bytes(LIMIT // 2)]):
        await say(one, message)
        peer, received = await asyncio.wait_for(either.received.get(), LONG_SECONDS)
        assert received == message
        either.connections[peer].send(message)
        assert await heard.next() == message


@pytest.mark.parametrize("with_keys", [False, True])
async def test_messages_both_ways_with_a_router_of_zeromqs(dealer, with_keys: bool) -> None:
    server, client = KeyPair.generate(), KeyPair.generate()
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    if with_keys:
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = server.public, server.secret
    port = router.bind_to_random_port("tcp://127.0.0.1")
    keys = PeerKeys(own=client, server_public=server.public) if with_keys else None
    one, heard = dealer(f"tcp://127.0.0.1:{port}", keys=keys)
    for message in ([b"one"], [b"two", b"", b"frames"], [bytes(LIMIT // 2)]):
        await say(one, message)
        peer, *received = await asyncio.wait_for(router.recv_multipart(), LONG_SECONDS)
        assert received == message
        await router.send_multipart([peer, *message])
        assert await heard.next() == message
    router.close(linger=0)
    context.destroy(linger=0)


async def test_a_router_with_another_key_gets_nothing(make_port, keys, dealer, caplog) -> None:
    caplog.set_level(logging.INFO, "megatron_runtime.transport.zmtp.dealer")
    port = make_port(keys=keys)
    right = PeerKeys.load(keys, Role.CLIENT)
    wrong = PeerKeys(
        own=right.own, server_public=KeyPair.generate().public, other_server_publics=(right.server_public,)
    )
    stranger, _ = dealer(port.address, keys=wrong)
    other, _ = dealer(port.address, keys=wrong.for_try(1))
    await say(other, [b"by the second key"])
    assert (await asyncio.wait_for(port.received.get(), LONG_SECONDS))[1] == [b"by the second key"]
    assert not stranger.send([b"x"])
    await asyncio.sleep(0.5)
    assert caplog.messages == [], "a line for each try would fill the log"


async def test_it_comes_back_when_its_connection_ends(make_port, dealer) -> None:
    port = make_port()
    reasons: list[str] = []
    one, _ = dealer(port.address, on_lost=reasons.append)
    await say(one, [b"first"])
    peer, _ = await asyncio.wait_for(port.received.get(), LONG_SECONDS)
    port.router.cut(peer)
    async with asyncio.timeout(LONG_SECONDS):
        while port.received.empty():
            one.send([b"again"])  # lost, while it has not heard of the end
            await asyncio.sleep(0.01)
    assert (await port.received.get())[0] != peer
    ended = [f"the connection to {port.address} ended"]
    assert reasons == ended
    one.close()
    await asyncio.sleep(0.05)
    assert reasons == ended, "close() is no loss"


async def test_close_sends_the_pending_messages(make_port, dealer) -> None:
    port = make_port()
    one, _ = dealer(port.address)
    await say(one, [b"hello"])
    assert one.send([b"goodbye"])
    one.close(linger_ms=1000)
    for expected in (b"hello", b"goodbye"):
        assert (await asyncio.wait_for(port.received.get(), LONG_SECONDS))[1] == [expected]


@pytest.mark.parametrize(
    "piece",
    [
        frames.frame(MORE, b""),
        frames.frame(MORE, bytes(200)),
        frames.frame(0, bytes(LIMIT + 100)),
        frames.frame(COMMAND, b"x" * 200),
        b"\xff" * 100,
    ],
    ids=["endless empty frames", "endless frames", "too large", "endless commands", "noise"],
)
async def test_the_memory_that_a_peer_can_occupy_is_bounded(dealer, piece: bytes) -> None:
    """ZeroMQ's socket takes 30 bytes for each byte of a message that never ends."""
    sent = ended = 0

    async def hostile(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent, ended
        try:
            writer.write(frames.greeting(b"NULL", as_server=False) + READY)
            many = piece * (-(-64_000 // len(piece)))
            for _ in range(100):
                writer.write(many)
                await writer.drain()
                sent += len(many)
        except ConnectionError:
            pass
        finally:
            ended += 1
            writer.close()

    server = await asyncio.start_server(hostile, "127.0.0.1", 0)
    tracemalloc.start()
    dealer(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with asyncio.timeout(LONG_SECONDS):
        while sent < 10 * LIMIT and ended < 2:  # noqa: ASYNC110 - what another task does has no event
            await asyncio.sleep(0.02)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    server.close()
    assert peak < 16 * LIMIT


@pytest.mark.parametrize(
    "address", ["ipc://x", "ipc://", "inproc://x", "tcp://host", "host:1", "tcp://:1", "tcp://h:x", ""]
)
def test_an_address_is_of_tcp_or_of_a_unix_socket(address: str) -> None:
    with pytest.raises(AddressError, match="want tcp://HOST:PORT"):
        parse_address(address)


def test_parts_of_addresses() -> None:
    assert parse_address("tcp://127.0.0.1:5557") == ("127.0.0.1", 5557)
    assert parse_address("tcp://[::1]:5557") == ("::1", 5557)
    assert parse_address("tcp://demo-coordinator.default.svc:5557") == ("demo-coordinator.default.svc", 5557)
    assert parse_address("ipc:///run/demo.sock") == Path("/run/demo.sock")


class Dns:
    """Resolves every name to the loopback address, or does not answer."""

    def __init__(self) -> None:
        self.answers = True
        self.asked = 0

    async def getaddrinfo(self, host: str, port: object, **options: object) -> list[tuple]:
        self.asked += 1
        if not self.answers:
            await asyncio.Event().wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]


async def test_a_name_keeps_its_last_address_while_dns_does_not_answer(dealer, monkeypatch) -> None:
    dns, accepted = Dns(), Heard()
    # Addresses are not looked up, and the listener below is bound to one.
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", dns.getaddrinfo, raising=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), sock=listener)
        async with server:
            dealer(f"tcp://coordinator.test:{listener.getsockname()[1]}")
            first = await accepted.next()
            dns.answers = False
            for _ in range(3):
                first.close()
                first = await accepted.next()
            assert dns.asked == 2, "one lookup is in progress"
            first.close()


async def test_a_name_that_does_not_exist_has_no_address(monkeypatch) -> None:
    async def unknown(*_: object, **__: object) -> list[tuple]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    dns = Dns()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", dns.getaddrinfo, raising=False)
    assert await addresses_of("deleted.test") == ["127.0.0.1"]
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown, raising=False)
    with pytest.raises(socket.gaierror):
        await addresses_of("deleted.test")
    assert await addresses_of("::1") == ["::1"]
