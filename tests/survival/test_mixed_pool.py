"""An engine that alone supports a parameter is killed in the middle of streams that use it."""

import asyncio

import pytest
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from fleet import Fleet, Load, until_serving, until_status

from megatron_runtime.client.rejection import InvalidRequestError
from megatron_runtime.requests.sampling_params import SamplingParams

STEPS = ("--echo-step-seconds", "0.02", "--kv-cache-memory", "16Mi")
LACKING = ("--echo-lacks", "HIGH_TEMPERATURE")
LENGTH = 200
"""Tokens of each stream: four seconds of steps, so that all are open when the engine is killed."""

pytestmark = pytest.mark.timeout(200)


async def test_streams_wait_for_the_only_engine_that_supports_them(fleet: Fleet) -> None:
    coordinator = await fleet.coordinator()
    await fleet.engine("whole", *STEPS)
    await fleet.engine("lacking", *STEPS, *LACKING)
    link = await fleet.admin()
    await until_serving(link, fleet.engines)
    client = await fleet.client()
    load = Load([client])
    for number in range(24):
        load.add([number, 5], LENGTH, **({"temperature": 3.0} if number % 3 == 0 else {}))
    whole = client.add_request([99, 5], SamplingParams(num_tokens_to_generate=LENGTH, temperature=3.0))
    await load.until(24 * 5)
    await fleet.engines.pop("whole").kill()
    await until_status(
        link, lambda status: status.queued == 9, what="the streams that the other engine does not support wait"
    )
    with pytest.raises(
        InvalidRequestError, match=r"temperature needs temperatures above 2.*backend 'echo'"
    ) as rejected:
        await client.add_request([7], SamplingParams(num_tokens_to_generate=5, temperature=3.0))
    assert (rejected.value.code, rejected.value.field) == (400, "temperature")
    await fleet.engine("whole", *STEPS)
    await load.check()
    assert (await asyncio.wait_for(whole, LONG_SECONDS))["generated_tokens"] == echo_answer([99, 5], LENGTH)
    assert (await coordinator.metrics())["megatron_coordinator_replays_total"] > 0
