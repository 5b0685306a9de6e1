"""Runs a coordinator's core at a simulated time: passes events to it and performs its effects in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.coordinator.core.settings import CoordinatorSettings

Peer = tuple[int, bytes]


class CoreDriver:
    """deliver: called with the peer and the frames of each message. Returns None if the connection does not exist,
             False if it accepts no more messages.
    full:    connections that accept no message now. Those that rejected one and are no longer full report room before
             the next message arrives, and before time passes."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        deliver: Callable[[Peer, list[bytes]], bool | None],
        *,
        full: Collection[Peer] = (),
    ) -> None:
        self.now = 1000.0
        self.closed: list[Peer] = []
        self._deliver = deliver
        self._full = full
        self._awaits_room: set[Peer] = set()
        self.core = CoordinatorCore(settings, now=self.now, randbits=random.Random(7).getrandbits)
        self.core.start(self.now)
        self._perform()

    def say(self, peer: Peer, message: Any) -> None:
        self.receive(peer, message.to_frames())

    def receive(self, peer: Peer, frames: list[bytes]) -> None:
        self.report_room()
        self.core.received(self.now, peer, frames)
        self._perform()

    def report_room(self) -> None:
        """Tell the core of connections that rejected a message and accept messages now."""
        for peer in self._awaits_room.difference(self._full):
            self._awaits_room.discard(peer)
            self.core.has_room(self.now, peer)
            self._perform()

    def connection_lost(self, peer: Peer, *, by_peer: bool) -> None:
        self.core.connection_lost(self.now, peer, by_peer=by_peer)
        self._perform()

    def pump(self) -> None:
        """Dispatch queued requests, as every heartbeat does."""
        self.core.dispatcher.pump()
        self._perform()

    def advance(self, seconds: float) -> None:
        self.report_room()
        until = self.now + seconds
        while (due := self.core.context.next_timer) <= until:
            self.now = max(self.now, due)
            self.core.run_timers(self.now)
            self._perform()
        self.now = until

    def _perform(self) -> None:
        while effects := self.core.context.effects:
            self.core.context.effects = []
            rejected = []
            for peer, frames in effects:
                if frames is None:
                    self.closed.append(peer)
                    continue
                accepted = self._deliver(peer, frames) if frames else None
                if not accepted:
                    self._awaits_room.add(peer)
                if frames and not accepted:
                    rejected.append((peer, frames, accepted is None))
            if rejected:
                self.core.not_sent(rejected)
