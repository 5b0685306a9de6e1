"""One connection to one coordinator's admin port, kept for the life of its resource.

It says HELLO until it is known, asks STATUS on a timer, and reopens its socket when the coordinator falls silent.
The coordinator may be of any image: what it sends is bounded in bytes and in number, and is dropped when malformed.
Whatever is worth a decision (reached, lost, changed, a signal answered) is told by `on_change`; nothing here decides.
Nothing blocks: a signal is handed to the socket or refused at once, and its answer arrives by itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_operator.link.canary import UNSUPPORTED, CanaryBook
from megatron_operator.link.signals import SignalBook
from megatron_operator.link.snapshot import printable, snapshot_of, without_traffic
from megatron_operator.plan.world import AskCanary, CoordinatorSnapshot, Signal
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.messages import (
    Control,
    ControlAck,
    ControlMessage,
    Disconnect,
    Error,
    Final,
    Heartbeat,
    Hello,
    HelloAck,
    MalformedMessageError,
    Status,
    StatusReply,
    decode,
)
from megatron_runtime.transport.security import PeerKeys
from megatron_runtime.transport.zmtp.dealer import Dealer

logger = logging.getLogger(__name__)

PEER_NAME = "megatron-operator"
"""All operators bear one name: a new leader's HELLO replaces the old one's registration."""
DEFAULT_SIGNAL_SECONDS = 60.0
GOODBYE_LINGER_MS = 200
MAX_MESSAGES_A_SECOND = 500
MAX_BYTES_A_SECOND = 8 << 20
"""A coordinator that sends more is cut off for `flood_pause`: reading it would hold up other resources."""


@dataclass(frozen=True, slots=True)
class LinkTimings:
    """Seconds."""

    hello_retry: float = 0.25
    hello_retry_max: float = 0.5
    status_interval: float = 5.0
    """Between STATUS questions while nothing is under way."""
    status_interval_busy: float = 0.5
    """While a signal is unanswered or a change is expected."""
    answer_timeout: float = 3.0
    """Without an answer to STATUS for so long the coordinator counts as lost and the socket is opened anew."""
    refresh_timeout: float = 3.0
    """Longest a pass waits for a fresh STATUS. A coordinator that is dead is known by its connection; one that is only
    busy is waited for, so that a crowded machine does not make the status go back and forth."""
    first_contact: float = 3.0
    """Since it was given an address, how long a pass waits for a connection that should come."""
    other_key: float = 1.0
    """A connection that has not come up for so long is tried with the coordinator's other key, where there is one."""
    refused_key: float = 5.0
    """A connection with keys that has not come up for so long is opened anew: ZeroMQ gives up for good on one whose key
    was refused, and the coordinator may have learnt of the key since."""
    ack_margin: float = 5.0
    """Added to a signal's own deadline before it counts as unanswered."""
    flood_pause: float = 10.0
    """For which a coordinator that sends too much is not connected to."""


