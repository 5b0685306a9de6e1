"""Engines and the coordinator are killed or frozen under streaming load: no request and no token is lost."""

import random
import time
from collections.abc import Callable

import pytest
from fleet import Fleet, Load, until_serving, until_status
from machine import scaled
from soak import repeated, size

STREAMS = size(40, soak=1000)
"""So few in `make test` that this process, which reads them all, is not seconds behind the engines."""
CLIENTS = 4
ENGINE_OPTIONS = ("--max-requests", "600", "--echo-step-seconds", "0.05", "--kv-cache-memory", "16Mi")
"""Two engines have capacity for all requests, so the measured waits are not waits for a slot."""
LIVENESS_SECONDS = scaled(180)
"""Far above the time that is needed: only a hang exceeds it."""

pytestmark = pytest.mark.timeout(400)


class Scene:
    """Three engines, a coordinator, four clients and streams of random lengths, all by one seed."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.random = random.Random(seed)

    async def start(self) -> None:
        fleet = self.fleet
        self.coordinator, self.link = await fleet.serve(3, *ENGINE_OPTIONS)
        self.load = Load([await fleet.client() for _ in range(CLIENTS)])
        for number in range(STREAMS):
            self.load.add([number, *self.random.choices(range(50_000), k=7)], self.random.randint(20, 100))

    async def until_a_random_moment(self) -> None:
        """Wait for a random number of tokens, few enough that every engine still has work."""
        await self.load.until(self.random.randint(STREAMS, self.load.asked // 4))
        self.open = sum(record.final is None for record in self.load.records)

    async def random_busy_engine(self) -> str:
        """Return the name of an engine that has requests, by the coordinator: this process reads tokens later."""
        busy = [engine.name for engine in (await self.link.status()).engines if engine.in_flight]
        assert busy, "every stream is complete"
        return self.random.choice(busy)

    async def check(self) -> None:
        """Check that every stream completes with the undisturbed answer and that the engines serve again."""
        await self.load.check(seconds=LIVENESS_SECONDS)
        await until_serving(self.link, self.fleet.engines)

    def added_latency(self, *, since: float) -> str:
        gaps = sorted(record.longest_gap(since=since) for record in self.load.records)
        return (
            f"{len(gaps)} streams complete and equal, {self.open} open at the fault; longest wait after it: "
            f"median {gaps[len(gaps) // 2]:.2f} s, p99 {gaps[len(gaps) * 99 // 100]:.2f} s, most {gaps[-1]:.2f} s"
        )


@pytest.fixture
async def scene(fleet: Fleet, seed: int) -> Scene:
    scene = Scene(fleet, seed)
    await scene.start()
    return scene


@repeated()
async def test_an_engine_is_killed_under_many_streams(scene: Scene, report: Callable[[str], None]) -> None:
    await scene.until_a_random_moment()
    killed = time.monotonic()
    await scene.fleet.engines.pop(await scene.random_busy_engine()).kill()
    await scene.check()
    report(scene.added_latency(since=killed))
    assert (await scene.coordinator.metrics())["megatron_coordinator_replays_total"] > 0


@repeated()
async def test_an_engine_is_frozen_and_thawed_under_many_streams(scene: Scene, report: Callable[[str], None]) -> None:
    await scene.until_a_random_moment()
    frozen = time.monotonic()
    engine = scene.fleet.engines[await scene.random_busy_engine()]
    engine.freeze()
    await until_status(scene.link, lambda status: len(status.engines) == 2, what="the frozen engine is removed")
    engine.thaw()
    await scene.check()
    report(scene.added_latency(since=frozen))
    counts = await scene.coordinator.metrics()
    assert counts["megatron_coordinator_replays_total"] > 0
    assert counts["megatron_coordinator_completed_requests_total"] == STREAMS


@repeated()
async def test_the_coordinator_is_killed_and_restarted_under_many_streams(
    scene: Scene, report: Callable[[str], None]
) -> None:
    await scene.until_a_random_moment()
    killed = time.monotonic()
    await scene.coordinator.kill()
    scene.coordinator = await scene.fleet.coordinator()
    await scene.check()
    report(scene.added_latency(since=killed))
