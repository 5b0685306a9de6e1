"""Clients and administrators registered now, and sending to them. A slow one costs nobody else anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from megatron_runtime.coordinator.core.records import Client
from megatron_runtime.coordinator.transport import PeerId, Sent
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Frames

REMEMBERED_ANSWERS = 4096
OUTBOX_MESSAGES = 100_000
"""Answers kept for a client that does not read; the one after it drops the client."""

_OK = Sent.OK  # see dispatching.py


class ClientRegistry:
    def __init__(self, send: Callable[[PeerId, Frames], Sent], now: Callable[[], float]) -> None:
        self._send = send
        self._now = now
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
        client = Client(name, peer, role, incarnation, next(self._routes), self._now(), plain=plain, key=key)
        self._by_name[role, name] = client
        self._by_peer[peer] = client
        self._by_route[client.route] = client
        return client

    def move(self, client: Client, peer: PeerId, *, incarnation: int, key: bytes = b"") -> None:
        """The client is at another connection now; what it is owed goes there."""
        self._by_peer.pop(client.peer, None)
        client.peer = peer
        client.key = key
        client.answered.clear()
        client.incarnation = incarnation
        client.reachable = True
        client.stuck_since = None
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

    def check_integrity(self) -> None:
        """What must hold whenever the loop is idle."""
        registered = set(self._by_name.values())
        assert registered == set(self._by_peer.values()) == set(self._by_route.values()), "a client is half registered"

    def send(self, client: Client, frames: Frames, *, answers: bytes | None = None) -> None:
        """Send now, or keep for later. `answers` is the uid of the request that this message ends."""
        if client.outbox or not client.reachable or not self.try_send(client, frames, answers=answers):
            client.outbox.append((answers, frames))

    def try_send(self, client: Client, frames: Frames, *, answers: bytes | None = None) -> bool:
        """Send now or not at all."""
        sent = self._send(client.peer, frames)
        if sent is _OK:
            client.stuck_since = None
            if answers is not None:
                client.answered[answers] = None
                if len(client.answered) > REMEMBERED_ANSWERS:
                    client.answered.popitem(last=False)
            return True
        if sent is Sent.GONE:
            client.reachable = False
        if client.stuck_since is None:
            client.stuck_since = self._now()
        return False

    def flush(self, client: Client) -> bool:
        """Send what was kept. True when nothing is left."""
        while client.outbox:
            answers, frames = client.outbox[0]
            if not client.reachable or not self.try_send(client, frames, answers=answers):
                return False
            client.outbox.popleft()
        return client.reachable
