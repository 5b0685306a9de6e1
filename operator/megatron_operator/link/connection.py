"""One connection to the admin port of one coordinator, kept for the lifetime of its resource.

The link polls STATUS, sends the signals that a pass decides on, and calls `on_change` for everything that needs a
decision: the coordinator was reached or lost, its status changed, or it answered a signal. The link itself decides
nothing.

The coordinator may run any image. The link therefore limits the size and number of the coordinator's messages, and
drops malformed messages. Nothing blocks. A signal is passed to the socket or rejected immediately, and the link never
sends a signal again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megatron_operator.decision.actions import AskCanary, Signal
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot, OperationReport
from megatron_operator.link.canary import UNSUPPORTED, CanaryBook
from megatron_operator.link.snapshot import printable, rejection_of, snapshot_of, without_traffic
from megatron_operator.resource.states import CoordinatorState
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.adapters import AdapterList
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.messages import (
    Control,
    ControlAck,
    Error,
    Final,
    Frames,
    Hello,
    HelloAck,
    MalformedMessageError,
    Message,
    Status,
    StatusReply,
)
from megatron_runtime.transport.addresses import CoordinatorAddresses
from megatron_runtime.transport.peer_link import LinkTiming, PeerLink
from megatron_runtime.transport.security import PeerKeys
from megatron_runtime.transport.zmtp.dealer import Dealer

logger = logging.getLogger(__name__)

PEER_NAME = "megatron-operator"
"""Name that all operators use in HELLO, so that a new leader's registration replaces the old leader's."""
DEFAULT_SIGNAL_SECONDS = 60.0
MAX_MESSAGES_A_SECOND = 500
MAX_BYTES_A_SECOND = 8 << 20
"""Limit of received bytes per second. A coordinator that sends more is disconnected for `flood_pause`, because reading
the data would delay other resources.
"""
REMEMBERED_REJECTIONS = 16


@dataclass(frozen=True, slots=True)
class LinkTimings:
    """Intervals and timeouts of a link, in seconds."""

    hello_retry: float = 0.5
    """Interval of HELLO messages until the coordinator answers."""
    status_interval: float = 2.0
    """Interval of STATUS messages while nothing is in progress."""
    status_interval_busy: float = 0.5
    """Interval of STATUS messages while a signal is unanswered or a change is expected."""
    answer_timeout: float = 3.0
    """Time without an answer to STATUS after which the coordinator is lost and a new socket is opened."""
    refresh_timeout: float = 3.0
    """Maximum time that a pass waits for a new STATUS. If the coordinator is dead, the wait ends with the connection.
    If the coordinator is only busy, the wait keeps the status of the resource stable.
    """
    first_contact: float = 3.0
    """Maximum time that a pass waits for an expected connection, counted from the assignment of the address."""
    other_key: float = 1.0
    """Time in which a connection must be established. Otherwise the coordinator's other key or address is tried, if
    there is one.
    """
    silence: float = 3.0
    """Time without any message after which the coordinator is lost. The link then opens a new socket, to the other
    coordinator if there is a pair. Coordinators send heartbeats every 0.5 s, so a loss is detected before the next
    STATUS is unanswered. This time is longer than `status_interval`.
    """
    ack_margin: float = 5.0
    """Time that is added to the deadline of a signal before it counts as unanswered."""
    flood_pause: float = 10.0
    """Time without a connection to a coordinator that sent too much."""


@dataclass(slots=True)
class _InFlight:
    until: float
    asked: int
    """Number of STATUS messages that were sent before the signal. If the signal arrived, the answers to later STATUS
    messages report it.
    """


class CoordinatorLink:
    """The link to one coordinator. `on_change` is called on the event loop and must not block."""

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
        self._addresses: tuple[str, ...] = ()
        self._keys: PeerKeys | None = None
        self._link: PeerLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._registered = asyncio.Event()
        self._lost_at: float | None = None
        """Time when the coordinator was lost. None while it is registered, before the first registration, and after
        this link itself has disconnected.
        """
        self._answered = asyncio.Event()
        self._asked = 0
        self._answers = 0
        self._expects_change = False
        self._nudge = asyncio.Event()
        self._reply: StatusReply | None = None
        self._in_flight: dict[str, _InFlight] = {}
        self._rejections: OrderedDict[str, OperationReport] = OrderedDict()
        self._busy_at: float | None = None
        """Time when a request was last reported; None before the first answer."""
        self._known_at = clock()
        """Time of the last message from a coordinator that knew its engines, or of the creation of this link."""
        self._canaries = CanaryBook(clock)
        self._error = "no address yet"
        self._pointed_at = 0.0
        self._expected = False
        self._fault = ""
        """The error of the last message that could not be parsed."""
        self._second = (0.0, 0, 0)
        """Data received in the current second: start of the second, number of messages, bytes."""

    @property
    def _address(self) -> str:
        """The current address of the coordinator; empty if there is none."""
        return "" if self._link is None else self._link.address

    def point_to(self, addresses: tuple[str, ...], keys: PeerKeys | None) -> None:
        """Connect to the coordinator at the first of `addresses`, and disconnect if `addresses` is empty.

        While the coordinator at the current address is silent or a standby, the link tries the other addresses. Does
        nothing if both arguments are the same as in the last call.
        """
        if (addresses, keys) == (self._addresses, self._keys):
            return
        self._addresses, self._keys = addresses, keys
        self._pointed_at = self._clock()
        self._disconnect(f"connecting to {addresses[0]}" if addresses else "no address yet")
        self._lost_at = None
        if not addresses:
            return
        self._link = PeerLink(
            CoordinatorAddresses(*addresses, learns=False),
            keys=keys,
            hello=lambda incarnation: Hello(role=Role.ADMIN, name=PEER_NAME, incarnation=incarnation),
            heartbeat=None,
            on_ack=self._on_hello_ack,
            on_message=self._on_message,
            on_lost=self._forget_registration,
            on_malformed=self._on_malformed,
            open_socket=self._open_socket,
            timing=LinkTiming(
                tick=self._timings.hello_retry, silence=self._timings.silence, other_key=self._timings.other_key
            ),
        )
        self._link.open()
        if self._task is None:
            self._task = asyncio.create_task(self._poll(), name=f"link {addresses[0]}")

    async def close(self) -> None:
        """Close the link. This method is idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._disconnect("closed")

    @property
    def snapshot(self) -> CoordinatorSnapshot:
        """The last report of the coordinator, or a snapshot of an unreachable coordinator."""
        if self._reply is None or not self._registered.is_set():
            lost = None if self._lost_at is None else self._clock() - self._lost_at
            return replace(self._unreachable(self._error), lost_seconds=lost)
        return snapshot_of(
            self._reply,
            rejections=self._rejections,
            canaries=self._canaries.reports,
            idle_seconds=0.0 if self._busy_at is None else self._clock() - self._busy_at,
            unknown_seconds=0.0 if self._knows_engines else self._clock() - self._known_at,
        )

    @property
    def silent(self) -> bool | None:
        """True if the coordinator was connected and is lost, False while it is connected, otherwise None."""
        return False if self._registered.is_set() else True if self._lost_at is not None else None

    def _unreachable(self, error: str) -> CoordinatorSnapshot:
        return CoordinatorSnapshot(error=error, unknown_seconds=self._clock() - self._known_at)

    @property
    def _knows_engines(self) -> bool:
        """Whether the coordinator has reported, in its last reply, that it knows its engines."""
        return self._reply is not None and self._reply.state is not CoordinatorState.RECOVERING

    async def refresh(self, *, expected: bool = False) -> CoordinatorSnapshot:
        """Return a snapshot that is not older than this call.

        If no answer arrives in time, the snapshot reports an unreachable coordinator.

        expected: whether the coordinator should be reachable. If so, the call waits up to `first_contact` for a new
            connection. A coordinator is therefore not reported as unreachable if it or this operator has just started.
        """
        came_up, self._expected = expected and not self._expected, expected
        if expected and not self._registered.is_set():
            if came_up and self._link is not None:
                # A new socket connects immediately, but the old one may wait for its next attempt.
                self._link.reopen(f"connecting to {self._address}")
                self._pointed_at = self._clock()
            await self._first_contact()
        if not self._registered.is_set():
            return self.snapshot
        if not await self._ask(self._timings.refresh_timeout):
            return self._unreachable(self._no_answer())
        return self.snapshot

    async def _first_contact(self) -> None:
        left = self._pointed_at + self._timings.first_contact - self._clock()
        if not self._addresses or left <= 0:
            return
        try:
            async with asyncio.timeout(left):
                await self._registered.wait()
        except TimeoutError:
            return

    def expect_change(self, expected: bool) -> None:
        """Poll the coordinator at a shorter interval while the resource waits for a change.

        expected: whether the resource waits for a change that the coordinator will report. False restores the normal
            interval.
        """
        if expected and not self._expects_change:
            self._nudge.set()
        self._expects_change = expected

    def awaits(self, operation_id: str) -> bool:
        """Return whether the signal with this operation id was sent and its answer can still arrive."""
        waiting = self._in_flight.get(operation_id)
        return waiting is not None and waiting.until > self._clock()

    def signal(self, signal: Signal) -> bool:
        """Send a signal, unless the same signal is unanswered.

        Returns False if there is no connection, otherwise True. A signal is never queued for a later connection. The
        caller must have checked its leadership.
        """
        if self.awaits(signal.operation_id):
            return True
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
            adapters=None if signal.adapters is None else AdapterList(signal.adapters),
        )
        if not self._send(message.to_frames()):
            return False
        self._rejections.pop(signal.operation_id, None)
        until = self._clock() + timeout + self._timings.ack_margin
        self._in_flight[signal.operation_id] = _InFlight(until, self._asked)
        self._nudge.set()
        return True

    def ask_canary(self, asked: AskCanary) -> bool:
        """Send a canary, unless the same canary to this engine is unanswered.

        Returns False if a canary must be sent but cannot be sent, otherwise True.
        """
        return self._registered.is_set() and self._canaries.ask(asked, self._send)

    # --- the connection -------------------------------------------------------------------------------------------

    def _open_socket(
        self,
        address: str,
        on_message: Callable[[Frames], None],
        /,
        *,
        on_open: Callable[[], None],
        keys: PeerKeys | None,
        **_: object,
    ) -> Dealer:
        """Open a DEALER socket with bounded memory.

        The socket sends only on an established connection, so that no signal arrives late.
        """
        receive = partial(self._receive, on_message)
        return Dealer(address, receive, on_open=on_open, keys=keys, max_message_bytes=limits.MAX_ADMIN_MESSAGE_BYTES)

    def _disconnect(self, error: str) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(error)
        self._forget_registration(error)

    def _forget_registration(self, error: str) -> None:
        """Forget the registration and the unanswered messages of the old connection.

        An unanswered signal can then be sent again. Its operation id prevents a second execution.

        error: why the connection ended.
        """
        was = self._registered.is_set()
        self._registered.clear()
        self._reply = None
        self._error = error
        self._in_flight.clear()
        self._canaries.forget_sent()
        self._asked = self._answers = 0
        self._answered.set()
        if was:
            self._lost_at = self._clock()
            logger.info("coordinator lost", extra={"address": self._address, "error": error})
            self._on_change()

    def _send(self, frames: Frames) -> bool:
        return self._link is not None and self._registered.is_set() and self._link.send(frames)

    def _receive(self, on_message: Callable[[Frames], None], frames: Frames) -> None:
        """Count a message and pass it to `on_message`. If the coordinator sends too many messages, disconnect."""
        if self._link is None:
            return
        begin, messages, size = self._second
        now = self._clock()
        if now - begin >= 1.0:
            begin, messages, size = now, 0, 0
        self._second = begin, messages + 1, size + sum(map(len, frames))
        if self._knows_engines:
            self._known_at = now
        if messages < MAX_MESSAGES_A_SECOND and self._second[2] <= MAX_BYTES_A_SECOND:
            on_message(frames)
            return
        self._fault = f"more than {MAX_MESSAGES_A_SECOND} messages or {MAX_BYTES_A_SECOND} bytes in a second"
        logger.warning("coordinator disconnected", extra={"address": self._address, "error": self._fault})
        self._link.reopen(self._no_answer(), after_seconds=self._timings.flood_pause)
        self._error = self._no_answer()
        self._lost_at = None  # the coordinator is alive

    def _no_answer(self) -> str:
        fault = f"; what it sends cannot be read: {self._fault}" if self._fault else ""
        return f"no answer from {self._address}{fault}"

    # --- STATUS ---------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            await self._registered.wait()
            await self._poll_once()

    async def _poll_once(self) -> None:
        """Send one STATUS, then wait until the next poll is due. A signal ends the wait."""
        if not await self._ask(self._timings.answer_timeout):
            if self._registered.is_set() and self._link is not None:
                self._link.move(self._no_answer())
            await asyncio.sleep(self._timings.hello_retry)  # not in a loop, whatever the coordinator answers
            return
        now = self._clock()
        self._drop([key for key, waiting in self._in_flight.items() if waiting.until <= now])
        self._nudge.clear()
        busy = self._in_flight or self._expects_change
        pause = self._timings.status_interval_busy if busy else self._timings.status_interval
        try:
            async with asyncio.timeout(pause):
                await self._nudge.wait()
        except TimeoutError:
            return

    async def _ask(self, timeout: float) -> bool:
        """Send STATUS and wait for its answer. Return whether the answer has arrived.

        The coordinator answers requests in the order in which it receives them.
        """
        if not self._send(Status().to_frames()):
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

    def _drop(self, operation_ids: list[str]) -> None:
        """Stop waiting for the answers to the signals with these operation ids, so that they can be sent again."""
        for operation_id in operation_ids:
            del self._in_flight[operation_id]
        if operation_ids:
            self._on_change()

    # --- messages -------------------------------------------------------------------------------------------------

    def _on_hello_ack(self, _ack: HelloAck, _forgotten: bool) -> None:
        if not self._registered.is_set():
            self._asked = self._answers = 0
            self._registered.set()
            self._lost_at = None
            logger.info("coordinator reached", extra={"address": self._address})

    def _on_malformed(self, error: MalformedMessageError) -> None:
        if not self._fault:  # logged once, until a STATUS_REPLY can be read
            logger.warning("malformed answer dropped", extra={"address": self._address, "error": str(error)})
        self._fault = str(error)[:400]
        if not self._registered.is_set():
            self._error = self._no_answer()

    def _on_message(self, message: Message) -> None:
        match message:
            case StatusReply():
                self._on_status(message)
            case ControlAck():
                self._on_ack(message)
            case Final(uid=uid) | Error(uid=bytes() as uid):
                self._on_canary(message, uid)
            case Error():
                if message.code in UNSUPPORTED:
                    self._on_canary(message, None)
                logger.warning(
                    "coordinator rejected a message",
                    extra={
                        "address": self._address,
                        "code": message.code.name,
                        "error": printable(message.message, 400),
                    },
                )

    def _on_canary(self, answer: Final | Error, uid: bytes | None) -> None:
        if self._canaries.answered(answer, uid):
            self._on_change()

    def _on_status(self, reply: StatusReply) -> None:
        before = without_traffic(self.snapshot)
        self._reply = reply
        self._fault = ""
        if self._busy_at is None or reply.queued or any(engine.in_flight for engine in reply.engines):
            self._busy_at = self._clock()
        self._answers = min(self._answers + 1, self._asked)
        self._answered.set()
        # A signal that was sent before the STATUS and is not in the answer was lost.
        known = {operation.operation_id for operation in reply.operations}
        sent = self._in_flight.items()
        self._drop([key for key, waiting in sent if self._answers > waiting.asked and key not in known])
        if without_traffic(self.snapshot) != before:
            self._on_change()

    def _on_ack(self, ack: ControlAck) -> None:
        waiting = self._in_flight.pop(ack.operation_id, None)
        if waiting is not None and not ack.ok:
            self._rejections[ack.operation_id] = rejection_of(ack)
            while len(self._rejections) > REMEMBERED_REJECTIONS:
                self._rejections.popitem(last=False)
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