class CoordinatorLink:
    """See the module. `on_change` is called from the event loop and must not block."""

    def __init__(
        self,
        *,
        on_change: Callable[[], None],
        timings: LinkTimings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_change = on_change
        self._timings = timings or LinkTimings()
        self._clock = clock
        self._address: str | None = None
        self._keys: PeerKeys | None = None
        self._socket: Dealer | None = None
        self._task: asyncio.Task[None] | None = None
        self._registered = asyncio.Event()
        self._answered = asyncio.Event()
        self._asked = 0
        self._answers = 0
        self._expects_change = False
        self._nudge = asyncio.Event()
        self._reply: StatusReply | None = None
        self._signals = SignalBook(clock)
        self._busy_at: float | None = None
        """When a request was last seen; None before the first answer."""
        self._canaries = CanaryBook(clock)
        self._error = "no address yet"
        self._incarnation = 0
        self._attempts = 0
        self._opened_at = 0.0
        self._coordinator = 0
        self._pointed_at = 0.0
        self._expected = False
        self._fault = ""
        """What was wrong with the last message that could not be read."""
        self._muted_until = 0.0
        self._second = (0.0, 0, 0)
        """Of what came: when it was last counted from zero, messages and bytes since."""

    def point_to(self, address: str | None, keys: PeerKeys | None) -> None:
        """Connect there; does nothing when that is where it points already. None disconnects."""
        if (address, keys) == (self._address, self._keys):
            return
        self._address, self._keys = address, keys
        self._pointed_at = self._clock()
        self._close_socket("no address yet" if address is None else f"connecting to {address}")
        if address is not None:
            self._open_socket()
            if self._task is None:
                self._task = asyncio.create_task(self._keep_alive(), name=f"link {address}")

    async def close(self) -> None:
        """Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._registered.is_set():
            self._send(Disconnect(reason="closed"))
        self._close_socket("closed", linger_ms=GOODBYE_LINGER_MS)

    @property
    def snapshot(self) -> CoordinatorSnapshot:
        """What the coordinator last said, or that it says nothing."""
        if self._reply is None or not self._registered.is_set():
            return CoordinatorSnapshot(error=self._error)
        return snapshot_of(
            self._reply,
            refusals=self._signals.refusals,
            canaries=self._canaries.reports,
            idle_seconds=self._idle_seconds(),
        )

    def _idle_seconds(self) -> float:
        return 0.0 if self._busy_at is None else self._clock() - self._busy_at

    async def refresh(self, *, expected: bool = False) -> CoordinatorSnapshot:
        """A snapshot not older than this call; unreachable when there is no answer in time.

        expected: the coordinator should be there; a connection just begun is waited for, so that a coordinator is
        not called unreachable only because it, or this operator, has just started.
        """
        came_up, self._expected = expected and not self._expected, expected
        if expected and not self._registered.is_set():
            if came_up and self._address is not None:
                # A fresh socket connects at once; the old one may be waiting out its reconnection interval.
                self._close_socket(f"connecting to {self._address}")
                self._open_socket()
                self._pointed_at = self._clock()
            await self._first_contact()
        if not self._registered.is_set():
            return self.snapshot
        if not await self._ask(self._timings.refresh_timeout):
            return CoordinatorSnapshot(error=self._no_answer())
        return self.snapshot

    async def _first_contact(self) -> None:
        left = self._pointed_at + self._timings.first_contact - self._clock()
        if self._address is None or left <= 0:
            return
        try:
            async with asyncio.timeout(left):
                await self._registered.wait()
        except TimeoutError:
            return

    def awaits(self, operation_id: str) -> bool:
        """This signal was sent and its answer may still come."""
        return self._signals.awaits(operation_id)

    def signal(self, signal: Signal) -> bool:
        """Send it, unless its answer is still awaited. False when there is no connection to send it on.

        The caller has checked its leadership; nothing is queued for a connection that may come later.
        """
        if self.awaits(signal.operation_id):
            return True
        if not self._registered.is_set():
            return False
        timeout = signal.deadline_seconds or DEFAULT_SIGNAL_SECONDS
        message = Control(
            kind=Header[signal.kind.value],
            operation_id=signal.operation_id,
            fence=signal.fence,
            timeout_seconds=timeout,
            expected_engines=signal.expected_engines,
            engine=signal.engine,
            source=signal.source,
            epoch=signal.epoch,
        )
        if not self._send(message):
            return False
        self._signals.sent(
            signal.operation_id, signal.kind, seconds=timeout + self._timings.ack_margin, asked=self._asked
        )
        self._nudge.set()
        return True

    def ask_canary(self, asked: AskCanary) -> bool:
        """Send a canary, unless the answer of one to that engine at that revision is still awaited. False when there is
        no connection to send it on."""
        if not self._registered.is_set() or self._socket is None:
            return False
        return self._canaries.ask(asked, self._socket.send)

    # --- the socket ---

    def _open_socket(self) -> None:
        assert self._address is not None
        if self._clock() < self._muted_until:
            return
        self._opened_at = self._clock()
        self._incarnation = secrets.randbits(64)
        # It sends on a completed connection only: no signal is delivered after the moment it was meant for.
        self._socket = Dealer(
            self._address,
            self._receive,
            keys=self._keys,
            attempt=self._attempts,
            max_message_bytes=limits.MAX_ADMIN_MESSAGE_BYTES,
        )
        self._attempts += 1
        self._socket.start()

    def _close_socket(self, error: str, *, linger_ms: int = 0) -> None:
        if self._socket is not None:
            self._socket.close(linger_ms=linger_ms)
            self._socket = None
        self._forget_registration(error)

    def expect_change(self, expected: bool) -> None:
        """Ask often while the resource waits for something that its coordinator will be the first to know."""
        if expected and not self._expects_change:
            self._nudge.set()
        self._expects_change = expected

    def _forget_registration(self, error: str) -> None:
        """What was in flight is no longer awaited here."""
        was = self._registered.is_set()
        self._registered.clear()
        self._reply = None
        self._error = error
        self._signals.forget_sent()
        self._canaries.forget_sent()
        self._asked = self._answers = 0
        self._answered.set()
        if was:
            logger.info("coordinator lost", extra={"address": self._address, "error": error})
            self._on_change()

    def _send(self, message: ControlMessage) -> bool:
        return self._socket is not None and self._socket.send(message.to_frames())

    # --- the conversation ---

    async def _keep_alive(self) -> None:
        retry = self._timings.hello_retry
        while True:
            if self._registered.is_set():
                retry = self._timings.hello_retry
                await self._poll_once()
                continue
            self._try_again()
            self._say_hello()
            try:
                async with asyncio.timeout(retry):
                    await self._registered.wait()
            except TimeoutError:
                retry = min(2 * retry, self._timings.hello_retry_max)

    def _try_again(self) -> None:
        """While the coordinator's key is rotated it may be either; a connection with the wrong one never comes up. One
        that sent too much is connected to again after a pause."""
        if self._address is None:
            return
        if self._socket is None:
            self._open_socket()
            return
        if self._keys is None:
            return
        patience = self._timings.other_key if self._keys.other_server_publics else self._timings.refused_key
        if self._clock() - self._opened_at > patience:
            self._close_socket(self._no_answer())
            self._open_socket()

    def _no_answer(self) -> str:
        fault = f"; what it sends cannot be read: {self._fault}" if self._fault else ""
        return f"no answer from {self._address}{fault}"

    async def _poll_once(self) -> None:
        """One STATUS, then a pause that a signal cuts short."""
        if not await self._ask(self._timings.answer_timeout):
            if self._registered.is_set() and self._address is not None:
                self._close_socket(self._no_answer())
                self._open_socket()
            return
        if self._signals.drop_overdue():
            self._on_change()
        self._nudge.clear()
        busy = self._signals or self._expects_change
        pause = self._timings.status_interval_busy if busy else self._timings.status_interval
        try:
            async with asyncio.timeout(pause):
                await self._nudge.wait()
        except TimeoutError:
            return

    async def _ask(self, timeout: float) -> bool:
        """STATUS, and its own answer: answers come in the order of the questions."""
        if not self._send(Status()):
            return False
        self._asked += 1
        wanted = self._asked
        try:
            async with asyncio.timeout(timeout):
                while self._answers < wanted:
                    if not self._registered.is_set():
                        return False
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            return False
        return True

    def _floods(self, frames: list[bytes]) -> bool:
        """Count what came. Whether it is more than may come in a second."""
        since, messages, size = self._second
        now = self._clock()
        if now - since >= 1.0:
            since, messages, size = now, 0, 0
        self._second = since, messages + 1, size + sum(map(len, frames))
        return messages >= MAX_MESSAGES_A_SECOND or self._second[2] > MAX_BYTES_A_SECOND

    def _receive(self, frames: list[bytes]) -> None:
        if self._floods(frames):
            self._fault = f"more than {MAX_MESSAGES_A_SECOND} messages or {MAX_BYTES_A_SECOND} bytes in a second"
            self._muted_until = self._clock() + self._timings.flood_pause
            logger.warning("coordinator cut off", extra={"address": self._address, "error": self._fault})
            self._close_socket(self._no_answer())
            return
        try:
            message = decode(frames)
        except MalformedMessageError as error:
            if not self._fault:  # once, until it is read again
                logger.warning("malformed answer dropped", extra={"address": self._address, "error": str(error)})
            self._fault = str(error)[:400]
            return
        match message:
            case HelloAck():
                self._on_hello_ack(message)
            case Heartbeat(incarnation=incarnation):
                if self._registered.is_set() and incarnation != self._coordinator:
                    self._register_again()
            case StatusReply():
                self._on_status(message)
            case ControlAck():
                self._on_ack(message)
            case Final(uid=uid):
                self._on_canary(message, uid)
            case Error(uid=bytes() as uid):
                self._on_canary(message, uid)
            case Error(code=ErrorCode.UNKNOWN_PEER):
                if self._registered.is_set():
                    self._register_again()
            case Error():
                if message.code in UNSUPPORTED:
                    self._on_canary(message, None)
                logger.warning(
                    "coordinator refused a message",
                    extra={
                        "address": self._address,
                        "code": message.code.name,
                        "error": printable(message.message, 400),
                    },
                )

    def _on_canary(self, answer: Final | Error, uid: bytes | None) -> None:
        if self._canaries.answered(answer, uid):
            self._on_change()

    def _register_again(self) -> None:
        self._forget_registration("the coordinator was started anew")
        self._say_hello()

    def _say_hello(self) -> None:
        self._send(Hello(role=Role.ADMIN, name=PEER_NAME, incarnation=self._incarnation))

    def _on_hello_ack(self, ack: HelloAck) -> None:
        self._coordinator = ack.incarnation
        if not self._registered.is_set():
            self._asked = self._answers = 0
            self._registered.set()
            logger.info("coordinator reached", extra={"address": self._address})

    def _on_status(self, reply: StatusReply) -> None:
        before = without_traffic(self.snapshot)
        self._reply = reply
        self._fault = ""
        if self._busy_at is None or reply.queued or any(engine.in_flight for engine in reply.engines):
            self._busy_at = self._clock()
        self._answers = min(self._answers + 1, self._asked)
        self._answered.set()
        known = {operation.operation_id for operation in reply.operations}
        if self._signals.drop_lost(known, answers=self._answers):
            self._on_change()
        if without_traffic(self.snapshot) != before:
            self._on_change()

    def _on_ack(self, ack: ControlAck) -> None:
        self._signals.answered(ack)
        logger.info(
            "signal answered",
            extra={
                "operation_id": printable(ack.operation_id, 64),
                "ok": ack.ok,
                "code": ack.code,
                "error": printable(ack.error or "", 400),
            },
        )
        self._on_change()
