"""The coordinator as a service. This module adds ROUTER sockets, timers, keys, metrics and the entry point to the core.

Everything runs on one event loop. No handler blocks or awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

import uvloop

from megatron_runtime.coordinator.core.context import SHARED_PORT
from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.coordinator.core.records import Ended, Engine, PeerId
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.environment import Access, PromptTokenizer
from megatron_runtime.coordinator.pair import Pair
from megatron_runtime.coordinator.plain.peers import PLAIN_PORTS, PlainPeers
from megatron_runtime.process import tracing
from megatron_runtime.process.children import end_signals
from megatron_runtime.process.scheduler_hints import request_scheduler_slices
from megatron_runtime.process.tracing import Tracer, tracer_from_environment
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Frames, KeyReport, Outgoing
from megatron_runtime.transport.security import Gatekeeper
from megatron_runtime.transport.zmtp.connection import Connection
from megatron_runtime.transport.zmtp.handshake import Handshake, NullHandshake
from megatron_runtime.transport.zmtp.router import Router

__all__ = ["Coordinator", "PromptTokenizer", "run", "serve"]

logger = logging.getLogger(__name__)

HAND_OVER_SECONDS = 1.0
"""Maximum time after SIGTERM for connecting to the other coordinator of a pair, which may be restarting."""
_HAND_OVER_RETRY_SECONDS = 0.1
DRAIN_SECONDS = 5.0
"""Maximum time after SIGTERM for open requests to end. Clients submit the remaining requests to the next
coordinator.
"""

OnBound: TypeAlias = Callable[[dict[Role, str]], None]
OnMessage: TypeAlias = Callable[[PeerId, Frames], None]
OnGone: TypeAlias = Callable[[PeerId, bool], None]
OnRoom: TypeAlias = Callable[[PeerId], None]
MayBeSilent: TypeAlias = Callable[[PeerId], bool]

_CLIENT_SEND_BYTES = 4 << 20
_ENGINE_SEND_BYTES = 64 << 20
"""Maximum number of unsent bytes for an engine. An engine that reads more slowly gets no work until it has caught
up.
"""


class BindError(OSError):
    """Raised if a port cannot be bound. The message names the address and the remedy."""


class Transport(Access):
    """The sockets of one coordinator.

    addresses:  after start(), the bound address of each role.
    gatekeeper: checks keys; None without encryption.
    on_gone:    called with each peer whose connection ended, and whether the peer's side closed it. The peer's
                operating system closes the connection when the peer exits. This side closes a connection if heartbeats
                are missing or after a protocol violation.
    on_room:    called with each peer whose connection accepts messages again after it rejected one.
    may_be_silent: returns whether a peer has announced that it is busy, so that its connection is kept although it is
                   silent.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        on_message: OnMessage,
        on_gone: OnGone,
        on_room: OnRoom,
        may_be_silent: MayBeSilent,
    ) -> None:
        self.addresses: dict[Role, str] = {}
        self.gatekeeper = Gatekeeper(settings.keys_dir) if settings.keys_dir is not None else None
        self._settings = settings
        self._on_message = on_message
        self._on_gone = on_gone
        self._on_room = on_room
        self._may_be_silent = may_be_silent
        self._routers: dict[int, Router] = {}
        self._connections: dict[PeerId, Connection] = {}

    @property
    def handler_errors(self) -> int:
        return sum(router.handler_errors for router in self._routers.values())

    def start(self) -> None:
        """Bind the sockets. Raises BindError."""
        settings = self._settings
        if settings.single_port:
            self.addresses = dict.fromkeys(Role, self._bind(SHARED_PORT, settings.client_port))
            return
        ports = {Role.CLIENT: settings.client_port, Role.ENGINE: settings.engine_port, Role.ADMIN: settings.admin_port}
        for role, port in ports.items():
            self.addresses[role] = self._bind(int(role), port)

    def stop(self) -> None:
        """Stop listening. This method is idempotent. Queued messages are still sent while closed() is awaited."""
        for router in self._routers.values():
            router.close()

    async def closed(self) -> None:
        """Wait until all messages that were queued before stop() have been sent, or until one second has passed."""
        await asyncio.gather(*(router.closed() for router in self._routers.values()))

    def router(self, port: int) -> Router:
        return self._routers[port]

    def is_connected(self, peer: PeerId) -> bool:
        return peer in self._connections

    def send(self, peer: PeerId, message: Frames, even_if_full: bool = False) -> bool:
        """Send a message. Return False, and send nothing, if there is no such connection or if it is full.

        If the connection is full, on_room is called later.
        """
        connection = self._connections.get(peer)
        return connection is not None and connection.send(message, even_if_full)

    def report_room(self, peer: PeerId) -> None:
        """Request a call of `on_room` when the peer's connection accepts messages again."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.report_room()

    def cut(self, peer: PeerId) -> None:
        """Close the peer's connection. Afterwards no message is received from the peer or sent to it."""
        self._routers[peer[0]].cut(peer)

    # --- access -------------------------------------------------------------------------------------------------

    def key_of(self, peer: PeerId) -> bytes:
        connection = self._connections.get(peer)
        return connection.key if connection is not None else b""

    def admits(self, peer: PeerId, key: bytes) -> bool:
        return self._opens(_key_role(peer[0]), key)

    def _opens(self, role: Role, key: bytes) -> bool:
        """Return whether a peer with this key may connect to the port of `role`.

        A trainer, and the other coordinator of a pair, may connect to the admin port.
        """
        gatekeeper = self.gatekeeper
        if gatekeeper is None or gatekeeper.admits(role, key):
            return True
        is_other = self._settings.other_host is not None and key in gatekeeper.servers
        return role is Role.ADMIN and (is_other or key in gatekeeper.trainers)

    def is_trainer(self, key: bytes) -> bool:
        return self.gatekeeper is not None and key in self.gatekeeper.trainers

    def report(self, connected: Iterable[bytes]) -> KeyReport | None:
        if self.gatekeeper is None:
            return None
        admitted = {key for keys in self.gatekeeper.allowed.values() for key in keys} | self.gatekeeper.trainers
        return KeyReport(
            server=self.gatekeeper.own.public.decode(),
            admitted=sorted(key.decode() for key in admitted),
            connected=sorted(key.decode() for key in connected),
        )

    def rejected(self) -> int:
        return sum(router.rejected for router in self._routers.values())

    # --- ports --------------------------------------------------------------------------------------------------

    def _bind(self, port: int, number: int) -> str:
        settings = self._settings
        router = Router(
            port,
            connections=self._connections,
            handshake=self._handshakes(_key_role(port)),
            on_message=self._on_message,
            on_gone=self._on_gone,
            on_room=self._on_room,
            max_message_bytes=(
                limits.MAX_CLIENT_MESSAGE_BYTES if port == Role.CLIENT else limits.MAX_ENGINE_MESSAGE_BYTES
            ),
            send_buffer_bytes=_ENGINE_SEND_BYTES if port == Role.ENGINE else _CLIENT_SEND_BYTES,
            check_seconds=settings.timing.connection_check,
            may_be_silent=self._may_be_silent,
        )
        if settings.socket_dir is not None:
            path = settings.socket_dir / Role(port).name.lower()
            where, remedy = f"ipc://{path}", "choose another --socket-dir"
        else:
            path, where, remedy = None, f"tcp://{settings.listen}:{number or '*'}", "choose another port"
        try:
            if path is None:
                address = router.bind(settings.listen, number)
            else:
                path.unlink(missing_ok=True)  # left by a coordinator that was killed
                address = router.bind_path(path)
        except OSError as error:
            reason = error.strerror or error
            raise BindError(error.errno, f"cannot bind {where} ({reason}): {remedy}") from error
        self._routers[port] = router
        return address

    def _handshakes(self, role: Role) -> Callable[[bytes], Handshake]:
        gatekeeper = self.gatekeeper
        if gatekeeper is None:
            return NullHandshake
        from megatron_runtime.transport.zmtp.curve import CurveHandshake, CurveServer

        server = CurveServer.from_z85(gatekeeper.own.secret, lambda key: self._opens(role, key))
        return lambda properties: CurveHandshake(server, properties)


