"""The coordinator's ROUTER with recorded messages, and clients of it: libzmq sockets or raw TCP connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio
from eventually import LONG_SECONDS
from libzmq_keys import set_keys

from megatron_runtime.protocol.headers import Role
from megatron_runtime.transport.security import Gatekeeper, PeerKeys, generate_key_files
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.connection import PeerId
from megatron_runtime.transport.zmtp.curve import CurveHandshake, CurveServer
from megatron_runtime.transport.zmtp.frames import COMMAND
from megatron_runtime.transport.zmtp.handshake import NullHandshake
from megatron_runtime.transport.zmtp.router import Router

LIMIT = 1 << 20
READY = frames.frame(COMMAND, frames.command(b"READY", frames.properties([(b"Socket-Type", b"DEALER")])))
NULL_BEGIN = frames.greeting(b"NULL", as_server=False) + READY
CURVE_GREETING = frames.greeting(b"CURVE", as_server=False)


class Port:
    """One ROUTER with its received messages and closed connections."""

    def __init__(self, *, keys: Path | None = None, role: Role = Role.CLIENT, check_seconds: float = 60.0) -> None:
        self.received: asyncio.Queue[tuple[PeerId, list[bytes]]] = asyncio.Queue()
        self.gone: asyncio.Queue[PeerId] = asyncio.Queue()
        self.room: asyncio.Queue[PeerId] = asyncio.Queue()
        """Connections that reported room."""
        self.ended_by_peer: dict[PeerId, bool] = {}
        """Whether the peer closed the connection, by closed connection."""
        self.connections: dict = {}
        self.on_message: Callable[[PeerId, list[bytes]], None] = lambda peer, frames: self.received.put_nowait(
            (peer, frames)
        )
        self.gatekeeper = Gatekeeper(keys) if keys is not None else None
        self.keys = keys
        self.router = Router(
            3,
            connections=self.connections,
            handshake=NullHandshake if keys is None else self._curve(role),
            on_message=lambda peer, frames: self.on_message(peer, frames),
            on_gone=self._gone,
            on_room=self.room.put_nowait,
            max_message_bytes=LIMIT,
            send_buffer_bytes=1 << 16,
            check_seconds=check_seconds,
        )
        self.address = self.router.bind("127.0.0.1", 0)
        self.context = zmq.asyncio.Context()

    def _gone(self, peer: PeerId, by_peer: bool) -> None:
        self.ended_by_peer[peer] = by_peer
        self.gone.put_nowait(peer)

    def _curve(self, role: Role):
        gatekeeper = self.gatekeeper
        server = CurveServer.from_z85(gatekeeper.own.secret, lambda key: gatekeeper.admits(role, key))
        return lambda properties: CurveHandshake(server, properties)

    def dealer(
        self, keys: PeerKeys | None = None, *, routing_id: bytes = b"", reconnects: bool = False
    ) -> zmq.asyncio.Socket:
        """Return a libzmq DEALER. Without `reconnects` it drops unread messages when its connection closes."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100 if reconnects else -1)
        if routing_id:
            dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        if keys is None and self.keys is not None:
            keys = PeerKeys.load(self.keys, Role.CLIENT)
        if keys is not None:
            set_keys(dealer, keys)
        dealer.connect(self.address)
        return dealer

    async def raw(self, begin: bytes = NULL_BEGIN) -> Raw:
        host, port = self.address.removeprefix("tcp://").split(":")
        raw = Raw(*await asyncio.open_connection(host, int(port)))
        raw.write(begin)
        return raw

    async def next(self) -> tuple[PeerId, list[bytes]]:
        return await asyncio.wait_for(self.received.get(), LONG_SECONDS)

    def send(self, peer: PeerId, *message: bytes) -> bool:
        return self.connections[peer].send(list(message))

    async def close(self) -> None:
        self.context.destroy(linger=0)
        self.router.close()
        await self.router.closed()


class Raw:
    """A raw TCP connection that reads ZMTP frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def pause(self) -> None:
        self._writer.transport.pause_reading()

    async def greeting(self) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(frames.GREETING_BYTES), LONG_SECONDS)

    async def frame(self) -> tuple[int, bytes]:
        async with asyncio.timeout(LONG_SECONDS):
            flags, size = await self._reader.readexactly(2)
            if flags & frames.LONG:
                size = int.from_bytes(bytes((size,)) + await self._reader.readexactly(7), "big")
            return flags, await self._reader.readexactly(size)

    async def end(self) -> None:
        """Wait until the other side closes the connection."""
        async with asyncio.timeout(LONG_SECONDS):
            with contextlib.suppress(ConnectionError):
                while await self._reader.read(1 << 16):
                    pass
        self._writer.close()

    def close(self) -> None:
        self._writer.close()


def key_files(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in generate_key_files().items():
        (path / name).write_text(text)
    return path


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_SECONDS):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
