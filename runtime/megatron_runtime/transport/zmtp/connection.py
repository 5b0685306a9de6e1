"""One connection of a ROUTER or a DEALER, from its greeting to its end."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, TypeAlias, cast

from megatron_runtime.protocol.codec import Frames
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.frames import (
    COMMAND,
    GREETING_BYTES,
    LONG,
    LONG_HEADER_BYTES,
    MORE,
    ViolationError,
)
from megatron_runtime.transport.zmtp.handshake import Box, Handshake, NotAdmittedError

logger = logging.getLogger(__name__)

PeerId: TypeAlias = tuple[int, bytes]
"""Name of a connection. It consists of the number of its port and the routing id."""

MESSAGES_PER_ITERATION = 256
"""Maximum number of messages that a connection handles in one iteration of the event loop."""
MAX_FRAMES = 16_384
"""Maximum number of frames of one message. An engine of Megatron-Core 0.20 sends the answers of a step as frames of one
message."""
PARTNERS = (b"DEALER", b"REQ", b"ROUTER")
"""Socket types to which a ROUTER may be connected (ZMTP 3.1)."""
ENVELOPE_BYTES = 64
"""Upper bound of the bytes that encryption adds to a frame."""
_HANDSHAKE_BYTES = 4096
"""Size limit of a frame before the end of the handshake."""


class Owner(Protocol):
    """The ROUTER or DEALER that owns a connection. Its methods are callbacks of the connection."""

    handler_errors: int
    """Number of messages that were dropped because received() raised an exception."""

    def opened(self, connection: Connection) -> None:
        """Handle a new connection, whose handshake has not begun."""

    def admitted(self, connection: Connection, routing_id: bytes) -> PeerId:
        """Register a connection that has completed its handshake, and return the connection's name.

        Raises ViolationError if the connection must be closed.
        """

    def received(self, peer: PeerId, frames: Frames) -> None:
        """Handle a message from a peer."""

    def flush_soon(self, connection: Connection) -> None:
        """Arrange that the connection's flush() is called in this iteration of the event loop.

        The connection has messages to send.
        """

    def has_room(self, connection: Connection) -> None:
        """Handle a connection that accepts messages again.

        The connection calls this method once after its buffer was full, and once for each report_room().
        """

    def lost(self, connection: Connection, violation: ViolationError | None) -> None:
        """Handle the end of a connection.

        violation: the peer's violation of the protocol, if this side closed the connection for this reason; otherwise
            None.
        """


class Connection(asyncio.Protocol):
    """One TCP or Unix connection. It decodes received messages and encodes sent messages.

    peer:          name of the connection; the routing id is b"" until the handshake is over.
    heard:         set to True when bytes arrive; the owner resets it.
    ended_by_peer: after the end, whether the peer closed the connection, with a FIN or RST.

    max_message_bytes: size limit of a received message; a larger message closes the connection.
    send_buffer_bytes: maximum number of unsent bytes; if there are more, send() returns False.
    """

    _transport: asyncio.Transport

    def __init__(self, owner: Owner, handshake: Handshake, *, max_message_bytes: int, send_buffer_bytes: int) -> None:
        self.peer: PeerId = (0, b"")
        self.heard = True
        self.is_open = False
        self.ended_by_peer = False
        self._ended_here = False
        self._owner = owner
        self._received = owner.received
        self._handshake = handshake
        self._box: Box | None = None
        self._violation: ViolationError | None = None
        # State of receiving: the bytes of an incomplete frame, and the frames of an incomplete message.
        self._greeted = False
        self._rest = bytearray()
        self._need = GREETING_BYTES
        self._limit = _HANDSHAKE_BYTES
        self._max_message_bytes = max_message_bytes
        self._message: Frames = []
        self._message_bytes = 0
        # State of sending: encoded messages that are written at the end of this iteration of the event loop.
        self._send_buffer_bytes = send_buffer_bytes
        self._paused = False
        self._reports_room = False
        self._out: list[bytes] = []
        self._out_bytes = 0

    @property
    def key(self) -> bytes:
        """The peer's public key in Z85; b"" if the connection is not encrypted."""
        return self._handshake.key

    @property
    def local_host(self) -> str:
        """This machine's address on the connection. For a Unix socket, it is the loopback address."""
        name = self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    # --- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._send_buffer_bytes)
        self._owner.opened(self)
        self._write(frames.greeting(self._handshake.mechanism, as_server=self._handshake.as_server))
        first = self._handshake.begin()
        if first:
            self._write(frames.frame(COMMAND, first))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self.ended_by_peer = not self._ended_here and (error is None or isinstance(error, ConnectionError))
        self._rest.clear()
        self._out.clear()
        self._owner.lost(self, self._violation)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._reports_room:
            self._report_soon()

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data = bytes(self._rest)
            self._rest.clear()
        try:
            self._read(data)
        except ViolationError as error:
            self._violate(error)

    # --- receiving ------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        """Handle the complete frames in `data`, and keep the remaining bytes for the next call."""
        position, end = 0, len(data)
        if not self._greeted:
            if end < GREETING_BYTES:
                self._keep(data, need=GREETING_BYTES)
                return
            frames.check_greeting(data, self._handshake.mechanism)
            self._greeted = True
            position = GREETING_BYTES
        need = 2
        left = MESSAGES_PER_ITERATION
        while end - position >= 2:
            flags = data[position]
            if flags & LONG:
                begin = position + LONG_HEADER_BYTES
                if begin > end:
                    need = LONG_HEADER_BYTES
                    break
                size = int.from_bytes(data[position + 1 : begin], "big")
            else:
                begin = position + 2
                size = data[position + 1]
            if size > self._limit:
                raise ViolationError(f"a frame of {size} bytes: at most {self._limit}")
            stop = begin + size
            if stop > end:
                need = stop - position
                break
            body = data[begin:stop]
            position = stop
            if self._box is None and flags <= LONG and flags != MORE and self.is_open and not self._message:
                message = [body]
                try:
                    self._received(self.peer, message)
                except Exception:
                    self._handler_failed(message)
            else:
                self._handle_frame(flags, body)
            if self._transport.is_closing():
                return
            left -= 1
            if not left and end - position >= 2:
                self._transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._resume, data[position:])
                return
        if position < end:
            self._keep(data[position:], need=need)

    def _keep(self, data: bytes, *, need: int) -> None:
        self._rest += data
        self._need = need

    def _resume(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.resume_reading()
        self.data_received(data)

    def _handle_frame(self, flags: int, body: bytes) -> None:
        if not self.is_open:
            self._shake_hands(flags, body)
            return
        if self._box is not None:
            flags, body = self._box.open(body)
        if flags & COMMAND:
            answer = frames.pong(body)
            if answer is not None and not self._paused:
                self._send_command(answer)
            return
        message = self._message
        message.append(body)
        self._message_bytes += len(body)
        if flags & MORE:
            if len(message) > MAX_FRAMES or self._message_bytes > self._limit:
                raise ViolationError("a message has too many frames or bytes")
            return
        self._message, self._message_bytes = [], 0
        try:
            self._received(self.peer, message)
        except Exception:
            self._handler_failed(message)

    def _handler_failed(self, message: Frames) -> None:
        self._owner.handler_errors += 1
        logger.exception("handler failed on a message of %d frames; the message is dropped", len(message))

    def _shake_hands(self, flags: int, command: bytes) -> None:
        if not flags & COMMAND:
            raise ViolationError("a message before the end of the handshake")
        answer = self._handshake.receive(command)
        properties = self._handshake.properties
        if properties is not None:
            if properties.get(b"socket-type") not in PARTNERS:
                raise ViolationError(f"a socket of type {properties.get(b'socket-type')!r}: want one of {PARTNERS}")
            self.peer = self._owner.admitted(self, properties.get(b"identity", b""))
            self.is_open = True
            self._limit = self._max_message_bytes + (0 if self._handshake.box is None else ENVELOPE_BYTES)
        if answer:
            self._write(frames.frame(COMMAND, answer))
        self._box = self._handshake.box

    def _violate(self, violation: ViolationError) -> None:
        self._violation = violation
        if isinstance(violation, NotAdmittedError):
            # libzmq stops reconnecting when it gets this error.
            self._write(frames.frame(COMMAND, frames.error(b"400")))
            self.close()
        else:
            self.abort()

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, message: Frames, even_if_full: bool = False) -> bool:
        """Queue a message, which is sent at the end of this iteration of the event loop.

        Return False, without queueing the message, if the buffer is full and `even_if_full` is False. When the buffer
        has room again, the connection calls the owner's has_room().
        """
        if (self._paused or self._out_bytes > self._send_buffer_bytes) and not even_if_full:
            self._reports_room = True
            return False
        if self._box is None:
            encoded = frames.frame(0, message[0]) if len(message) == 1 else frames.message(message)
        else:
            last = len(message) - 1
            encoded = b"".join([self._box.close(MORE if n < last else 0, body) for n, body in enumerate(message)])
        if not self._out:
            self._owner.flush_soon(self)
        self._out.append(encoded)
        self._out_bytes += len(encoded)
        return True

    def report_room(self) -> None:
        """Call the owner's has_room() as soon as the buffer is not full, but not before this method has returned."""
        self._reports_room = True
        if not self._out:
            self._report_soon()

    def _report_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        # If the buffer is full again, resume_writing() or flush() calls this method later.
        is_full = self._paused or self._out_bytes > self._send_buffer_bytes
        if self._reports_room and not is_full and not self._transport.is_closing():
            self._reports_room = False
            self._owner.has_room(self)

    def ping(self) -> None:
        self._send_command(frames.PING)

    def flush(self) -> None:
        """Write all messages that were queued in this iteration of the event loop, in one system call."""
        out, self._out, self._out_bytes = self._out, [], 0
        if out and not self._transport.is_closing():
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._reports_room:
            self._report_soon()

    def close(self) -> None:
        """Close the connection after the queued messages have been sent."""
        if self._out:
            self.flush()
        self._ended_here = True
        self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately. Queued messages are lost."""
        self._ended_here = True
        self._transport.abort()

    def _send_command(self, body: bytes) -> None:
        self._write(frames.frame(COMMAND, body) if self._box is None else self._box.close(COMMAND, body))

    def _write(self, data: bytes) -> None:
        """Write a handshake or command immediately, after the messages that are already queued."""
        if self._out:
            self.flush()
        if not self._transport.is_closing():
            self._transport.write(data)
