"""Requests that wait: in which order, and until when. One timer for all of them."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable

from megatron_runtime.data_parallel_inference_coordinator.clock import Clock, Timer
from megatron_runtime.data_parallel_inference_coordinator.records import Entry

GRAIN_SECONDS = 0.02
"""A request's time is up at most so much later than it should be, and never earlier."""


class WaitingQueue:
    """Requests without an engine: the lowest priority number first, then in order of arrival.

    Each model has lanes of its own, so that a request whose model has no room is overtaken by those of another.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], OrderedDict[bytes, Entry]] = {}
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def add(self, entry: Entry, *, first: bool = False) -> None:
        """`first`: before all of its priority."""
        lane = self._lanes.setdefault(_lane_of(entry), OrderedDict())
        lane[entry.uid] = entry
        if first:
            lane.move_to_end(entry.uid, last=False)
        self.length += 1

    def discard(self, entry: Entry) -> None:
        lane = self._lanes.get(_lane_of(entry))
        if lane is not None and lane.pop(entry.uid, None) is not None:
            self.length -= 1
            if not lane:
                del self._lanes[_lane_of(entry)]

    def heads(self) -> list[Entry]:
        """The first request of each lane, the next one of all before the others."""
        heads = [next(iter(lane.values())) for lane in self._lanes.values()]
        if len(heads) > 1:
            heads.sort(key=lambda entry: (entry.meta.priority, entry.arrived))
        return heads


def _lane_of(entry: Entry) -> tuple[int, str]:
    return entry.meta.priority, entry.model


class Deadlines:
    """Calls `expire(entry)` when an entry's time is up. Entries wait in slots of GRAIN_SECONDS."""

    def __init__(self, clock: Clock, expire: Callable[[Entry], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._slots: dict[int, dict[bytes, Entry]] = {}
        self._order: list[int] = []
        self._timer: Timer | None = None
        self._timer_slot = 0

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def set(self, entry: Entry, when: float | None) -> None:
        """Replace the entry's deadline; None takes it away."""
        slot = math.ceil(when / GRAIN_SECONDS) if when is not None else None
        if slot == entry.slot:
            return
        if entry.slot is not None:
            waiting = self._slots[entry.slot]
            del waiting[entry.uid]
            if not waiting:
                del self._slots[entry.slot]
        entry.slot = slot
        if slot is None:
            return
        if slot not in self._slots:
            self._slots[slot] = {}
            heapq.heappush(self._order, slot)
            if len(self._order) > 2 * len(self._slots) + 1024:
                self._order = sorted(self._slots)
        self._slots[slot][entry.uid] = entry
        if self._timer is None or slot < self._timer_slot:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self.stop()
        while self._order and self._order[0] not in self._slots:
            heapq.heappop(self._order)
        if self._order:
            self._timer_slot = self._order[0]
            self._timer = self._clock.call_at(self._timer_slot * GRAIN_SECONDS, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._clock.time()
        while self._order and self._order[0] * GRAIN_SECONDS <= now:
            for entry in list(self._slots.get(heapq.heappop(self._order), {}).values()):
                self.set(entry, None)
                self._expire(entry)
        self._arm()
