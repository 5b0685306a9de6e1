"""A request that crashes every engine that runs it, among streams whose answers must stay correct."""

import re
import signal
import time
from collections.abc import Callable
from functools import partial

import openai
import pytest
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, Load, until_serving
from soak import size

from megatron_runtime.client.rejection import RequestFailedError
from megatron_runtime.requests.sampling_params import SamplingParams

POISON = 666
STREAMS = 8
POISONED = ("--echo-step-seconds", "0.02", "--echo-crash-token", str(POISON), "--echo-crash-length", "6")

pytestmark = pytest.mark.timeout(size(300, soak=1200))


async def three_exits(fleet: Fleet) -> list[int]:
    """Return the exit statuses of engines once there are three. A request fails before the last exit is noticed."""

    async def have_exited() -> bool:
        return len(fleet.exits) >= 3

    await eventually(have_exited, what="three engines have exited")
    return [code for _, code in fleet.exits]


async def test_a_poison_request_fails_after_three_crashes(fleet: Fleet, report: Callable[[str], None]) -> None:
    coordinator = await fleet.coordinator()
    for name in ("engine-0", "engine-1"):
        await fleet.keep_running(name, *POISONED)
    link = await fleet.admin()
    await until_serving(link, fleet.engines)
    client = await fleet.client()
    load = Load([client])
    for number in range(STREAMS):
        load.add([number, 5], 300)
    await load.until(STREAMS * 5)
    with pytest.raises(RequestFailedError) as failed:
        await client.add_request([POISON, 5], SamplingParams(num_tokens_to_generate=20))
    assert failed.value.code == 500
    assert not failed.value.is_transient
    assert failed.value.retry_after_seconds is None
    await load.check()
    assert await three_exits(fleet) == [-signal.SIGSEGV] * 3
    await until_serving(link, fleet.engines)
    (found,) = (await link.status()).failed_requests
    assert found.uid == re.search(r"[0-9a-f]{32}", str(failed.value)).group()
    assert len(found.engines) == 3
    samples = await coordinator.metrics()
    assert samples["megatron_coordinator_poison_requests_total"] == 1
    assert samples["megatron_coordinator_engine_crashes_total"] == 3
    report(f"longest wait of a well-behaved stream {max(r.longest_gap(since=0) for r in load.records):.2f} s")


async def test_requests_of_two_engines_killed_at_once_all_complete(fleet: Fleet, report: Callable[[str], None]) -> None:
    """Requests replayed from one killed engine to the other were in flight at two crashes: suspects, not poison."""
    coordinator = await fleet.coordinator()
    for name in ("engine-0", "engine-1", "engine-2"):
        await fleet.keep_running(name, "--echo-step-seconds", "0.02", "--max-requests", "600")
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
    await load.check(seconds=size(120, soak=900))
    samples = await coordinator.metrics()
    assert samples["megatron_coordinator_poison_requests_total"] == 0
    assert not (await link.status()).failed_requests
    report(
        f"{streams} streams, {samples['megatron_coordinator_suspect_requests_total']:.0f} suspects; "
        f"longest wait {max(record.longest_gap(since=killed) for record in load.records):.2f} s"
    )


async def test_the_openai_server_answers_a_poison_request_with_its_id_and_other_streams_are_whole(fleet: Fleet) -> None:
    await fleet.coordinator()
    for name in ("engine-0", "engine-1"):
        await fleet.keep_running(name, *POISONED)
    link = await fleet.admin()
    await until_serving(link, fleet.engines)
    _, url = await fleet.server()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=LONG_SECONDS) as client:
        ask = partial(client.completions.create, model="smollm2-135m", stream=True, max_tokens=100)
        undisturbed = "".join([part.choices[0].text async for part in await ask(prompt=[7, 5])])
        streams = [await ask(prompt=[7, 5]) for _ in range(STREAMS)]
        begun = [await anext(stream) for stream in streams]
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(model="smollm2-135m", prompt=[POISON], max_tokens=20)
        assert (failed.value.status_code, failed.value.code) == (500, "engine_failed")
        for first, stream in zip(begun, streams, strict=True):
            assert first.choices[0].text + "".join([part.choices[0].text async for part in stream]) == undisturbed
    assert await three_exits(fleet) == [-signal.SIGSEGV] * 3
    (found,) = (await link.status()).failed_requests
    assert found.uid in failed.value.message
