"""A DEALER without keys that lives on the event loop alone: no thread of ZeroMQ's has to wake for a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from megatron_runtime.protocol.codec import Frames
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.frames import COMMAND, GREETING_BYTES, LONG, LONG_HEADER_BYTES, MORE

_READY = frames.frame(COMMAND, frames.command(b"READY", frames.properties([(b"Socket-Type", b"DEALER")])))


class LeanSocket(asyncio.Protocol):
    """Made by connect(). on_message: called with the frames of each message.

    Its other side is a coordinator or a forwarder of the benchmark's own, which keeps to the protocol: nothing is
    checked.
    """

    def __init__(self, on_message: Callable[[Frames], None]) -> None:
        self._on_message = on_message
        self._rest = b""
        self._message: Frames = []
        self._greeted = False
        self._ready = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, address: str, on_message: Callable[[Frames], None]) -> LeanSocket:
        """Return when both sides are ready: ZeroMQ loses what comes before it has said so."""
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        _, socket = await asyncio.get_running_loop().create_connection(lambda: cls(on_message), host, int(port))
        await socket._ready.wait()
        return socket

    def send(self, message: Frames) -> None:
        assert self._transport is not None
        self._transport.write(frames.message(message))

    def close(self) -> None:
        """What was sent goes out."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(frames.greeting(b"NULL", as_server=False))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        data = self._rest + data if self._rest else data
        position, end = 0, len(data)
        if not self._greeted and end >= GREETING_BYTES:
            self._greeted = True
            self._transport.write(_READY)
            position = GREETING_BYTES
        while self._greeted and end - position >= 2:
            flags = data[position]
            begin = position + (LONG_HEADER_BYTES if flags & LONG else 2)
            size = int.from_bytes(data[position + 1 : begin], "big")
            if begin + size > end:
                break
            position = begin + size
            self._take(flags, data[begin:position])
        self._rest = data[position:]

    def _take(self, flags: int, body: bytes) -> None:
        assert self._transport is not None
        if flags & COMMAND:
            self._ready.set()  # READY, or a PING after it
            answer = frames.pong(body)
            if answer is not None:
                self._transport.write(frames.frame(COMMAND, answer))
            return
        self._message.append(body)
        if not flags & MORE:
            message, self._message = self._message, []
            self._on_message(message)
