"""Who is silent: heartbeats go out, engines and clients that do not answer are removed, slow readers catch up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from megatron_runtime.coordinator.core.clients import ClientRegistry
from megatron_runtime.coordinator.core.clock import Clock, Timer
from megatron_runtime.coordinator.core.engines import EngineRegistry
from megatron_runtime.coordinator.core.records import Client, Engine
from megatron_runtime.coordinator.core.settings import Timing
from megatron_runtime.coordinator.transport import PeerId, Sent
from megatron_runtime.protocol.messages import Frames

logger = logging.getLogger(__name__)


class Surroundings(Protocol):
    """What follows from silence."""

    def heartbeat_frames(self) -> Frames: ...

    def relieve(self, engine: Engine) -> None:
        """Give what a silent engine has to others."""

    def lose_engine(self, engine: Engine, reason: str) -> None: ...

    def lose_client(self, client: Client, reason: str) -> None: ...

    def catch_up(self, client: Client) -> None: ...

    def pump(self) -> None: ...


class Health:
    """One timer. A tick that comes late says that this process slept: nobody is blamed for that time."""

    def __init__(
        self,
        timing: Timing,
        *,
        engines: EngineRegistry,
        clients: ClientRegistry,
        send: Callable[[PeerId, Frames], Sent],
        surroundings: Surroundings,
        clock: Clock,
    ) -> None:
        self._timing = timing
        self._clock = clock
        self._engines = engines
        self._clients = clients
        self._send = send
        self._surroundings = surroundings
        self._due = 0.0
        self._timer: Timer | None = None

    def start(self) -> None:
        self._schedule()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        self._due = self._clock.time() + self._timing.heartbeat
        self._timer = self._clock.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._clock.time()
        late = now - self._due
        if late > self._timing.suspect / 2:
            logger.warning("this process stood still for %.1f s", late)
            for peer in [*self._engines, *self._clients]:
                peer.heard += late
        self._schedule()
        heartbeat = self._surroundings.heartbeat_frames()
        for engine in self._engines:
            self._check_engine(engine, now, heartbeat)
        for client in self._clients:
            self._check_client(client, now, heartbeat)
        self._surroundings.pump()

    def _check_engine(self, engine: Engine, now: float, heartbeat: Frames) -> None:
        engine.full = False
        if engine.plain:
            return
        silent = now - engine.heard
        engine.suspect = silent > self._timing.suspect
        if engine.suspect and engine.in_flight and now > engine.busy_until:
            self._surroundings.relieve(engine)
        if silent > self._timing.dead and now > engine.busy_until + self._timing.dead:
            self._surroundings.lose_engine(engine, f"silent for {silent:.1f} s")
        elif self._send(engine.peer, heartbeat) is Sent.GONE:
            self._surroundings.lose_engine(engine, "its connection is gone")

    def _check_client(self, client: Client, now: float, heartbeat: Frames) -> None:
        silent = now - client.heard
        if not client.plain and silent > self._timing.client_dead:
            self._surroundings.lose_client(client, f"silent for {silent:.1f} s")
            return
        if client.blocked:
            self._surroundings.catch_up(client)
        if client.stuck_since is not None and now - client.stuck_since > self._timing.slow_client:
            self._surroundings.lose_client(client, f"its buffer has been full for {self._timing.slow_client:g} s")
        elif client.plain and not client.reachable:
            self._surroundings.lose_client(client, "its connection is gone")
        elif not client.plain and client.reachable and self._send(client.peer, heartbeat) is Sent.GONE:
            client.reachable = False
