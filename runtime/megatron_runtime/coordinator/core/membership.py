"""Membership of engines and clients: HELLO and its answer, recovery after a restart, heartbeats, and removal."""

from __future__ import annotations

import logging

from megatron_runtime.coordinator.core.context import SHARED_PORT, Context
from megatron_runtime.coordinator.core.dispatch import Dispatcher
from megatron_runtime.coordinator.core.records import Client, CrashEvidence, Engine, PeerId
from megatron_runtime.coordinator.core.replies import Replies
from megatron_runtime.coordinator.core.routing import EngineRouter
from megatron_runtime.coordinator.core.verbs import Verbs
from megatron_runtime.coordinator.environment import Access
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import PROTOCOL_VERSION, ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import PASSING_STATES, TRANSITIONS, CoordinatorState, EngineState
from megatron_runtime.protocol.messages import (
    ORDERLY_GOODBYES,
    ControlCommit,
    Frames,
    Heartbeat,
    Hello,
)

logger = logging.getLogger(__name__)

OUTBOX_MESSAGES = 100_000
"""Maximum number of answers kept for a client that does not read. A client that exceeds this limit is removed."""
UNREAD_SHARE = 0.25
"""Maximum memory for the unread answers of all clients, as a fraction of the journal's memory. If it is exceeded, the
client with the most unread answers is removed.
"""
HEAL_HEARTBEATS = 4
"""Number of heartbeats after which a state and epoch are sent again if the engine's heartbeats do not show them."""

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
"""The state that a restarted coordinator adopts from an engine, by the engine's state."""
_DISTANCE = {CoordinatorState.RUNNING: 0, CoordinatorState.PAUSED: 1, CoordinatorState.SUSPENDED: 2}


class Recovery:
    """The recovery of state, epoch, fence and adapters after a restart of the coordinator.

    The data come from the engines that still run after the restart.
    """

    def __init__(self, context: Context, router: EngineRouter, verbs: Verbs) -> None:
        self._context = context
        self._router = router
        self._verbs = verbs
        self._adopted: CoordinatorState | None = None
        self._unregistered: set[PeerId] = set()
        self._settled = False

    @property
    def under_way(self) -> bool:
        return self._verbs.state is CoordinatorState.RECOVERING

    def start(self) -> None:
        if self.under_way:
            now, timing = self._context.now, self._context.settings.timing
            settle = min(timing.recovery_settle, timing.recovery)
            self._context.set_timer("recovery settles", now + settle, self.settle)
            self._context.set_timer("recovery ends", now + timing.recovery, self._end)

    def heard_of(self, peer: PeerId) -> None:
        """Make recovery wait for an unregistered engine that has sent a message."""
        if self.under_way:
            self._unregistered.add(peer)

    def registered(self, engine: Engine, hello: Hello, *, survivor: bool) -> None:
        """Handle the HELLO of an engine. survivor: whether the engine was serving before it registered."""
        self._unregistered.discard(engine.peer)
        self._verbs.fence = max(self._verbs.fence, hello.fence)
        state = _RECOVERED_STATES.get(hello.state) if hello.state is not None else None
        if survivor and state is not None:
            if self.under_way:
                if self._adopted is None or _DISTANCE[state] > _DISTANCE[self._adopted]:
                    self._adopted = state
                self._take_epoch(hello)
                self._take_adapters(hello)
            elif not self._verbs.settled:
                self._adopt_late(state, hello)
        self._end_if_complete()

    def _adopt_late(self, state: CoordinatorState, hello: Hello) -> None:
        """Adopt state, weights and adapters of an engine that registers between recovery and the first operation.

        If no engine registered during recovery, the first engine that was serving determines the state. The coordinator
        adopts the weights with the highest epoch, so that a confirmed update is kept.
        """
        if self._adopted is None:
            self._adopted = state
            self._verbs.state = state
        before = self._verbs.epoch, self._verbs.adapters
        self._take_epoch(hello)
        self._take_adapters(hello)
        if (self._verbs.epoch, self._verbs.adapters) != before:
            self._announce()

    def _take_epoch(self, hello: Hello) -> None:
        """Adopt the engine's epoch, and the weights of this epoch, if it is the highest epoch so far."""
        if hello.source is not None and hello.epoch >= self._verbs.epoch:
            self._verbs.see_source(hello.source, hello.revision)
        self._verbs.epoch = max(self._verbs.epoch, hello.epoch)

    def _take_adapters(self, hello: Hello) -> None:
        """Adopt the engine's list of adapters if it is the newest so far."""
        if hello.adapters is not None and hello.adapters.generation > self._verbs.adapters.generation:
            self._verbs.adapters = hello.adapters

    def settle(self) -> None:
        """Handle the end of Timing.recovery_settle.

        From now on, recovery ends as soon as all engines that have sent a message are registered.
        """
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
        self._router.blocks.forget_all()
        self._context.needs_pump = True
        for engine in self._context.engines:
            self._verbs.welcome(engine)


