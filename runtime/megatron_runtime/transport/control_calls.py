"""Control verbs and STATUS requests as awaitable calls on a registered connection."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import Control, ControlAck, Error, Frames, Message, Status, StatusReply
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError

ANSWER_MARGIN_SECONDS = 5.0
"""Time that a caller waits beyond the deadline of its operation, so that the coordinator's answer arrives first."""


class ControlRejectedError(Exception):
    """The coordinator rejected a control message, or the operation failed.

    code:  ErrorCode; ILLEGAL_SIGNAL, IN_PROGRESS, STALE_FENCE, ENGINES_MISSING, DEADLINE, ENGINE_FAILED …
    state: state of the coordinator, as text; empty if the answer does not contain it.
    fence: with STALE_FENCE, the highest fence that the coordinator has received.
    ack:   the CONTROL_ACK, with the result of each engine; None if the coordinator answered with ERROR.
    """

    def __init__(self, code: int, message: str, ack: ControlAck | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.state = "" if ack is None else str(ack.state)
        self.fence = None if ack is None else ack.fence
        self.ack = ack


class ControlCalls:
    """The unanswered calls of one connection.

    After each new registration, the calls are sent again. Their operation ids prevent a second execution.
    """

    def __init__(self, send: Callable[[Frames], bool], *, address: str) -> None:
        self._send = send
        self._address = address
        self._operations: dict[str, tuple[Control, asyncio.Future[ControlAck]]] = {}
        self._status: deque[asyncio.Future[StatusReply]] = deque()

    def control(self, control: Control) -> asyncio.Future[ControlAck]:
        """Send a verb, and return a future for the CONTROL_ACK that confirms the verb.

        The future raises ControlRejectedError or CoordinatorUnreachableError. The caller may ignore the future.
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
            text = f"{name} is larger than the coordinator's max_message_bytes"
            future.set_exception(ControlRejectedError(int(ErrorCode.TOO_LARGE), text))
        return future

    def status(self, *, timeout_seconds: float) -> asyncio.Future[StatusReply]:
        message = f"no STATUS_REPLY from {self._address} within {timeout_seconds:g} s"
        future: asyncio.Future[StatusReply] = _future(timeout_seconds, message)
        self._status.append(future)
        self._send(Status().to_frames())
        return future

    def resend(self) -> None:
        """Send all unanswered calls again, after a new registration."""
        for control, _ in list(self._operations.values()):
            self._send(control.to_frames())
        self._status = deque(future for future in self._status if not future.done())
        for _ in self._status:
            self._send(Status().to_frames())

    def handle(self, message: Message) -> bool:
        """Pass `message` to the call that it answers. Return whether `message` answers a call."""
        match message:
            case ControlAck(operation_id=operation_id):
                _, future = self._operations.get(operation_id, (None, None))
                if future is not None and not future.done():
                    _settle(future, message)
            case StatusReply():
                while self._status:
                    status = self._status.popleft()
                    if not status.done():
                        status.set_result(message)
                        break
            case Error(uid=None, code=ErrorCode.UNSUPPORTED) if self._status:
                _reject(self._status, message)
            case Error(uid=None, code=ErrorCode.WRONG_ROLE | ErrorCode.MALFORMED) if self._operations or self._status:
                # An error without an operation id rejects all calls: this connection is not allowed to send verbs.
                _reject(self._futures(), message)
            case _:
                return False
        return True

    def close(self) -> None:
        for future in self._futures():
            future.cancel()
        self._status.clear()

    def _futures(self) -> list[asyncio.Future[Any]]:
        return [*(future for _, future in self._operations.values()), *self._status]


def _reject(futures: Iterable[asyncio.Future[Any]], message: Error) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(ControlRejectedError(int(message.code), message.message))


def _settle(future: asyncio.Future[ControlAck], ack: ControlAck) -> None:
    if ack.ok:
        future.set_result(ack)
    else:
        code = int(ErrorCode.ENGINE_FAILED) if ack.code is None else ack.code
        future.set_exception(ControlRejectedError(code, ack.error or "failed", ack))


def _future(seconds: float, message: str) -> asyncio.Future[Any]:
    """Return a future that raises CoordinatorUnreachableError after `seconds`. The caller may ignore the future."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def give_up() -> None:
        if not future.done():
            future.set_exception(CoordinatorUnreachableError(message))

    timer = loop.call_later(seconds, give_up)

    def done(_: asyncio.Future[Any]) -> None:
        timer.cancel()
        if not future.cancelled():
            future.exception()  # mark the exception as retrieved

    future.add_done_callback(done)
    return future
