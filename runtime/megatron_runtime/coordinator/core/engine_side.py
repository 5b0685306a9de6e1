"""What registered engines say, and what is done about it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from megatron_runtime.coordinator.core import plain
from megatron_runtime.coordinator.core.clock import Clock
from megatron_runtime.coordinator.core.counters import Counters
from megatron_runtime.coordinator.core.dispatching import Dispatcher
from megatron_runtime.coordinator.core.records import CrashEvidence, Engine
from megatron_runtime.coordinator.core.registration import Registration
from megatron_runtime.coordinator.core.replies import Replies
from megatron_runtime.coordinator.core.routing import Router
from megatron_runtime.coordinator.core.verbs import Verbs
from megatron_runtime.coordinator.transport import PeerId
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.lifecycle import PASSING_STATES, TRANSITIONS, CoordinatorState, EngineState
from megatron_runtime.protocol.messages import (
    ENGINE_FAILED,
    ControlAck,
    ControlCommit,
    Disconnect,
    Error,
    EvictedBlocks,
    Final,
    Frames,
    Heartbeat,
    Message,
    Partial,
    Plain,
    block_hashes_from_bytes,
)

logger = logging.getLogger(__name__)

HEAL_HEARTBEATS = 4
"""So many heartbeats an engine may take to show the state and epoch it was told before it is told again."""


class Surroundings(Protocol):
    def reject_role(self, peer: PeerId, message: Message) -> None: ...

    def lose_engine(self, engine: Engine, reason: str, crash: CrashEvidence = CrashEvidence.NONE) -> None: ...


Handler: TypeAlias = Callable[[Engine, Any, Frames], None]


class EngineSide:
    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        replies: Replies,
        router: Router,
        verbs: Verbs,
        registration: Registration,
        counters: Counters,
        send: Callable[[PeerId, Frames], object],
        clock: Clock,
        heartbeat_seconds: float,
        surroundings: Surroundings,
    ) -> None:
        self._heal_seconds = HEAL_HEARTBEATS * heartbeat_seconds
        self._dispatcher = dispatcher
        self._replies = replies
        self._router = router
        self._verbs = verbs
        self._registration = registration
        self._counters = counters
        self._send = send
        self._clock = clock
        self._surroundings = surroundings
        self._handlers: dict[type[Any], Handler] = {
            Partial: replies.partial,
            Final: replies.final,
            EvictedBlocks: self._evicted,
            Heartbeat: self._heartbeat,
            ControlAck: self._ack,
            Disconnect: self._leave,
            Error: lambda engine, message, _: logger.warning("engine %s: %s", engine.name, message.message),
            Plain: self._plain,
        }

    def handle(self, engine: Engine, message: Message, frames: Frames) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            self._surroundings.reject_role(engine.peer, message)
        else:
            handler(engine, message, frames)

    def late(self, peer: PeerId, message: Message, frames: Frames) -> bool:
        """Something from an engine that was removed. True when it was the answer to an open request."""
        if isinstance(message, Final):
            return self._replies.late_final(peer, message, frames)
        if isinstance(message, Plain) and message.items and message.items[0] == Header.ENGINE_REPLY:
            return any([self._late_output(peer, output) for output in plain.read_outputs(message.items)])
        return False

    def _late_output(self, peer: PeerId, output: plain.PlainOutput) -> bool:
        former = self._dispatcher.former(output.dispatch_id, peer)
        if former is None:
            return False
        before = bytes(former.entry.generated[: former.generated_bytes])
        final = plain.as_final(output, former.entry.uid, generated_before=before)
        return self._replies.late_final(peer, final, final.to_frames())

    def _leave(self, engine: Engine, message: Disconnect, _: Frames) -> None:
        failed = message.reason == ENGINE_FAILED
        crash = CrashEvidence.CERTAIN if failed else CrashEvidence.NONE
        self._surroundings.lose_engine(engine, message.reason or "it left", crash)

    def _heartbeat(self, engine: Engine, message: Heartbeat, _: Frames) -> None:
        now = self._clock.time()
        engine.busy_until = now + message.busy_for if message.busy_for > 0 else 0.0
        before = engine.available()
        engine.suspect = False
        engine.relieved.clear()
        if engine.unsettled and not message.running:
            engine.unsettled = False
            if self._dispatcher.quarantine.active:
                self._dispatcher.pump()
        # A passing state was sent on the way to a commit that is out already, or is decided here.
        if isinstance(message.state, EngineState) and message.state not in PASSING_STATES:
            engine.state = message.state
        if message.epoch is not None:
            engine.epoch = message.epoch
        engine.digest = message.digest
        if engine.available() and not before:
            self._dispatcher.pump()
        settled = self._verbs.current is None and self._verbs.state is not CoordinatorState.RECOVERING
        if settled and message.busy_for <= 0 and now - engine.told > self._heal_seconds:
            self._heal(engine, message, now)

    def _heal(self, engine: Engine, message: Heartbeat, now: float) -> None:
        """Nothing is under way. An engine that shows another state, epoch or weights than it was told a while ago has
        missed a commit, or an answer to its HELLO: tell it again.
        """
        owed, engine.owed = engine.owed, None
        if owed is not None and self._misses(message, owed):
            engine.told = now
            # The end of a STOP cannot be learnt otherwise; another commit, if this one is lost too, by HELLO_ACK.
            engine.owed = owed if owed.signal is Header.STOP else None
            self._send(engine.peer, owed.to_frames())
        elif engine.serving and message.state is not None and not self._is_where_all_are(engine, message):
            self._registration.welcome(engine)

    def _is_where_all_are(self, engine: Engine, message: Heartbeat) -> bool:
        verbs, source = self._verbs, self._verbs.source_for(engine)
        same_epoch = message.epoch is None or message.epoch == verbs.epoch
        return message.state == verbs.state and same_epoch and (source is None or source == message.source)

    @staticmethod
    def _misses(message: Heartbeat, commit: ControlCommit) -> bool:
        """Whether an engine that says this has not seen `commit`."""
        transition = TRANSITIONS.get(commit.signal)
        if transition is not None:
            return message.state == transition.passing
        return message.epoch is not None and message.epoch != commit.epoch

    def _ack(self, engine: Engine, ack: ControlAck, _: Frames) -> None:
        if not self._verbs.acknowledged(engine, ack):
            self._counters.stale += 1

    def _evicted(self, engine: Engine, message: EvictedBlocks, _: Frames) -> None:
        if message.cleared:
            self._router.forget(engine)
        hashes = block_hashes_from_bytes(message.hashes)
        self._counters.evicted_blocks += len(hashes)
        self._router.evicted(engine, hashes)

    def _plain(self, engine: Engine, message: Plain, frames: Frames) -> None:
        if not message.items:
            if engine.plain and len(frames) == 1:
                self._registration.plain_engine(engine.peer)
            else:
                self._surroundings.reject_role(engine.peer, message)
            return
        if not engine.plain or message.items[0] not in (Header.ENGINE_REPLY, Header.ENGINE_REPLY_PARTIAL):
            self._surroundings.reject_role(engine.peer, message)
            return
        for output in plain.read_outputs(message.items):
            entry = engine.in_flight.get(output.dispatch_id)
            if entry is None:
                self._counters.stale += 1
            elif output.reply is None:
                partial = plain.as_partial(output, entry.uid, route=entry.client.route, offset=entry.tokens_so_far)
                self._replies.partial(engine, partial, partial.to_frames())
            else:
                before = bytes(entry.generated[: entry.dispatched_bytes])
                final = plain.as_final(output, entry.uid, generated_before=before)
                self._replies.final(engine, final, final.to_frames())
