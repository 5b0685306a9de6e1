"""A request that ends every engine that runs it, among streams that must notice nothing but a wait."""

import asyncio
import re
import signal
from collections.abc import Callable

import pytest
from fleet import Fleet, Load, until_serving

from megatron_runtime.engines.echo_executor import echo_answer
from megatron_runtime.inference_client import EngineFailedError
from megatron_runtime.sampling_params import SamplingParams

POISON = 666
STREAMS = 8
OPTIONS = ("--echo-step-seconds", "0.02", "--fault", f"crash-on-token:token={POISON},length=6")

pytestmark = pytest.mark.timeout(300)


class Supervisor:
    """Starts an engine again when it ends, as a kubelet does. exits: the status of each that ended."""

    def __init__(self, fleet: Fleet) -> None:
        self.exits: list[int] = []
        self._fleet = fleet
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, name: str) -> None:
        engine = await self._fleet.engine(name, *OPTIONS)
        self._tasks.append(asyncio.create_task(self._watch(name, engine)))

    async def _watch(self, name: str, engine) -> None:
        self.exits.append(await engine.ended())
        await self.start(name)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


async def test_a_request_that_ends_engines_is_failed_after_three(fleet: Fleet, report: Callable[[str], None]) -> None:
    coordinator = await fleet.coordinator()
    supervisor = Supervisor(fleet)
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
