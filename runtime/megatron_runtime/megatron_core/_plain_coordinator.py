"""The socket of an InferenceClient, which can connect to a coordinator of Megatron-Core.

A coordinator of Megatron-Core supports only Megatron-Core's messages (docs/reference/protocol.md). For such a
coordinator, the socket translates messages, so that the client always sends and receives the messages of this project.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from megatron_runtime.client.pending import TOKEN_BYTES
from megatron_runtime.megatron_core._event_socket import EventSocket
from megatron_runtime.protocol.headers import CONTROLS, PROTOCOL_VERSION, ErrorCode, Header
from megatron_runtime.protocol.lifecycle import TRANSITIONS, CoordinatorState, EngineState
from megatron_runtime.protocol.messages import (
    PARAMETERS,
    PLAIN,
    Abort,
    Control,
    ControlAck,
    Disconnect,
    Error,
    Final,
    Frames,
    Heartbeat,
    Hello,
    HelloAck,
    MalformedMessageError,
    Message,
    Partial,
    PartialEntry,
    Plain,
    Status,
    Submit,
    decode,
    pack,
    token_list_from_bytes,
    tokens_to_bytes,
    unpack,
)

logger = logging.getLogger(__name__)

SIGNALS = CONTROLS - {Header.UPDATE_WEIGHTS, Header.SET_ADAPTERS, Header.DRAIN}
"""The control messages that a coordinator of Megatron-Core supports."""
INCARNATION = 1
"""Incarnation that is reported to the client for a coordinator of Megatron-Core, which sends no incarnation."""
_NEW = {"new_log_probs": "log_probs", "new_top_n_logprobs": "top_n_logprobs"}


class GreetingSocket:
    """A libzmq DEALER socket that sends CONNECT first, and detects the coordinator's protocol from the answer.

    If the answer has a protocol version, this project's coordinator sent it, and all later messages pass unchanged,
    starting with HELLO. If the answer has no version, Megatron-Core's coordinator sent it, and all later messages are
    translated.

    When the connection to a coordinator of Megatron-Core ends, all open requests are lost and get an error. Before the
    next HELLO, the socket sends CONNECT again.

    receive: called with the frames of each message, in this project's protocol.
    on_lost: called with the reason when the connection to a coordinator of Megatron-Core has ended.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], receive: Callable[[Frames], object], on_lost: Callable[[str], object]
    ) -> None:
        self._receive = receive
        self._on_lost = on_lost
        self._zmq_socket = socket
        self._monitor: EventSocket | None = None
        self._hello: Frames = []
        """The HELLO to send after the coordinator has answered CONNECT."""
        self._acknowledgement: Frames | None = None
        """The answer to CONNECT from a coordinator of this project."""
        self._translator: _Translator | None = None
        self._socket = EventSocket(socket, self._on_message)

    def send(self, message: Frames) -> bool:
        """Send a message, and return whether it was accepted.

        Before the coordinator has answered CONNECT, the only valid message is HELLO. This method then sends CONNECT,
        and HELLO follows when the coordinator has answered.
        """
        if self._translator is not None:
            return self._translator.send(message)
        if self._acknowledgement is not None:
            return self._socket.send(message)
        self._hello = message
        return self._socket.send([pack([int(Header.CONNECT), PROTOCOL_VERSION])])

    def close(self, *, linger_ms: int = 0) -> None:
        if self._monitor is not None:
            self._zmq_socket.disable_monitor()
            self._monitor.close()
        self._socket.close(linger_ms=linger_ms)

    def _on_message(self, frames: Frames) -> None:
        if self._translator is not None:
            self._translator.on_message(frames)
        elif self._acknowledgement is None:
            self._on_greeting(frames)
        elif frames != self._acknowledgement:  # late answer to one of several CONNECT messages
            self._receive(frames)

    def _on_greeting(self, frames: Frames) -> None:
        try:
            message = decode(frames, plain=PLAIN)
        except MalformedMessageError:
            self._receive(frames)  # the receiver reports the malformed message
            return
        match message:
            case Plain(items=[Header.CONNECT_ACK]):
                self._translator = _Translator(self._socket, self._receive)
                if self._monitor is None:
                    monitor = self._zmq_socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                    self._monitor = EventSocket(monitor, lambda _: self._lose())
                self._translator.send(self._hello)
            case Plain(items=[Header.CONNECT_ACK, *_]) | Error(code=ErrorCode.UNKNOWN_PEER):
                # An engine port answers CONNECT with this error. It then rejects HELLO, and gives the reason.
                self._acknowledgement = [] if isinstance(message, Error) else frames
                self._socket.send(self._hello)
            case _:
                self._receive(frames)

    def _lose(self) -> None:
        translator, self._translator = self._translator, None
        if translator is not None:
            translator.fail_requests()
            self._on_lost("the connection to the coordinator of Megatron-Core has ended")


