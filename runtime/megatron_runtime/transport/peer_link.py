"""One peer's connection to a coordinator: registration, heartbeats, reconnection. It moves messages, no more."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import zmq

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import (
    Disconnect,
    Error,
    Frames,
    Heartbeat,
    Hello,
    HelloAck,
    MalformedMessageError,
    Message,
    decode,
)
from megatron_runtime.transport.event_socket import EventSocket
from megatron_runtime.transport.security import PeerKeys

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 3.0
"""A coordinator silent for so long is looked for anew, on a fresh socket."""
GOODBYE_LINGER_MS = 2000
"""So long a goodbye may take to leave this machine: at most, where the coordinator is gone."""


class CoordinatorUnreachableError(TimeoutError):
    """No coordinator answered in time. The message names the address."""


class HandshakeRefusedError(AssertionError):
    """The coordinator answered HELLO with a refusal: wrong port for the role, or no protocol version in common."""


def coordinator_address(where: int | str) -> str:
    """The ZeroMQ address of a port number (on this machine), "host:port" or "tcp://host:port"."""
    if isinstance(where, int):
        return f"tcp://127.0.0.1:{where}"
    if "://" in where:
        return where
    host, separator, port = where.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"coordinator address {where!r}: want a port number, 'host:port' or 'tcp://host:port'")
    return f"tcp://{host}:{port}"


class PeerLink:
    """Keeps one DEALER registered with the coordinator at `address`, whatever becomes of either.

    hello:      builds the HELLO of this moment for an incarnation.
    on_ack:     called with each HELLO_ACK, and whether the coordinator may have forgotten what was sent before.
    on_message: called with every other message, ERROR and HEARTBEAT included.
    heartbeat:  builds the HEARTBEAT of this moment; by default it says nothing but that the peer lives.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: PeerKeys | None,
        hello: Callable[[int], Hello],
        on_ack: Callable[[HelloAck, bool], None],
        on_message: Callable[[Message], None],
        heartbeat: Callable[[int], Heartbeat] = lambda incarnation: Heartbeat(incarnation=incarnation),
    ) -> None:
        self.address = address
        self.registered = False
        self.max_message_bytes = limits.MAX_CLIENT_MESSAGE_BYTES
        """As the coordinator last said."""
        self.rejected_frames = 0
        self.coordinator_incarnation = 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = keys
        self._hello = hello
        self._on_ack = on_ack
        self._on_message = on_message
        self._heartbeat = heartbeat
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: EventSocket | None = None
        self._incarnation = 0
        self._key_stamp: tuple[int, int] | None = None
        self._attempts = 0
        self._lost = False
        self._heard = 0.0
        self._due = 0.0
        self._heartbeat_seconds = limits.HEARTBEAT_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._acknowledged: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        return self._socket.socket if self._socket is not None else None

    async def start(self, *, loop: asyncio.AbstractEventLoop | None = None, connect_timeout_seconds: float) -> None:
        """Open the connection and wait for the first HELLO_ACK; with a timeout of 0, do not wait.

        Raises:
            CoordinatorUnreachableError: nobody answered; the link is closed.
            HandshakeRefusedError: the coordinator refused; the link is closed.
        """
        self._loop = loop or asyncio.get_running_loop()
        self._acknowledged = self._loop.create_future()
        self._open()
        self._schedule_tick()
        if not connect_timeout_seconds:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._acknowledged), connect_timeout_seconds)
        except TimeoutError as error:
            self.close()
            raise CoordinatorUnreachableError(
                f"no coordinator answered at {self.address} within {connect_timeout_seconds:g} s: "
                "check the address, that it runs, and that its keys and ours are of one set"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self, reason: str = "") -> None:
        """Say DISCONNECT and end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._acknowledged is not None:
            self._acknowledged.cancel()
        if self._socket is not None:
            if self.registered:
                self._socket.send(Disconnect(reason=reason).to_frames())
            self._socket.close(linger_ms=GOODBYE_LINGER_MS if self.registered else 0)
            self._socket = None
        self.registered = False
        self.context.term()

    def send(self, frames: Frames) -> bool:
        """Hand `frames` to the socket, whose buffer is unbounded. Before registration they are dropped.

        False when the coordinator would not take a message of this size: it is not sent then.
        """
        size = sum(map(len, frames))
        if size > self.max_message_bytes:
            logger.error("a message of %d bytes is not sent: at most %d", size, self.max_message_bytes)
            return False
        if self._socket is not None and self.registered:
            self._socket.send(frames)
        return True

    def beat(self) -> None:
        """Send a HEARTBEAT now: something it says has changed."""
        self.send(self._heartbeat(self._incarnation).to_frames())

    def _open(self) -> None:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_ENGINE_MESSAGE_BYTES)
        if self._keys is not None:
            # A connection may have failed because the keys changed.
            self._key_stamp = self._keys.stamp()
            self._keys = self._keys.refreshed()
            self._keys.apply(socket, attempt=self._attempts)
            self._attempts += 1
        socket.connect(self.address)
        self._incarnation = random.SystemRandom().getrandbits(64)
        self._socket = EventSocket(socket, self._receive)
        self._socket.start(self._loop)
        self._heard = self._now()
        self.say_hello()

    def _now(self) -> float:
        assert self._loop is not None, "start() first"
        return self._loop.time()

    def say_hello(self) -> None:
        """Register, or renew the registration after a change of what HELLO says."""
        if self._socket is not None:
            self._socket.send(self._hello(self._incarnation).to_frames())

    def _tick(self) -> None:
        assert self._loop is not None
        # While this loop stood still it heard nothing, whatever was said.
        now = self._now()
        self._heard = min(now, self._heard + max(0.0, now - self._due))
        self._schedule_tick()
        if now - self._heard > SILENCE_SECONDS:
            if self.registered:
                logger.warning("the coordinator at %s has been silent for %.0f s", self.address, SILENCE_SECONDS)
            self._reopen()
        elif self._own_key_changed():
            logger.info("another key of its own: registering anew with it at %s", self.address)
            self._reopen()
        elif self.registered:
            self.beat()
        else:
            self.say_hello()

    def _schedule_tick(self) -> None:
        assert self._loop is not None
        self._due = self._now() + self._heartbeat_seconds
        self._timer = self._loop.call_later(self._heartbeat_seconds, self._tick)

    def _own_key_changed(self) -> bool:
        """A rotated key is taken up while the one before is still admitted, so that nobody has to be cut off."""
        if self._keys is None:
            return False
        stamp = self._keys.stamp()
        if stamp is None or stamp == self._key_stamp:
            return False
        self._key_stamp = stamp
        return self._keys.refreshed().own != self._keys.own

    def _reopen(self) -> None:
        self._lose()
        if self._socket is not None:
            self._socket.close()
        self._open()

    def _lose(self) -> None:
        self._lost = True
        self.registered = False

    def _receive(self, frames: list[bytes]) -> None:
        self._heard = self._now()
        try:
            message = decode(frames)
        except MalformedMessageError as error:
            self.rejected_frames += 1
            logger.warning("dropped a frame from the coordinator: %s", error)
            return
        match message:
            case HelloAck():
                self._registered(message)
            case Error(code=ErrorCode.UNKNOWN_PEER):
                if self.registered:
                    self._lose()
                    self.say_hello()
            case Error(code=ErrorCode.VERSION | ErrorCode.WRONG_ROLE) if not self.registered:
                self._refused(f"refused HELLO: {message.code.name}: {message.message}")
            case Heartbeat(incarnation=incarnation) if self.registered and incarnation != self.coordinator_incarnation:
                self._lose()
                self.say_hello()
            case _ if self._is_first_answer() and not isinstance(message, Error | Heartbeat):
                self._refused(f"answered HELLO with {type(message).__name__}: it is no coordinator of this protocol")
            case _:
                self._on_message(message)

    def _is_first_answer(self) -> bool:
        return self.coordinator_incarnation == 0 and not self.registered

    def _registered(self, ack: HelloAck) -> None:
        forgotten = self._lost or self.coordinator_incarnation not in (0, ack.incarnation)
        self.coordinator_incarnation = ack.incarnation
        self._heartbeat_seconds = ack.heartbeat_seconds
        self.max_message_bytes = ack.max_message_bytes
        self._lost = False
        self.registered = True
        if self._acknowledged is not None and not self._acknowledged.done():
            self._acknowledged.set_result(None)
        self._on_ack(ack, forgotten)

    def _refused(self, what: str) -> None:
        message = f"the coordinator at {self.address} {what}"
        if self._acknowledged is not None and not self._acknowledged.done():
            self._acknowledged.set_exception(HandshakeRefusedError(message))
        else:
            logger.error("%s", message)
