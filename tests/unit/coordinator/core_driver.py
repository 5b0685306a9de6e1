"""Runs a coordinator's core and translators at a simulated time: passes events and performs effects in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.plain.peers import PlainPeers
from megatron_runtime.protocol.messages import frames_of

Peer = tuple[int, bytes]


class CoreDriver:
    """deliver: called with the peer and the frames of each message. Returns None if the connection does not exist,
             False if it accepts no more messages.
    is_connected: whether a connection exists.
    full:    connections that accept no message now. Those that rejected one and are no longer full report room before
             the next message arrives, and before time passes."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        deliver: Callable[[Peer, list[bytes]], bool | None],
        *,
        is_connected: Callable[[Peer], bool] = lambda peer: True,
        full: Collection[Peer] = (),
    ) -> None:
        self.now = 1000.0
        self.closed: list[Peer] = []
        self._deliver = deliver
        self._full = full
        self._awaits_room: set[Peer] = set()
        self.core = CoordinatorCore(settings, now=self.now, randbits=random.Random(7).getrandbits)
        self.is_shut_down = False
        self.plain = PlainPeers(
            self.core,
            send=lambda peer, message, even_if_full=False: self._deliver(peer, message),
            is_connected=is_connected,
            now=lambda: self.now,
            shut_down=lambda: setattr(self, "is_shut_down", True),
        )
        self.core.start(self.now)
        self._perform()

    def say(self, peer: Peer, message: Any) -> None:
        self.receive(peer, message.to_frames())

    def receive(self, peer: Peer, frames: list[bytes]) -> None:
        self.report_room()
        if not self.plain.receive(peer, frames):
            self.core.received(self.now, peer, frames)
        self._perform()

    def report_room(self) -> None:
        """Tell the core of connections that rejected a message and accept messages now."""
        for peer in self._awaits_room.difference(self._full):
            self._awaits_room.discard(peer)
            self.core.has_room(self.now, peer)
            self._perform()

    def connection_lost(self, peer: Peer, *, by_peer: bool) -> None:
        if not self.plain.gone(peer, by_peer=by_peer):
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
        self.plain.deliver()
        while effects := self.core.context.effects:
            self.core.context.effects = []
            rejected = []
            for peer, message in effects:
                if message is None:
                    self.closed.append(peer)
                    continue
                translator = self.plain.translators.get(peer)
                if translator is not None and message:
                    accepted = translator.send(message)
                else:
                    accepted = self._deliver(peer, frames_of(message)) if message else None
                if not accepted:
                    self._awaits_room.add(peer)
                if message and not accepted:
                    rejected.append((peer, message, accepted is None))
            if rejected:
                self.core.not_sent(rejected)
            self.plain.deliver()
