"""transport/zmtp and libzmq, each as server and as client, over a network that changes bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from eventually import LONG_SECONDS
from libzmq_keys import set_keys
from soak import repeated, size
from tcp_relay import TcpRelay

from megatron_runtime.protocol.headers import Role
from megatron_runtime.transport.security import KeyPair, PeerKeys
from megatron_runtime.transport.zmtp.dealer import Dealer

from .zmtp_port import LIMIT, Port

SIZES = (0, 1, 7, 254, 255, 256, 257, 4096, 65_535, 65_536)
CONNECTIONS = size(15, soak=400)


class MutatingRelay(TcpRelay):
    """Changes the bytes of one direction of each connection, once, somewhere in the first 4 KiB."""

    def __init__(self, target: int, rng: random.Random, *, to_server: bool) -> None:
        super().__init__(target)
        self._rng, self._to_server = rng, to_server
        self.changed = 0

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, held: bool) -> None:
        if held is self._to_server:
            writer.write(self._mutated(await self._begin(reader)))
        await super()._pipe(reader, writer, held=held)

    async def _begin(self, reader: asyncio.StreamReader) -> bytes:
        """Up to 64 bytes of the greeting, and sometimes what follows within a moment."""
        return await reader.read(self._rng.choice((10, 64, 64, 4096)))

    def _mutated(self, data: bytes) -> bytes:
        self.changed += 1
        rng, changed = self._rng, bytearray(data)
        if not changed:
            return data
        at, count = rng.randrange(len(changed)), rng.randint(1, 16)
        match rng.choice(("flip", "insert", "delete", "repeat", "noise")):
            case "flip":
                changed[at] ^= 1 << rng.randrange(8)
            case "insert":
                changed[at:at] = rng.randbytes(count)
            case "delete":
                del changed[at : at + count]
            case "repeat":
                changed[at:at] = changed[at : at + count] * rng.choice((1, 100))
            case _:
                changed[at:] = rng.randbytes(len(changed) - at)
        return bytes(changed)


class LateRelay(MutatingRelay):
    """Changes bytes after the handshake: in the messages."""

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, held: bool) -> None:
        if held is not self._to_server:
            await TcpRelay._pipe(self, reader, writer, held=held)
            return
        left = self._rng.randint(600, 3000)
        while left > 0 and (chunk := await reader.read(left)):
            left -= len(chunk)
            writer.write(chunk)
        writer.write(self._mutated(await reader.read(64)))
        await TcpRelay._pipe(self, reader, writer, held=held)


class LibzmqRouter:
    """A ROUTER of libzmq."""

    def __init__(self, keys: PeerKeys | None, server: KeyPair | None) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        if server is not None:
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = server.public, server.secret
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.keys = keys

    async def next(self) -> tuple[bytes, list[bytes]]:
        peer, *message = await asyncio.wait_for(self.socket.recv_multipart(), LONG_SECONDS)
        return peer, message


@pytest.fixture(params=["without keys", "with keys"])
async def libzmq_router(request: pytest.FixtureRequest) -> AsyncIterator[LibzmqRouter]:
    server = KeyPair.generate() if request.param == "with keys" else None
    keys = PeerKeys(own=KeyPair.generate(), server_public=server.public) if server is not None else None
    router = LibzmqRouter(keys, server)
    yield router
    router.context.destroy(linger=0)


def random_messages(rng: random.Random, count: int) -> list[list[bytes]]:
    return [[rng.randbytes(rng.choice(SIZES)) for _ in range(rng.choice((1, 1, 1, 2, 5)))] for _ in range(count)]


async def sent(dealer: Dealer, message: list[bytes]) -> None:
    async with asyncio.timeout(LONG_SECONDS):
        while not dealer.send(message):  # noqa: ASYNC110 - a buffer offers no event
            await asyncio.sleep(0.001)


@repeated(soak=50)
async def test_random_messages_of_libzmqs_dealer_reach_our_router_and_return(either: Port, seed: int) -> None:
    rng = random.Random(seed)
    dealer = either.dealer()
    for message in random_messages(rng, 60):
        await dealer.send_multipart(message)
        peer, found = await either.next()
        assert found == message
        assert either.send(peer, *message)
        assert await asyncio.wait_for(dealer.recv_multipart(), LONG_SECONDS) == message


@repeated(soak=50)
async def test_random_messages_of_our_dealer_reach_libzmqs_router_and_return(
    libzmq_router: LibzmqRouter, seed: int
) -> None:
    rng = random.Random(seed)
    heard: asyncio.Queue[list[bytes]] = asyncio.Queue()
    address = f"tcp://127.0.0.1:{libzmq_router.port}"
    dealer = Dealer(address, heard.put_nowait, keys=libzmq_router.keys, max_message_bytes=LIMIT)
    for message in random_messages(rng, 60):
        await sent(dealer, message)
        peer, found = await libzmq_router.next()
        assert found == message
        await libzmq_router.socket.send_multipart([peer, *message])
        assert await asyncio.wait_for(heard.get(), LONG_SECONDS) == message
    dealer.close()


async def through(relay: MutatingRelay, use: Callable[[int], Awaitable[None]]) -> None:
    """Use the relay's port `CONNECTIONS` times."""
    await relay.start()
    for _ in range(CONNECTIONS):
        await use(relay.port)
    await relay.stop()
    # A connection that is reset early brings no bytes to change.
    assert relay.changed >= CONNECTIONS // 2


