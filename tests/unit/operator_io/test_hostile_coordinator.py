"""A tenant's coordinator that answers garbage and maximal fences affects the status of its own resource only."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from eventually import LONG_SECONDS
from hostile_coordinator import ANSWERS, HIGHEST, HostileCoordinator, reply
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot
from megatron_operator.link.connection import MAX_MESSAGES_A_SECOND, CoordinatorLink, LinkTimings
from megatron_operator.link.snapshot import printable

from .lossy_link import CoordinatorPort, LossyLink
from .operator_task import InMemoryApi, Leader, Watch, new_operator

FAST = LinkTimings(
    hello_retry=0.02,
    status_interval=0.02,
    status_interval_busy=0.02,
    answer_timeout=0.3,
    refresh_timeout=0.3,
    first_contact=2.0,
    flood_pause=0.5,
)


@pytest.fixture
async def hostile() -> AsyncIterator[Callable[..., HostileCoordinator]]:
    made: list[HostileCoordinator] = []

    def make(*args: Any, **options: Any) -> HostileCoordinator:
        made.append(HostileCoordinator(*args, **options))
        return made[-1]

    yield make
    for one in made:
        await one.close()


class Tenant:
    """A namespace: one resource, its task, and whatever answers as its coordinator."""

    def __init__(self, leader: Leader, make_link: Callable[[asyncio.Event, Cluster], Any], address: str = "") -> None:
        self.cluster = Cluster(copy.deepcopy(MINIMAL), security=False)
        self.api = InMemoryApi(self.cluster)
        self.watch = Watch(self.api)
        self.watch.show()
        woken = asyncio.Event()
        self.link = make_link(woken, self.cluster)
        options: dict[str, Any] = {"address": address} if address else {}
        self.task = new_operator(
            self.api, self.watch, self.link, term=leader.term, woken=woken, resync_seconds=0.2, leader=leader, **options
        )
        self.running = asyncio.create_task(self.task.run())

    def turn(self) -> None:
        assert not self.running.done(), self.running.exception()
        self.watch.show()
        self.task.wake()
        self.cluster.tick()

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    @property
    def told(self) -> str:
        return json.dumps(self.cluster.status, ensure_ascii=False)


def honest_link(woken: asyncio.Event, cluster: Cluster) -> LossyLink:
    import random

    link = LossyLink(on_change=woken.set, timings=FAST)
    link.connect_through(CoordinatorPort(cluster), random.Random(1), fault_rate=0.0)
    return link


@pytest.mark.slow
async def test_verbs_work_while_the_coordinator_of_another_tenant_sends_garbage(hostile: Any) -> None:
    leader = Leader(term=7)
    bad = hostile()
    tenant = Tenant(leader, honest_link)
    attacker = Tenant(leader, lambda woken, _: CoordinatorLink(on_change=woken.set, timings=FAST), bad.address)
    try:
        for goal in ("Running", "Paused", "Running", "Suspended", "Running"):
            tenant.cluster.patch(desiredState=goal)
            attacker.cluster.patch(desiredState=goal)
            async with asyncio.timeout(LONG_SECONDS):
                while tenant.cluster.state != goal or tenant.cluster.status["observedGeneration"] != (
                    tenant.cluster.generation
                ):
                    tenant.turn()
                    attacker.turn()
                    await asyncio.sleep(0.02)
        async with asyncio.timeout(LONG_SECONDS):
            while not bad.round.is_set() or "StaleFence" not in attacker.told:
                attacker.turn()
                await asyncio.sleep(0.02)
    finally:
        await tenant.close()
        await attacker.close()
    assert leader.term == 7, "what a coordinator says raised the term of all"
    assert [signal.fence for signal in tenant.cluster.coordinator.begun] == [7] * len(tenant.cluster.coordinator.begun)
    assert len(tenant.cluster.coordinator.begun) >= 5
    assert "fenceOffset" not in tenant.told
    assert str(HIGHEST) not in tenant.told
    assert str(HIGHEST) in attacker.told or str(1 << 53) in attacker.told
    assert attacker.told.isprintable()


async def refreshed(link: CoordinatorLink, until: Callable[[CoordinatorSnapshot], bool]) -> CoordinatorSnapshot:
    async with asyncio.timeout(LONG_SECONDS):
        while True:
            found = await link.refresh(expected=True)
            if until(found):
                return found
            await asyncio.sleep(0.01)


@pytest.fixture
async def link_to() -> AsyncIterator[Callable[[str], CoordinatorLink]]:
    made: list[CoordinatorLink] = []

    def make(address: str) -> CoordinatorLink:
        made.append(CoordinatorLink(on_change=lambda: None, timings=FAST))
        made[-1].point_to((address,), None)
        return made[-1]

    yield make
    for link in made:
        await link.close()


async def test_an_unreadable_answer_is_named(hostile: Any, link_to: Any) -> None:
    link = link_to(hostile({"the highest epoch": ANSWERS["the highest epoch"]}).address)
    found = await refreshed(link, lambda found: "cannot be read" in found.error)
    assert f"field epoch {HIGHEST}" in found.error
    assert not found.reachable


async def test_texts_of_a_coordinator_are_cut_and_escaped(hostile: Any, link_to: Any) -> None:
    link = link_to(hostile({"names": ANSWERS["names that do not print"]}).address)
    found = await refreshed(link, lambda found: found.reachable)
    [engine] = found.engines
    assert engine.name == r"demo-engine-0\x1b[2J\nnot a line"
    assert engine.digest.startswith(r"\u202e")
    assert len(engine.digest) <= 128
    assert found.fence == HIGHEST
    assert printable("a\tb\x7f\ud800", 100) == r"a\tb\x7f\ud800"


@pytest.mark.slow
async def test_a_flooding_coordinator_is_disconnected_for_a_while(hostile: Any, link_to: Any) -> None:
    bad = hostile({"status": lambda: [reply()]}, floods=2 * MAX_MESSAGES_A_SECOND)
    link = link_to(bad.address)
    found = await refreshed(link, lambda found: "in a second" in found.error)
    assert not found.reachable
    assert found.lost_seconds is None, "its pod is not replaced: it is alive"
    asked = len(bad.told)
    await refreshed(link, lambda _: len(bad.told) > asked)  # and is tried again


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.startswith("a bomb")] + ["two megabytes"])
async def test_one_answer_costs_the_operator_little_memory(hostile: Any, link_to: Any, name: str) -> None:
    """Of 256 Mi that serve every resource. An answer of two megabytes cost 137 MB."""
    bad = hostile({name: ANSWERS[name]})
    ANSWERS[name]()
    gc.collect()
    tracemalloc.start()
    link = link_to(bad.address)
    async with asyncio.timeout(LONG_SECONDS):
        while len(bad.told) < 2:
            await link.refresh(expected=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20, "the hostile end of it is in this process, too"
