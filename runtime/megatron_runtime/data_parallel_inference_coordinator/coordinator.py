"""The coordinator: one table from message to handler, and the parts that the handlers use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any, Protocol

from megatron_runtime.data_parallel_inference_coordinator import plain
from megatron_runtime.data_parallel_inference_coordinator.clients import OUTBOX_MESSAGES, Client, ClientRegistry
from megatron_runtime.data_parallel_inference_coordinator.counters import Counters
from megatron_runtime.data_parallel_inference_coordinator.dispatching import RETRY_AFTER_SECONDS, Dispatcher
from megatron_runtime.data_parallel_inference_coordinator.engines import Engine, EngineRegistry
from megatron_runtime.data_parallel_inference_coordinator.health import Health
from megatron_runtime.data_parallel_inference_coordinator.recovery import Recovery
from megatron_runtime.data_parallel_inference_coordinator.registration import Registration
from megatron_runtime.data_parallel_inference_coordinator.replies import Replies
from megatron_runtime.data_parallel_inference_coordinator.routing import Router
from megatron_runtime.data_parallel_inference_coordinator.settings import CoordinatorSettings
from megatron_runtime.data_parallel_inference_coordinator.transport import SHARED_PORT, PeerId, Transport
from megatron_runtime.data_parallel_inference_coordinator.verbs import Verbs
from megatron_runtime.wire import limits
from megatron_runtime.wire.headers import ErrorCode, Header, Role
from megatron_runtime.wire.messages import (
    Abort,
    Control,
    ControlAck,
    Disconnect,
    Error,
    Final,
    Frames,
    Heartbeat,
    Hello,
    MalformedMessageError,
    Message,
    Partial,
    Plain,
    Status,
    StatusReply,
    Submit,
    decode,
    tokens_to_bytes,
)
from megatron_runtime.wire.states import PASSING_STATES, CoordinatorState, EngineState

logger = logging.getLogger(__name__)

_BENIGN_PLAIN = frozenset({Header.CONNECT, Header.SUBMIT_REQUEST, Header.SHUTDOWN})


class Tokenizer(Protocol):
    """What is asked of a tokenizer; only plain clients and text prompts need one."""

    def tokenize(self, text: str) -> list[int]: ...


class Coordinator:
    """Everything runs on one event loop; no handler blocks or awaits.

    on_bound: called with the address of each role once the sockets are bound.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        tokenizer: Tokenizer | None = None,
        on_bound: Callable[[dict[Role, str]], None] | None = None,
    ) -> None:
        self.settings = settings
        self.incarnation = random.SystemRandom().getrandbits(64)
        self.counters = Counters()
        self.engines = EngineRegistry()
        self.transport = Transport(settings, self._receive)
        self.ended = asyncio.Event()
        self._idle = asyncio.Event()
        self.registered = asyncio.Event()
        """Set at each registration of an engine; who waits for one clears it."""
        self._tokenizer = tokenizer
        self._on_bound = on_bound
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self.send = self.transport.send
        self.clients = ClientRegistry(self.send, loop.time)
        self.router = Router(
            settings.routing_policy,
            alpha=settings.alpha,
            block_size_tokens=settings.block_size_tokens,
            record=settings.schedule_output_path is not None,
        )
        state = CoordinatorState.RECOVERING if settings.timing.recovery > 0 else CoordinatorState.RUNNING
        self.verbs = Verbs(self.engines, send=self.send, answer=self._answer_control, surroundings=self, state=state)
        self.dispatcher = Dispatcher(
            settings,
            engines=self.engines,
            clients=self.clients,
            router=self.router,
            counters=self.counters,
            send=self.send,
            may_dispatch=lambda: self.verbs.may_dispatch,
            on_lost=self.lose_engine,
            on_change=self._changed,
        )
        self.replies = Replies(self.dispatcher, self.clients, self.counters)
        self.recovery = Recovery(self.verbs, settings.timing, on_end=self._recovered)
        self.registration = Registration(
            incarnation=self.incarnation,
            engines=self.engines,
            clients=self.clients,
            verbs=self.verbs,
            recovery=self.recovery,
            heartbeat_seconds=settings.timing.heartbeat,
            max_clients=settings.max_clients,
            now=loop.time,
            surroundings=self,
        )
        self.health = Health(
            settings.timing, engines=self.engines, clients=self.clients, send=self.send, surroundings=self
        )
        self._engine_handlers: dict[type[Any], Callable[[Engine, Any, Frames], None]] = {
            Partial: self.replies.partial,
            Final: self.replies.final,
            Heartbeat: self._engine_heartbeat,
            ControlAck: self._engine_ack,
            Disconnect: lambda engine, message, _: self.lose_engine(engine, message.reason or "it left"),
            Error: lambda engine, message, _: logger.warning("engine %s: %s", engine.name, message.message),
            Plain: self._plain_engine,
        }
        self._client_handlers: dict[type[Any], Callable[[Client, Any, Frames], None]] = {
            Submit: self._submit,
            Abort: self._abort,
            Heartbeat: lambda *_: None,
            Control: self._control,
            Status: self._status,
            Disconnect: lambda client, message, _: self.lose_client(client, message.reason or "it left"),
            Plain: self._plain_client,
        }
        self._admin_messages = frozenset({Heartbeat, Control, Status, Disconnect})

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind and serve. Raises BindError."""
        self.transport.start()
        self.recovery.start()
        self.health.start()
        if self._on_bound is not None:
            self._on_bound(self.transport.addresses)

    def stop(self) -> None:
        """End at once. Open requests are their clients' to submit again. Idempotent."""
        self.ended.set()
        self.health.stop()
        self.recovery.stop()
        for entry in self.dispatcher.journal:
            self.dispatcher.forget(entry)
        self.transport.stop()
        if self.settings.schedule_output_path is not None:
            self.router.write_decisions(self.settings.schedule_output_path)

    async def drain(self, *, seconds: float) -> None:
        """Return when nothing is open, or when the time is up."""
        self._idle.clear()
        self._changed()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    def _changed(self) -> None:
        self.verbs.check_drained()
        if not len(self.dispatcher.journal):
            self._idle.set()

    async def wait_for_engines(self, number: int) -> None:
        while len(self.engines.serving()) < number:
            self.registered.clear()
            await self.registered.wait()

    # --- receiving ----------------------------------------------------------------------------------------------

    def _receive(self, peer: PeerId, frames: Frames) -> None:
        if peer[0] == Role.CLIENT and sum(map(len, frames)) > limits.MAX_CLIENT_MESSAGE_BYTES:
            self._reject(peer, "too_large", ErrorCode.TOO_LARGE, f"at most {limits.MAX_CLIENT_MESSAGE_BYTES} bytes")
            return
        try:
            message = decode(frames)
        except MalformedMessageError as error:
            self._reject(peer, "malformed", ErrorCode.MALFORMED, str(error))
            return
        if isinstance(message, Hello):
            self.registration.hello(peer, message)
            self.registered.set()
            return
        engine = self.engines.at(peer)
        if engine is not None:
            engine.heard = self._now()
            self._handle(peer, self._engine_handlers, engine, message, frames)
            return
        client = self.clients.at(peer)
        if client is not None:
            client.heard = self._now()
            if client.role is Role.ADMIN and type(message) not in self._admin_messages:
                self._reject_role(peer, message)
            else:
                self._handle(peer, self._client_handlers, client, message, frames)
            return
        self._stranger(peer, message, frames)

    def _handle(self, peer: PeerId, handlers: dict[type[Any], Any], sender: Any, message: Message, raw: Frames) -> None:
        handler = handlers.get(type(message))
        if handler is None:
            self._reject_role(peer, message)
            return
        try:
            handler(sender, message, raw)
        except MalformedMessageError as error:
            self._reject(peer, "malformed", ErrorCode.MALFORMED, str(error))

    def _stranger(self, peer: PeerId, message: Message, frames: Frames) -> None:
        shared = peer[0] == SHARED_PORT
        if shared and isinstance(message, Plain) and not message.items and len(frames) == 1:
            self.registration.plain_engine(peer)
            self.registered.set()
        elif shared and isinstance(message, Plain) and message.items and message.items[0] == Header.CONNECT:
            self.registration.plain_client(peer)
        else:
            if shared or peer[0] == Role.ENGINE:
                self.recovery.heard_of(peer)
            self._reject(peer, "unknown_peer", ErrorCode.UNKNOWN_PEER, "say HELLO")

    def _reject(self, peer: PeerId, reason: str, code: ErrorCode, message: str) -> None:
        self.counters.rejected[reason] += 1
        client = self.clients.at(peer)
        engine = self.engines.at(peer)
        if (client is None or not client.plain) and (engine is None or not engine.plain):
            self._send_error(peer, code, message)

    def _reject_role(self, peer: PeerId, message: Message) -> None:
        self._reject(peer, "wrong_role", ErrorCode.WRONG_ROLE, f"{type(message).__name__} is not for your role")

    def refuse(self, peer: PeerId, code: ErrorCode, message: str) -> None:
        self.counters.rejected[code.name.lower()] += 1
        self._send_error(peer, code, message)

    def _send_error(self, peer: PeerId, code: ErrorCode, message: str) -> None:
        self.send(peer, Error(code=code, message=message[:1000], incarnation=self.incarnation).to_frames())

    # --- from clients -------------------------------------------------------------------------------------------

    def _submit(self, client: Client, message: Submit, _: Frames) -> None:
        prompt = message.prompt
        if message.meta.text:
            try:
                prompt = tokens_to_bytes(self._tokenize(prompt.decode("utf-8", "replace")))
            except MalformedMessageError as error:
                self.counters.refused += 1
                refusal = Error(code=ErrorCode.INVALID_REQUEST, message=str(error), uid=message.uid)
                self.clients.send(client, refusal.to_frames(), answers=message.uid)
                return
        self._admit(client, message.uid, message, prompt=prompt)

    def _admit(
        self, client: Client, uid: bytes, message: Submit, *, prompt: bytes, plain_id: int | None = None
    ) -> None:
        rejects = self.settings.pause_mode == "Reject" and self.verbs.holds
        if (rejects or self.engines.stopped) and self.dispatcher.journal.get(uid) is None:
            self._refuse_submit(client, uid, plain_id)
            return
        self.dispatcher.submit(
            client,
            uid,
            message.meta,
            prompt=prompt,
            generated=message.generated,
            params=message.params,
            plain_id=plain_id,
        )
        if client.blocked:
            self.catch_up(client)

    def _refuse_submit(self, client: Client, uid: bytes, plain_id: int | None) -> None:
        self.counters.refused += 1
        state = "stopped" if self.engines.stopped else self.verbs.state.value.lower()
        text = f"the engines are {state}: try again later"
        if plain_id is not None:
            self.clients.send(client, plain.failed_reply(plain_id, ErrorCode.UNAVAILABLE, text))
            return
        error = Error(code=ErrorCode.UNAVAILABLE, message=text, uid=uid, retry_after_seconds=RETRY_AFTER_SECONDS)
        self.clients.send(client, error.to_frames(), answers=uid)

    def _tokenize(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise MalformedMessageError("the prompt is text and this coordinator has no tokenizer: send token ids")
        return list(self._tokenizer.tokenize(text))

    def _abort(self, client: Client, message: Abort, _: Frames) -> None:
        uid = client.plain_ids.get(message.id) if isinstance(message.id, int) else message.id
        entry = client.open.get(uid) if uid is not None else None
        if entry is not None:
            self.dispatcher.abort(entry)
            self.dispatcher.pump()

    def _control(self, client: Client, message: Control, _: Frames) -> None:
        if client.peer[0] == Role.CLIENT:
            self._reject_role(client.peer, message)
        elif client.peer[0] == Role.ADMIN and (message.operation_id is None or message.fence is None):
            text = f"{message.kind.name}: operation_id and fence are required on the admin port"
            self._reject(client.peer, "malformed", ErrorCode.MALFORMED, text)
        else:
            self.verbs.handle(message, client)

    def _answer_control(self, client: Client, ack: ControlAck, control: Control) -> None:
        if client.plain:
            if not ack.ok:
                logger.warning("%s of a plain client refused: %s", control.kind.name, ack.error)
        elif not ack.ok and control.operation_id is None:
            code = ErrorCode(ack.code) if ack.code is not None else ErrorCode.ENGINE_FAILED
            self.clients.send(client, Error(code=code, message=ack.error or "failed").to_frames())
        else:
            self.clients.send(client, ack.to_frames())

    def _status(self, client: Client, _message: Status, _: Frames) -> None:
        self.clients.send(client, self.status().to_frames())

    def status(self) -> StatusReply:
        now = self._now()
        return StatusReply(
            incarnation=self.incarnation,
            state=self.verbs.state,
            epoch=self.verbs.epoch,
            fence=self.verbs.fence,
            queued=len(self.dispatcher.queue),
            in_flight=self.engines.in_flight(),
            engines=[engine.describe(now) for engine in self.engines],
            operations=self.verbs.operations(),
            rejected_frames=self.counters.rejected_frames,
        )

    def _plain_client(self, client: Client, message: Plain, _: Frames) -> None:
        header = message.items[0] if message.items else None
        if not client.plain or header not in _BENIGN_PLAIN:
            self._reject_role(client.peer, message)
        elif header == Header.CONNECT:
            self.registration.plain_client(client.peer)
        elif header == Header.SHUTDOWN:
            logger.info("told to shut down")
            self.ended.set()
        else:
            self._plain_submit(client, message.items)

    def _plain_submit(self, client: Client, items: list[Any]) -> None:
        try:
            request = plain.read_submit(items)
            prompt = self._tokenize(request.prompt) if isinstance(request.prompt, str) else request.prompt
        except MalformedMessageError as error:
            self.counters.rejected["malformed"] += 1
            number = items[1] if len(items) > 1 and isinstance(items[1], int) else None
            if number is not None:
                self.clients.send(client, plain.failed_reply(number, ErrorCode.INVALID_REQUEST, str(error)))
            return
        uid = random.SystemRandom().randbytes(limits.UID_BYTES)
        client.plain_ids[request.id] = uid
        body = Submit(uid, request.meta(), tokens_to_bytes(prompt), b"", plain.pack(request.params))
        self._admit(client, uid, body, prompt=body.prompt, plain_id=request.id)
        if uid not in client.open:
            client.plain_ids.pop(request.id, None)

    # --- from engines -------------------------------------------------------------------------------------------

    def _engine_heartbeat(self, engine: Engine, message: Heartbeat, _: Frames) -> None:
        engine.busy_until = self._now() + message.busy_for if message.busy_for > 0 else 0.0
        # A passing state was sent on the way to a commit that is out already, or is decided here.
        if isinstance(message.state, EngineState) and message.state not in PASSING_STATES:
            engine.state = message.state
        if engine.suspect:
            engine.suspect = False
            self.dispatcher.pump()

    def _engine_ack(self, engine: Engine, ack: ControlAck, _: Frames) -> None:
        if not self.verbs.acknowledged(engine, ack):
            self.counters.stale += 1

    def _plain_engine(self, engine: Engine, message: Plain, frames: Frames) -> None:
        if not message.items:
            if engine.plain and len(frames) == 1:
                self.registration.plain_engine(engine.peer)
            else:
                self._reject_role(engine.peer, message)
            return
        if not engine.plain or message.items[0] not in (Header.ENGINE_REPLY, Header.ENGINE_REPLY_PARTIAL):
            self._reject_role(engine.peer, message)
            return
        for output in plain.read_outputs(message.items):
            entry = engine.in_flight.get(output.dispatch_id)
            if entry is None:
                self.counters.stale += 1
            elif output.reply is None:
                partial = plain.as_partial(output, entry.uid, route=entry.client.route, offset=entry.tokens_so_far)
                self.replies.partial(engine, partial, partial.to_frames())
            else:
                final = plain.as_final(
                    output, entry.uid, generated_before=bytes(entry.generated[: entry.dispatched_bytes])
                )
                self.replies.final(engine, final, final.to_frames())

    # --- what the parts ask of each other -----------------------------------------------------------------------

    def heartbeat_frames(self) -> Frames:
        return Heartbeat(incarnation=self.incarnation, state=self.verbs.state).to_frames()

    def lose_engine(self, engine: Engine, reason: str) -> None:
        """Remove an engine; what it had in flight goes elsewhere."""
        if not self.engines.is_registered(engine):
            return
        logger.warning("engine %s removed: %s; %d requests in flight", engine.name, reason, len(engine.in_flight))
        self.counters.engines_lost += 1
        self.engines.remove(engine)
        self.router.forget(engine)
        self.dispatcher.release(engine)
        self.verbs.engine_lost(engine, reason)
        self.dispatcher.pump()

    evict = lose_engine

    def lose_client(self, client: Client, reason: str) -> None:
        logger.info("client %s removed: %s; %d requests aborted", client.name, reason, len(client.open))
        self.clients.remove(client)
        self.dispatcher.abort_all(client)

    def catch_up(self, client: Client) -> None:
        self.replies.catch_up(client)
        if len(client.outbox) > OUTBOX_MESSAGES:
            self.lose_client(client, f"{len(client.outbox)} answers wait for it")

    def welcome(self, engine: Engine) -> None:
        self.registration.welcome(engine)

    def stop_requests(self) -> None:
        self.engines.stopped = True
        message = "the engines were stopped"
        self.dispatcher.fail_all(self.dispatcher.journal, ErrorCode.UNAVAILABLE, message)

    def pump(self) -> None:
        self.dispatcher.pump()

    def _recovered(self) -> None:
        for engine in self.engines:
            self.welcome(engine)
        self.dispatcher.pump()
