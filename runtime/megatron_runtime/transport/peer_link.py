"""The connection of one peer to a coordinator, with registration, heartbeats, loss detection and reconnection.

Two coordinators may form a pair. The peer is registered with only one coordinator at a time. It tries the other
coordinator if its current coordinator is silent or reports that it is a standby.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

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
from megatron_runtime.protocol.text import printable
from megatron_runtime.transport.addresses import CoordinatorAddresses
from megatron_runtime.transport.security import PeerKeys
from megatron_runtime.transport.zmtp.dealer import Dealer, parse_address

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 3.0
"""Time without any message after which a peer opens a new socket."""
REDIRECT_SECONDS = 0.1
"""Time between the answer of a standby coordinator and the next attempt, which uses the other coordinator."""
PROBE_SECONDS = 2.0
"""Timeout, in seconds, of the test connection that determines why a coordinator does not answer."""
GOODBYE_LINGER_MS = 2000


class CoordinatorUnreachableError(TimeoutError):
    """No coordinator answered in time. The message names the address."""


class HandshakeRejectedError(AssertionError):
    """The coordinator rejected HELLO, because the port is for another role, or because the peers share no protocol
    version.
    """


SEND_BUFFER_BYTES = 1 << 30
"""Maximum number of unsent bytes of a connection. It is practically unlimited, because the messages of open requests
must not be dropped.
"""


class PeerSocket(Protocol):
    """A DEALER that is connecting or connected, such as zmtp.dealer.Dealer."""

    def send(self, message: Frames, /) -> bool: ...

    def close(self, *, linger_ms: int = 0) -> None: ...


class OpenSocket(Protocol):
    """A function that opens a socket. It takes the arguments of zmtp.dealer.Dealer's constructor."""

    def __call__(
        self,
        address: str,
        on_message: Callable[[Frames], None],
        /,
        *,
        on_open: Callable[[], None],
        on_lost: Callable[[str], None],
        keys: PeerKeys | None,
    ) -> PeerSocket: ...