class Membership:
    """The component that registers engines and clients, monitors their heartbeats, and removes them."""

    def __init__(
        self,
        context: Context,
        router: EngineRouter,
        verbs: Verbs,
        dispatcher: Dispatcher,
        replies: Replies,
        access: Access,
    ) -> None:
        self.recovery = Recovery(context, router, verbs)
        self._timing = context.settings.timing
        self._context = context
        self._engines = context.engines
        self._clients = context.clients
        self._router = router
        self._verbs = verbs
        self._dispatcher = dispatcher
        self._replies = replies
        self._counters = context.counters
        self._access = access
        self._due = 0.0
        self._tasks: tuple[str, ...] = ()
        """The tasks that were last sent to the clients."""

    def start(self) -> None:
        self.recovery.start()
        self._schedule()

    # --- HELLO --------------------------------------------------------------------------------------------------

    def hello(self, peer: PeerId, hello: Hello) -> None:
        if not self._access.admits(peer, self._access.key_of(peer)):
            # The key was accepted and has been revoked since.
            self._context.reject(peer, ErrorCode.WRONG_ROLE, "the key of this connection is no longer accepted")
            self._context.close(peer)
        elif not PROTOCOL_VERSION - 1 <= hello.version <= PROTOCOL_VERSION + 1:
            message = f"version {hello.version}: this coordinator speaks {PROTOCOL_VERSION}"
            self._context.reject(peer, ErrorCode.VERSION, message)
        elif peer[0] not in (SHARED_PORT, hello.role):
            message = f"HELLO of a {hello.role.name} on the {Role(peer[0]).name} port"
            self._context.reject(peer, ErrorCode.WRONG_ROLE, message)
        elif self._role_of(peer) not in (None, hello.role):
            message = f"this connection is registered in another role than {hello.role.name}: open a new one"
            self._context.reject(peer, ErrorCode.WRONG_ROLE, message)
        elif hello.role is Role.ENGINE:
            self._hello_engine(peer, hello)
        else:
            self._hello_client(peer, hello)

    def _role_of(self, peer: PeerId) -> Role | None:
        client = self._clients.at(peer)
        return client.role if client is not None else Role.ENGINE if self._engines.at(peer) is not None else None

    def _hello_engine(self, peer: PeerId, hello: Hello) -> None:
        engine = self._engines.named(hello.name)
        if engine is not None and hello.started_ms is not None and hello.started_ms < engine.started_ms:
            # This is an older process that was cut off, or whose pod was replaced.
            self._context.reject(peer, ErrorCode.UNAVAILABLE, f"a later process is registered as {hello.name}")
            return
        other = self._engines.at(peer)
        if other is not None and other is not engine:
            self.lose_engine(other, f"its connection now has the name {hello.name}")
        renewed = engine is not None and engine.peer == peer and engine.incarnation == hello.incarnation
        if engine is not None and not renewed:
            # A new process does not serve yet, so a HELLO with `serving` comes from a process that kept running.
            restarted = not hello.serving and engine.incarnation != hello.incarnation
            crash = CrashEvidence.CERTAIN if restarted else CrashEvidence.NONE
            self.lose_engine(engine, "it registered again", crash)
        if engine is None and len(self._engines) >= limits.MAX_ENGINES:
            message = f"{len(self._engines)} engines are registered already: at most {limits.MAX_ENGINES}"
            self._context.reject(peer, ErrorCode.UNAVAILABLE, message)
            return
        if engine is None or not renewed:
            self._dispatcher.quarantine.returned(hello.name, has_outlived=hello.serving)
            key, now = self._access.key_of(peer), self._context.now
            engine = Engine(hello.name, peer, hello.incarnation, next(self._engines.indices), now, key=key)
            self._engines.add(engine)
            logger.info("engine %s registered (serving: %s)", hello.name, hello.serving)
        engine.heard = self._context.now
        engine.learn(hello)
        self._engines.announced(engine)
        if engine.serving and engine.does not in self._tasks and (engine.task or self._tasks):
            self.announce()  # clients that know no task would wait for the next heartbeat
        self.recovery.registered(engine, hello, survivor=hello.serving and not renewed)
        current = self._verbs.current
        if current is not None and engine not in current.signalled:
            engine.entered_during = current.operation_id
        self._verbs.welcome(engine)
        self._context.needs_pump = True

    def _hello_client(self, peer: PeerId, hello: Hello) -> None:
        key = self._access.key_of(peer)
        client = self._clients.named(hello.role, hello.name)
        other = self._clients.at(peer)
        if other is not None and other is not client:
            self.lose_client(other, f"its connection now has the name {hello.name}")
        if client is None:
            if len(self._clients) >= self._context.settings.max_clients:
                message = f"{len(self._clients)} clients are registered already"
                self._context.reject(peer, ErrorCode.UNAVAILABLE, message)
                return
            route = next(self._clients.routes)
            client = Client(hello.name, peer, hello.role, hello.incarnation, route, self._context.now, key=key)
            self._clients.add(client)
        elif client.peer != peer or client.incarnation != hello.incarnation:
            self._clients.move(client, peer, incarnation=hello.incarnation, key=key)
        client.heard = self._context.now
        client.model, client.formats = hello.model, hello.formats
        self._verbs.acknowledge_hello(peer, state=self._verbs.state, route=client.route, tasks=self._engines.tasks)
        if client.blocked:
            self._replies.catch_up(client)

    # --- removal ------------------------------------------------------------------------------------------------

    def lose_engine(self, engine: Engine, reason: str, crash: CrashEvidence = CrashEvidence.NONE) -> None:
        """Remove an engine and requeue its requests.

        crash: evidence that one of its requests crashed the engine. Ignored if the engine ran no request, was draining,
            or was executing a verb, because the loss can then have another cause.
        """
        if not self._engines.is_registered(engine):
            return
        if reason in ORDERLY_GOODBYES and not engine.in_flight:
            logger.info("engine %s removed: %s", engine.name, reason)
        else:
            logger.warning("engine %s removed: %s; %d requests in flight", engine.name, reason, len(engine.in_flight))
        self._counters.engines_lost += 1
        ran = engine.serving and engine.state is EngineState.RUNNING and not engine.draining
        self._engines.remove(engine)
        if crash is not CrashEvidence.NONE and ran and not self._verbs.waits_for(engine):
            self._dispatcher.quarantine.crashed(engine, certain=crash is CrashEvidence.CERTAIN)
        self._router.blocks.forget(engine)
        self._dispatcher.release(engine)
        self._verbs.engine_lost(engine, reason)

    def connection_lost(self, peer: PeerId, *, by_peer: bool) -> None:
        """Handle the end of a connection.

        If the peer is an engine, this method requeues the requests of the engine. A live engine registers again. If the
        peer is a client, it has Timing.client_dead seconds to register again.

        by_peer: whether the other side closed the connection, as the operating system does when a process exits.
        """
        client, engine = self._clients.at(peer), self._engines.at(peer)
        if client is not None:
            client.stuck_since = (
                None  # the shell will report no room; the next message shows that the connection is gone
            )
        if engine is None:
            return
        self.lose_engine(engine, "its connection ended", CrashEvidence.CUT if by_peer else CrashEvidence.NONE)

    def lose_client(self, client: Client, reason: str) -> None:
        logger.info("client %s removed: %s; %d requests aborted", client.name, reason, len(client.open))
        self._clients.remove(client)
        self._dispatcher.abort(client.open.values())
        self._dispatcher.handoffs.client_lost(client)

    def has_room(self, peer: PeerId) -> None:
        """Continue to send to a peer whose connection accepts messages again."""
        client, engine = self._clients.at(peer), self._engines.at(peer)
        if client is not None:
            self._replies.has_room(client)
        elif engine is not None and engine.full:
            engine.full = False
            self._context.needs_pump = True

    def keys_changed(self) -> None:
        """Remove the registered peers whose keys were revoked.

        A peer that is not registered is rejected when it sends HELLO.
        """
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
        """Send heartbeats, and remove silent peers and clients that do not read.

        A late tick shows that this process was stalled. The duration of the stall does not count as silence of the
        peers.
        """
        now = self._context.now
        late = now - self._due
        if late > self._timing.suspect / 2:
            logger.warning("this process was stalled for %.1f s", late)
            for peer in [*self._engines, *self._clients]:
                peer.heard += late
            for client in self._clients:
                if client.stuck_since is not None:
                    client.stuck_since += late
        self._schedule()
        heartbeat = self._heartbeat()
        self._engines.update_costs(now)
        for engine in self._engines:
            self._check_engine(engine, now, heartbeat)
        for client in self._clients:
            self._check_client(client, now, heartbeat)
        self._limit_unread()
        self._context.needs_pump = True

    def _limit_unread(self) -> None:
        """Remove clients until the unread answers of the others fit in UNREAD_SHARE of the journal's memory.

        The client with the most bytes of unread answers is removed first.
        """
        unread = sum(client.outbox_bytes for client in self._clients)
        limit = int(self._context.settings.journal_bytes * UNREAD_SHARE)
        while unread > limit:
            client = max(self._clients, key=lambda client: client.outbox_bytes)
            unread -= client.outbox_bytes
            self.lose_client(client, f"it has not read {client.outbox_bytes} bytes of answers")

    def _heartbeat(self) -> Frames:
        self._tasks = self._engines.tasks
        return Heartbeat(
            incarnation=self._context.incarnation,
            state=self._verbs.state,
            adapters=self._verbs.adapters.generation or None,
            tasks=self._tasks,
        ).to_frames()

    def announce(self) -> None:
        """Send all clients a heartbeat immediately, with the tasks of the engines and the generation of the adapters.

        A client with an older list of adapters then requests the new list.
        """
        heartbeat = self._heartbeat()
        for client in self._clients:
            if client.reachable and client.stuck_since is None:
                self._context.send(client.peer, heartbeat)

    def _check_engine(self, engine: Engine, now: float, heartbeat: Frames) -> None:
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
        if silent > self._timing.client_dead:
            self.lose_client(client, f"silent for {silent:.1f} s")
        elif client.stuck_since is not None and now - client.stuck_since > self._timing.slow_client:
            self.lose_client(client, f"its buffer has been full for {self._timing.slow_client:g} s")
        elif len(client.outbox) > OUTBOX_MESSAGES:
            self.lose_client(client, f"{len(client.outbox)} answers wait for it")
        else:
            if client.blocked:
                self._replies.catch_up(client)
            if client.reachable and client.stuck_since is None:
                self._context.send(client.peer, heartbeat)

    def engine_heartbeat(self, engine: Engine, message: Heartbeat) -> None:
        now = self._context.now
        engine.busy_until = now + message.busy_for if message.busy_for > 0 else 0.0
        before = engine.available()
        if engine.report(message):
            self._engines.load_changed(engine)
        engine.suspect = False
        engine.relieved.clear()
        if engine.unsettled and not message.running:
            engine.unsettled = False
            if self._dispatcher.quarantine.active:
                self._context.needs_pump = True
        # An engine in a passing state waits for a commit, which was sent already or is still to be decided here.
        if isinstance(message.state, EngineState) and message.state not in PASSING_STATES:
            engine.state = message.state
        # Until the heartbeat reflects the last commit, the weights in it are obsolete, unless the commit was lost.
        if engine.owed is None or not _misses(message, engine.owed):
            if message.epoch is not None:
                engine.epoch = message.epoch
            engine.source, engine.digest = message.source, message.digest
        if engine.available() and not before:
            self._context.needs_pump = True
        settled = self._verbs.current is None and not self.recovery.under_way
        if settled and message.busy_for <= 0 and now - engine.welcomed > HEAL_HEARTBEATS * self._timing.heartbeat:
            self._heal(engine, message)

    def _heal(self, engine: Engine, message: Heartbeat) -> None:
        """Send a commit or HELLO_ACK again if a heartbeat reports an outdated state, epoch, weights or adapters.

        Call this method only if no operation is in progress, and after the engine has had HEAL_HEARTBEATS heartbeats
        to report the current values.
        """
        owed, engine.owed = engine.owed, None
        if owed is not None and _misses(message, owed):
            engine.welcomed = self._context.now
            # Only the commit reports the end of a STOP. If another commit is lost too, HELLO_ACK replaces it.
            engine.owed = owed if owed.signal is Header.STOP else None
            self._context.send(engine.peer, owed.to_frames())
        elif engine.serving and message.state is not None and not self._agrees(engine, message):
            self._verbs.welcome(engine)

    def _agrees(self, engine: Engine, message: Heartbeat) -> bool:
        verbs, source = self._verbs, self._verbs.source_for(engine)
        same_epoch = message.epoch is None or message.epoch == verbs.epoch
        same_adapters = message.adapters in (None, verbs.adapters.generation)
        same_weights = same_epoch and (source is None or source == message.source)
        return message.state == verbs.state and same_weights and same_adapters


def _misses(message: Heartbeat, commit: ControlCommit) -> bool:
    """Return whether this heartbeat shows that the engine has not received `commit`."""
    transition = TRANSITIONS.get(commit.signal)
    if transition is not None:
        return message.state == transition.passing
    if commit.signal is Header.SET_ADAPTERS:
        return False  # HELLO_ACK also contains the list
    return message.epoch is not None and message.epoch != commit.epoch
