"""Tables of the open requests: the journal, the waiting queue, the deadlines and the tenants.

The tables only store data. They make no decisions and send no messages. An entry leaves every table when its request
ends.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count

from megatron_runtime.coordinator.core.context import Context
from megatron_runtime.coordinator.core.records import (
    EPOCH_SPAN_BYTES,
    TOKEN_BYTES,
    Band,
    Entry,
    Levels,
    Tenant,
    TenantKey,
)
from megatron_runtime.protocol.epochs import TokenEpochs, add_epochs
from megatron_runtime.protocol.media import Media

GRAIN_SECONDS = 0.02
"""Maximum time by which a request expires after its deadline. It never expires earlier."""


class MediaStore:
    """The images, audio and video of open requests, stored once per client.

    Media are not shared between clients, because digests are not verified here. A client must not be able to replace
    the data for another client's digest.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, bytes], tuple[bytes, int]] = {}
        """Maps (route of the client, digest) to the data and the number of open requests that use the data."""

    def completed(self, route: int, media: Media) -> Media | None:
        """Return `media` with the data of items that the client sent with an earlier request and has omitted here.

        Returns None if the data of an item is not stored.
        """
        items = [
            item if (held := self._held.get((route, item.digest))) is None else item._replace(data=held[0])
            for item in media.items
        ]
        return media._replace(items=tuple(items)) if all(item.data for item in items) else None

    def added_bytes(self, entry: Entry) -> int:
        """Return the size in bytes of the media that this request would add to the store."""
        if entry.media is None:
            return 0
        new = {item.digest: len(item.data) for item in entry.media.items}
        return sum(size for digest, size in new.items() if (entry.media_route, digest) not in self._held)

    def add(self, entry: Entry) -> None:
        for key, data in _media_of(entry).items():
            held, requests = self._held.get(key, (data, 0))
            self._held[key] = held, requests + 1

    def remove(self, entry: Entry) -> int:
        """Remove the media of a request that has ended, unless other requests use them.

        Return the number of freed bytes.
        """
        removed = 0
        for key in _media_of(entry):
            data, requests = self._held[key]
            if requests > 1:
                self._held[key] = data, requests - 1
            else:
                del self._held[key]
                removed += len(data)
        return removed


def _media_of(entry: Entry) -> dict[tuple[int, bytes], bytes]:
    items = () if entry.media is None else entry.media.items
    return {(entry.media_route, item.digest): item.data for item in items}


