"""Messages between two processes of one engine, over a stream socket. A message is msgpack with a length prefix."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

from megatron_runtime.protocol.codec import DETAILS, pack, unpack

_SIZE = struct.Struct("<Q")

OnMessage = Callable[[list[Any]], None]


class Channel(asyncio.Protocol):
    """One end of the connection, on an event loop.

    The event loop calls `on_message` directly. A task that waits for messages would cost more CPU time.

    on_message: called with each message. If it raises, the connection is closed.
    on_end:     called once when the connection has ended, even if close() caused the end.
    """

    def __init__(self, on_message: OnMessage, on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()

    @classmethod
    async def open(cls, end: socket.socket, on_message: OnMessage, on_end: Callable[[], None]) -> Channel:
        """Return the channel over the socket `end` on the running loop. The channel closes the socket."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_message, on_end), sock=end)
        return channel

    def send(self, message: Any) -> None:
        """Send a message. The message is dropped if the connection has ended."""
        self._transport.write(frame(message))

    def close(self) -> None:
        """Close the connection after all queued messages are sent. Idempotent."""
        self._transport.close()

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start, end = 0, len(received)
        while end - start >= _SIZE.size:
            (size,) = _SIZE.unpack_from(received, start)
            body = start + _SIZE.size
            if end - body < size:
                break
            start = body + size
            self._on_message(unpack(bytes(received[body:start]), DETAILS))
        del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


def frame(message: Any) -> bytes:
    body = pack(message)
    return _SIZE.pack(len(body)) + body


def receive(end: socket.socket) -> Any:
    """Return the next message from a blocking socket. Raises OSError if the other end has closed the connection."""
    (size,) = _SIZE.unpack(_receive(end, _SIZE.size))
    return unpack(_receive(end, size), DETAILS)


def _receive(end: socket.socket, size: int) -> bytes:
    received = end.recv(size, socket.MSG_WAITALL)
    if len(received) < size:
        raise ConnectionResetError("the other end has closed the connection")
    return received