@pytest.mark.parametrize("relay_kind", [MutatingRelay, LateRelay], ids=["handshake", "messages"])
@repeated(soak=20)
async def test_changed_bytes_of_libzmqs_dealer_end_their_connection_at_most(
    either: Port, keys: Path, relay_kind: type[MutatingRelay], seed: int
) -> None:
    rng = random.Random(seed)
    messages = [b"%d." % number + bytes(200) for number in range(30)]
    honest = either.dealer()

    async def use(port: int) -> None:
        dealer = either.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        if either.keys is not None:
            set_keys(dealer, PeerKeys.load(either.keys, Role.CLIENT))
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for message in messages:
            await dealer.send(message)
        await honest.send(b"honest")
        found: dict[object, list[bytes]] = {}
        while True:
            peer, message = await either.next()
            if message == [b"honest"]:
                break
            found.setdefault(peer, []).extend(message)
        await asyncio.sleep(0.01)
        while not either.received.empty():
            peer, message = either.received.get_nowait()
            found.setdefault(peer, []).extend(message)
        dealer.close()
        if either.keys is not None:
            for delivered in found.values():
                assert delivered == messages[: len(delivered)], "a message that no peer encrypted"

    await through(relay_kind(int(either.address.rpartition(":")[2]), rng, to_server=True), use)
    assert either.router.handler_errors == 0


@pytest.mark.slow
@pytest.mark.parametrize("relay_kind", [MutatingRelay, LateRelay], ids=["handshake", "messages"])
@repeated(soak=20)
async def test_changed_bytes_of_libzmqs_router_end_a_connection_of_our_dealer_at_most(
    libzmq_router: LibzmqRouter, relay_kind: type[MutatingRelay], seed: int
) -> None:
    """The dealer connects again, through another change, until an answer arrives as it was sent."""
    rng = random.Random(seed)
    answers = [b"%d." % number + bytes(200) for number in range(30)]
    dealers: list[Dealer] = []

    async def use(port: int) -> None:
        heard: list[bytes] = []
        opened = asyncio.Event()
        dealer = Dealer(
            f"tcp://127.0.0.1:{port}",
            heard.extend,
            on_open=opened.set,
            keys=libzmq_router.keys,
            max_message_bytes=LIMIT,
        )
        dealers.append(dealer)
        try:
            async with asyncio.timeout(0.3):
                await opened.wait()
        except TimeoutError:
            pass
        else:
            dealer.send([b"question"])
            try:
                async with asyncio.timeout(0.3):
                    peer, *_ = await libzmq_router.socket.recv_multipart()
                    for answer in answers:
                        await libzmq_router.socket.send_multipart([peer, answer])
                    await asyncio.sleep(0.02)
            except TimeoutError:
                pass
        assert dealer._task is not None
        assert not dealer._task.done(), "it does not connect again"
        dealer.close()
        if libzmq_router.keys is not None:
            assert heard == answers[: len(heard)], "a message that no peer encrypted"

    await through(relay_kind(libzmq_router.port, rng, to_server=False), use)
    assert not any(dealer.handler_errors for dealer in dealers)
