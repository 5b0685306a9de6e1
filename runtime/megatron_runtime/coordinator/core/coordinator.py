"""The coordinator as a deterministic state machine. Events are its inputs, and effects are its outputs.

Events are the methods of CoordinatorCore whose first argument is the time, `now`. After each event, service.py performs
`context.effects` and empties the list. The core uses no socket, clock, event loop or random number generator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from megatron_runtime.coordinator.core import rejections
from megatron_runtime.coordinator.core.context import SHARED_PORT, Context
from megatron_runtime.coordinator.core.dispatch import Dispatcher
from megatron_runtime.coordinator.core.membership import Membership
from megatron_runtime.coordinator.core.records import Client, CrashEvidence, Engine, PeerId
from megatron_runtime.coordinator.core.replies import Replies
from megatron_runtime.coordinator.core.routing import EngineRouter
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.core.verbs import Verbs
from megatron_runtime.coordinator.environment import Access, PromptReader, PromptTokenizer
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.messages import (
    ENGINE_FAILED,
    Abort,
    CachedBlocks,
    Charge,
    Control,
    ControlAck,
    Disconnect,
    Dispatch,
    Error,
    Exported,
    Final,
    Heartbeat,
    Hello,
    Imported,
    MalformedMessageError,
    Message,
    Outgoing,
    PackedTokens,
    Partial,
    Prefill,
    ReleaseBlocks,
    Reserve,
    Status,
    StatusReply,
    Submit,
    Transfer,
    block_hashes_from_bytes,
    decode,
)
from megatron_runtime.requests.quotas import Quotas

logger = logging.getLogger(__name__)

_ADMIN = Role.ADMIN  # see context.py
_ADMIN_MESSAGES = frozenset({Heartbeat, Control, Status, Disconnect})
_TRAINER_VERBS = frozenset({Header.UPDATE_WEIGHTS, Header.SET_GENERATION_EPOCH})


Handler: TypeAlias = Callable[[Any, Any, Outgoing], None]


class CoordinatorCore:
    """The core of a coordinator.

    It owns the components of the coordinator, and passes each event to the component that handles it.

    now:      time of creation, in seconds on the clock that all events use.
    randbits: returns an integer with the given number of random bits.
    access:   checks keys for the core.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        now: float,
        randbits: Callable[[int], int],
        tokenizer: PromptTokenizer | None = None,
        access: Access | None = None,
    ) -> None:
        self.context = context = Context(settings, now=now, randbits=randbits)
        self.engines = context.engines
        self.clients = context.clients
        self.counters = context.counters
        self.router = EngineRouter(
            settings.routing_policy,
            alpha=settings.alpha,
            block_size_tokens=settings.block_size_tokens,
            deterministic=settings.deterministic,
            record=settings.schedule_output_path is not None,
        )
        self.prompts = PromptReader(tokenizer, needs_tokens=self.router.by_prefix)
        self.access = access if access is not None else Access()
        self.verbs = verbs = Verbs(
            context,
            self.router,
            evict=lambda engine, reason: self.membership.lose_engine(engine, reason),
            stopped=self._engines_stopped,
            cancel_transfers=lambda: self.dispatcher.cancel_transfers(),
            adapters_changed=lambda: self.membership.announce(),
        )
        self.dispatcher = dispatcher = Dispatcher(context, self.router, verbs, self.prompts)
        self.replies = Replies(context, dispatcher)
        # The first window is random, so that tokens reserved with another coordinator are not returned here.
        self.quotas = Quotas(first_window=context.randbits(32) << 28)
        self.membership = Membership(context, self.router, verbs, dispatcher, self.replies, self.access)
        self._of_clients = self._handlers_of_clients()
        self._of_engines = self._handlers_of_engines()

    # --- events -------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Start the recovery of state from the engines, and the heartbeats."""
        self.context.now = now
        self.membership.start()

    def received(self, now: float, peer: PeerId, sent: Outgoing) -> None:
        """Handle a message from a peer. A message from a plain peer has already been translated.

        This method raises no exception, whatever message a peer sends.
        """
        self.context.now = now
        try:
            message = decode(sent) if isinstance(sent, list) else sent
        except MalformedMessageError as error:
            self.context.reject(peer, ErrorCode.MALFORMED, str(error))
            return
        if type(message) is Hello:
            self.membership.hello(peer, message)
        elif (engine := self.engines.at(peer)) is not None:
            engine.heard = now
            handler = self._of_engines.get(type(message), self._misplaced)
            handler(engine, message, sent)
        elif (client := self.clients.at(peer)) is not None:
            client.heard = now
            is_for_role = client.role is not _ADMIN or self._is_for_admin(client, message)
            handler = self._of_clients.get(type(message), self._misplaced) if is_for_role else self._misplaced
            handler(client, message, sent)
        elif not (isinstance(message, Final) and self.replies.late_final(peer, message, sent)):
            if peer[0] in (SHARED_PORT, Role.ENGINE):
                self.membership.recovery.heard_of(peer)
            self.context.reject(peer, ErrorCode.UNKNOWN_PEER, "say HELLO")
        if self.context.needs_pump or self.verbs.current is not None:  # see _settle()
            self._settle()

    def may_be_silent(self, now: float, peer: PeerId) -> bool:
        """Return whether the peer is an engine in a busy period that it has announced, such as loading."""
        engine = self.engines.at(peer)
        return engine is not None and now <= engine.busy_until + self.context.settings.timing.dead

    def connection_lost(self, now: float, peer: PeerId, *, by_peer: bool) -> None:
        """Handle the end of a connection.

        by_peer: whether the other side closed the connection, as the operating system does when a process exits.
        """
        self.context.now = now
        self.membership.connection_lost(peer, by_peer=by_peer)
        self._settle()

    def has_room(self, now: float, peer: PeerId) -> None:
        """Continue to send to a peer whose connection accepts messages again.

        service.py calls this method if the connection was full, or if Context.report_room() has requested the call.
        """
        self.context.now = now
        self.membership.has_room(peer)
        self._settle()

    def not_sent(self, rejected: Sequence[tuple[PeerId, Outgoing, bool]]) -> None:
        """Handle messages that could not be sent, because their connections did not accept them.

        rejected: for each of these messages, in the order of the effects: the peer, the message, and whether the
            connection has ended. If it has not, service.py calls has_room() when it accepts messages again.
        """
        for peer, message, is_gone in reversed(rejected):
            engine, client = self.engines.at(peer), self.clients.at(peer)
            if client is not None:
                self.replies.not_sent(client, message, is_gone=is_gone)
            elif engine is not None and isinstance(message, Dispatch | Prefill | Transfer):
                engine.full = True
                self.dispatcher.not_dispatched(engine, message.dispatch_id)
        self._settle()

    def run_timers(self, now: float) -> None:
        """Run all timers that are due. Call this method no later than `context.next_timer`."""
        self.context.now = now
        while (callback := self.context.pop_due_timer()) is not None:
            callback()
            self._settle()

    def keys_changed(self, now: float) -> None:
        """Remove the peers whose keys `access` no longer accepts."""
        self.context.now = now
        self.membership.keys_changed()
        self._settle()

    def remove_engine(self, now: float, engine: Engine, reason: str) -> None:
        self.context.now = now
        self.membership.lose_engine(engine, reason)
        self._settle()

    def _settle(self) -> None:
        """Dispatch waiting requests and complete a DRAIN. Repeat both until neither has an effect."""
        while True:
            if self.context.needs_pump:
                self.dispatcher.pump()
            elif self.verbs.current is None or not self.verbs.check_drained():
                return

    def _engines_stopped(self) -> None:
        self.engines.stopped = True
        for entry in self.dispatcher.journal:
            self.dispatcher.fail(entry, rejections.unavailable("stopped"))

    # --- reports ------------------------------------------------------------------------------------------------

    def status(self) -> StatusReply:
        peers = (*self.engines, *self.clients)
        return StatusReply(
            incarnation=self.context.incarnation,
            state=self.verbs.state,
            epoch=self.verbs.epoch,
            fence=self.verbs.fence,
            queued=self.dispatcher.waiting,
            in_flight=self.engines.in_flight(),
            engines=[
                engine.describe(self.context.now, recomputes=self.dispatcher.transfers.recomputes(engine))
                for engine in self.engines
            ],
            operations=self.verbs.operations(),
            rejected_frames=self.counters.rejected.total() + self.access.rejected(),
            drained_all=self.verbs.drained_all,
            keys=self.access.report({peer.key for peer in peers if peer.key}),
            failed_requests=list(self.dispatcher.quarantine.failures) or None,
            adapters=self.verbs.adapter_report(),
            formats=next((client.formats for client in reversed(list(self.clients)) if client.formats), None),
        )

    # --- messages -----------------------------------------------------------------------------------------------

    def _misplaced(self, sender: Client | Engine, message: Message, _: Outgoing) -> None:
        self.context.reject(sender.peer, ErrorCode.WRONG_ROLE, f"{type(message).__name__} is not for your role")

    # --- messages of clients ------------------------------------------------------------------------------------

    def _handlers_of_clients(self) -> dict[type[Any], Handler]:
        return {
            Submit: self._submit,
            Abort: self._abort,
            Heartbeat: lambda *_: None,
            Reserve: self._reserve,
            ReleaseBlocks: lambda client, message, _: self.dispatcher.handoffs.release(client, message.dispatch_id),
            Charge: lambda _, message, __: self.quotas.charge(self.context.now, message),
            Control: self._control,
            Status: lambda client, *_: self.context.answer(client, self.status().to_frames()),
            Disconnect: lambda client, message, _: self.membership.lose_client(client, message.reason or "it left"),
        }

    def _submit(self, client: Client, message: Submit, _: Outgoing) -> None:
        if message.meta.text or (self.prompts.needs_tokens and type(message.prompt) is PackedTokens):
            try:
                meta, prompt = self.prompts.accept(message.meta, message.prompt)
            except MalformedMessageError as error:
                self.counters.error_answers += 1
                rejection = Error(code=ErrorCode.INVALID_REQUEST, message=str(error), uid=message.uid)
                self.context.answer(client, rejection.to_frames(), uid=message.uid)
                return
            message = message._replace(meta=meta, prompt=prompt)
        self.dispatcher.submit(client, message)
        if client.blocked:
            self.replies.catch_up(client)

    def _abort(self, client: Client, message: Abort, _: Outgoing) -> None:
        entry = client.open.get(message.id) if isinstance(message.id, bytes) else None
        if entry is not None:
            self.dispatcher.abort([entry])

    def _reserve(self, client: Client, message: Reserve, _: Outgoing) -> None:
        quota = self.quotas.reserve(self.context.now, message)
        if not quota.accepted:
            self.counters.over_limit += 1
        self.context.answer(client, quota.to_frames())

    def _is_for_admin(self, client: Client, message: Message) -> bool:
        """Return whether a client with the role of an administrator may send this message.

        A trainer may send only some of the verbs (_TRAINER_VERBS). An administrator may send a request only if the
        request names its engine, as a canary does. All other requests must use the client port.
        """
        if client.peer[0] == Role.ADMIN and self.access.is_trainer(client.key):
            is_verb = not isinstance(message, Control) or message.kind in _TRAINER_VERBS
            return is_verb and type(message) in _ADMIN_MESSAGES
        if isinstance(message, Submit):
            return bool(message.meta.engine)
        return type(message) in _ADMIN_MESSAGES

    def _control(self, client: Client, message: Control, sent: Outgoing) -> None:
        if client.peer[0] == Role.CLIENT:
            self._misplaced(client, message, sent)
        elif client.peer[0] == Role.ADMIN and self.access.is_trainer(client.key):
            # A trainer is not a leader, so its fence must not lock out the operator.
            self.verbs.handle(message.model_copy(update={"fence": None}), client)
        elif client.peer[0] == Role.ADMIN and (message.operation_id is None or message.fence is None):
            text = f"{message.kind.name}: operation_id and fence are required on the admin port"
            self.context.reject(client.peer, ErrorCode.MALFORMED, text)
        else:
            self.verbs.handle(message, client)

    # --- messages of engines ------------------------------------------------------------------------------------

    def _handlers_of_engines(self) -> dict[type[Any], Handler]:
        return {
            Partial: self.replies.partial,
            Final: self.replies.final,
            CachedBlocks: self._cached_blocks,
            Exported: lambda engine, message, _: self.dispatcher.exported(engine, message),
            Imported: lambda engine, message, _: self.dispatcher.imported(engine, message),
            Heartbeat: lambda engine, message, _: self.membership.engine_heartbeat(engine, message),
            ControlAck: self._acknowledged,
            Disconnect: self._engine_leaves,
            Error: lambda engine, message, _: logger.warning("engine %s: %s", engine.name, message.message),
        }

    def _engine_leaves(self, engine: Engine, message: Disconnect, _: Outgoing) -> None:
        crash = CrashEvidence.CERTAIN if message.reason == ENGINE_FAILED else CrashEvidence.NONE
        self.membership.lose_engine(engine, message.reason or "it left", crash)

    def _acknowledged(self, engine: Engine, ack: ControlAck, _: Outgoing) -> None:
        if not self.verbs.acknowledged(engine, ack):
            self.counters.stale += 1

    def _cached_blocks(self, engine: Engine, message: CachedBlocks, _: Outgoing) -> None:
        if message.cleared:
            self.router.blocks.forget(engine)
        evicted = block_hashes_from_bytes(message.evicted)
        self.counters.evicted_blocks += len(evicted)
        self.router.blocks.evict(engine, evicted)
        self.router.stored(engine, block_hashes_from_bytes(message.stored))