@dataclass(slots=True)
class _Request:
    """An open request at a coordinator of Megatron-Core. tokens: number of tokens received in partial answers."""

    uid: bytes
    tokens: int = 0


class _Translator:
    """Converts this project's messages to Megatron-Core's messages, and converts the answers back.

    The translator itself answers HELLO, HEARTBEAT, STATUS and control messages, because a coordinator of Megatron-Core
    does not answer them.
    """

    def __init__(self, socket: EventSocket, receive: Callable[[Frames], object]) -> None:
        self._socket = socket
        self._receive = receive
        self._requests: dict[int, _Request] = {}
        self._numbers: dict[bytes, int] = {}
        self._next_number = 0
        self._state = CoordinatorState.RUNNING
        """The state that results from this client's signals. A coordinator of Megatron-Core reports no state."""
        self._streams = False
        """Whether a partial answer has arrived. Releases without streaming do not support aborts: an unknown message
        makes them exit.
        """

    def send(self, frames: Frames) -> bool:
        match decode(frames, plain=PLAIN):
            case Submit() as submit:
                return self._submit(submit)
            case Abort(id=bytes(uid)) if uid in self._numbers:
                number = self._numbers[uid]
                self._forget(number)
                return not self._streams or self._send(Header.ABORT_REQUEST, number)
            case Control() as control:
                return self._control(control)
            case Plain(items=[Header.SHUTDOWN]):
                return self._send(Header.SHUTDOWN)
            case Hello():
                self._answer(HelloAck(incarnation=INCARNATION, state=CoordinatorState.RUNNING))
            case Heartbeat():
                self._answer(Heartbeat(incarnation=INCARNATION))
            case Status():
                text = "a coordinator of Megatron-Core has no STATUS: use a coordinator of this project"
                self._answer(Error(code=ErrorCode.UNSUPPORTED, message=text))
            case Abort() | Disconnect():
                pass
            case message:
                logger.debug("a coordinator of Megatron-Core has no %s", type(message).__name__)
        return True

    def fail_requests(self) -> None:
        """Answer every open request with an error.

        Call this when the coordinator has exited, because its requests are lost.
        """
        text = (
            "the coordinator of Megatron-Core has ended, with the requests that it had: start it, and send them again"
        )
        for number, request in list(self._requests.items()):
            self._forget(number)
            self._answer(Error(code=ErrorCode.UNAVAILABLE, message=text, uid=request.uid))

    def on_message(self, frames: Frames) -> None:
        try:
            message = decode(frames, plain=PLAIN)
        except MalformedMessageError as error:
            logger.warning("dropped a frame from the coordinator of Megatron-Core: %s", error)
            return
        match message:
            case Plain(items=[Header.ENGINE_REPLY | Header.ENGINE_REPLY_PARTIAL as kind, int(number), content, *_]):
                request = self._requests.get(number)
                if request is None:
                    return
                try:
                    answer: Message
                    if kind == Header.ENGINE_REPLY:
                        answer = _final(request, content)
                    else:
                        self._streams = True
                        answer = _partial(request, content)
                except MalformedMessageError as error:
                    text = f"unreadable answer: {error}"
                    answer = Error(code=ErrorCode.ENGINE_FAILED, message=text, uid=request.uid)
                if not isinstance(answer, Partial):
                    self._forget(number)
                self._answer(answer)
            case _:
                logger.debug("ignored a message of a coordinator of Megatron-Core: %.120r", message)

    def _submit(self, submit: Submit) -> bool:
        number, self._next_number = self._next_number, self._next_number + 1
        self._requests[number], self._numbers[submit.uid] = _Request(submit.uid), number
        # The coordinator or an engine tokenizes a text prompt.
        prompt = submit.prompt.decode() if submit.meta.text else token_list_from_bytes(submit.prompt)
        return self._send(Header.SUBMIT_REQUEST, number, prompt, unpack(submit.params, PARAMETERS))

    def _control(self, control: Control) -> bool:
        """Send a signal, and acknowledge it immediately, because the coordinator does not confirm signals.

        A coordinator of Megatron-Core ignores a signal that its state does not allow.
        """
        operation_id = control.operation_id or "-"
        if control.kind not in SIGNALS:
            text = f"{control.kind.name}: a coordinator of Megatron-Core has no such message"
            state = EngineState(self._state)
            code = int(ErrorCode.UNSUPPORTED)
            self._answer(ControlAck(operation_id=operation_id, ok=False, state=state, code=code, error=text))
            return True
        is_sent = self._send(control.kind, *(() if control.epoch is None else (control.epoch,)))
        transition = TRANSITIONS.get(control.kind)
        state = EngineState(self._state)
        if transition is not None and self._state in transition.legal_from:
            state = transition.lands_in
            self._state = CoordinatorState.STOPPING if control.kind is Header.STOP else transition.coordinator_after
        self._answer(ControlAck(operation_id=operation_id, ok=True, state=state))
        return is_sent

    def _send(self, header: Header, *items: Any) -> bool:
        return self._socket.send([pack([int(header), *items])])

    def _answer(self, message: Any) -> None:
        self._receive(message.to_frames())

    def _forget(self, number: int) -> None:
        del self._numbers[self._requests.pop(number).uid]