class Journal:
    """All open requests by uid, with the data for another dispatch: prompt, media, parameters and generated tokens.

    bytes: memory that the entries and their media use. A new request that would exceed `limit_bytes` is rejected.
    """

    def __init__(self, *, limit_bytes: int) -> None:
        self.bytes = 0
        self.limit_bytes = limit_bytes
        self.media = MediaStore()
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, uid: bytes) -> Entry | None:
        return self._entries.get(uid)

    def fits(self, entry: Entry) -> bool:
        """Return whether a new entry fits within `limit_bytes`.

        Generated tokens also count against the limit, but the journal accepts them even beyond the limit.
        """
        return self.bytes + entry.admitted_bytes <= self.limit_bytes

    def add(self, entry: Entry) -> None:
        self._entries[entry.uid] = entry
        self.bytes += entry.admitted_bytes
        if entry.media is not None:
            self.media.add(entry)

    def replace_prompt(self, entry: Entry, prompt: bytes) -> None:
        self.bytes += len(prompt) - len(entry.prompt)
        entry.prompt = prompt

    def append(
        self,
        entry: Entry,
        tokens: bytes,
        *,
        epochs: TokenEpochs = (),
        first: int = 0,
        details: bytes = b"",
        details_cost: int = 0,
    ) -> None:
        """Append new tokens of a request (little-endian int32).

        epochs:       epochs of the weights that sampled the tokens of the engine's message.
        first:        index of the request's first new token in the tokens of the engine's message.
        details:      packed extras of the message, such as log-probabilities, which all requests of the message share.
        details_cost: bytes of `details` that count against this request.
        """
        if epochs:
            spans = len(entry.epochs)
            add_epochs(entry.epochs, epochs, first=first, count=len(tokens) // TOKEN_BYTES, at=entry.tokens_so_far)
            self.bytes += EPOCH_SPAN_BYTES * (len(entry.epochs) - spans)
        if details:
            entry.details.append((entry.tokens_so_far, details))
            entry.details_bytes += details_cost
        entry.generated += tokens
        self.bytes += len(tokens) + (details_cost if details else 0)

    def remove(self, entry: Entry) -> None:
        if self._entries.pop(entry.uid, None) is not None:
            self.bytes -= entry.cost()
            if entry.media is not None:
                self.bytes -= self.media.remove(entry)


class WaitingQueue:
    """Requests that wait for an engine.

    The lowest priority number comes first. Within a priority, requests whose engine was lost (replays) come first, then
    requests of the tenant with the fewest requests at engines. Requests of one tenant keep their order of arrival.

    Each combination of priority, model, adapter and required features has its own band. A request whose engines are at
    capacity therefore does not delay requests that other engines can answer.
    """

    def __init__(self) -> None:
        self._bands: dict[tuple[int, str, str, str], Band] = {}
        self.length = 0

    def add(self, entry: Entry, *, first: bool = False, moved: bool = False) -> None:
        """Add a request to the queue.

        first: place the request ahead of all other requests of its priority, because its engine was lost (a replay).
        moved: place the request ahead of the other requests of its tenant, but not ahead of other tenants.
        """
        key = _band_of(entry)
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
        band = self._bands.get(_band_of(entry))
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
            del self._bands[_band_of(entry)]

    def heads(self) -> list[Entry]:
        """Return each band's first replay and first other request, sorted by their position in the whole queue.

        A band has the requests with equal priority, model, adapter and needs. A replay is a request whose engine was
        lost.
        """
        heads = []
        for band in self._bands.values():
            if band.replays:
                heads.append(next(iter(band.replays.values())))
            if band.tenants:
                heads.append(next(iter(band.tenants.lowest().lanes[band].values())))
        if len(heads) > 1:
            heads.sort(key=_place)
        return heads


def _band_of(entry: Entry) -> tuple[int, str, str, str]:
    return entry.meta.priority, entry.model, entry.meta.adapter, entry.meta.needs


def _place(entry: Entry) -> tuple[int, int, int, float]:
    if entry.is_replay:
        return entry.meta.priority, 0, 0, entry.arrived
    return entry.meta.priority, entry.tenant.load, entry.tenant.order, entry.arrived  # the order is at least 1


class Deadlines:
    """The deadlines of open requests.

    `expire(entry)` is called at the deadline of an entry. One timer serves all entries, with a resolution of
    GRAIN_SECONDS.
    """

    def __init__(self, context: Context, expire: Callable[[Entry], None]) -> None:
        self._context = context
        self._expire = expire
        self._slots: dict[int, dict[bytes, Entry]] = {}
        self._armed = math.inf
        """The slot for which the timer is set. The slot may have become empty."""

    def set(self, entry: Entry, when: float | None) -> None:
        """Replace the entry's deadline. None removes the deadline."""
        slot = math.ceil(when / GRAIN_SECONDS) if when is not None else None
        if slot == entry.slot:
            return
        if entry.slot is not None:
            waiting = self._slots[entry.slot]
            del waiting[entry.uid]
            if not waiting:
                del self._slots[entry.slot]
        entry.slot = slot
        if slot is not None:
            self._slots.setdefault(slot, {})[entry.uid] = entry
            if slot < self._armed:
                self._arm(slot)

    def _arm(self, slot: int) -> None:
        self._armed = slot
        self._context.set_timer("deadlines", slot * GRAIN_SECONDS, self._fire)

    def _fire(self) -> None:
        self._armed = math.inf
        for slot in sorted(slot for slot in self._slots if slot * GRAIN_SECONDS <= self._context.now):
            for entry in list(self._slots.get(slot, {}).values()):
                self.set(entry, None)
                self._expire(entry)
        if self._slots:
            self._arm(min(self._slots))


class Tenants:
    """The tenants with open requests. A tenant is removed with its last open request.

    is_shared: whether all requests count as requests of one tenant.
    busy:      tenants that have more than one request at engines.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._tenants: dict[TenantKey, Tenant] = {}
        self._order = count(1)
        self.busy = Levels()

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def of(self, key: TenantKey) -> Tenant:
        """Return the tenant with this key. A new tenant is not stored until its first open request."""
        if self._is_shared:
            key = ""
        tenant = self._tenants.get(key)
        return tenant if tenant is not None else Tenant(key, next(self._order))

    def opened(self, entry: Entry) -> None:
        """Count a request that the journal has accepted."""
        tenant = entry.tenant
        if not tenant.num_open:
            self._tenants[tenant.key] = tenant
        tenant.num_open += 1
        tenant.open_bytes += entry.admitted_bytes

    def closed(self, entry: Entry) -> None:
        """Stop counting a request that has ended. The request must no longer be in a queue or at an engine."""
        tenant = entry.tenant
        tenant.num_open -= 1
        tenant.open_bytes -= entry.admitted_bytes
        if not tenant.num_open:
            del self._tenants[tenant.key]

    def dispatched(self, entry: Entry, *, former: int = 0) -> None:
        """Record that an engine received the request under `entry.dispatch_id`.

        former: dispatch id at the engine of the previous stage; 0 if the request was in the queue.
        """
        tenant = entry.tenant
        if former:
            del tenant.in_flight[former]
            tenant.in_flight[entry.dispatch_id] = entry
            return
        before = len(tenant.in_flight)
        tenant.in_flight[entry.dispatch_id] = entry
        self._reload(tenant, before, before + 1)

    def returned(self, entry: Entry) -> None:
        """Record that the engine no longer has the request.

        `entry.dispatch_id` is still the id of its last dispatch.
        """
        tenant = entry.tenant
        before = len(tenant.in_flight)
        del tenant.in_flight[entry.dispatch_id]
        self._reload(tenant, before, before - 1)

    def _reload(self, tenant: Tenant, before: int, after: int) -> None:
        tenant.order = next(self._order)
        if before > 1:
            self.busy.discard(tenant, before)
        if after > 1:
            self.busy.add(tenant, after)
        for band in tenant.lanes:
            band.tenants.discard(tenant, before)
            band.tenants.add(tenant, after)
