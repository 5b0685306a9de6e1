"""Keys change while the coordinator runs: other ones are admitted, and who came with one that no longer is, goes."""

from __future__ import annotations

import logging
from typing import Protocol

from megatron_runtime.coordinator.core.clients import ClientRegistry
from megatron_runtime.coordinator.core.clock import Clock, Timer
from megatron_runtime.coordinator.core.engines import EngineRegistry
from megatron_runtime.coordinator.core.records import Client, Engine
from megatron_runtime.coordinator.transport import Transport

logger = logging.getLogger(__name__)

_REASON = "its key was revoked"


class Surroundings(Protocol):
    def lose_engine(self, engine: Engine, reason: str) -> None: ...

    def lose_client(self, client: Client, reason: str) -> None: ...


class KeyRotation:
    """Looks at the key files every `every` seconds.

    A connection with a revoked key is cut whether or not it is registered: registered ones here, others when they
    say HELLO.
    """

    def __init__(
        self,
        transport: Transport,
        engines: EngineRegistry,
        clients: ClientRegistry,
        *,
        clock: Clock,
        every: float,
        surroundings: Surroundings,
    ) -> None:
        self._transport = transport
        self._engines = engines
        self._clients = clients
        self._clock = clock
        self._every = every
        self._surroundings = surroundings
        self._timer: Timer | None = None

    def start(self) -> None:
        self._timer = self._clock.call_at(self._clock.time() + self._every, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self.start()
        if not self._transport.keys_changed():
            return
        logger.info("the keys changed; connections with keys that are gone are cut")
        for engine in self._engines:
            if not self._transport.admits(engine.peer, engine.key):
                self._surroundings.lose_engine(engine, _REASON)
                self._transport.cut(engine.peer)
        for client in self._clients:
            if not self._transport.admits(client.peer, client.key):
                self._surroundings.lose_client(client, _REASON)
                self._transport.cut(client.peer)
