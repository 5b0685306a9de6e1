"""A request that crashes every engine that runs it, among streams whose answers must stay correct."""

import asyncio
import re
import signal
import time
from collections.abc import Callable

import pytest
from fleet import Fleet, Load, until_serving
from soak import size

from megatron_runtime.backends.echo.echo_executor import echo_answer
from megatron_runtime.client.rejection import EngineFailedError
from megatron_runtime.requests.sampling_params import SamplingParams

POISON = 666
STREAMS = 8
POISONED = ("--echo-step-seconds", "0.02", "--fault", f"crash-on-token:token={POISON},length=6")

pytestmark = pytest.mark.timeout(size(300, soak=1200))


class Supervisor:
    """Restarts engines that exit, as a kubelet does. exits: their exit statuses."""

    def __init__(self, fleet: Fleet, *arguments: str) -> None:
        self.exits: list[int] = []
        self._fleet = fleet
        self._arguments = arguments
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, name: str) -> None:
        engine = await self._fleet.engine(name, *self._arguments)
        self._tasks.append(asyncio.create_task(self._watch(name, engine)))

    async def _watch(self, name: str, engine) -> None:
        self.exits.append(await engine.ended())
        await self.start(name)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


async def test_a_poison_request_fails_after_three_crashes(fleet: Fleet, report: Callable[[str], None]) -> None:
    coordinator = await fleet.coordinator()
    supervisor = Supervisor(fleet, *POISONED)
    for name in ("engine-0", "engine-1"):
        await supervisor.start(name)
    try:
        link = await fleet.admin()
        await until_serving(link, fleet.engines)
        client = await fleet.client()
        load = Load([client])
        for number in range(STREAMS):
            load.add([number, 5], 300)
        await load.until(STREAMS * 5)
        with pytest.raises(EngineFailedError) as failed:
            await client.add_request([POISON, 5], SamplingParams(num_tokens_to_generate=20))
        assert failed.value.code == 500
        assert not failed.value.is_transient
        assert failed.value.retry_after_seconds is None
        await load.finish(seconds=120)
        for record in load.records:
            record.check(echo_answer(record.prompt, record.length))
        assert supervisor.exits == [-signal.SIGSEGV] * 3
        await until_serving(link, fleet.engines)
        (found,) = (await link.status()).failed_requests
        assert found.uid == re.search(r"[0-9a-f]{32}", str(failed.value)).group()
        assert len(found.engines) == 3
        samples = await coordinator.metrics()
        assert samples["megatron_coordinator_poison_requests_total"] == 1
        assert samples["megatron_coordinator_engine_crashes_total"] == 3
        report(f"longest wait of a well-behaved stream {max(r.longest_gap(since=0) for r in load.records):.2f} s")
    finally:
        supervisor.stop()


async def test_requests_of_two_engines_killed_at_once_all_complete(fleet: Fleet, report: Callable[[str], None]) -> None:
    """Requests replayed from one killed engine to the other were in flight at two crashes: suspects, not poison."""
    coordinator = await fleet.coordinator()
    supervisor = Supervisor(fleet, "--echo-step-seconds", "0.02", "--max-requests", "600")
    for name in ("engine-0", "engine-1", "engine-2"):
        await supervisor.start(name)
    try:
        link = await fleet.admin()
        await until_serving(link, fleet.engines)
        load = Load([await fleet.client() for _ in range(2)])
        streams = size(60, soak=1000)
        for number in range(streams):
            load.add([number, 5], size(100, soak=200))
        await load.until(streams * 20)
        killed = time.monotonic()
        for name in ("engine-0", "engine-1"):
            fleet.engines[name].process.kill()
        await load.finish(seconds=size(120, soak=900))
        for record in load.records:
            record.check(echo_answer(record.prompt, record.length))
        samples = await coordinator.metrics()
        assert samples["megatron_coordinator_poison_requests_total"] == 0
        assert not (await link.status()).failed_requests
        report(
            f"{streams} streams, {samples['megatron_coordinator_suspect_requests_total']:.0f} suspects; "
            f"longest wait {max(record.longest_gap(since=killed) for record in load.records):.2f} s"
        )
    finally:
        supervisor.stop()
