"""Tenants share the engines: who makes room for whom. A table of who has what is in tenants.py.

A tenant's load is the number of its requests at engines. The shares are equal where no tenant that waits has two
requests fewer at engines than another: max-min fairness. Requests are moved until then, and each move brings the loads
of two tenants closer, so no request is moved back and forth. While one tenant alone has requests, nothing is moved.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_runtime.coordinator.core.clock import Clock
from megatron_runtime.coordinator.core.records import Engine, Entry
from megatron_runtime.coordinator.core.tenants import TenantBook
from megatron_runtime.coordinator.core.waiting import WaitingQueue

MOVE_AGAIN_SECONDS = 2.0
"""A request that made room stays where it goes next for at least so long, counted from when it made room."""
SEARCH_AGAIN_SECONDS = 0.1
"""After a search found no request that may make room, the next one waits for so long."""


class Shares:
    """dispatch:  give a waiting request to one of these engines.
    take_back: take a request from its engine, and let it wait before the others of its tenant.
    refuse:    end a request because the coordinator is full, for this reason.
    """

    def __init__(
        self,
        tenants: TenantBook,
        queue: WaitingQueue,
        *,
        clock: Clock,
        may_dispatch: Callable[[], bool],
        dispatch: Callable[[Entry, list[Engine]], None],
        take_back: Callable[[Entry, Engine], None],
        refuse: Callable[[Entry, str], None],
    ) -> None:
        self._tenants = tenants
        self._queue = queue
        self._clock = clock
        self._may_dispatch = may_dispatch
        self._dispatch = dispatch
        self._take_back = take_back
        self._refuse = refuse
        self.next_search = 0.0

    def level(self) -> None:
        """Make room for tenants that wait and have fewer requests at engines than others, until none has two fewer."""
        now = self._clock.time()
        while now >= self.next_search and self._queue.length and self._may_dispatch():
            most = self._tenants.busy.highest_load
            short = [entry for entry in self._queue.heads() if entry.tenant.load + 2 <= most]
            if not short:
                return
            if not any(self._make_room(entry, now) for entry in short):
                self.next_search = now + SEARCH_AGAIN_SECONDS

    def _make_room(self, entry: Entry, now: float) -> bool:
        """Give a waiting request the place of the most recent one of a tenant that has at least two more at engines.

        False where none may make room.
        """
        for tenant in self._tenants.busy.from_highest():
            if tenant.load < entry.tenant.load + 2:
                return False
            for other in reversed(tenant.in_flight.values()):
                engine = other.engine
                if engine is not None and self.may_move(other, engine, entry, now):
                    self._take_back(other, engine)
                    self._dispatch(entry, [engine])
                    return True
        return False

    @staticmethod
    def may_move(other: Entry, engine: Engine, entry: Entry, now: float) -> bool:
        """Whether `other`, at `engine`, may make room for `entry`."""
        return (
            not engine.plain
            and engine.available()
            and not engine.reserved
            and engine.runs(entry.model)
            and len(engine.in_flight) <= engine.max_requests
            and not other.meta.engine
            and other.meta.priority >= entry.meta.priority
            and (other.moved_at is None or now - other.moved_at >= MOVE_AGAIN_SECONDS)
        )

    def drop_for(self, entry: Entry, *, by_bytes: bool) -> bool:
        """The queue, or by bytes the journal, is full: refuse the last waiting request of the tenant that has the most.

        False where that would leave this tenant with less than the one that sends `entry`, or where all its waiting
        requests have tokens: those are not refused.
        """
        if not len(self._tenants):
            return False
        if by_bytes:
            heaviest = max(self._tenants, key=lambda tenant: tenant.open_bytes)
        else:
            heaviest = max(self._tenants, key=lambda tenant: tenant.num_waiting)
        last = heaviest.last_waiting()
        if last is None:
            return False
        if by_bytes:
            is_fair = heaviest.open_bytes - last.admitted_bytes >= entry.tenant.open_bytes + entry.cost()
        else:
            is_fair = heaviest.num_waiting > entry.tenant.num_waiting + 1
        if is_fair:
            self._refuse(last, "the coordinator is full and other tenants have fewer requests")
        return is_fair
