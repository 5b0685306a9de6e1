"""A DEALER on the event loop. It has one connection to a ROUTER, and opens a new connection when the current one ends.

The DEALER limits its memory in bytes. libzmq limits only the size of a frame and the number of messages, so a message
with an unlimited number of frames could fill the memory of the process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_runtime.protocol.codec import Frames
from megatron_runtime.transport.security import PeerKeys
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.connection import Connection, PeerId
from megatron_runtime.transport.zmtp.frames import ViolationError
from megatron_runtime.transport.zmtp.handshake import Handshake, NullHandshake

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 1.0
"""Timeout of a TCP connection attempt. A SYN to a pod on a lost node is not answered, and its retransmissions go to the
same pod. The next attempt uses another source port, for which kube-proxy chooses a pod again.
"""
RESOLVE_SECONDS = 0.3
"""Time after which the last known addresses of a name are used. An unanswered lookup takes 30 s to fail."""
HANDSHAKE_SECONDS = 3.0
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.1, 1.0
_PROPERTIES = frames.properties([(b"Socket-Type", b"DEALER"), (b"Identity", b"")])


class AddressError(ValueError):
    """The address is neither `tcp://HOST:PORT` nor `ipc://PATH`."""


def parse_address(address: str) -> tuple[str, int] | Path:
    """Return the host and port, or the path of the Unix socket, that an address names. Raises AddressError."""
    try:
        parts = urlsplit(address)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
        if parts.scheme == "ipc" and not parts.netloc and parts.path:
            return Path(parts.path)
    except ValueError:
        pass
    raise AddressError(f"address {address!r}: want tcp://HOST:PORT or ipc:///PATH")


async def addresses_of(host: str) -> list[str]:
    """Return the IP addresses of a host. While DNS does not answer, return the last known addresses.

    Raises:
        OSError: the name does not exist, or has never been resolved.
    """
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    loop, known, lookup = asyncio.get_running_loop(), _known.get(host), _lookups.get(host)
    if lookup is None or lookup.done() or lookup.get_loop() is not loop:
        # Run one lookup per name at a time: each occupies a thread until the resolver gives up.
        lookup = _lookups[host] = asyncio.ensure_future(loop.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        lookup.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        async with asyncio.timeout(RESOLVE_SECONDS if known else None):
            entries = await asyncio.shield(lookup)
    except (TimeoutError, socket.gaierror) as error:
        if known is None or (isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN):
            raise
        return known
    _known[host] = [*dict.fromkeys(str(entry[4][0]) for entry in entries)]
    return _known[host]


_known: dict[str, list[str]] = {}
"""The addresses of each host name that this process has resolved."""
_lookups: dict[str, asyncio.Future[Any]] = {}
"""The lookup in progress, or otherwise the last lookup, for each host name."""


@dataclass(eq=False, repr=False)
class Dealer:
    """A DEALER that connects on the running event loop, and reconnects until close().

    on_message: called with the frames of each message. Its exceptions are logged and counted.
    on_open:    called after each handshake; from then on send() works.
    on_lost:    called with the reason when an established connection ends for a reason other than close().
    keys:       this side's key pair and the ROUTER's public key; None means no encryption.
    max_message_bytes: size limit of a received message; a larger message closes the connection.
    send_buffer_bytes: maximum number of unsent bytes; if there are more, send() returns False.
    """

    address: str
    on_message: Callable[[Frames], None]
    _: KW_ONLY
    on_open: Callable[[], None] = lambda: None
    on_lost: Callable[[str], None] = lambda reason: None
    keys: PeerKeys | None = None
    max_message_bytes: int
    send_buffer_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        self.handler_errors = 0
        self._target = parse_address(self.address)
        self._connection: Connection | None = None
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._run(), name=f"dealer {self.address}")

    def send(self, message: Frames) -> bool:
        """Send a message on the established connection.

        Return False, and drop the message, if there is no connection or if its buffer is full.
        """
        connection = self._connection
        return connection is not None and connection.is_open and connection.send(message)

    @property
    def local_host(self) -> str | None:
        """This machine's address on the connection, or None without an established connection."""
        connection = self._connection
        return connection.local_host if connection is not None and connection.is_open else None

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the connection. Queued messages are still sent for up to `linger_ms` milliseconds. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if linger_ms and connection.is_open:
            connection.close()
            asyncio.get_running_loop().call_later(linger_ms / 1000, connection.abort)
        else:
            connection.abort()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = RETRY_SECONDS
        while True:
            self._ended.clear()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    if isinstance(self._target, Path):
                        _, connection = await loop.create_unix_connection(self._make_connection, str(self._target))
                    else:
                        connection = await self._open(*self._target)
            except (OSError, TimeoutError):
                pass
            else:
                await self._ended.wait()
                if connection.peer[1]:
                    pause = RETRY_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    async def _open(self, host: str, port: int) -> Connection:
        loop, failure = asyncio.get_running_loop(), OSError(f"{host} has no address")
        for address in await addresses_of(host):
            try:
                _, connection = await loop.create_connection(self._make_connection, address, port)
            except OSError as error:
                failure = error
            else:
                return connection
        raise failure

    def _make_connection(self) -> Connection:
        return Connection(
            self, self._handshake(), max_message_bytes=self.max_message_bytes, send_buffer_bytes=self.send_buffer_bytes
        )

    def _handshake(self) -> Handshake:
        if self.keys is None:
            return NullHandshake(_PROPERTIES, begins=True)
        from megatron_runtime.transport.zmtp.curve import CurveClientHandshake

        own = self.keys.own
        return CurveClientHandshake(own.public, own.secret, self.keys.server_public, _PROPERTIES)

    # --- callbacks of the connection ------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        if self._task is None:  # close() was called before the connection opened
            connection.abort()
            return
        self._connection = connection
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, connection.abort)

    def admitted(self, connection: Connection, _routing_id: bytes) -> PeerId:
        self._stop_timer()
        asyncio.get_running_loop().call_soon(self.on_open)
        return 0, b"admitted"

    def received(self, _peer: PeerId, message: Frames) -> None:
        if self._connection is not None:
            self.on_message(message)

    def flush_soon(self, connection: Connection) -> None:
        asyncio.get_running_loop().call_soon(connection.flush)

    def has_room(self, connection: Connection) -> None:
        """Do nothing, because callers of send() do not wait for room in the buffer."""

    def lost(self, connection: Connection, violation: ViolationError | None) -> None:
        self._stop_timer()
        was_open = bool(connection.peer[1])
        if violation is not None:
            # With wrong keys, every attempt fails in the handshake, so a warning for each would fill the log.
            level = logging.WARNING if was_open else logging.DEBUG
            logger.log(level, "connection to %s ended: %s", self.address, violation)
        self._ended.set()
        if self._connection is connection:
            self._connection = None
            if was_open:
                self.on_lost(f"the connection to {self.address} ended")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
