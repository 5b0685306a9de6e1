"""Verbs and STATUS as awaitable calls: `ControlLink` for administrators, `ControlCalls` also for inference clients."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.messages import (
    Control,
    ControlAck,
    Error,
    Frames,
    Hello,
    Message,
    Status,
    StatusReply,
)
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError, PeerLink, coordinator_address
from megatron_runtime.transport.security import PeerKeys

ANSWER_MARGIN_SECONDS = 5.0
"""Added to the deadline of an operation before its sender gives up, so that the coordinator's answer comes first."""


class ControlRefusedError(Exception):
    """The coordinator rejected a control message, or the operation failed.

    code:  ErrorCode; ILLEGAL_SIGNAL, IN_PROGRESS, STALE_FENCE, ENGINES_MISSING, DEADLINE, ENGINE_FAILED …
    state: the coordinator's state, as text; empty if the answer does not have it.
    fence: with STALE_FENCE, the highest fence that the coordinator has received.
    ack:   the whole answer, with the outcome of each engine; None for an ERROR.
    """

    def __init__(self, code: int, state: str, message: str, fence: int | None, ack: ControlAck | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.state = state
        self.message = message
        self.fence = fence
        self.ack = ack


class ControlCalls:
    """Calls in progress on one connection. After a new registration an operation is sent again, safely, by its id."""

    def __init__(self, send: Callable[[Frames], bool], *, address: str) -> None:
        self._send = send
        self._address = address
        self._operations: dict[str, tuple[Control, asyncio.Future[ControlAck]]] = {}
        self._status: deque[asyncio.Future[StatusReply]] = deque()

    def control(self, control: Control) -> asyncio.Future[ControlAck]:
        """Send now. The future gives the confirmed CONTROL_ACK, or raises ControlRefusedError or
        CoordinatorUnreachableError; it may be ignored.
        """
        operation_id = control.operation_id or uuid.uuid4().hex
        control = control.model_copy(update={"operation_id": operation_id})
        seconds = control.timeout_seconds + ANSWER_MARGIN_SECONDS
        name = control.kind.name
        unanswered = f"no answer from {self._address} to {name} {operation_id} within {seconds:g} s"
        future: asyncio.Future[ControlAck] = _future(seconds, f"{unanswered}: STATUS reports its outcome")
        self._operations[operation_id] = (control, future)
        future.add_done_callback(lambda _: self._operations.pop(operation_id, None))
        if not self._send(control.to_frames()):
            text = f"{name} is larger than the coordinator takes: at most its max_message_bytes"
            future.set_exception(ControlRefusedError(int(ErrorCode.TOO_LARGE), "", text, None))
        return future

    def status(self, *, timeout_seconds: float) -> asyncio.Future[StatusReply]:
        message = f"no STATUS_REPLY from {self._address} within {timeout_seconds:g} s"
        future: asyncio.Future[StatusReply] = _future(timeout_seconds, message)
        self._status.append(future)
        self._send(Status().to_frames())
        return future

    def resend(self) -> None:
        """Send everything without an answer again, after a new registration."""
        for control, _ in list(self._operations.values()):
            self._send(control.to_frames())
        self._status = deque(future for future in self._status if not future.done())
        for _ in self._status:
            self._send(Status().to_frames())

    def handle(self, message: Message) -> bool:
        """Handle `message` if it answers a call, and return whether it does."""
        match message:
            case ControlAck():
                self._settle(message)
            case StatusReply():
                self._settle_status(message)
            case Error(uid=None, code=ErrorCode.WRONG_ROLE | ErrorCode.MALFORMED) if self._operations or self._status:
                self._reject_all(message)
            case _:
                return False
        return True

    def close(self) -> None:
        for _, future in list(self._operations.values()):
            future.cancel()
        for status in self._status:
            status.cancel()
        self._status.clear()

    def _settle(self, ack: ControlAck) -> None:
        _, future = self._operations.get(ack.operation_id, (None, None))
        if future is None or future.done():
            return
        if ack.ok:
            future.set_result(ack)
        else:
            code = ack.code if ack.code is not None else int(ErrorCode.ENGINE_FAILED)
            future.set_exception(ControlRefusedError(code, str(ack.state), ack.error or "failed", ack.fence, ack))

    def _settle_status(self, reply: StatusReply) -> None:
        while self._status:
            future = self._status.popleft()
            if not future.done():
                future.set_result(reply)
                return

    def _reject_all(self, error: Error) -> None:
        """An ERROR has no operation id: this connection may send no verbs at all."""
        refusal = ControlRefusedError(int(error.code), "", error.message, None)
        waiting: list[asyncio.Future[Any]] = [future for _, future in self._operations.values()]
        for future in [*waiting, *self._status]:
            if not future.done():
                future.set_exception(refusal)


def _future(seconds: float, message: str) -> asyncio.Future[Any]:
    """Return a future that raises CoordinatorUnreachableError after `seconds`. The caller may ignore it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def give_up() -> None:
        if not future.done():
            future.set_exception(CoordinatorUnreachableError(message))

    timer = loop.call_later(seconds, give_up)

    def done(_: asyncio.Future[Any]) -> None:
        timer.cancel()
        if not future.cancelled():
            future.exception()  # marks it as retrieved

    future.add_done_callback(done)
    return future


class ControlLink:
    """A connection to a coordinator's admin port (or to its only port), kept registered until close()."""

    def __init__(self, address: int | str, *, keys: PeerKeys | None = None, name: str | None = None) -> None:
        self._name = name or f"admin-{uuid.uuid4().hex[:12]}"
        self._link = PeerLink(
            coordinator_address(address),
            keys=keys,
            hello=lambda incarnation: Hello(role=Role.ADMIN, name=self._name, incarnation=incarnation),
            on_ack=lambda _ack, _forgotten: self._calls.resend(),
            on_message=lambda message: self._calls.handle(message),
        )
        self._calls = ControlCalls(self._link.send, address=self._link.address)

    @property
    def connected(self) -> bool:
        return self._link.registered

    @property
    def coordinator_incarnation(self) -> int:
        """A new number after each restart of the coordinator; 0 before the first answer."""
        return self._link.coordinator_incarnation

    async def start(self, *, connect_timeout_seconds: float = 10.0) -> None:
        """Connect. With a timeout of 0, return at once and connect in the background.

        Raises CoordinatorUnreachableError or HandshakeRefusedError. The link is closed then.
        """
        await self._link.start(connect_timeout_seconds=connect_timeout_seconds)

    def control(
        self,
        kind: Header,
        *,
        operation_id: str | None = None,
        fence: int | None = None,
        timeout_seconds: float = 60.0,
        expected_engines: int | None = None,
        engine: str | None = None,
        epoch: int | None = None,
        source: str | None = None,
    ) -> asyncio.Future[ControlAck]:
        """Send a control message now. The future gives its confirmed CONTROL_ACK.

        The future raises ControlRefusedError if the coordinator rejects the message or the operation fails, and
        CoordinatorUnreachableError without an answer: the outcome is then unknown, and STATUS reports it.
        """
        return self._calls.control(
            Control(
                kind=kind,
                operation_id=operation_id,
                fence=fence,
                timeout_seconds=timeout_seconds,
                expected_engines=expected_engines,
                engine=engine,
                epoch=epoch,
                source=source,
            )
        )

    def status(self, *, timeout_seconds: float = 5.0) -> asyncio.Future[StatusReply]:
        return self._calls.status(timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Cancel calls without an answer and disconnect. Idempotent."""
        self._calls.close()
        self._link.close("closed")
