"""Targets of transport/zmtp: the bytes that a peer sends to a ROUTER or a DEALER, with and without keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.connection import Connection, PeerId
from megatron_runtime.transport.zmtp.curve import CurveBox, CurveHandshake, CurveServer
from megatron_runtime.transport.zmtp.frames import ViolationError
from megatron_runtime.transport.zmtp.handshake import Handshake, NullHandshake
from tests.fuzz.harness import Target
from tests.fuzz.strategies import mutated

LIMIT = 1 << 16
KEY = bytes(range(32))
_PROPERTIES = frames.properties([(b"Socket-Type", b"ROUTER")])
_PIECES = [
    frames.frame(frames.COMMAND, frames.command(b"READY", frames.properties([(b"Socket-Type", b"DEALER")]))),
    frames.frame(frames.COMMAND, b"\x04PING\x00\x00context"),
    frames.frame(frames.MORE, b"part"),
    frames.frame(0, b""),
    frames.frame(0, bytes(300)),
    b"\x02" + (1 << 62).to_bytes(8, "big"),
]


class _Transport:
    """Accepts the writes of a connection."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None:
        assert len(data) <= LIMIT + 1024

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def set_write_buffer_limits(self, high: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class _Owner:
    """Checks the size of the messages that a connection delivers."""

    handler_errors = 0

    def opened(self, connection: Connection) -> None: ...
    def flush_soon(self, connection: Connection) -> None: ...
    def has_room(self, connection: Connection) -> None: ...
    def lost(self, connection: Connection, violation: ViolationError | None) -> None: ...

    def admitted(self, connection: Connection, routing_id: bytes) -> PeerId:
        return 0, routing_id or b"name"

    def received(self, peer: PeerId, message: list[bytes]) -> None:
        assert sum(map(len, message)) <= LIMIT + frames.LONG_HEADER_BYTES + 64


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _connection(make: Callable[[], Handshake], data: bytes) -> None:
    async def feed() -> None:
        transport: Any = _Transport()
        owner = _Owner()
        connection = Connection(owner, make(), max_message_bytes=LIMIT, send_buffer_bytes=LIMIT)
        connection.connection_made(transport)
        middle = len(data) // 2
        for part in (data[:middle], data[middle:]):
            if not transport.is_closing():
                connection.data_received(part)
                await asyncio.sleep(0)
        assert len(connection._rest) <= LIMIT + 4096
        connection.connection_lost(None)
        assert owner.handler_errors == 0, "a message is larger than the limit"

    _loop().run_until_complete(feed())


def _curve_frame(data: bytes) -> None:
    """Decrypt `data` as the content of a valid frame, then as a frame that is not authentic."""
    box = CurveBox(KEY, last_received=0)
    _, content = CurveBox(KEY, last_received=0).open(_sealed(data))
    assert content == data
    box.open(data)


def _sealed(data: bytes) -> bytes:
    sealed = CurveBox(KEY, last_received=0, as_server=False).close(0, data)
    return sealed[9:] if sealed[0] & frames.LONG else sealed[2:]


def _null() -> Handshake:
    return NullHandshake(_PROPERTIES)


def _server() -> Handshake:
    return CurveHandshake(CurveServer(KEY, KEY, lambda _key: True), _PROPERTIES)


_STRATEGY = partial(mutated, tokens=_PIECES)
TARGETS: tuple[Target, ...] = (
    Target(name="zmtp_router", run=partial(_connection, _null), errors=(), strategy=_STRATEGY),
    Target(
        name="zmtp_dealer",
        run=partial(_connection, lambda: NullHandshake(_PROPERTIES, begins=True)),
        errors=(),
        strategy=_STRATEGY,
    ),
    Target(name="zmtp_curve", run=partial(_connection, _server), errors=(), strategy=_STRATEGY),
    Target(name="zmtp_curve_frame", run=_curve_frame, errors=(ViolationError,)),
)
