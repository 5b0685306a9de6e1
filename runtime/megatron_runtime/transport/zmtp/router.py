"""A ZeroMQ ROUTER socket on the event loop, with one port and the connections that it accepts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from megatron_runtime.process.listening import listening_socket
from megatron_runtime.protocol.codec import Frames
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.connection import Connection, PeerId
from megatron_runtime.transport.zmtp.frames import ViolationError
from megatron_runtime.transport.zmtp.handshake import Handshake, NotAdmittedError

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 30.0
MAX_HANDSHAKES = 1000
"""Maximum number of handshakes in progress. A further connection closes the oldest connection in handshake."""
CLOSING_SECONDS = 1.0
_BACKLOG = 1024
_ROUTER = 6
"""Value of zmq.ROUTER."""
_PROPERTIES = frames.properties([(b"Socket-Type", b"ROUTER"), (b"Identity", b"")])


@dataclass(eq=False, repr=False)
class Router:
    """A ROUTER that accepts connections on one port.

    The name of a connection consists of the port's `number` and a routing id, which the peer sends or the ROUTER
    generates. If a connection sends the routing id of an earlier connection and both have the same key, it takes over
    the name, and the ROUTER closes the earlier connection. If the keys differ, the ROUTER closes the later connection.

    connections:  connections that have completed the handshake, by name. Several ports may share this map.
    handshake:    creates the server side of a handshake with these properties.
    on_message:   called with the peer and the frames of each message. Its exceptions are logged and counted.
    on_gone:      called for each connection that ends for a reason other than cut() or close(). Its arguments are the
                  name and whether the peer closed the connection with a FIN or RST. The operating system also sends
                  a FIN or RST when a process exits.
    on_room:      called when a connection that rejected a message accepts messages again; see Connection.report_room().
    check_seconds: interval of PING. A connection without a byte in two to three intervals is closed.
    may_be_silent: returns whether a silent connection is kept, because its process has announced that it is busy.
    first:        returns the protocol of each new TCP connection. Its argument is a function that returns a Connection,
                  which can later replace the protocol. None makes each new connection a Connection.
    type, last_endpoint: the same as the attributes of a zmq.Socket.
    rejected:     number of connections that were closed because the port does not accept their keys.
    """

    number: int
    _: KW_ONLY
    connections: dict[PeerId, Connection]
    handshake: Callable[[bytes], Handshake]
    on_message: Callable[[PeerId, Frames], None]
    on_gone: Callable[[PeerId, bool], None] = lambda peer, by_peer: None
    on_room: Callable[[PeerId], None] = lambda peer: None
    max_message_bytes: int
    send_buffer_bytes: int
    check_seconds: float
    may_be_silent: Callable[[PeerId], bool] = lambda peer: False
    first: Callable[[Callable[[], Connection]], asyncio.Protocol] | None = None

    def __post_init__(self) -> None:
        self.type = _ROUTER
        self.last_endpoint = ""
        self.handler_errors = 0
        self.rejected = 0
        self.received = self.on_message
        self._handshakes: dict[Connection, asyncio.TimerHandle] = {}
        self._all: set[Connection] = set()
        self._silent: set[Connection] = set()
        self._unsent: list[Connection] = []
        self._listeners: list[tuple[socket.socket, asyncio.Task[asyncio.Server]]] = []
        self._checks: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._ended.set()
        self._closing = False
        self._next_id = secrets.randbits(32)

    def bind(self, host: str, port: int) -> str:
        """Listen on a TCP port, and return its address. Raises OSError.

        host: "*" for all IPv4 addresses, "::" for all addresses.
        port: 0 for any free port.
        """
        listener = listening_socket("" if host == "*" else host, port, backlog=_BACKLOG)
        name, bound = listener.getsockname()[:2]
        address = f"tcp://[{name}]:{bound}" if ":" in name else f"tcp://{name}:{bound}"
        first = self.first
        protocol = self._connection if first is None else lambda: first(self._connection)
        return self._listen(listener, address, self._loop.create_server(protocol, sock=listener))

    def bind_path(self, path: Path) -> str:
        """Listen on a Unix socket to which only this user may connect, and return its address. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        server = self._loop.create_unix_server(self._connection, sock=listener)
        return self._listen(listener, f"ipc://{path}", server)

    def close(self) -> None:
        """Stop listening, and close each connection after its queued messages have been sent.

        This method is idempotent.
        """
        if self._checks is not None:
            self._checks.cancel()
            self._checks = None
        self._closing = True
        for listener, server in self._listeners:
            # Free the port now, even if the event loop closes the listener later.
            listener.shutdown(socket.SHUT_RDWR)
            server.add_done_callback(lambda done: done.result().close())
        self._listeners.clear()
        for connection in list(self._all):
            if connection.is_open:
                connection.close()
            else:
                connection.abort()

    async def closed(self, *, seconds: float = CLOSING_SECONDS) -> None:
        """Wait until every connection has ended. After `seconds`, unsent messages are dropped."""
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            for connection in list(self._all):
                connection.abort()

    def _listen(self, listener: socket.socket, address: str, server: Coroutine[Any, Any, asyncio.Server]) -> str:
        # A peer that connects before this task runs waits in the listener's backlog.
        self._listeners.append((listener, self._loop.create_task(server)))
        if self._checks is None:
            self._checks = self._loop.call_later(self.check_seconds, self._check)
        self.last_endpoint = address
        return address

    def _connection(self) -> Connection:
        return Connection(
            self,
            self.handshake(_PROPERTIES),
            max_message_bytes=self.max_message_bytes,
            send_buffer_bytes=self.send_buffer_bytes,
        )

    def _check(self) -> None:
        """Send PING to each connection, and close each connection from which no byte has arrived since the last two
        PINGs.
        """
        self._checks = self._loop.call_later(self.check_seconds, self._check)
        silent, self._silent = self._silent, set()
        for connection in [connection for connection in self._all if connection.is_open]:
            if connection.heard:
                connection.heard = False
            elif connection in silent and not self.may_be_silent(connection.peer):
                logger.info("connection %s ended: no answer to PING", connection.peer)
                connection.abort()
                continue
            else:
                self._silent.add(connection)
            connection.ping()

    def cut(self, peer: PeerId) -> None:
        """Close a connection immediately. No further message is received from this peer or sent to it."""
        connection = self.connections.pop(peer, None)
        if connection is not None:
            connection.close()

    # --- callbacks of the connections -----------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        self._all.add(connection)
        self._ended.clear()
        if self._closing:
            connection.abort()
            return
        if len(self._handshakes) >= MAX_HANDSHAKES:
            next(iter(self._handshakes)).abort()
        self._handshakes[connection] = self._loop.call_later(HANDSHAKE_SECONDS, connection.abort)

    def admitted(self, connection: Connection, routing_id: bytes) -> PeerId:
        self._handshakes.pop(connection).cancel()
        if not routing_id:
            self._next_id = (self._next_id + 1) % (1 << 32)
            routing_id = b"\0" + self._next_id.to_bytes(4, "big")
        peer = self.number, routing_id
        before = self.connections.get(peer)
        if before is not None:
            if before.key != connection.key:
                raise ViolationError(f"routing id {routing_id!r} belongs to a connection with another key")
            before.abort()
            connection.report_room()  # the replaced connection, which may have been full, will not report room
        self.connections[peer] = connection
        return peer

    def flush_soon(self, connection: Connection) -> None:
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(connection)

    def has_room(self, connection: Connection) -> None:
        if self.connections.get(connection.peer) is connection:
            self.on_room(connection.peer)

    def lost(self, connection: Connection, violation: ViolationError | None) -> None:
        self._all.discard(connection)
        self._silent.discard(connection)
        timer = self._handshakes.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if self.connections.get(connection.peer) is connection:
            del self.connections[connection.peer]
            if not self._closing:
                self.on_gone(connection.peer, connection.ended_by_peer)
        if violation is not None:
            logger.debug("a connection on port %d was ended: %s", self.number, violation)
        if isinstance(violation, NotAdmittedError):
            self.rejected += 1
        if not self._all:
            self._ended.set()

    def flush(self) -> None:
        """Write the queued messages of all connections."""
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            connection.flush()
