"""Three of ten control frames dropped, doubled or delayed: every verb is reached, none is confirmed that was not."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster
from machine import scaled
from soak import size

from megatron_operator.decision.coordinator_snapshot import OperationReport
from megatron_operator.link.connection import LinkTimings

from .lossy_link import CoordinatorPort, LossyLink
from .operator_task import InMemoryApi, Watch, new_operator

GOALS = ("Running", "Paused", "Suspended", "Running", "Stopped")
SEEDS = range(size(8, soak=1000))
AT_ONCE = 5
"""More of them make each other late, and what is late is asked again."""
FAULT_RATE = 0.3
TIMINGS = LinkTimings(
    hello_retry=0.02,
    status_interval=0.05,
    status_interval_busy=0.03,
    answer_timeout=0.2,
    refresh_timeout=0.15,
    first_contact=0.2,
    ack_margin=0.1,
)


class Truth:
    """Compares what the status claims with what the coordinator knows, whenever it is written."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.lies: list[str] = []

    def look(self, status: dict[str, Any]) -> None:
        """The task survives whatever a write raises, so what is wrong is kept for the test."""
        try:
            self.check(status)
        except AssertionError as error:
            self.lies.append(str(error))

    def check(self, status: dict[str, Any]) -> None:
        lifecycle, coordinator = status["lifecycle"], self._cluster.coordinator
        if lifecycle.get("phase") == "Confirmed":
            report: OperationReport = coordinator.operations[lifecycle["operationId"]]
            assert report.outcome.value == "Confirmed", f"confirmed in the status alone: {lifecycle}"
        if status["state"] in ("Paused", "Suspended"):
            assert coordinator.state.value == status["state"].upper(), f"{status['state']} is not {coordinator.state}"
            assert {engine.state.value for engine in coordinator.engines.values()} == {status["state"].upper()}


async def live(seed: int) -> int:
    """All goals in turn; the number of faults on the way."""
    rng = random.Random(seed)
    cluster = Cluster(copy.deepcopy(MINIMAL), security=False)
    truth = Truth(cluster)
    api = InMemoryApi(cluster, on_status=truth.look)
    watch = Watch(api)
    watch.show()
    woken = asyncio.Event()
    link = LossyLink(on_change=woken.set, timings=TIMINGS)
    link.connect_through(CoordinatorPort(cluster), rng, fault_rate=FAULT_RATE)
    task = new_operator(api, watch, link, term=1, woken=woken, resync_seconds=0.2)
    running = asyncio.create_task(task.run())
    try:
        for goal in GOALS:
            cluster.patch(desiredState=goal)
            async with asyncio.timeout(scaled(600)):
                while not _reached(cluster, goal):
                    assert not running.done(), running.exception()
                    watch.show()
                    task.wake()
                    await asyncio.sleep(0.05)
                    cluster.tick()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert truth.lies == []
    return sum(socket.there.faults + socket.back.faults for socket in link.sockets)


def _reached(cluster: Cluster, goal: str) -> bool:
    status = cluster.status
    return status.get("state") == goal and status.get("observedGeneration") == cluster.generation


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a loaded machine takes many times as long
async def test_every_verb_is_reached_and_none_is_confirmed_falsely() -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> int:
        async with gate:
            return await live(seed)

    faults = await asyncio.gather(*(one(seed) for seed in SEEDS))
    print(f"{len(faults)} seeds, {sum(faults)} faults")
    assert sum(faults) > 10 * len(faults)