def _key_role(port: int) -> Role:
    """Return the role whose keys a port accepts. The shared port accepts keys of clients."""
    return Role.CLIENT if port == SHARED_PORT else Role(port)


class Coordinator:
    """The shell around the core.

    It passes messages, connection losses and time to the core, and performs the effects that the core returns.

    on_bound: called when the sockets have been bound, with a mapping from each role to its address.
    ended:    set by stop() or by a SHUTDOWN message.
    tracer:   records spans of requests; None if requests are not traced.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        tokenizer: PromptTokenizer | None = None,
        on_bound: OnBound | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.settings = settings
        self._tracer = tracer
        self.ended = asyncio.Event()
        self.transport = Transport(
            settings,
            on_message=self._received,
            on_gone=self._gone,
            on_room=self._has_room,
            may_be_silent=self._may_be_silent,
        )
        self._loop = asyncio.get_running_loop()
        self._on_bound = on_bound
        self._tokenizer = tokenizer
        self._time = self._loop.time
        self.core = self._make_core()
        self._context = self.core.context
        self.plain = PlainPeers(
            self.core,
            send=self.transport.send,
            is_connected=self.transport.is_connected,
            now=self._time,
            shut_down=self.ended.set,
        )
        self._pair: Pair | None = None
        """The pair of coordinators. None if there is no other coordinator, so that this one is always active."""
        if settings.other_host is not None:
            self._pair = Pair(settings, self.transport.gatekeeper, changed=self._pair_changed, send=self.transport.send)
        self._timer: asyncio.TimerHandle | None = None
        self._armed = math.inf
        self._key_timer: asyncio.TimerHandle | None = None
        self._event_done = asyncio.Event()

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the sockets and serve. Raises BindError."""
        self.transport.start()
        if self._pair is None:
            self._begin()
        else:
            self._pair.start()
        self._check_keys()
        if self._on_bound is not None:
            self._on_bound(self.transport.addresses)

    def stop(self) -> None:
        """Close all connections and timers. This method is idempotent.

        Clients submit open requests again to the next coordinator.
        """
        self.ended.set()
        self._armed = -math.inf
        for timer in (self._timer, self._key_timer):
            if timer is not None:
                timer.cancel()
        if self._pair is not None:
            self._pair.close()
        self.transport.stop()
        if self.settings.schedule_output_path is not None:
            self.settings.schedule_output_path.write_text(self.core.router.decisions_text())

    async def close(self) -> None:
        """Call stop(), and wait until the queued messages have been sent."""
        self.stop()
        await self.transport.closed()

    async def drain(self, *, seconds: float) -> None:
        """Wait until no request is open, or until `seconds` have passed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until(lambda: not len(self.core.dispatcher.journal)), seconds)

    async def hand_over(self, *, seconds: float = 0.0) -> bool:
        """Let the other coordinator of the pair take over. Return False if it is not available within `seconds`."""
        deadline = self._time() + seconds
        while self._pair is not None and not self._pair.hand_over():
            if self._time() >= deadline:
                return False
            await asyncio.sleep(_HAND_OVER_RETRY_SECONDS)
        return self._pair is not None

    async def wait_for_engines(self, number: int) -> None:
        await self._until(lambda: len(self.core.engines.serving()) >= number)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, a function of the core's state, returns True."""
        while not condition():
            self._event_done.clear()
            await self._event_done.wait()

    def remove_engine(self, engine: Engine, reason: str) -> None:
        """Remove an engine. Its requests are dispatched to other engines."""
        self.core.remove_engine(self._time(), engine, reason)
        self._perform()

    # --- active and standby -------------------------------------------------------------------------------------

    def _make_core(self) -> CoordinatorCore:
        core = CoordinatorCore(
            self.settings,
            now=self._time(),
            randbits=random.SystemRandom().getrandbits,
            tokenizer=self._tokenizer,
            access=self.transport,
        )
        if self._tracer is not None:
            core.context.ended = []
        return core

    def _begin(self) -> None:
        """Become active. The state, epoch and fence come from the engines, as after a restart."""
        self._set_wall_time()
        self.core.start(self._time())
        self._perform()

    def _pair_changed(self) -> None:
        """Handle a change of role or term of this coordinator of a pair."""
        pair, core = self._pair, self.core
        assert pair is not None
        was_active = core.context.active
        if pair.active:
            core.context.term = pair.term
            if not was_active:
                self._begin()
        elif was_active:
            self._stand_by(pair)

    def _stand_by(self, pair: Pair) -> None:
        """Become the standby. Discard the state, and redirect all peers to the other coordinator.

        Clients then submit their open requests to the other coordinator.
        """
        peers = [peer.peer for peer in (*self.core.engines, *self.core.clients)]
        self.core = self._make_core()
        self._context = self.core.context
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._armed = None, math.inf
        for peer in peers:
            pair.redirect(peer)
            self.transport.cut(peer)
        self._event_done.set()

    # --- events and effects -------------------------------------------------------------------------------------

    def _received(self, peer: PeerId, frames: Frames) -> None:
        if self._pair is not None and not self._pair.passes(peer, self.transport.key_of(peer), frames):
            return
        try:
            # Engines and administrators of Megatron-Core use the shared port.
            if peer[0] not in PLAIN_PORTS or not self.plain.receive(peer, frames):
                self.core.received(self._time(), peer, frames)
        finally:
            self._perform()

    def _may_be_silent(self, peer: PeerId) -> bool:
        return self.core.may_be_silent(self._time(), peer)

    def _gone(self, peer: PeerId, by_peer: bool) -> None:
        if not self.plain.gone(peer, by_peer=by_peer):
            self.core.connection_lost(self._time(), peer, by_peer=by_peer)
        self._perform()

    def _has_room(self, peer: PeerId) -> None:
        self.core.has_room(self._time(), peer)
        self._perform()

    def _perform(self) -> None:
        """Perform the effects of the last event, and set the timer for the next deadline of the core."""
        context, plain = self._context, self.plain
        translators = plain.translators
        if plain.messages:
            plain.deliver()
        while effects := context.effects:
            context.effects = []
            send = self.transport.send
            rejected: list[tuple[PeerId, Outgoing, bool]] = []
            for peer, message in effects:
                if message:
                    translator = translators.get(peer) if translators else None
                    if translator is not None:
                        is_accepted = translator.send(message)
                    else:
                        is_accepted = send(peer, message if isinstance(message, list) else message.to_frames())
                    if not is_accepted:
                        is_gone = translator is None and not self.transport.is_connected(peer)
                        rejected.append((peer, message, is_gone))
                elif message is not None:
                    self.transport.report_room(peer)
                else:
                    self.transport.cut(peer)
            if rejected:
                self.core.not_sent(rejected)
            if plain.messages:
                plain.deliver()
        if context.next_timer < self._armed:
            self._arm(context.next_timer)
        if self._tracer is not None and context.ended:
            ended, context.ended = context.ended, []
            for request in ended:
                _trace(self._tracer, request, wall_offset=context.wall_offset)
        self._event_done.set()

    # --- timers -------------------------------------------------------------------------------------------------

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = when
        self._timer = self._loop.call_at(when, self._timer_due)

    def _timer_due(self) -> None:
        # The loop rounds to milliseconds, so the timer may be early.
        now = max(self._time(), self._armed)
        self._timer, self._armed = None, math.inf
        self._set_wall_time()
        try:
            self.core.run_timers(now)
        finally:
            self._perform()

    def _set_wall_time(self) -> None:
        self.core.context.wall_offset = time.time() - self._time()

    def _check_keys(self) -> None:
        """Read changed key files. Called every `key_check` seconds."""
        gatekeeper = self.transport.gatekeeper
        if gatekeeper is None:
            return
        self._key_timer = self._loop.call_later(self.settings.timing.key_check, self._check_keys)
        if gatekeeper.changed():
            self.core.keys_changed(self._time())
            self._perform()


