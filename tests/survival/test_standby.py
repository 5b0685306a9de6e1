"""The active coordinator of a pair is killed, frozen or stopped under streams, and the standby takes over."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable

import pytest
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, Load, Process, until_serving, until_status
from soak import repeated, size

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.transport.control_calls import ControlRejectedError

STREAMS = size(40, soak=1000)
ENGINE_OPTIONS = ("--max-requests", "600", "--echo-step-seconds", "0.05", "--kv-cache-memory", "16Mi")
HOSTS = ("127.0.0.1", "127.0.0.2")
"""Both coordinators have the same ports. Engines and clients know the first one only."""
FROZEN_SECONDS = 6.0
"""Longer than peers wait for a silent coordinator (3 s)."""

pytestmark = pytest.mark.timeout(400)


class Scene:
    """A pair of coordinators, two engines, two clients and streams of random lengths. The first one is active."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.random = random.Random(seed)
        self.health_ports = free_ports(2)

    async def start(self) -> None:
        self.pair = [await self.coordinator(0), await self.coordinator(1)]
        for number in range(2):
            await self.fleet.engine(f"engine-{number}", *ENGINE_OPTIONS)
        self.link = await self.fleet.admin()
        await until_serving(self.link, self.fleet.engines)
        assert await self.active() == [True, False]
        self.load = Load([await self.fleet.client() for _ in range(2)])
        self.add_streams()

    async def coordinator(self, number: int) -> Process:
        other = HOSTS[1 - number]
        return await self.fleet.coordinator(
            "--other-host", other, host=HOSTS[number], health_port=self.health_ports[number]
        )

    def add_streams(self) -> None:
        for number in range(STREAMS):
            self.load.add([number, *self.random.choices(range(50_000), k=7)], self.random.randint(20, 100))

    async def active(self) -> list[bool]:
        return [bool((await process.metrics())["megatron_coordinator_active"]) for process in self.pair]

    async def other_is_active(self) -> dict[str, float]:
        """Wait until the second coordinator is active, whatever the first is, and return its metrics."""
        found: dict[str, float] = {}

        async def is_active() -> bool:
            found.update(await self.pair[1].metrics())
            return found["megatron_coordinator_active"] == 1

        await eventually(is_active, what="the second coordinator is active")
        return found

    async def until_active(self, *wanted: bool) -> None:
        async def agree() -> bool:
            try:
                return await self.active() == list(wanted)
            except OSError:
                return False  # a coordinator starts

        await eventually(agree, what=f"active coordinators: {wanted}")

    async def check(self) -> None:
        """Check that every stream completes with the undisturbed answer and that both engines serve."""
        await self.load.check()
        await until_serving(self.link, self.fleet.engines)

    def longest_wait(self, *, since: float) -> str:
        gaps = [record.longest_gap(since=since) for record in self.load.records]
        return f"{len(gaps)} streams complete and equal; longest wait {max(gaps):.2f} s"


@pytest.fixture
async def scene(fleet: Fleet, seed: int) -> Scene:
    scene = Scene(fleet, seed)
    await scene.start()
    await scene.load.until(scene.random.randint(STREAMS, scene.load.asked // 4))
    return scene


@repeated()
async def test_the_standby_takes_over_from_a_coordinator_that_is_killed_or_stopped(
    scene: Scene, report: Callable[[str], None]
) -> None:
    killed = time.monotonic()
    await scene.pair[0].kill()
    await scene.check()
    report(scene.longest_wait(since=killed))

    # The killed one returns as the standby. It takes over when the other one is stopped in an orderly way.
    scene.pair[0] = await scene.coordinator(0)
    await scene.until_active(False, True)
    scene.add_streams()
    await scene.load.until(scene.load.tokens + STREAMS)
    stopped = time.monotonic()
    # Frozen engines complete nothing: a coordinator that waited for open requests would not exit.
    for engine in scene.fleet.engines.values():
        engine.freeze()
    assert (await scene.link.status()).in_flight > 0
    scene.pair[1].process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(scene.pair[1].ended(), LONG_SECONDS) == 0
    for engine in scene.fleet.engines.values():
        engine.thaw()
    await scene.check()
    report(scene.longest_wait(since=stopped))


@repeated()
async def test_a_coordinator_that_wakes_up_changes_nothing(scene: Scene, report: Callable[[str], None]) -> None:
    """It is frozen longer than its peers wait, and finds its connections and its term outdated."""
    frozen = time.monotonic()
    scene.pair[0].freeze()
    await asyncio.sleep(FROZEN_SECONDS)
    in_between = await scene.other_is_active()
    scene.pair[0].thaw()
    await scene.until_active(False, True)
    scene.add_streams()
    await scene.check()
    report(scene.longest_wait(since=frozen))
    after = await scene.pair[1].metrics()
    assert after["megatron_coordinator_active"] == 1
    assert after["megatron_coordinator_engines_lost_total"] == in_between["megatron_coordinator_engines_lost_total"]


@repeated()
async def test_verbs_hold_across_a_takeover(scene: Scene) -> None:
    """The standby takes the state and the fence of the engines, so an old leader changes nothing."""
    paused = await scene.link.control(Header.PAUSE, fence=7)
    assert paused.ok
    tokens = await scene.load.at_rest()
    await scene.pair[0].kill()
    status = await until_status(scene.link, lambda status: status.state == "PAUSED", what="the standby is PAUSED")
    assert status.fence == 7
    with pytest.raises(ControlRejectedError) as stale:
        await scene.link.control(Header.UNPAUSE, fence=6)
    assert stale.value.code == ErrorCode.STALE_FENCE
    assert scene.load.tokens == tokens
    assert (await scene.link.control(Header.UNPAUSE, fence=8)).ok
    await scene.check()
