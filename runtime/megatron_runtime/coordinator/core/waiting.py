"""Requests that wait: in which order, and until when. One timer for all of them."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron_runtime.coordinator.core.clock import Clock, Timer
from megatron_runtime.coordinator.core.records import Entry
from megatron_runtime.coordinator.core.tenants import Levels

GRAIN_SECONDS = 0.02
"""A request's time is up at most so much later than it should be, and never earlier."""


@dataclass(slots=True, eq=False)
class Band:
    """Waiting requests of one priority and model.

    replays: those that an engine was lost with, in the order in which they go; they go before all others.
    tenants: whose others wait; their lanes are in Tenant.lanes.
    """

    priority: int
    model: str
    replays: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    tenants: Levels = field(default_factory=Levels)

    def heads(self) -> Iterator[Entry]:
        """The first replay, and the first of the tenant that goes next."""
        if self.replays:
            yield next(iter(self.replays.values()))
        if self.tenants:
            yield next(iter(self.tenants.lowest().lanes[self].values()))


class WaitingQueue:
    """Requests without an engine: the lowest priority number first, then replays, then the tenant that has the fewest
    requests at engines, and each tenant's in the order of arrival.

    Each model has a band of its own, so that a request whose model has no room is overtaken by those of another.
    """

    def __init__(self) -> None:
        self._bands: dict[tuple[int, str], Band] = {}
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def add(self, entry: Entry, *, first: bool = False, moved: bool = False) -> None:
        """first: a replay, before all of its priority. moved: before the others of its tenant only."""
        key = entry.meta.priority, entry.model
        band = self._bands.get(key)
        if band is None:
            band = self._bands[key] = Band(*key)
        entry.is_replay = first
        if first:
            lane = band.replays
        else:
            tenant = entry.tenant
            lane = tenant.lanes.get(band) or OrderedDict()
            if not lane:
                tenant.lanes[band] = lane
                band.tenants.add(tenant, tenant.load)
        lane[entry.uid] = entry
        if first or moved:
            lane.move_to_end(entry.uid, last=False)
        self.length += 1

    def discard(self, entry: Entry) -> None:
        band = self._bands.get((entry.meta.priority, entry.model))
        if band is None:
            return
        tenant = entry.tenant
        lane = band.replays if entry.is_replay else tenant.lanes.get(band)
        if lane is None or lane.pop(entry.uid, None) is None:
            return
        self.length -= 1
        if not lane and not entry.is_replay:
            del tenant.lanes[band]
            band.tenants.discard(tenant, tenant.load)
        if not band.replays and not band.tenants:
            del self._bands[band.priority, band.model]

    def heads(self) -> list[Entry]:
        """The requests that may go next, of each band at most two; the next one of all before the others."""
        heads = [entry for band in self._bands.values() for entry in band.heads()]
        if len(heads) > 1:
            heads.sort(key=_place)
        return heads

    def check_integrity(self) -> None:
        """What must hold whenever the loop is idle."""
        waiting = 0
        for key, band in self._bands.items():
            assert key == (band.priority, band.model), "a band is in the place of another"
            assert band.replays or band.tenants, "an empty band is kept"
            tenants = list(band.tenants)
            band.tenants.check_integrity(tenants)
            lanes = [tenant.lanes[band] for tenant in tenants]
            assert all(lanes), "an empty lane is kept"
            assert all(entry.is_replay for entry in band.replays.values()), "a request waits among replays"
            waiting += len(band.replays) + sum(map(len, lanes))
        assert waiting == self.length, "waiting requests are miscounted"


def _place(entry: Entry) -> tuple[int, int, int, int, float]:
    if entry.is_replay:
        return entry.meta.priority, 0, 0, 0, entry.arrived
    return entry.meta.priority, 1, entry.tenant.load, entry.tenant.turn, entry.arrived


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