def _trace(tracer: Tracer, ended: Ended, *, wall_offset: float) -> None:
    """Record the span of a request that ended.

    wall_offset: value to add to a time of the coordinator's clock to get Unix time.
    """
    entry, engine, at, error = ended
    attributes: dict[str, str | int | float | None] = {
        tracing.REQUEST_ID: entry.meta.request_id or entry.uid.hex(),
        tracing.TIME_IN_QUEUE: ended.queue_seconds,
        tracing.END_TO_END: at - entry.arrived,
        "megatron.uid": entry.uid.hex(),
        "megatron.engine": engine or None,
        "megatron.dispatches": entry.dispatches,
    }
    start, end = entry.arrived + wall_offset, at + wall_offset
    traceparent = entry.meta.traceparent
    tracer.record("coordinate", traceparent=traceparent, start=start, end=end, attributes=attributes, error=error)


def run(
    settings: CoordinatorSettings, *, tokenizer: PromptTokenizer | None = None, on_bound: OnBound | None = None
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        BindError: a port is in use.
        KeyFileError: a key is missing.
    """
    request_scheduler_slices()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, tokenizer=tokenizer, on_bound=on_bound))


async def serve(
    settings: CoordinatorSettings, *, tokenizer: PromptTokenizer | None = None, on_bound: OnBound | None = None
) -> None:
    tracer = tracer_from_environment("megatron-coordinator")
    coordinator = Coordinator(settings, tokenizer=tokenizer, on_bound=on_bound, tracer=tracer)
    loop = asyncio.get_running_loop()
    is_signalled = False

    def leave() -> None:
        nonlocal is_signalled
        is_signalled = True
        coordinator.ended.set()

    async with contextlib.AsyncExitStack() as stack:
        if tracer is not None:
            stack.callback(tracer.close)
        for number in end_signals():
            loop.add_signal_handler(number, leave)
            stack.callback(loop.remove_signal_handler, number)
        coordinator.start()
        stack.push_async_callback(coordinator.close)
        # A full collection would free nothing, as imported modules stay and requests leave no reference cycles.
        gc.freeze()
        gc.set_threshold(50_000, 50, 100)
        for role, address in coordinator.transport.addresses.items():
            logger.info("%s port: %s", role.name.lower(), address)
        # The sockets are bound by now, so peers need not wait for the rest of the start.
        if settings.health_port is not None:
            stack.push_async_callback(await _start_health(settings.health_port, coordinator))
        await asyncio.to_thread(importlib.import_module, "megatron_runtime.requests.hashing")
        await coordinator.ended.wait()
        if is_signalled and not await coordinator.hand_over(seconds=HAND_OVER_SECONDS):
            await coordinator.drain(seconds=DRAIN_SECONDS)


async def _start_health(port: int, coordinator: Coordinator) -> Callable[[], Awaitable[None]]:
    """Serve probes and metrics on `port`. Return the function that stops the server."""
    from prometheus_client import CollectorRegistry

    from megatron_runtime.coordinator.metrics import CoordinatorMetrics
    from megatron_runtime.process.health import HealthServer

    registry = CollectorRegistry()
    registry.register(CoordinatorMetrics(lambda: coordinator.core))
    addresses = coordinator.transport.addresses
    health = HealthServer(missing=lambda: [] if addresses else ["bound sockets"], registry=registry, port=port)
    await health.start()
    return health.stop
