"""The engines registered now: who they are, how they are, and what each has in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from megatron_runtime.data_parallel_inference_coordinator.transport import PeerId
from megatron_runtime.wire.messages import EngineStatus, Hello
from megatron_runtime.wire.states import EngineState

if TYPE_CHECKING:
    from megatron_runtime.data_parallel_inference_coordinator.journal import Entry

UNLIMITED_REQUESTS = 1 << 20
"""Capacity of an engine that announced none: it queues by itself."""


@dataclass(slots=True, eq=False)
class Engine:
    """One registration of one engine.

    index:     order of registration; breaks ties in routing.
    draining:  gets no new work until it registers anew.
    full:      its socket's buffer was full; cleared at the next heartbeat.
    in_flight: requests by dispatch id.
    """

    name: str
    peer: PeerId
    incarnation: int
    index: int
    heard: float
    plain: bool = False
    serving: bool = False
    state: EngineState = EngineState.PAUSED
    epoch: int = 0
    ranks: int = 1
    revision: str = ""
    max_requests: int = UNLIMITED_REQUESTS
    block_size_tokens: int = 0
    busy_until: float = 0.0
    draining: bool = False
    full: bool = False
    suspect: bool = False
    entered_during: str | None = None
    """Operation under way when this engine joined: told the outcome when it ends."""
    in_flight: dict[int, Entry] = field(default_factory=dict)

    def takes_work(self) -> bool:
        return (
            self.serving
            and not self.draining
            and not self.suspect
            and not self.full
            and len(self.in_flight) < self.max_requests
        )

    def describe(self, now: float) -> EngineStatus:
        return EngineStatus(
            name=self.name,
            state=self.state,
            serving=self.serving,
            epoch=self.epoch,
            ranks=self.ranks,
            revision=self.revision,
            in_flight=len(self.in_flight),
            silent_seconds=round(max(0.0, now - self.heard), 3),
            plain=self.plain,
            draining=self.draining,
        )


class EngineRegistry:
    """Engines by name and by connection."""

    def __init__(self) -> None:
        self._by_name: dict[str, Engine] = {}
        self._by_peer: dict[PeerId, Engine] = {}
        self._indices = count()
        self.stopped = False
        """All engines were told STOP and none has come since: there is nothing to wait for."""

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def named(self, name: str) -> Engine | None:
        return self._by_name.get(name)

    def at(self, peer: PeerId) -> Engine | None:
        return self._by_peer.get(peer)

    def serving(self) -> list[Engine]:
        return [engine for engine in self._by_name.values() if engine.serving]

    def ready_for_work(self) -> list[Engine]:
        return [engine for engine in self._by_name.values() if engine.takes_work()]

    def in_flight(self) -> int:
        return sum(len(engine.in_flight) for engine in self._by_name.values())

    def add(self, name: str, peer: PeerId, *, incarnation: int, now: float, plain: bool = False) -> Engine:
        engine = Engine(name, peer, incarnation, next(self._indices), now, plain=plain)
        self.stopped = False
        self._by_name[name] = engine
        self._by_peer[peer] = engine
        return engine

    def remove(self, engine: Engine) -> None:
        if self._by_name.get(engine.name) is engine:
            del self._by_name[engine.name]
        if self._by_peer.get(engine.peer) is engine:
            del self._by_peer[engine.peer]
        engine.serving = False

    def is_registered(self, engine: Engine) -> bool:
        return self._by_name.get(engine.name) is engine


def update_from_hello(engine: Engine, hello: Hello) -> None:
    engine.serving = hello.serving
    engine.epoch = hello.epoch
    engine.ranks = max(1, hello.ranks)
    engine.revision = hello.revision
    engine.max_requests = hello.max_requests if hello.max_requests > 0 else UNLIMITED_REQUESTS
    engine.block_size_tokens = max(0, hello.block_size_tokens)
    if hello.state is not None:
        engine.state = hello.state
