"""The engines registered now, by name and by connection."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from megatron_runtime.coordinator.core.records import Engine, Entry
from megatron_runtime.coordinator.transport import PeerId
from megatron_runtime.protocol.lifecycle import EngineState

_RUNNING = EngineState.RUNNING  # see dispatching.py


class EngineRegistry:
    """stopped: all engines were told STOP and none has come since: there is nothing to wait for."""

    def __init__(self) -> None:
        self._by_name: dict[str, Engine] = {}
        self._by_peer: dict[PeerId, Engine] = {}
        self._indices = count()
        self.stopped = False

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

    def with_room(self) -> list[Engine]:
        # Engine.available() spelled out: this runs for every request.
        return [
            engine
            for engine in self._by_name.values()
            if engine.serving
            and engine.state is _RUNNING
            and not (engine.draining or engine.suspect or engine.full or engine.reserved)
            and len(engine.in_flight) < engine.max_requests
        ]

    def available(self) -> list[Engine]:
        """Those that take work, whether they have room or let it wait."""
        return [engine for engine in self._by_name.values() if engine.available() and not engine.reserved]

    def dispatched(self) -> Iterator[tuple[int, Entry]]:
        """Every request that an engine has, with its dispatch id."""
        for engine in self:
            yield from list(engine.in_flight.items())

    def in_flight(self) -> int:
        return sum(len(engine.in_flight) for engine in self._by_name.values())

    def add(
        self, name: str, peer: PeerId, *, incarnation: int, now: float, plain: bool = False, key: bytes = b""
    ) -> Engine:
        engine = Engine(name, peer, incarnation, next(self._indices), now, plain=plain, key=key)
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

    def check_integrity(self) -> None:
        """What must hold whenever the loop is idle."""
        assert set(self._by_name.values()) == set(self._by_peer.values()), "an engine is half registered"

    def is_registered(self, engine: Engine) -> bool:
        return self._by_name.get(engine.name) is engine
