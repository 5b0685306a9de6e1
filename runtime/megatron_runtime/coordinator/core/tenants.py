"""Tenants: how many requests each has at the engines, and which of them goes next. Nothing outlives a tenant's last
open request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from megatron_runtime.coordinator.core.records import Entry
    from megatron_runtime.coordinator.core.waiting import Band

TenantKey: TypeAlias = str | int
"""The id that the request names, or the route number of the client that sent it."""


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant with open requests.

    turn:      when the number of its requests at engines changed last, counted, not timed.
    in_flight: its requests at engines by dispatch id, the most recent last.
    lanes:     its waiting requests that are no replays, in order, for each band of the queue.
    num_open, open_bytes: its open requests, and what they took of the journal when they were admitted.
    """

    key: TenantKey
    turn: int
    in_flight: dict[int, Entry] = field(default_factory=dict)
    lanes: dict[Band, OrderedDict[bytes, Entry]] = field(default_factory=dict)
    num_open: int = 0
    open_bytes: int = 0

    @property
    def load(self) -> int:
        return len(self.in_flight)

    @property
    def num_waiting(self) -> int:
        return self.num_open - len(self.in_flight)

    def last_waiting(self) -> Entry | None:
        """The request that goes last of those that wait and have no tokens yet."""
        for _, lane in sorted(self.lanes.items(), key=lambda item: item[0].priority, reverse=True):
            last = next(reversed(lane.values()))
            if not last.generated:
                return last
        return None


class Levels:
    """Tenants by load; those of one load in the order in which they reached it or began to wait."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[Tenant, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __iter__(self) -> Iterator[Tenant]:
        return (tenant for level in self._levels.values() for tenant in level)

    def add(self, tenant: Tenant, load: int) -> None:
        level = self._levels.get(load)
        if level is None:
            level = self._levels[load] = OrderedDict()
        level[tenant] = None

    def discard(self, tenant: Tenant, load: int) -> None:
        level = self._levels.get(load)
        if level is not None and tenant in level:
            del level[tenant]
            if not level:
                del self._levels[load]

    def lowest(self) -> Tenant:
        return next(iter(self._levels[min(self._levels)]))

    @property
    def highest_load(self) -> int:
        return max(self._levels, default=0)

    def from_highest(self) -> Iterator[Tenant]:
        for load in sorted(self._levels, reverse=True):
            yield from self._levels[load]

    def check_integrity(self, tenants: Collection[Tenant]) -> None:
        """`tenants` are those that belong here."""
        found = [(load, tenant) for load, level in self._levels.items() for tenant in level]
        assert all(load == tenant.load for load, tenant in found), "a tenant is in the place of another load"
        assert {tenant for _, tenant in found} == set(tenants), "a tenant is missing or has no request here"
        assert all(self._levels.values()), "an empty level is kept"


class TenantBook:
    """The tenants with open requests.

    is_shared: all requests count as those of one tenant.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._tenants: dict[TenantKey, Tenant] = {}
        self._turns = count(1)
        self.busy = Levels()
        """Those that have several requests at engines."""

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def of(self, key: TenantKey) -> Tenant:
        """The tenant of that key; a new one is kept with its first open request."""
        if self._is_shared:
            key = ""
        tenant = self._tenants.get(key)
        return tenant if tenant is not None else Tenant(key, next(self._turns))

    def opened(self, entry: Entry) -> None:
        """The journal took the request."""
        tenant = entry.tenant
        if not tenant.num_open:
            self._tenants[tenant.key] = tenant
        tenant.num_open += 1
        tenant.open_bytes += entry.admitted_bytes

    def closed(self, entry: Entry) -> None:
        """The request is over. It waits nowhere and no engine has it."""
        tenant = entry.tenant
        tenant.num_open -= 1
        tenant.open_bytes -= entry.admitted_bytes
        if not tenant.num_open:
            del self._tenants[tenant.key]

    def dispatched(self, entry: Entry) -> None:
        """An engine has the request, under `entry.dispatch_id`."""
        tenant = entry.tenant
        before = len(tenant.in_flight)
        tenant.in_flight[entry.dispatch_id] = entry
        self._reload(tenant, before, before + 1)

    def returned(self, entry: Entry) -> None:
        """No engine has the request any more; `entry.dispatch_id` is still the former one."""
        tenant = entry.tenant
        before = len(tenant.in_flight)
        del tenant.in_flight[entry.dispatch_id]
        self._reload(tenant, before, before - 1)

    def _reload(self, tenant: Tenant, before: int, after: int) -> None:
        tenant.turn = next(self._turns)
        if before > 1:
            self.busy.discard(tenant, before)
        if after > 1:
            self.busy.add(tenant, after)
        for band in tenant.lanes:
            band.tenants.discard(tenant, before)
            band.tenants.add(tenant, after)

    def check_integrity(self, entries: list[Entry]) -> None:
        """What must hold whenever the loop is idle. `entries` are all open requests."""
        assert {id(entry.tenant) for entry in entries} == {id(tenant) for tenant in self}, "a tenant without a request"
        for tenant in self:
            own = [entry for entry in entries if entry.tenant is tenant]
            assert tenant.num_open == len(own), "open requests of a tenant are miscounted"
            assert tenant.open_bytes == sum(entry.admitted_bytes for entry in own), "a tenant's bytes are miscounted"
            in_flight = {entry.dispatch_id: entry for entry in own if entry.engine is not None}
            assert tenant.in_flight == in_flight, "requests of a tenant at engines are miscounted"
            assert list(tenant.in_flight) == sorted(in_flight), "requests of a tenant are not in the order of dispatch"
        self.busy.check_integrity({tenant for tenant in self if tenant.load > 1})
