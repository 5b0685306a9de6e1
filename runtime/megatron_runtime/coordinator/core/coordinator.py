"""The coordinator: its parts put together, what arrives given to the right one, and its life from bind to close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from megatron_runtime.coordinator.core.client_side import ClientSide, Tokenizer
from megatron_runtime.coordinator.core.clients import OUTBOX_MESSAGES, ClientRegistry
from megatron_runtime.coordinator.core.clock import Clock
from megatron_runtime.coordinator.core.counters import Counters
from megatron_runtime.coordinator.core.dispatching import Dispatcher
from megatron_runtime.coordinator.core.engine_side import EngineSide
from megatron_runtime.coordinator.core.engines import EngineRegistry
from megatron_runtime.coordinator.core.records import Client, CrashEvidence, Engine
from megatron_runtime.coordinator.core.recovery import Recovery
from megatron_runtime.coordinator.core.registration import Registration
from megatron_runtime.coordinator.core.replies import Replies
from megatron_runtime.coordinator.core.routing import Router
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.core.verbs import Verbs
from megatron_runtime.coordinator.health import Health
from megatron_runtime.coordinator.key_rotation import KeyRotation
from megatron_runtime.coordinator.transport import (
    SHARED_PORT,
    OnGone,
    OnMessage,
    PeerId,
    Transport,
)
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.messages import (
    CONTROL,
    PLAIN,
    Error,
    Frames,
    Heartbeat,
    Hello,
    KeyReport,
    MalformedMessageError,
    Message,
    Plain,
    StatusReply,
    decode,
)

__all__ = ["Coordinator", "Tokenizer"]

logger = logging.getLogger(__name__)


class Coordinator:
    """Everything runs on one event loop; no handler blocks or awaits.

    on_bound:  called with the address of each role once the sockets are bound.
    clock:     the running loop's by default.
    transport: makes the sockets.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        tokenizer: Tokenizer | None = None,
        on_bound: Callable[[dict[Role, str]], None] | None = None,
        clock: Clock | None = None,
        transport: Callable[[CoordinatorSettings, OnMessage, OnGone], Transport] = Transport,
    ) -> None:
        self.settings = settings
        self.incarnation = random.SystemRandom().getrandbits(64)
        self.counters = Counters()
        self.engines = EngineRegistry()
        self.transport = transport(settings, self.receive, self.gone)
        self.ended = asyncio.Event()
        self.registered = asyncio.Event()
        """Set at each registration of an engine; who waits for one clears it."""
        self._idle = asyncio.Event()
        self._on_bound = on_bound
        self.clock: Clock = clock if clock is not None else asyncio.get_running_loop()
        self.send = self.transport.send
        self._build(tokenizer)

    def _build(self, tokenizer: Tokenizer | None) -> None:
        settings, clock = self.settings, self.clock
        self.clients = ClientRegistry(self.send, clock.time)
        self.router = Router(
            settings.routing_policy,
            alpha=settings.alpha,
            block_size_tokens=settings.block_size_tokens,
            deterministic=settings.deterministic,
            record=settings.schedule_output_path is not None,
        )
        self.verbs = Verbs(
            self.engines,
            send=self.send,
            answer=lambda client, ack, control: self.client_side.answer_control(client, ack, control),
            surroundings=self,
            state=CoordinatorState.RECOVERING if settings.timing.recovery > 0 else CoordinatorState.RUNNING,
            clock=clock,
        )
        self.dispatcher = Dispatcher(
            settings,
            engines=self.engines,
            clients=self.clients,
            router=self.router,
            counters=self.counters,
            send=self.send,
            clock=clock,
            may_dispatch=lambda: self.verbs.may_dispatch,
            on_lost=self._lose_unreachable,
            on_change=self._changed,
        )
        self.replies = Replies(
            self.dispatcher, self.clients, self.counters, detokenizer=getattr(tokenizer, "detokenize", None)
        )
        self.recovery = Recovery(self.verbs, settings.timing, clock=clock, on_known=self._recovered)
        self.registration = Registration(
            incarnation=self.incarnation,
            engines=self.engines,
            clients=self.clients,
            verbs=self.verbs,
            recovery=self.recovery,
            heartbeat_seconds=settings.timing.heartbeat,
            max_clients=settings.max_clients,
            now=clock.time,
            sender_key=self.transport.sender_key,
            surroundings=self,
        )
        self.health = Health(
            settings.timing, engines=self.engines, clients=self.clients, send=self.send, surroundings=self, clock=clock
        )
        self.key_rotation = KeyRotation(
            self.transport, self.engines, self.clients, clock=clock, every=settings.timing.key_check, surroundings=self
        )
        self.client_side = ClientSide(
            clients=self.clients,
            engines=self.engines,
            dispatcher=self.dispatcher,
            verbs=self.verbs,
            registration=self.registration,
            counters=self.counters,
            tokenizer=tokenizer,
            rejects_when_held=settings.pause_mode == "Reject",
            surroundings=self,
        )
        self.engine_side = EngineSide(
            dispatcher=self.dispatcher,
            replies=self.replies,
            router=self.router,
            verbs=self.verbs,
            registration=self.registration,
            counters=self.counters,
            send=self.send,
            clock=clock,
            heartbeat_seconds=settings.timing.heartbeat,
            surroundings=self,
        )

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind and serve. Raises BindError."""
        self.transport.start()
        self.recovery.start()
        self.health.start()
        if self.settings.keys_dir is not None:
            self.key_rotation.start()
        if self._on_bound is not None:
            self._on_bound(self.transport.addresses)

    def stop(self) -> None:
        """End at once. Open requests are their clients' to submit again. Idempotent."""
        self.ended.set()
        self.health.stop()
        self.recovery.stop()
        self.key_rotation.stop()
        for entry in self.dispatcher.journal:
            self.dispatcher.forget(entry)
        self.dispatcher.deadlines.stop()
        self.dispatcher.quarantine.stop()
        self.transport.stop()
        if self.settings.schedule_output_path is not None:
            self.router.write_decisions(self.settings.schedule_output_path)

    async def drain(self, *, seconds: float) -> None:
        """Return when nothing is open, or when the time is up."""
        self._idle.clear()
        self._changed()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def wait_for_engines(self, number: int) -> None:
        while len(self.engines.serving()) < number:
            self.registered.clear()
            await self.registered.wait()

    def check_integrity(self) -> None:
        """What must hold whenever the loop is idle."""
        self.dispatcher.check_integrity()
        self.clients.check_integrity()
        self.engines.check_integrity()

    # --- receiving ----------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, frames: Frames) -> None:
        """A message arrived. Nothing that anyone sends raises here."""
        try:
            self._handle(peer, decode(frames, plain=PLAIN if peer[0] == SHARED_PORT else CONTROL), frames)
        except MalformedMessageError as error:
            self.reject(peer, "malformed", ErrorCode.MALFORMED, str(error))

    def gone(self, peer: PeerId, by_peer: bool) -> None:
        """A connection ended. An engine of ours that lives comes back on another and registers anew.

        A plain one would not: it is kept until something for it cannot be sent, unless it runs a suspect alone, when
        nothing else is sent to it. A client gets its time to come back.

        by_peer: the other side ended it, as the system does when a process ends.
        """
        engine = self.engines.at(peer)
        if engine is None:
            return
        engine.was_cut = by_peer
        if not engine.plain or engine.reserved:
            self.lose_engine(engine, "its connection ended", CrashEvidence.CUT if by_peer else CrashEvidence.NONE)

    def _lose_unreachable(self, engine: Engine, reason: str) -> None:
        """A plain engine whose end had no consequence before."""
        self.lose_engine(engine, reason, CrashEvidence.CERTAIN if engine.was_cut else CrashEvidence.NONE)

    def _handle(self, peer: PeerId, message: Message, frames: Frames) -> None:
        if type(message) is Hello:
            self._hello(peer, message)
            return
        engine = self.engines.at(peer)
        if engine is not None:
            engine.heard = self.clock.time()
            self.engine_side.handle(engine, message, frames)
            return
        client = self.clients.at(peer)
        if client is not None:
            client.heard = self.clock.time()
            self.client_side.handle(client, message, frames)
            return
        self._stranger(peer, message, frames)

    def _hello(self, peer: PeerId, message: Hello) -> None:
        if self.transport.admits(peer, self.transport.sender_key(peer)):
            self.registration.hello(peer, message)
            self.registered.set()
        else:
            # Admitted once, with a key that has been revoked since.
            self.refuse(peer, ErrorCode.WRONG_ROLE, "the key of this connection is no longer admitted")
            self.transport.cut(peer)

    def _stranger(self, peer: PeerId, message: Message, frames: Frames) -> None:
        shared = peer[0] == SHARED_PORT
        if shared and isinstance(message, Plain) and not message.items and len(frames) == 1:
            self.registration.plain_engine(peer)
            self.registered.set()
        elif shared and isinstance(message, Plain) and message.items and message.items[0] == Header.CONNECT:
            self.registration.plain_client(peer)
        elif not self.engine_side.late(peer, message, frames):
            if shared or peer[0] == Role.ENGINE:
                self.recovery.heard_of(peer)
            self.reject(peer, "unknown_peer", ErrorCode.UNKNOWN_PEER, "say HELLO")

    def reject(self, peer: PeerId, reason: str, code: ErrorCode, message: str) -> None:
        """Count a frame that is dropped, and say so to its sender, unless it speaks the plain protocol."""
        self.counters.rejected[reason] += 1
        client = self.clients.at(peer)
        engine = self.engines.at(peer)
        if (client is None or not client.plain) and (engine is None or not engine.plain):
            self._send_error(peer, code, message)

    def reject_role(self, peer: PeerId, message: Message) -> None:
        self.reject(peer, "wrong_role", ErrorCode.WRONG_ROLE, f"{type(message).__name__} is not for your role")

    def refuse(self, peer: PeerId, code: ErrorCode, message: str) -> None:
        """Answer a HELLO with ERROR."""
        self.counters.rejected[code.name.lower()] += 1
        self._send_error(peer, code, message)

    def _send_error(self, peer: PeerId, code: ErrorCode, message: str) -> None:
        self.send(peer, Error(code=code, message=message[:1000], incarnation=self.incarnation).to_frames())

    # --- what the parts ask of each other -----------------------------------------------------------------------

    def status(self) -> StatusReply:
        now = self.clock.time()
        return StatusReply(
            incarnation=self.incarnation,
            state=self.verbs.state,
            epoch=self.verbs.epoch,
            fence=self.verbs.fence,
            queued=self.dispatcher.waiting,
            in_flight=self.engines.in_flight(),
            engines=[engine.describe(now) for engine in self.engines],
            operations=self.verbs.operations(),
            rejected_frames=self.rejected_frames,
            drained_all=self.verbs.drained_all,
            keys=self._key_report(),
            failed_requests=list(self.dispatcher.quarantine.failures) or None,
        )

    def _key_report(self) -> KeyReport | None:
        peers = (*self.engines, *self.clients)
        return self.transport.key_report({peer.key for peer in peers if peer.key})

    @property
    def rejected_frames(self) -> int:
        """Frames dropped and connections refused."""
        gatekeeper = self.transport.gatekeeper
        return self.counters.rejected_frames + (gatekeeper.refused if gatekeeper is not None else 0)

    def heartbeat_frames(self) -> Frames:
        return Heartbeat(incarnation=self.incarnation, state=self.verbs.state).to_frames()

    def relieve(self, engine: Engine) -> None:
        self.dispatcher.relieve(engine)

    def lose_engine(self, engine: Engine, reason: str, crash: CrashEvidence = CrashEvidence.NONE) -> None:
        """Remove an engine; what it had in flight goes elsewhere.

        crash: whether its end may be due to what it ran. An engine that ran nothing, that was to leave, or that was
               carrying out a verb may have ended for that reason instead: its end counts against no request.
        """
        if not self.engines.is_registered(engine):
            return
        logger.warning("engine %s removed: %s; %d requests in flight", engine.name, reason, len(engine.in_flight))
        self.counters.engines_lost += 1
        ran = engine.serving and engine.state is EngineState.RUNNING and not engine.draining
        self.engines.remove(engine)
        if crash is not CrashEvidence.NONE and ran and not self.verbs.waits_for(engine):
            self.dispatcher.quarantine.crashed(engine, certain=crash is CrashEvidence.CERTAIN)
        self.router.forget(engine)
        self.dispatcher.release(engine)
        self.verbs.engine_lost(engine, reason)
        self.dispatcher.pump()

    def evict(self, engine: Engine, reason: str) -> None:
        self.lose_engine(engine, reason)

    def engine_is_back(self, name: str, *, has_outlived: bool) -> None:
        self.dispatcher.quarantine.back(name, has_outlived=has_outlived)

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
        self.dispatcher.fail_all(self.dispatcher.journal, ErrorCode.UNAVAILABLE, "the engines were stopped")

    def weights_changed(self) -> None:
        self.router.forget_all()

    def shut_down(self) -> None:
        logger.info("told to shut down")
        self.ended.set()

    def pump(self) -> None:
        self.dispatcher.pump()

    def _changed(self) -> None:
        if self.verbs.current is not None:
            self.verbs.check_drained()
        if not self.dispatcher.journal:
            self._idle.set()

    def _recovered(self) -> None:
        self.weights_changed()
        for engine in self.engines:
            self.welcome(engine)
        self.dispatcher.pump()
