"""The input and output of one event: its time, the timers that it sets, and the effects that it causes.

The core reads no clock and sends nothing. The shell sets `now` before each event and performs `effects`, in order,
after it. It calls run_timers() no later than `next_timer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from megatron_runtime.protocol.messages import Frames

PeerId: TypeAlias = tuple[int, bytes]
"""Number of a port and routing id: one connection."""
SHARED_PORT = 3
"""Port number in the single-port mode. The other port numbers are the values of Role."""
COORDINATOR: PeerId = (-1, b"")
"""Closing this peer ends the coordinator."""

Effect: TypeAlias = tuple[PeerId, Frames | None]
"""Send these frames to the peer; None: close its connection when everything before has been sent."""


class Context:
    """What every part of the core shares. Seconds throughout.

    now:         time of the event, on a monotonic clock.
    wall_offset: seconds to add to `now` for seconds since 1970.
    next_timer:  when the earliest timer is due; infinite without one.
    randbits:    returns an integer of that many random bits.
    """

    def __init__(self, *, now: float, randbits: Callable[[int], int]) -> None:
        self.now = now
        self.wall_offset = 0.0
        self.randbits = randbits
        self.effects: list[Effect] = []
        self.next_timer = math.inf
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}

    def send(self, peer: PeerId, frames: Frames) -> None:
        self.effects.append((peer, frames))

    def close(self, peer: PeerId) -> None:
        self.effects.append((peer, None))

    def set_timer(self, name: str, when: float, callback: Callable[[], None]) -> None:
        """Call `callback` at `when`, instead of what the timer of this name was set to."""
        self._timers[name] = when, callback
        self.next_timer = min(when for when, _ in self._timers.values())

    def cancel_timer(self, name: str) -> None:
        if self._timers.pop(name, None) is not None:
            self.next_timer = min((when for when, _ in self._timers.values()), default=math.inf)

    def pop_due_timer(self) -> Callable[[], None] | None:
        """Remove the earliest timer that is due and return its callback."""
        if self.next_timer > self.now:
            return None
        name = min(self._timers, key=lambda name: self._timers[name][0])
        callback = self._timers[name][1]
        self.cancel_timer(name)
        return callback
