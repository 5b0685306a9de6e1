"""A clock that a test moves: the coordinator's timers fire when it is advanced."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class SimulatedClock:
    def __init__(self) -> None:
        self._now = 1000.0
        self._due: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._cancelled: set[int] = set()
        self._count = 0

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., Any], /, *args: Any) -> SimulatedTimer:
        self._count += 1
        heapq.heappush(self._due, (when, self._count, callback, args))
        return SimulatedTimer(self._cancelled, self._count)

    def advance(self, seconds: float) -> None:
        until = self._now + seconds
        while self._due and self._due[0][0] <= until:
            when, number, callback, args = heapq.heappop(self._due)
            if number in self._cancelled:
                self._cancelled.discard(number)
                continue
            self._now = max(self._now, when)
            callback(*args)
        self._now = until


class SimulatedTimer:
    def __init__(self, cancelled: set[int], number: int) -> None:
        self._cancelled, self._number = cancelled, number

    def cancel(self) -> None:
        self._cancelled.add(self._number)