def _final(request: _Request, reply: Any) -> Final:
    """Return the FINAL message for the reply in an ENGINE_REPLY. Raises MalformedMessageError.

    reply: map of a request, or a map whose key "requests" has the maps of the segments of one request, in order.
    """
    parts = reply.get("requests", [reply]) if isinstance(reply, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise MalformedMessageError("ENGINE_REPLY: want a map with the fields of a request")
    tokens = [token for part in parts for token in part.get("generated_tokens") or ()]
    body = {key: value for key, value in parts[-1].items() if value is not None and key != "generated_tokens"}
    texts = [part.get("generated_text") for part in parts]
    if all(isinstance(text, str) for text in texts):
        body["generated_text"] = "".join(texts)
    body["generated_length"] = len(tokens)
    return Final(0, request.uid, _tokens(tokens), pack(body))


def _partial(request: _Request, frame: Any) -> Partial:
    """Return the PARTIAL message for `frame`, a map in an ENGINE_REPLY_PARTIAL. Raises MalformedMessageError."""
    if not isinstance(frame, dict):
        raise MalformedMessageError("ENGINE_REPLY_PARTIAL: want a map with new_tokens")
    tokens = _tokens(frame.get("new_tokens") or [])
    details = {_NEW.get(key, key): value for key, value in frame.items() if key not in ("request_id", "new_tokens")}
    count = len(tokens) // TOKEN_BYTES
    entry = PartialEntry(request.uid, 0, request.tokens, count)
    request.tokens += count
    return Partial(0, [entry], tokens, pack({request.uid: details}) if details else b"")


def _tokens(tokens: Any) -> bytes:
    try:
        return tokens_to_bytes(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessageError(f"tokens of an answer cannot be read: {error}") from error
