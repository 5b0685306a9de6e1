"""A TCP relay on loopback that can delay the bytes to the server."""

from __future__ import annotations

import asyncio
import contextlib


class TcpRelay:
    """A listening port on loopback that relays to another port."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = 0
        """The listening port; it stays the same after `stop`."""
        self.held = 0
        """Number of delayed bytes."""

    async def start(self, port: int = 0) -> None:
        """Listen, on any free port by default."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the listening port and all connections."""
        if self._server is not None:
            self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def hold(self) -> None:
        """Stop forwarding to the server."""
        self._flowing.clear()

    def release(self) -> None:
        """Forward the delayed bytes and all that follow."""
        self._flowing.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        for pipe in (self._pipe(reader, far_writer, held=True), self._pipe(far_reader, writer, held=False)):
            task = asyncio.create_task(pipe)
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, held: bool) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while chunk := await reader.read(1 << 16):
                if held and not self._flowing.is_set():
                    self.held += len(chunk)
                    await self._flowing.wait()
                writer.write(chunk)
                await writer.drain()
