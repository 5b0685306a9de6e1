"""A resource has one manager: an operator leaves it alone while the Lease that its status names is renewed."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.claims import ABANDONED_DURATIONS, READ_SECONDS, Claims
from megatron_operator.cluster.lease import Elector, LeaseSettings
from megatron_operator.controller.metrics import Metrics

from .operator_task import DirectLink, InMemoryApi, Watch, new_operator


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def elector(store: Any, clock: Clock, name: str = "first", **options: Any) -> Elector:
    return Elector(store, LeaseSettings("system", name, f"{name}-0", 10.0, **options), clock=clock)


async def test_a_resource_without_a_manager_or_of_this_operator_is_managed(store: Any, clock: Clock) -> None:
    claims = Claims(store, own="system/first", clock=clock)
    assert await claims.other("") == ""
    assert await claims.other("system/first") == ""
    assert await claims.other("system/deleted") == "", "no operator has the Lease"


async def test_a_renewed_lease_keeps_its_resources_and_an_abandoned_one_loses_them(store: Any, clock: Clock) -> None:
    first = elector(store, clock)
    await first.acquire()
    claims = Claims(store, own="other/second", clock=clock)
    for _ in range(20):
        assert await claims.other("system/first") == "it is managed by first-0 with Lease system/first"
        clock.now += READ_SECONDS
        await first._renew()
    await first.release()
    clock.now += READ_SECONDS
    assert await claims.other("system/first"), "a successor of the same release may lead within seconds"
    clock.now += ABANDONED_DURATIONS * 10.0 + 1
    assert await claims.other("system/first") == ""


async def test_a_lease_that_may_not_be_read_counts_as_renewed(store: Any, clock: Clock) -> None:
    claims = Claims(store, own="other/second", clock=clock)
    store.reject = KubeApiError(403, "Forbidden", "leases may not be read")
    clock.now += 1000
    other = await claims.other("system/first")
    assert "leases may not be read" in other
    assert "status.manager" in other
    store.reject = KubeApiError(503, "Unavailable", "try again")
    clock.now += READ_SECONDS
    with pytest.raises(KubeApiError, match="try again"):
        await claims.other("system/first")


async def test_the_leases_of_others_are_read_once_for_all_resources(store: Any, clock: Clock) -> None:
    await elector(store, clock).acquire()
    claims, get = Claims(store, own="other/second", clock=clock), store.get
    reads = []

    async def count(*arguments: Any) -> Any:
        reads.append(arguments)
        return await get(*arguments)

    store.get = count
    await asyncio.gather(*(claims.other("system/first") for _ in range(50)))
    assert len(reads) == 1


class Answers:
    """Claims with a given answer."""

    own = "other/second"

    def __init__(self, answer: str) -> None:
        self.answer = answer

    async def other(self, manager: str) -> str:
        return self.answer if manager not in ("", self.own) else ""


async def test_the_second_operator_changes_nothing_until_it_takes_the_resource_over() -> None:
    cluster = Cluster(copy.deepcopy(MINIMAL), security=False).settled()
    cluster.status["manager"] = "system/first"
    before = copy.deepcopy((cluster.status, cluster.objects))
    api = InMemoryApi(cluster)
    watch = Watch(api)
    watch.show()
    claims = Answers("it is managed by first-0 with Lease system/first")
    second = new_operator(api, watch, DirectLink(cluster), term=1, claims=claims)
    cluster.objects.pop(next(iter(cluster.objects)))
    lost = len(cluster.objects)
    for _ in range(3):
        assert await second.run_once() == READ_SECONDS
    assert cluster.status == before[0]
    assert len(cluster.objects) == lost
    assert second.reading.manager == "system/first"
    metrics = Metrics()
    metrics.show(lambda: [second.reading])
    labels = {"namespace": "default", "name": cluster.name, "lease": "system/first"}
    assert metrics.registry.get_sample_value("megatron_operator_managed_elsewhere", labels) == 1

    claims.answer = ""
    await second.run_once()
    assert cluster.status["manager"] == "other/second"
    assert second.reading.manager == ""


async def test_the_lease_of_earlier_releases_is_held_too_while_it_exists(store: Any, clock: Clock) -> None:
    old = elector(store, clock, "former")
    await old.acquire()
    new = elector(store, clock, "renamed", former="former")
    assert not await new._holds_former()
    assert new.waits_for == ("system/former", "former-0")
    await old.release()
    assert await new.acquire() == 3, "its term continues that of the earlier Lease"
    again = elector(store, clock, "former")
    assert not await again._try_acquire(), "an operator of an earlier release stands by"
    clock.now += 6
    await new._renew()
    assert new.seconds_left < 1, "both Leases must be renewed"


async def test_two_releases_lead_at_once_and_one_of_them_holds_the_earlier_lease(store: Any, clock: Clock) -> None:
    old = elector(store, clock, "former")
    await old.acquire()
    await old.release()
    first, second = (elector(store, clock, name, former="former") for name in ("a", "b"))
    assert await first.acquire() == 3
    assert await second.acquire() == 1
    assert first.leading
    assert second.leading


async def test_a_new_installation_has_one_lease(store: Any, clock: Clock) -> None:
    assert await elector(store, clock, "renamed", former="former").acquire() == 1
    assert [name for _, _, name in store.objects] == ["renamed"]


async def test_a_standby_is_shown_with_the_lease_and_its_holder(store: Any, clock: Clock) -> None:
    await elector(store, clock, "former").acquire()
    waiting = Elector(store, LeaseSettings("system", "former", "another", 10.0), clock=clock)
    assert not await waiting._try_acquire()
    metrics = Metrics()
    metrics.show(list, standby=lambda: waiting.waits_for)
    labels = {"lease": "system/former", "holder": "former-0"}
    assert metrics.registry.get_sample_value("megatron_operator_standby", labels) == 1
