"""What registered clients and administrators say, and what is done about it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from megatron_runtime.coordinator.core import plain
from megatron_runtime.coordinator.core.clients import ClientRegistry
from megatron_runtime.coordinator.core.counters import Counters
from megatron_runtime.coordinator.core.dispatching import RETRY_AFTER_SECONDS, Dispatcher
from megatron_runtime.coordinator.core.engines import EngineRegistry
from megatron_runtime.coordinator.core.records import Client
from megatron_runtime.coordinator.core.registration import Registration
from megatron_runtime.coordinator.core.verbs import Verbs
from megatron_runtime.coordinator.transport import SHARED_PORT, PeerId
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.messages import (
    Abort,
    Control,
    ControlAck,
    Disconnect,
    Error,
    Frames,
    Heartbeat,
    MalformedMessageError,
    Message,
    Plain,
    Status,
    StatusReply,
    Submit,
    tokens_to_bytes,
)

logger = logging.getLogger(__name__)

MAX_TEXT_CHARACTERS = 512 * 1024
"""Of a prompt that is sent as text: all other clients wait while it is tokenized."""

_ADMIN = Role.ADMIN  # see dispatching.py
_ADMIN_MESSAGES = frozenset({Heartbeat, Control, Status, Disconnect})


class Tokenizer(Protocol):
    """What is asked of a tokenizer; only plain clients and text prompts need one."""

    def tokenize(self, text: str) -> list[int]: ...


class Surroundings(Protocol):
    def reject(self, peer: PeerId, reason: str, code: ErrorCode, message: str) -> None:
        """Count a frame that is dropped, and say so to its sender."""

    def reject_role(self, peer: PeerId, message: Message) -> None: ...

    def lose_client(self, client: Client, reason: str) -> None: ...

    def catch_up(self, client: Client) -> None: ...

    def status(self) -> StatusReply: ...

    def shut_down(self) -> None: ...


Handler: TypeAlias = Callable[[Client, Any, Frames], None]


class ClientSide:
    """rejects_when_held: answer 503 to what comes while engines are paused or suspended, instead of holding it."""

    def __init__(
        self,
        *,
        clients: ClientRegistry,
        engines: EngineRegistry,
        dispatcher: Dispatcher,
        verbs: Verbs,
        registration: Registration,
        counters: Counters,
        tokenizer: Tokenizer | None,
        rejects_when_held: bool,
        surroundings: Surroundings,
    ) -> None:
        self.tokenizer = tokenizer
        self._clients = clients
        self._engines = engines
        self._dispatcher = dispatcher
        self._verbs = verbs
        self._registration = registration
        self._counters = counters
        self._rejects_when_held = rejects_when_held
        self._surroundings = surroundings
        self._handlers: dict[type[Any], Handler] = {
            Submit: self._submit,
            Abort: self._abort,
            Heartbeat: lambda *_: None,
            Control: self._control,
            Status: self._status,
            Disconnect: lambda client, message, _: surroundings.lose_client(client, message.reason or "it left"),
            Plain: self._plain,
        }

    def handle(self, client: Client, message: Message, frames: Frames) -> None:
        handler = self._handlers.get(type(message))
        if handler is None or (client.role is _ADMIN and not _is_for_admins(message)):
            self._surroundings.reject_role(client.peer, message)
        else:
            handler(client, message, frames)

    def answer_control(self, client: Client, ack: ControlAck, control: Control) -> None:
        """Tell who asked what became of a control message."""
        if client.plain:
            if not ack.ok:
                logger.warning("%s of a plain client refused: %s", control.kind.name, ack.error)
        elif not ack.ok and control.operation_id is None:
            code = ErrorCode(ack.code) if ack.code is not None else ErrorCode.ENGINE_FAILED
            self._clients.send(client, Error(code=code, message=ack.error or "failed").to_frames())
        else:
            self._clients.send(client, ack.to_frames())

    # --- requests -----------------------------------------------------------------------------------------------

    def _submit(self, client: Client, message: Submit, _: Frames) -> None:
        if message.meta.text:
            try:
                prompt = tokens_to_bytes(self._tokenize(message.prompt.decode("utf-8", "replace")))
            except MalformedMessageError as error:
                self._counters.refused += 1
                refusal = Error(code=ErrorCode.INVALID_REQUEST, message=str(error), uid=message.uid)
                self._clients.send(client, refusal.to_frames(), answers=message.uid)
                return
            message = message._replace(meta=message.meta._replace(text=False), prompt=prompt)
        self._admit(client, message)

    def _admit(self, client: Client, message: Submit, *, plain_id: int | None = None) -> None:
        rejects = self._rejects_when_held and self._verbs.holds
        if (rejects or self._engines.stopped) and self._dispatcher.journal.get(message.uid) is None:
            self._refuse(client, message.uid, plain_id)
            return
        self._dispatcher.submit(client, message, plain_id=plain_id)
        if client.blocked:
            self._surroundings.catch_up(client)

    def _refuse(self, client: Client, uid: bytes, plain_id: int | None) -> None:
        self._counters.refused += 1
        state = "stopped" if self._engines.stopped else self._verbs.state.value.lower()
        text = f"the engines are {state}: try again later"
        if plain_id is not None:
            self._clients.send(client, plain.failed_reply(plain_id, ErrorCode.UNAVAILABLE, text))
            return
        error = Error(code=ErrorCode.UNAVAILABLE, message=text, uid=uid, retry_after_seconds=RETRY_AFTER_SECONDS)
        self._clients.send(client, error.to_frames(), answers=uid)

    def _tokenize(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise MalformedMessageError("the prompt is text and this coordinator has no tokenizer: send token ids")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise MalformedMessageError(
                f"the prompt is a text of {len(text)} characters: at most {MAX_TEXT_CHARACTERS} are tokenized here, so "
                "send token ids"
            )
        try:
            return list(self.tokenizer.tokenize(text))
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            logger.warning("a prompt of %d characters cannot be tokenized: %r", len(text), error)
            raise MalformedMessageError(f"the prompt cannot be tokenized: {error}; send token ids") from error

    def _abort(self, client: Client, message: Abort, _: Frames) -> None:
        uid = client.plain_ids.get(message.id) if isinstance(message.id, int) else message.id
        entry = client.open.get(uid) if uid is not None else None
        if entry is not None:
            self._dispatcher.abort(entry)
            self._dispatcher.pump()

    # --- control ------------------------------------------------------------------------------------------------

    def _control(self, client: Client, message: Control, _: Frames) -> None:
        if client.peer[0] == Role.CLIENT:
            self._surroundings.reject_role(client.peer, message)
        elif client.peer[0] == Role.ADMIN and (message.operation_id is None or message.fence is None):
            text = f"{message.kind.name}: operation_id and fence are required on the admin port"
            self._surroundings.reject(client.peer, "malformed", ErrorCode.MALFORMED, text)
        else:
            self._verbs.handle(message, client)

    def _status(self, client: Client, _message: Status, _: Frames) -> None:
        self._clients.send(client, self._surroundings.status().to_frames())

    # --- the plain protocol -------------------------------------------------------------------------------------

    def _plain(self, client: Client, message: Plain, _: Frames) -> None:
        header = message.items[0] if message.items else None
        if header == Header.SHUTDOWN and client.peer[0] == SHARED_PORT:
            self._surroundings.shut_down()
        elif not client.plain or header not in (Header.CONNECT, Header.SUBMIT_REQUEST):
            self._surroundings.reject_role(client.peer, message)
        elif header == Header.CONNECT:
            self._registration.plain_client(client.peer)
        else:
            self._plain_submit(client, message.items)

    def _plain_submit(self, client: Client, items: list[Any]) -> None:
        try:
            request = plain.read_submit(items)
            prompt = self._tokenize(request.prompt) if isinstance(request.prompt, str) else request.prompt
        except MalformedMessageError as error:
            self._counters.rejected["malformed"] += 1
            number = items[1] if len(items) > 1 and isinstance(items[1], int) else None
            if number is not None:
                self._clients.send(client, plain.failed_reply(number, ErrorCode.INVALID_REQUEST, str(error)))
            return
        uid = random.SystemRandom().randbytes(limits.UID_BYTES)
        client.plain_ids[request.id] = uid
        body = Submit(uid, request.meta(), tokens_to_bytes(prompt), b"", plain.pack(request.params))
        self._admit(client, body, plain_id=request.id)
        if uid not in client.open:
            client.plain_ids.pop(request.id, None)


def _is_for_admins(message: Message) -> bool:
    """Control, and the canary of one engine; requests of users come by the client port."""
    if isinstance(message, Submit):
        return bool(message.meta.engine)
    return type(message) in _ADMIN_MESSAGES
