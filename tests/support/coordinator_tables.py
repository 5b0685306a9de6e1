"""The invariants that hold between two events of a coordinator's core."""

from __future__ import annotations

import math
from collections.abc import Collection

from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.coordinator.core.dispatch import Dispatcher
from megatron_runtime.coordinator.core.open_requests import Tenants, WaitingQueue
from megatron_runtime.coordinator.core.quarantine import Quarantine
from megatron_runtime.coordinator.core.records import Entry, Levels, Tenant
from megatron_runtime.coordinator.core.routing import load_by


def check_tables(core: CoordinatorCore) -> None:
    """Assert that clients, engines, open requests and tenants refer to each other as they must."""
    registered = set(core.clients._by_name.values())
    by_route = set(core.clients._by_route.values())
    assert registered == set(core.clients._by_peer.values()) == by_route, "a client is half registered"
    assert set(core.engines._by_name.values()) == set(core.engines._by_peer.values()), "an engine is half registered"
    _check_loads(core)
    _check_requests(core.dispatcher)
    _check_quarantine(core.dispatcher.quarantine)
    _check_queue(core.dispatcher.queue)
    _check_tenants(core.dispatcher.tenants, list(core.dispatcher.journal))


def _check_loads(core: CoordinatorCore) -> None:
    list(core.engines.by_load)  # which moves engines whose load has changed
    load = load_by(core.context.settings.routing_policy, alpha=core.context.settings.alpha)
    order = []
    for engine in core.engines:
        order.append((load(engine) if len(engine.in_flight) < engine.max_requests else math.inf, engine.index))
        assert engine.queued == sum(entry.uncached for entry in engine.in_flight.values()), "a queue is miscounted"
        waiting = sum(entry.uncached > 0 for entry in engine.in_flight.values())
        assert engine.waiting == waiting, "requests that wait for their first token are miscounted"
        assert engine.held == sum(entry.size for entry in engine.in_flight.values()), "held tokens are miscounted"
    placed = [place[:2] for place in core.engines.by_load._order]
    assert placed == sorted(order), "an engine is not in its place by load"
    holders = {engine for engines in core.router.blocks._holders.values() for engine in engines}
    assert holders <= set(core.engines), "blocks of a removed engine are known"


def _check_requests(dispatcher: Dispatcher) -> None:
    journal = dispatcher.journal
    media = {
        (entry.media_route, item.digest): len(item.data)
        for entry in journal
        if entry.media is not None
        for item in entry.media.items
    }
    expected = sum(entry.cost() for entry in journal) + sum(media.values())
    assert journal.bytes == expected, "journal bytes are miscounted"
    for entry in journal:
        assert entry.is_open, "an open request is unknown to its client"
        if entry.engine is not None:
            assert entry.engine.in_flight.get(entry.dispatch_id) is entry, "a dispatch is unknown to its engine"
    waiting = sum(entry.engine is None for entry in journal)
    assert dispatcher.waiting == waiting, "a request without an engine does not wait for one"
    for _, former in dispatcher._former.values():
        assert journal.get(former.uid) is former, "a former dispatch outlived its request"


def _check_quarantine(quarantine: Quarantine) -> None:
    for entry in quarantine._waiting.values():
        assert entry.engine is None, "a suspect waits and has an engine"
        assert quarantine.suspects(entry), "a request is held back without two crashes"
    expected = [] if quarantine._reserved is None else [quarantine._reserved]
    assert [engine for engine in quarantine._engines if engine.reserved] == expected, "a reservation without cause"
    trial, accused = quarantine._trial, quarantine._accused
    if trial is not None:
        assert trial.engine is not None, "a suspect runs on no engine"
        assert trial.engine is quarantine._reserved, "a suspect runs on an engine that is not reserved"
        assert list(trial.engine.in_flight.values()) == [trial], "a suspect does not run alone"
    assert accused is None or accused.uid in quarantine._waiting, "an accused request does not wait"


def _check_queue(queue: WaitingQueue) -> None:
    waiting = 0
    for key, band in queue._bands.items():
        assert key == (band.priority, band.model, band.adapter, band.needs), "a band is under the key of another"
        assert band.replays or band.tenants, "an empty band is kept"
        tenants = [tenant for level in band.tenants._levels.values() for tenant in level]
        _check_levels(band.tenants, tenants)
        lanes = [tenant.lanes[band] for tenant in tenants]
        assert all(lanes), "an empty lane is kept"
        assert all(entry.is_replay for entry in band.replays.values()), "a request waits among replays"
        waiting += len(band.replays) + sum(map(len, lanes))
    assert waiting == queue.length, "waiting requests are miscounted"


def _check_tenants(tenants: Tenants, entries: list[Entry]) -> None:
    assert {id(entry.tenant) for entry in entries} == {id(tenant) for tenant in tenants}, "a tenant without a request"
    for tenant in tenants:
        own = [entry for entry in entries if entry.tenant is tenant]
        assert tenant.num_open == len(own), "open requests of a tenant are miscounted"
        assert tenant.open_bytes == sum(entry.admitted_bytes for entry in own), "a tenant's bytes are miscounted"
        in_flight = {entry.dispatch_id: entry for entry in own if entry.engine is not None}
        assert tenant.in_flight == in_flight, "requests of a tenant at engines are miscounted"
        assert list(tenant.in_flight) == sorted(in_flight), "requests of a tenant are not in the order of dispatch"
    _check_levels(tenants.busy, {tenant for tenant in tenants if tenant.load > 1})


def _check_levels(levels: Levels, tenants: Collection[Tenant]) -> None:
    """Assert that a table contains exactly `tenants`, in the order of their load."""
    found = [(load, tenant) for load, level in levels._levels.items() for tenant in level]
    assert all(load == tenant.load for load, tenant in found), "a tenant is at another load than its own"
    assert {tenant for _, tenant in found} == set(tenants), "a tenant is missing or has no request here"
    assert all(levels._levels.values()), "an empty level is kept"
