"""The clients and engines registered now, by name and by connection, and sending to clients that read slowly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from megatron_runtime.coordinator.core.context import Context, PeerId
from megatron_runtime.coordinator.core.records import Client, Engine, Entry
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import Frames

REMEMBERED_ANSWERS = 4096
OUTBOX_MESSAGES = 100_000
"""Answers kept for a client that does not read. One more and the client is removed."""

_RUNNING = EngineState.RUNNING  # a global is found in a tenth of the time of a member of an Enum (Python 3.11)


class ClientRegistry:
    """Clients and administrators. A slow one costs the others nothing."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._by_name: dict[tuple[Role, str], Client] = {}
        self._by_peer: dict[PeerId, Client] = {}
        self._by_route: dict[int, Client] = {}
        self._routes = count(1)

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def named(self, role: Role, name: str) -> Client | None:
        return self._by_name.get((role, name))

    def at(self, peer: PeerId) -> Client | None:
        return self._by_peer.get(peer)

    def routed(self, route: int) -> Client | None:
        return self._by_route.get(route)

    def add(
        self, name: str, peer: PeerId, role: Role, *, incarnation: int, plain: bool = False, key: bytes = b""
    ) -> Client:
        route = next(self._routes)
        client = Client(name, peer, role, incarnation, route, self._context.now, plain=plain, key=key)
        self._by_name[role, name] = self._by_peer[peer] = self._by_route[route] = client
        return client

    def move(self, client: Client, peer: PeerId, *, incarnation: int, key: bytes = b"") -> None:
        """The client has a new connection. Everything owed to it is sent there."""
        self._by_peer.pop(client.peer, None)
        client.peer, client.key, client.incarnation = peer, key, incarnation
        client.answered.clear()
        client.reachable, client.stuck_since = True, None
        self._by_peer[peer] = client
        for entry in client.open.values():
            # What was sent on the old connection may not have arrived. The client drops what it has already.
            entry.forwarded = entry.held
            client.behind = client.behind or entry.meta.streaming

    def remove(self, client: Client) -> None:
        if self._by_name.get((client.role, client.name)) is client:
            del self._by_name[client.role, client.name]
        if self._by_peer.get(client.peer) is client:
            del self._by_peer[client.peer]
        self._by_route.pop(client.route, None)
        client.outbox.clear()

    def send(self, client: Client, frames: Frames, *, answers: bytes | None = None) -> None:
        """Send now, or keep for later if the client is behind. `answers`: uid of the request that this message ends."""
        if client.outbox or not client.reachable:
            client.outbox.append((answers, frames))
        else:
            self.send_now(client, frames, answers=answers)

    def send_now(self, client: Client, frames: Frames, *, answers: bytes | None = None) -> None:
        self._context.effects.append((client.peer, frames))
        if answers is not None:
            client.answered[answers] = None
            if len(client.answered) > REMEMBERED_ANSWERS:
                client.answered.popitem(last=False)

    def check_integrity(self) -> None:
        registered = set(self._by_name.values())
        assert registered == set(self._by_peer.values()) == set(self._by_route.values()), "a client is half registered"


class EngineRegistry:
    """stopped: all engines were sent STOP and none has registered since: there is nothing to wait for."""

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

    def is_registered(self, engine: Engine) -> bool:
        return self._by_name.get(engine.name) is engine

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
        """Engines that take work, whether they have room or queue it."""
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
        self._by_name[name] = self._by_peer[peer] = engine
        return engine

    def remove(self, engine: Engine) -> None:
        if self._by_name.get(engine.name) is engine:
            del self._by_name[engine.name]
        if self._by_peer.get(engine.peer) is engine:
            del self._by_peer[engine.peer]
        engine.serving = False

    def check_integrity(self) -> None:
        assert set(self._by_name.values()) == set(self._by_peer.values()), "an engine is half registered"
