"""The time from a patch to a confirmed Paused, with many requests in flight. The test prints it and sets no limit.

`MEGATRON_SOAK=1` runs the size that the documentation quotes.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from machine import scaled
from soak import size

from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Role
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.security import PeerKeys

from .conftest import percentile_ms

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

REQUESTS = size(100, soak=1000)
PAUSES = size(1, soak=100)
LOOK_SECONDS = 0.01
STEP_SECONDS = "0.02"
TOKENS = 90_000
"""Tokens of each request: half an hour of steps, longer than any run."""


async def paused_after(resource: Any) -> float:
    """Return the seconds from the patch until the status reports that all ranks have confirmed."""
    began = time.monotonic()
    await resource.patch(desiredState="Paused")
    async with asyncio.timeout(scaled(60)):
        while True:
            status = await resource.status()
            lifecycle = status.get("lifecycle") or {}
            if (status.get("state"), lifecycle.get("phase")) == ("Paused", "Confirmed"):
                return time.monotonic() - began
            await asyncio.sleep(LOOK_SECONDS)


async def test_pause_with_requests_in_flight(resource: Any, operator: Any, node: Any) -> None:
    node.engine_arguments = (
        *("--echo-step-seconds", STEP_SECONDS),
        *("--max-requests", str(REQUESTS)),
        *("--kv-cache-memory", "64Mi"),
    )
    await resource.create(replicas=2, model={"source": {"builtin": "echo"}, "maxSequenceLength": TOKENS + 10})
    await resource.settled("Running")
    keys = PeerKeys.load(node.keys_folder("demo"), Role.CLIENT)
    client = InferenceClient(node.ports.client, deserialize=False, keys=keys)
    await client.start(connect_timeout_seconds=60)
    try:
        open_ended = SamplingParams(num_tokens_to_generate=TOKENS)
        requests = [client.add_request([number, 1, 2, 3], open_ended) for number in range(REQUESTS)]
        taken = []
        for _ in range(1 + PAUSES):
            taken.append(await paused_after(resource))
            await resource.patch(desiredState="Running")
            await resource.settled("Running")
        assert not [request for request in requests if request.done()], "a request completed during the measurement"
        for request in requests:
            request.cancel()
    finally:
        client.stop()
    # The first pause includes the time until the engines have accepted the requests sent just before it.
    first, *others = taken
    figures = {
        "requests_in_flight": REQUESTS,
        "pauses": PAUSES,
        "paused_p50_ms": percentile_ms(others, 0.5),
        "paused_p99_ms": percentile_ms(others, 0.99),
        "paused_while_requests_arrive_ms": percentile_ms([first], 1),
    }
    print(f"\n{json.dumps(figures)}")
