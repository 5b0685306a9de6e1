"""The coordinator as a service: sockets, timers, keys, metrics and the entry point around the core.

Everything runs on one event loop; no handler blocks or awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import uvloop

from megatron_runtime.coordinator.core.context import COORDINATOR, PeerId
from megatron_runtime.coordinator.core.coordinator import CoordinatorCore, Tokenizer
from megatron_runtime.coordinator.core.membership import Access
from megatron_runtime.coordinator.core.records import Engine
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.scheduler_hints import request_short_slices
from megatron_runtime.coordinator.transport import Sent, Transport
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Frames

__all__ = ["Coordinator", "Tokenizer", "run", "serve"]

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0
"""After SIGTERM, the time for open requests to end. Clients submit the rest again to the next coordinator."""

OnBound = Callable[[dict[Role, str]], None]
_OK, _GONE = Sent.OK, Sent.GONE  # see core/registries.py


class Coordinator:
    """Passes messages, connection losses and time to the core, and performs the effects that it returns.

    on_bound: called with the address of each role once the sockets are bound.
    ended:    set by stop() or by a SHUTDOWN message.
    """

    def __init__(
        self, settings: CoordinatorSettings, *, tokenizer: Tokenizer | None = None, on_bound: OnBound | None = None
    ) -> None:
        self.settings = settings
        self.ended = asyncio.Event()
        self.transport = transport = Transport(settings, self._received, self._gone)
        self._loop = asyncio.get_running_loop()
        self._on_bound = on_bound
        self.core = CoordinatorCore(
            settings,
            now=self._loop.time(),
            randbits=random.SystemRandom().getrandbits,
            tokenizer=tokenizer,
            access=Access(
                key_of=transport.sender_key,
                admits=transport.admits,
                report=transport.key_report,
                rejected=lambda: transport.gatekeeper.refused if transport.gatekeeper is not None else 0,
            ),
        )
        self._context = self.core.context
        self._time = self._loop.time
        self._timer: asyncio.TimerHandle | None = None
        self._armed = math.inf
        self._key_timer: asyncio.TimerHandle | None = None
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind and serve. Raises BindError."""
        self.transport.start()
        self._set_wall_time()
        self.core.start(self._time())
        self._perform()
        if self.settings.keys_dir is not None:
            self._schedule_key_check()
        if self._on_bound is not None:
            self._on_bound(self.transport.addresses)

    def stop(self) -> None:
        """End at once. Clients submit open requests again to the next coordinator. Idempotent."""
        self.ended.set()
        self._armed = -math.inf
        for timer in (self._timer, self._key_timer):
            if timer is not None:
                timer.cancel()
        self.transport.stop()
        if self.settings.schedule_output_path is not None:
            self.core.router.write_decisions(self.settings.schedule_output_path)

    async def drain(self, *, seconds: float) -> None:
        """Return when no request is open, or when the time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until(lambda: not len(self.core.dispatcher.journal)), seconds)

    async def wait_for_engines(self, number: int) -> None:
        await self._until(lambda: len(self.core.engines.serving()) >= number)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition`, a function of the core's state, holds."""
        if not condition():
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append((condition, future))
            await future

    def remove_engine(self, engine: Engine, reason: str) -> None:
        """Take an engine out of the pool; its requests go elsewhere."""
        self.core.remove_engine(self._time(), engine, reason)
        self._perform()

    # --- events and effects -------------------------------------------------------------------------------------

    def _received(self, peer: PeerId, frames: Frames) -> None:
        try:
            self.core.received(self._time(), peer, frames)
        finally:
            self._perform()

    def _gone(self, peer: PeerId, by_peer: bool) -> None:
        self.core.connection_lost(self._time(), peer, by_peer=by_peer)
        self._perform()

    def _perform(self) -> None:
        """Perform the effects of the last event, and arm the timer for the next one."""
        context = self._context
        if effects := context.effects:
            context.effects = []
            send = self.transport.send
            refused: list[tuple[PeerId, Frames, bool]] = []
            for peer, frames in effects:
                if frames is None:
                    self._close(peer)
                elif (sent := send(peer, frames)) is not _OK:
                    refused.append((peer, frames, sent is _GONE))
            if refused:
                self.core.not_sent(refused, Counter(peer for peer, _ in effects))
                self._perform()
        if context.next_timer < self._armed:
            self._arm(context.next_timer)
        if self._waiters:
            self._wake()

    def _close(self, peer: PeerId) -> None:
        if peer == COORDINATOR:
            self.ended.set()
        else:
            self.transport.cut(peer)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for condition, future in waiters:
            if not condition():
                self._waiters.append((condition, future))
            elif not future.done():
                future.set_result(None)

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

    def _schedule_key_check(self) -> None:
        self._key_timer = self._loop.call_later(self.settings.timing.key_check, self._check_keys)

    def _check_keys(self) -> None:
        self._schedule_key_check()
        if self.transport.keys_changed():
            self.core.keys_changed(self._time())
            self._perform()


def run(settings: CoordinatorSettings, *, tokenizer: Tokenizer | None = None, on_bound: OnBound | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises BindError if a port is taken, KeyFileError if a key is missing.
    """
    request_short_slices()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, tokenizer=tokenizer, on_bound=on_bound))


async def serve(
    settings: CoordinatorSettings, *, tokenizer: Tokenizer | None = None, on_bound: OnBound | None = None
) -> None:
    coordinator = Coordinator(settings, tokenizer=tokenizer, on_bound=on_bound)
    loop = asyncio.get_running_loop()
    leave = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    coordinator.start()
    # Imported modules stay, and requests leave no cycles: a full collection would find nothing.
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    for role, address in coordinator.transport.addresses.items():
        logger.info("%s port: %s", role.name.lower(), address)
    stop_health: Callable[[], Awaitable[None]] | None = None
    try:
        # Peers have their addresses by now; the following would have kept them waiting.
        if settings.health_port is not None:
            stop_health = await _start_health(settings.health_port, coordinator)
        await asyncio.to_thread(importlib.import_module, "megatron_runtime.requests.hashing")
        waiting = [asyncio.create_task(event.wait()) for event in (leave, coordinator.ended)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if leave.is_set():
            await coordinator.drain(seconds=DRAIN_SECONDS)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        coordinator.stop()
        await coordinator.transport.closed()
        if stop_health is not None:
            await stop_health()


async def _start_health(port: int, coordinator: Coordinator) -> Callable[[], Awaitable[None]]:
    """Serve probes and metrics on `port`. Returns what ends them."""
    from prometheus_client import CollectorRegistry

    from megatron_runtime.coordinator.metrics import CoordinatorMetrics
    from megatron_runtime.process.health import HealthServer

    registry = CollectorRegistry()
    registry.register(CoordinatorMetrics(coordinator.core))
    transport = coordinator.transport
    health = HealthServer(
        missing=lambda: [] if transport.addresses else ["bound sockets"], registry=registry, port=port
    )
    await health.start()
    return health.stop
