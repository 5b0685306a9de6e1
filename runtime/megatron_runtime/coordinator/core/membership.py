"""Membership of engines and clients: HELLO and its answer, recovery after a restart, heartbeats, removal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_runtime.coordinator.core.context import SHARED_PORT, Context, PeerId
from megatron_runtime.coordinator.core.dispatch import Dispatcher
from megatron_runtime.coordinator.core.records import Client, Counters, CrashEvidence, Engine
from megatron_runtime.coordinator.core.registries import OUTBOX_MESSAGES, ClientRegistry, EngineRegistry
from megatron_runtime.coordinator.core.replies import Replies
from megatron_runtime.coordinator.core.routing import Router
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.core.verbs import Change, Verbs
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import PROTOCOL_VERSION, ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import (
    PASSING_STATES,
    TRANSITIONS,
    CoordinatorState,
    EngineState,
)
from megatron_runtime.protocol.messages import (
    ControlCommit,
    Error,
    Frames,
    Heartbeat,
    Hello,
    HelloAck,
    KeyReport,
    pack,
)

logger = logging.getLogger(__name__)

HEAL_HEARTBEATS = 4
"""An engine may take this many heartbeats to show the state and epoch that it was sent before they are sent again."""

_RECOVERED_STATES: dict[EngineState, CoordinatorState] = {
    EngineState.RUNNING: CoordinatorState.RUNNING,
    EngineState.UNPAUSING: CoordinatorState.PAUSED,
    EngineState.PAUSING: CoordinatorState.PAUSED,
    EngineState.PAUSED: CoordinatorState.PAUSED,
    EngineState.RESUMING: CoordinatorState.SUSPENDED,
    EngineState.RESUMED: CoordinatorState.PAUSED,
    EngineState.SUSPENDING: CoordinatorState.SUSPENDED,
    EngineState.SUSPENDED: CoordinatorState.SUSPENDED,
}
"""The state that a restarted coordinator takes from an engine in this state."""
_DISTANCE = {CoordinatorState.RUNNING: 0, CoordinatorState.PAUSED: 1, CoordinatorState.SUSPENDED: 2}


@dataclass(frozen=True, slots=True)
class Access:
    """What the shell knows of keys; the defaults are those of a coordinator without encryption.

    key_of:   public key of a connection.
    admits:   whether a connection with this key may stay.
    report:   the keys in use for STATUS, given those of registered peers; None without encryption.
    rejected: number of connections whose keys were not admitted.
    """

    key_of: Callable[[PeerId], bytes] = lambda peer: b""
    admits: Callable[[PeerId, bytes], bool] = lambda peer, key: True
    report: Callable[[Iterable[bytes]], KeyReport | None] = lambda keys: None
    rejected: Callable[[], int] = lambda: 0


class Recovery:
    """A restarted coordinator takes state, epoch and fence from the engines that outlived the one before."""

    def __init__(self, context: Context, engines: EngineRegistry, verbs: Verbs, timing: Timing) -> None:
        self._context = context
        self._engines = engines
        self._verbs = verbs
        self._timing = timing
        self._adopted: CoordinatorState | None = None
        self._unregistered: set[PeerId] = set()
        self._settled = False

    @property
    def under_way(self) -> bool:
        return self._verbs.state is CoordinatorState.RECOVERING

    def start(self) -> None:
        if self.under_way:
            now, settle = self._context.now, min(self._timing.recovery_settle, self._timing.recovery)
            self._context.set_timer("recovery settles", now + settle, self.settle)
            self._context.set_timer("recovery ends", now + self._timing.recovery, self._end)

    def heard_of(self, peer: PeerId) -> None:
        """An engine that is not registered sent a message: recovery waits for it."""
        if self.under_way:
            self._unregistered.add(peer)

    def registered(self, engine: Engine, hello: Hello, *, survivor: bool) -> None:
        """An engine sent HELLO. `survivor`: it served before this coordinator knew it."""
        self._unregistered.discard(engine.peer)
        self._verbs.see_fence(hello.fence)
        state = _RECOVERED_STATES.get(hello.state) if hello.state is not None else None
        if survivor and state is not None:
            if self.under_way:
                if self._adopted is None or _DISTANCE[state] > _DISTANCE[self._adopted]:
                    self._adopted = state
                self._take_epoch(hello)
            elif not self._verbs.settled:
                self._adopt_late(state, hello)
        self._end_if_complete()

    def _adopt_late(self, state: CoordinatorState, hello: Hello) -> None:
        """No operation was begun since recovery ended.

        If no engine registered in time, the first survivor determines the state. The newest weights win, whichever
        engine came first: a confirmed update is kept.
        """
        if self._adopted is None:
            self._adopted = state
            self._verbs.state = state
        before = self._verbs.epoch
        self._take_epoch(hello)
        if self._verbs.epoch > before:
            self._announce()

    def _take_epoch(self, hello: Hello) -> None:
        """The highest epoch, and the weights that belong to it."""
        if hello.source is not None and hello.epoch >= self._verbs.epoch:
            self._verbs.see_source(hello.source, hello.revision)
        self._verbs.epoch = max(self._verbs.epoch, hello.epoch)

    def settle(self) -> None:
        """Every live engine was heard of by now."""
        self._settled = True
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._settled and not self._unregistered:
            self._end()

    def _end(self) -> None:
        if self.under_way:
            self._context.cancel_timer("recovery settles")
            self._context.cancel_timer("recovery ends")
            self._verbs.state = self._adopted or CoordinatorState.RUNNING
            logger.info("recovered: state %s, epoch %d", self._verbs.state.value, self._verbs.epoch)
            self._announce()

    def _announce(self) -> None:
        self._verbs.consequences += Change.WEIGHTS, Change.CONCLUDED
        for engine in self._engines:
            self._verbs.welcome(engine)


class Membership:
    """Registers engines and clients, watches their heartbeats, and removes them."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        context: Context,
        *,
        incarnation: int,
        engines: EngineRegistry,
        clients: ClientRegistry,
        router: Router,
        verbs: Verbs,
        dispatcher: Dispatcher,
        replies: Replies,
        counters: Counters,
        access: Access,
    ) -> None:
        self.recovery = Recovery(context, engines, verbs, settings.timing)
        self._timing = settings.timing
        self._max_clients = settings.max_clients
        self._context = context
        self._incarnation = incarnation
        self._engines = engines
        self._clients = clients
        self._router = router
        self._verbs = verbs
        self._dispatcher = dispatcher
        self._replies = replies
        self._counters = counters
        self._access = access
        self._due = 0.0

    def start(self) -> None:
        self.recovery.start()
        self._schedule()

    # --- HELLO --------------------------------------------------------------------------------------------------

    def hello(self, peer: PeerId, hello: Hello) -> None:
        if not self._access.admits(peer, self._access.key_of(peer)):
            # Admitted once, with a key that has been revoked since.
            self._reject(peer, ErrorCode.WRONG_ROLE, "the key of this connection is no longer admitted")
            self._context.close(peer)
        elif not PROTOCOL_VERSION - 1 <= hello.version <= PROTOCOL_VERSION + 1:
            message = f"version {hello.version}: this coordinator speaks {PROTOCOL_VERSION}"
            self._reject(peer, ErrorCode.VERSION, message)
        elif peer[0] not in (SHARED_PORT, hello.role):
            message = f"HELLO of a {hello.role.name} on the {Role(peer[0]).name} port"
            self._reject(peer, ErrorCode.WRONG_ROLE, message)
        elif not self._may_change(peer, hello):
            message = f"this connection is registered in another role than {hello.role.name}: open a new one"
            self._reject(peer, ErrorCode.WRONG_ROLE, message)
        elif hello.role is Role.ENGINE:
            self._hello_engine(peer, hello)
        else:
            self._hello_client(peer, hello)

    def _may_change(self, peer: PeerId, hello: Hello) -> bool:
        client = self._clients.at(peer)
        if hello.role is Role.ENGINE:
            return client is None
        return self._engines.at(peer) is None and (client is None or client.role is hello.role)

    def _reject(self, peer: PeerId, code: ErrorCode, message: str) -> None:
        self._counters.rejected[code.name.lower()] += 1
        self._context.send(peer, Error(code=code, message=message, incarnation=self._incarnation).to_frames())

    def _hello_engine(self, peer: PeerId, hello: Hello) -> None:
        engine = self._engines.named(hello.name)
        other = self._engines.at(peer)
        if other is not None and other is not engine:
            self.lose_engine(other, f"its connection now has the name {hello.name}")
        renewed = engine is not None and engine.peer == peer and engine.incarnation == hello.incarnation
        if engine is not None and not renewed:
            # A live process serves, on whichever connection; a process that starts has to load first.
            restarted = not hello.serving and engine.incarnation != hello.incarnation
            crash = CrashEvidence.CERTAIN if restarted else CrashEvidence.NONE
            self.lose_engine(engine, "it registered again", crash)
        if engine is None and not self._has_room_for_engine():
            message = f"{len(self._engines)} engines are registered already: at most {limits.MAX_ENGINES}"
            self._reject(peer, ErrorCode.UNAVAILABLE, message)
            return
        if engine is None or not renewed:
            self._dispatcher.quarantine.returned(hello.name, has_outlived=hello.serving)
            self._dispatcher.carry_out_decisions()
            key, now = self._access.key_of(peer), self._context.now
            engine = self._engines.add(hello.name, peer, incarnation=hello.incarnation, now=now, key=key)
            logger.info("engine %s registered (serving: %s)", hello.name, hello.serving)
        engine.heard = self._context.now
        engine.learn(hello)
        self.recovery.registered(engine, hello, survivor=hello.serving and not renewed)
        current = self._verbs.current
        if current is not None and engine not in current.signalled:
            engine.entered_during = current.operation_id
        self._verbs.welcome(engine)
        self._dispatcher.needs_pump = True

    def plain_engine(self, peer: PeerId) -> None:
        known = self._engines.at(peer)
        if known is not None:
            self.lose_engine(known, "it registered again", CrashEvidence.CERTAIN)
        name = peer[1].decode("utf-8", "replace") if peer[1][:1] != b"\0" else peer[1].hex()
        namesake = self._engines.named(name)
        if namesake is not None:
            self.lose_engine(namesake, "another engine took its name")
        if not self._has_room_for_engine():
            logger.warning("plain engine %s rejected: %d engines are registered already", name, len(self._engines))
            return
        engine = self._engines.add(name, peer, incarnation=0, now=self._context.now, plain=True)
        engine.serving = True
        engine.state = EngineState.RUNNING
        logger.info("plain engine %s registered", name)
        self._dispatcher.needs_pump = True

    def _has_room_for_engine(self) -> bool:
        return len(self._engines) < limits.MAX_ENGINES

    def _hello_client(self, peer: PeerId, hello: Hello) -> None:
        key = self._access.key_of(peer)
        client = self._clients.named(hello.role, hello.name)
        other = self._clients.at(peer)
        if other is not None and other is not client:
            self.lose_client(other, f"its connection now has the name {hello.name}")
        if client is None:
            if not self._has_room_for_client(peer):
                return
            client = self._clients.add(hello.name, peer, hello.role, incarnation=hello.incarnation, key=key)
        elif client.peer != peer or client.incarnation != hello.incarnation:
            self._clients.move(client, peer, incarnation=hello.incarnation, key=key)
        client.heard = self._context.now
        client.model = hello.model
        ack = HelloAck(
            incarnation=self._incarnation,
            state=self._verbs.state,
            epoch=self._verbs.epoch,
            fence=self._verbs.fence,
            route=client.route,
            heartbeat_seconds=self._timing.heartbeat,
        )
        self._context.send(peer, ack.to_frames())
        if client.blocked:
            self.catch_up(client)

    def plain_client(self, peer: PeerId) -> None:
        client = self._clients.at(peer)
        if client is None:
            if not self._has_room_for_client(peer):
                return
            client = self._clients.add(f"plain-{peer[1].hex()}", peer, Role.CLIENT, incarnation=0, plain=True)
        client.heard = self._context.now
        self._context.send(peer, [pack([int(Header.CONNECT_ACK)])])

    def _has_room_for_client(self, peer: PeerId) -> bool:
        """If there is none, `peer` is sent an error."""
        if len(self._clients) < self._max_clients:
            return True
        self._reject(peer, ErrorCode.UNAVAILABLE, f"{len(self._clients)} clients are registered already")
        return False

    # --- removal ------------------------------------------------------------------------------------------------

    def lose_engine(self, engine: Engine, reason: str, crash: CrashEvidence = CrashEvidence.NONE) -> None:
        """Remove an engine; its requests go elsewhere.

        crash: whether its requests may have ended it. An engine that ran nothing, that was to leave, or that was
               carrying out a verb may have ended for that reason instead: its end counts against no request.
        """
        if not self._engines.is_registered(engine):
            return
        logger.warning("engine %s removed: %s; %d requests in flight", engine.name, reason, len(engine.in_flight))
        self._counters.engines_lost += 1
        ran = engine.serving and engine.state is EngineState.RUNNING and not engine.draining
        self._engines.remove(engine)
        if crash is not CrashEvidence.NONE and ran and not self._verbs.waits_for(engine):
            self._dispatcher.quarantine.crashed(engine, certain=crash is CrashEvidence.CERTAIN)
            self._dispatcher.carry_out_decisions()
        self._router.forget(engine)
        self._dispatcher.release(engine)
        self._verbs.engine_lost(engine, reason)

    def connection_lost(self, peer: PeerId, *, by_peer: bool) -> None:
        """A connection ended. A live engine comes back on another and registers again.

        A plain one would not: it is kept until something for it cannot be sent, unless it runs a suspect alone, when
        nothing else is sent to it. A client gets its time to come back.

        by_peer: the other side ended it, as the system does when a process ends.
        """
        engine = self._engines.at(peer)
        if engine is None:
            return
        engine.was_cut = by_peer
        if not engine.plain or engine.reserved:
            self.lose_engine(engine, "its connection ended", CrashEvidence.CUT if by_peer else CrashEvidence.NONE)

    def lose_unreachable(self, engine: Engine) -> None:
        """Nothing can be sent to the engine. For a plain engine, this is how the end of its connection shows."""
        crash = CrashEvidence.CERTAIN if engine.was_cut else CrashEvidence.NONE
        self.lose_engine(engine, "its connection is gone", crash)

    def lose_client(self, client: Client, reason: str) -> None:
        logger.info("client %s removed: %s; %d requests aborted", client.name, reason, len(client.open))
        self._clients.remove(client)
        self._dispatcher.abort(client.open.values())

    def catch_up(self, client: Client) -> None:
        self._replies.catch_up(client)
        if len(client.outbox) > OUTBOX_MESSAGES:
            self.lose_client(client, f"{len(client.outbox)} answers wait for it")

    def keys_changed(self) -> None:
        """Remove the peers whose keys were revoked. A connection that is not registered is closed at its HELLO."""
        logger.info("the keys changed; connections with revoked keys are closed")
        reason = "its key was revoked"
        for engine in self._engines:
            if not self._access.admits(engine.peer, engine.key):
                self.lose_engine(engine, reason)
                self._context.close(engine.peer)
        for client in self._clients:
            if not self._access.admits(client.peer, client.key):
                self.lose_client(client, reason)
                self._context.close(client.peer)

    # --- heartbeats ---------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        self._due = self._context.now + self._timing.heartbeat
        self._context.set_timer("heartbeat", self._due, self._tick)

    def _tick(self) -> None:
        """Send heartbeats, remove silent peers, and send again to slow clients.

        A tick that comes late shows that this process was stalled: no peer is blamed for that time.
        """
        now = self._context.now
        late = now - self._due
        if late > self._timing.suspect / 2:
            logger.warning("this process was stalled for %.1f s", late)
            for peer in [*self._engines, *self._clients]:
                peer.heard += late
        self._schedule()
        heartbeat = Heartbeat(incarnation=self._incarnation, state=self._verbs.state).to_frames()
        for engine in self._engines:
            self._check_engine(engine, now, heartbeat)
        for client in self._clients:
            self._check_client(client, now, heartbeat)
        self._dispatcher.needs_pump = True

    def _check_engine(self, engine: Engine, now: float, heartbeat: Frames) -> None:
        engine.full = False
        if engine.plain:
            return
        silent = now - engine.heard
        engine.suspect = silent > self._timing.suspect
        if engine.suspect and engine.in_flight and now > engine.busy_until:
            self._dispatcher.relieve(engine)
        if silent > self._timing.dead and now > engine.busy_until + self._timing.dead:
            self.lose_engine(engine, f"silent for {silent:.1f} s")
        else:
            self._context.send(engine.peer, heartbeat)

    def _check_client(self, client: Client, now: float, heartbeat: Frames) -> None:
        silent = now - client.heard
        if not client.plain and silent > self._timing.client_dead:
            self.lose_client(client, f"silent for {silent:.1f} s")
        elif client.stuck_since is not None and now - client.stuck_since > self._timing.slow_client:
            self.lose_client(client, f"its buffer has been full for {self._timing.slow_client:g} s")
        elif client.plain and not client.reachable:
            self.lose_client(client, "its connection is gone")
        else:
            if client.blocked:
                self.catch_up(client)
            if not client.plain and client.reachable:
                self._context.send(client.peer, heartbeat)

    def engine_heartbeat(self, engine: Engine, message: Heartbeat) -> None:
        now = self._context.now
        engine.busy_until = now + message.busy_for if message.busy_for > 0 else 0.0
        before = engine.available()
        engine.suspect = False
        engine.relieved.clear()
        if engine.unsettled and not message.running:
            engine.unsettled = False
            if self._dispatcher.quarantine.active:
                self._dispatcher.needs_pump = True
        # A passing state was sent on the way to a commit that was sent already, or is decided here.
        if isinstance(message.state, EngineState) and message.state not in PASSING_STATES:
            engine.state = message.state
        if message.epoch is not None:
            engine.epoch = message.epoch
        engine.digest = message.digest
        if engine.available() and not before:
            self._dispatcher.needs_pump = True
        settled = self._verbs.current is None and not self.recovery.under_way
        if settled and message.busy_for <= 0 and now - engine.welcomed > HEAL_HEARTBEATS * self._timing.heartbeat:
            self._heal(engine, message)

    def _heal(self, engine: Engine, message: Heartbeat) -> None:
        """No operation is under way. An engine that shows another state, epoch or weights than it was sent a while ago
        missed a commit, or an answer to its HELLO: send it again.
        """
        owed, engine.owed = engine.owed, None
        if owed is not None and _misses(message, owed):
            engine.welcomed = self._context.now
            # The end of a STOP cannot be learned otherwise; another commit, if this one is lost too, by HELLO_ACK.
            engine.owed = owed if owed.signal is Header.STOP else None
            self._context.send(engine.peer, owed.to_frames())
        elif engine.serving and message.state is not None and not self._agrees(engine, message):
            self._verbs.welcome(engine)

    def _agrees(self, engine: Engine, message: Heartbeat) -> bool:
        verbs, source = self._verbs, self._verbs.source_for(engine)
        same_epoch = message.epoch is None or message.epoch == verbs.epoch
        return message.state == verbs.state and same_epoch and (source is None or source == message.source)


def _misses(message: Heartbeat, commit: ControlCommit) -> bool:
    """Whether an engine with this heartbeat has not received `commit`."""
    transition = TRANSITIONS.get(commit.signal)
    if transition is not None:
        return message.state == transition.passing
    return message.epoch is not None and message.epoch != commit.epoch