open_dealer: OpenSocket = partial(
    Dealer, max_message_bytes=limits.MAX_ENGINE_MESSAGE_BYTES, send_buffer_bytes=SEND_BUFFER_BYTES
)
"""Opens the socket of engines and clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """Intervals and timeouts of a PeerLink, in seconds.

    tick:      interval of heartbeats, and of HELLO until the registration; None uses the interval in HELLO_ACK.
    silence:   time without any message after which the link opens a new socket.
    other_key: timeout that replaces `silence` before the registration, if another key or address can be tried; None
               uses `silence`.
    """

    tick: float | None = None
    silence: float = field(default_factory=lambda: SILENCE_SECONDS)
    other_key: float | None = None


async def unreachable_cause(
    address: str,
    peer: str = "coordinator",
    *,
    remedy: str = "check coordinator_host and coordinator_port, and that the coordinator runs",
) -> str:
    """Try to connect to the address of a peer, and return the reason why the peer does not answer there."""
    try:
        target = parse_address(address)
        async with asyncio.timeout(PROBE_SECONDS):
            if isinstance(target, Path):
                _, writer = await asyncio.open_unix_connection(target)
            else:
                _, writer = await asyncio.open_connection(*target)
    except TimeoutError:
        return f"no connection within {PROBE_SECONDS:g} s: check that the network allows it"
    except (OSError, ValueError) as error:
        return f"{error}: {remedy}"
    writer.close()
    return f"the port accepts connections, but no {peer} answers: check that it is its port, and the keys of both"


def _log_malformed(error: MalformedMessageError) -> None:
    logger.warning("dropped a frame from the coordinator: %s", error)


@dataclass(eq=False, repr=False)
class PeerLink:
    """A link that keeps one DEALER registered with a coordinator.

    It reconnects after a lost connection or a restart of the coordinator.

    addresses:    addresses of the coordinator, or of both coordinators of a pair.
    keys:         keys in use, which are read again when their files change; None means no encryption.
    hello:        returns the HELLO to send now. Its argument is the incarnation of the link.
    on_ack:       called with each HELLO_ACK and a flag that is set if the coordinator may have lost earlier messages.
    on_message:   called with every other message, including ERROR and HEARTBEAT.
    heartbeat:    returns the HEARTBEAT to send now. Its argument is the incarnation of the link. None: the link sends
                  no heartbeats.
    on_lost:      called with the reason when a registration ends for a reason other than close().
    on_malformed: called with the error of each message that cannot be decoded; by default the error is logged.
    open_socket:  opens a new DEALER for each attempt to register.
    """

    addresses: CoordinatorAddresses
    _: KW_ONLY
    keys: PeerKeys | None
    hello: Callable[[int], Hello]
    on_ack: Callable[[HelloAck, bool], None]
    on_message: Callable[[Message], object]
    heartbeat: Callable[[int], Heartbeat] | None = lambda incarnation: Heartbeat(incarnation=incarnation)
    on_lost: Callable[[str], None] = lambda reason: None
    on_malformed: Callable[[MalformedMessageError], None] = _log_malformed
    open_socket: OpenSocket = open_dealer
    timing: LinkTiming = field(default_factory=LinkTiming)

    def __post_init__(self) -> None:
        self.registered = False
        self.max_message_bytes = limits.MAX_CLIENT_MESSAGE_BYTES
        """Size limit of a message, from the last HELLO_ACK."""
        self.coordinator_incarnation = 0
        self._term = 0
        """The highest term of the coordinators with which this peer has been registered."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: PeerSocket | None = None
        self._incarnation = 0
        self._key_stamp: tuple[int, int] | None = None
        self._tries = 0
        self._lost = False
        self._last_received = 0.0
        self._due = 0.0
        self._muted_until = 0.0
        self._tick_seconds = self.timing.tick or limits.HEARTBEAT_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._acknowledged: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def address(self) -> str:
        """The coordinator's address that is in use, or the next address to try."""
        return self.addresses.current

    @property
    def local_host(self) -> str | None:
        """This machine's address on the connection to the coordinator, or None if there is no connection."""
        return self._socket.local_host if isinstance(self._socket, Dealer) else None

    def open(self) -> None:
        """Start to connect, in the background on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._acknowledged = self._loop.create_future()
        self._open()
        self._schedule_tick()

    async def start(self, *, connect_timeout_seconds: float) -> None:
        """Connect and wait for the first HELLO_ACK.

        Raises:
            CoordinatorUnreachableError: no coordinator answered. The link is closed.
            HandshakeRejectedError: the coordinator rejected HELLO. The link is closed.
        """
        self.open()
        assert self._acknowledged is not None
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

    def close(self, reason: str = "", *, linger_ms: int = GOODBYE_LINGER_MS) -> None:
        """Send DISCONNECT with `reason` and close the socket. This method is idempotent.

        linger_ms: maximum time for sending DISCONNECT, in milliseconds.
        """
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
            self._socket.close(linger_ms=linger_ms if self.registered else 0)
            self._socket = None
        self.registered = False

    def send(self, frames: Frames) -> bool:
        """Send a message and return True. Before the registration, drop the message and return True.

        Return False, without sending the message, if the message is larger than the coordinator accepts or if the
        socket's buffer is full.
        """
        size = sum(map(len, frames))
        if size > self.max_message_bytes:
            logger.error("a message of %d bytes is not sent: at most %d", size, self.max_message_bytes)
            return False
        if self._socket is not None and self.registered:
            return self._socket.send(frames)
        return True

    def beat(self) -> None:
        """Send a HEARTBEAT immediately. Call this method when the content of the HEARTBEAT has changed."""
        if self.heartbeat is not None:
            self.send(self.heartbeat(self._incarnation).to_frames())

    def say_hello(self) -> None:
        """Send HELLO, to register or to report that the content of HELLO has changed."""
        if self._socket is not None:
            hello = self.hello(self._incarnation)
            self._socket.send((hello.model_copy(update={"term": self._term}) if self._term else hello).to_frames())

    def reopen(self, reason: str, *, after_seconds: float = 0.0) -> None:
        """Close the socket, and open a new socket after `after_seconds`.

        If an earlier call has set a delay that ends later, the link waits for the end of that delay.
        """
        self._muted_until = max(self._muted_until, self._now() + after_seconds)
        self._hang_up(reason)
        self._open()

    def move(self, reason: str) -> None:
        """Open a new socket to the other coordinator of a pair.

        If no other coordinator is known, open the socket to the same coordinator.
        """
        self._hang_up(reason)
        self.addresses.move_on()
        self._open()

    def _hang_up(self, reason: str) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._lose(reason)

    def _redirected(self, reason: str) -> None:
        """Handle the answer of a standby coordinator: try the other coordinator after REDIRECT_SECONDS."""
        assert self._loop is not None
        self._hang_up(reason)
        self.addresses.move_on()
        self._loop.call_later(REDIRECT_SECONDS, self._open_again)

    def _open_again(self) -> None:
        if self._socket is None and not self._closed:
            # A standby that answers has accepted the key in use, so the next attempt uses the same key.
            self._tries = max(0, self._tries - 1)
            self._open()

    def _open(self) -> None:
        self._last_received = self._now()
        if self._last_received < self._muted_until:
            return
        self._incarnation = random.SystemRandom().getrandbits(64)
        keys = self._next_keys()
        self._socket = self.open_socket(
            self.address, self._receive, on_open=self.say_hello, on_lost=self._lose, keys=keys
        )
        self.say_hello()

    def _next_keys(self) -> PeerKeys | None:
        """Return the keys for the next attempt to connect.

        The files are read again, because changed keys can be the reason why the last attempt failed.
        """
        tries = self._tries
        self._tries += 1
        if self.keys is None:
            return None
        self._key_stamp = self.keys.stamp()
        self.keys = self.keys.refreshed()
        return self.keys.for_try(tries // len(self.addresses))

    def _lose(self, reason: str) -> None:
        was_registered, self.registered, self._lost = self.registered, False, True
        if was_registered:
            self.on_lost(reason)

    def _now(self) -> float:
        assert self._loop is not None, "start() first"
        return self._loop.time()

    def _schedule_tick(self) -> None:
        assert self._loop is not None
        self._due = self._now() + self._tick_seconds
        self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        # Messages may have arrived while the event loop was blocked, so blocked time does not count as silence.
        now = self._now()
        self._last_received = min(now, self._last_received + max(0.0, now - self._due))
        self._schedule_tick()
        if self._socket is None:
            self._open()
        elif now - self._last_received > self._patience():
            reason = f"no message from the coordinator at {self.address} for {now - self._last_received:.0f} s"
            if self.registered:
                logger.warning("%s: connecting again", reason)
            self.move(reason)
        elif self._own_key_changed():
            reason = f"registering again at {self.address} with the new key of this process"
            logger.info("%s", reason)
            self.reopen(reason)
        elif self.registered:
            self.beat()
        else:
            self.say_hello()

    def _patience(self) -> float:
        keys = self.keys.other_server_publics if self.keys is not None else ()
        if not self.registered and (keys or len(self.addresses) > 1) and self.timing.other_key is not None:
            return self.timing.other_key
        return self.timing.silence

    def _own_key_changed(self) -> bool:
        """Return whether the key file has a new key.

        The link then switches to the new key while the coordinator still accepts the old key, so that the switch does
        not interrupt the connection's service.
        """
        if self.keys is None:
            return False
        stamp = self.keys.stamp()
        if stamp is None or stamp == self._key_stamp:
            return False
        self._key_stamp = stamp
        return self.keys.refreshed().own != self.keys.own

    def _receive(self, frames: Frames) -> None:
        self._last_received = self._now()
        try:
            message = decode(frames)
        except MalformedMessageError as error:
            self.on_malformed(error)
            if self._knows_no_coordinator:
                self._reject(f"answered HELLO with bytes that are not a message: it is not a coordinator ({error})")
            return
        match message:
            case HelloAck():
                self._register(message)
            case Error(code=ErrorCode.UNKNOWN_PEER):
                if self.registered:
                    self._lose("the coordinator does not know this connection")
                    self.say_hello()
            case Error(code=ErrorCode.STANDBY, other=other):
                self.addresses.learn(other)
                self._redirected(f"the coordinator at {self.address} is on standby")
            case Error(code=ErrorCode.VERSION | ErrorCode.WRONG_ROLE) if not self.registered:
                self._reject(f"rejected HELLO: {message.code.name}: {printable(message.message)}")
            case Heartbeat(incarnation=incarnation) if self.registered and incarnation != self.coordinator_incarnation:
                self._lose("the coordinator was restarted")
                self.say_hello()
            case Error() | Heartbeat():
                self.on_message(message)
            case _ if self._knows_no_coordinator:
                self._reject(f"answered HELLO with {type(message).__name__}: it is not a coordinator of this protocol")
            case _:
                self.on_message(message)

    @property
    def _knows_no_coordinator(self) -> bool:
        """Return whether this link has never been registered."""
        return not self.registered and self.coordinator_incarnation == 0

    def _register(self, ack: HelloAck) -> None:
        if ack.term is not None and ack.term < self._term:
            self._redirected(f"the coordinator at {self.address} has term {ack.term}, of at least {self._term}")
            return
        self._term = ack.term or 0
        self.addresses.learn(ack.other)
        forgotten = self._lost or self.coordinator_incarnation not in (0, ack.incarnation)
        self.coordinator_incarnation = ack.incarnation
        if self.timing.tick is None:
            self._tick_seconds = ack.heartbeat_seconds
        self.max_message_bytes = ack.max_message_bytes
        self._lost = False
        self.registered = True
        if self._acknowledged is not None and not self._acknowledged.done():
            self._acknowledged.set_result(None)
        self.on_ack(ack, forgotten)

    def _reject(self, what: str) -> None:
        message = f"the coordinator at {self.address} {what}"
        if self._acknowledged is not None and not self._acknowledged.done():
            self._acknowledged.set_exception(HandshakeRejectedError(message))
            self._acknowledged.exception()  # retrieve the exception, which no task awaits after open()
        else:
            logger.error("%s", message)
