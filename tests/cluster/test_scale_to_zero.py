"""Requests that arrive while a resource has no engine: over HTTP, with a real server, coordinator and engines."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from echo_executor import echo_answer
from eventually import LONG_SECONDS, eventually
from prometheus_client.parser import text_string_to_metric_families

from megatron_operator.resource.names import COORDINATOR, ENGINE

from .client_load import LENGTH, Answer, HttpLoad
from .fake_node import FakeNode

pytestmark = pytest.mark.cluster

REQUESTS = 8
IDLE_SECONDS = 10
"""The smallest value of spec.lifecycle.suspend.idleSeconds."""


@pytest.fixture
def node(node: FakeNode) -> FakeNode:
    node.server_program = ("-m", "megatron_runtime.cli")
    return node


async def answered(answer: Answer, prompt: list[int]) -> None:
    """Request an answer, and compare it with the answer of an undisturbed engine."""
    (await answer(prompt)).check(echo_answer(prompt, LENGTH))


async def queued(node: FakeNode) -> float:
    """Return the number of requests that wait for an engine, as an autoscaler reads it."""
    (coordinator,) = [each for each in node.containers.values() if each.component == COORDINATOR]
    async with httpx.AsyncClient(trust_env=False) as http:
        page = await http.get(f"http://127.0.0.1:{coordinator.health_port}/metrics")
    families = {family.name: family for family in text_string_to_metric_families(page.text)}
    return sum(sample.value for sample in families["megatron_coordinator_queued_requests"].samples)


def engines(node: FakeNode) -> list[str]:
    return [container.engine for container in node.containers.values() if container.component == ENGINE]


async def asleep(resource: Any, node: FakeNode) -> dict[str, Any]:
    """Return the status once the resource is suspended and no process of an engine is left."""
    status: dict[str, Any] = await resource.released()

    async def no_engine_runs() -> bool:
        return not engines(node)

    await eventually(no_engine_runs, what="the kubelet has stopped the engine")
    return status


def states(status: dict[str, Any]) -> list[str]:
    return [entry["to"] for entry in status["history"]]


async def test_a_request_wakes_a_resource_without_pods_and_none_is_lost_as_it_falls_asleep(
    resource: Any, operator: Any, node: FakeNode
) -> None:
    suspend = {"level": "ReleasePods", "wakeOnRequest": True, "idleSeconds": IDLE_SECONDS}
    await resource.create(desiredState="Suspended", lifecycle={"suspend": suspend})
    await asleep(resource, node)
    async with AsyncExitStack() as stack:
        load = HttpLoad(node, "demo")
        clients = [await stack.enter_async_context(load.client()) for _ in range(REQUESTS)]

        async def burst(number: int) -> None:
            requests = (answered(client, [number, place, 2, 3]) for place, client in enumerate(clients))
            await asyncio.wait_for(asyncio.gather(*requests), LONG_SECONDS)

        # Answers arrive before the operator has seen what it woke: first the status reports that.
        await burst(1)
        await resource.until(lambda status: "Running" in states(status))
        # It is suspended again when it is idle. The next requests arrive while it is being suspended.
        await resource.until(lambda status: "woken" not in status["lifecycle"])
        await burst(2)
    status = await asleep(resource, node)
    assert states(status)[-2:] == ["Running", "Suspended"]
    assert (await resource.get())["spec"]["desiredState"] == "Suspended"


async def test_requests_wait_at_zero_replicas_until_the_scale_subresource_adds_one(
    resource: Any, operator: Any, node: FakeNode, kubectl: Any
) -> None:
    await resource.create(replicas=0)
    await asleep(resource, node)
    async with AsyncExitStack() as stack:
        load = HttpLoad(node, "demo")
        clients = [await stack.enter_async_context(load.client()) for _ in range(REQUESTS)]
        prompts = [[number, 1, 2, 3] for number in range(REQUESTS)]
        pairs = zip(clients, prompts, strict=True)
        requests = asyncio.gather(*(answered(*pair) for pair in pairs))

        async def all_wait() -> bool:
            return await queued(node) == REQUESTS

        await eventually(all_wait, what="all requests wait")
        done = kubectl("scale", "mi/demo", "--replicas=1")
        assert done.returncode == 0, done.stderr
        await asyncio.wait_for(requests, LONG_SECONDS)
        assert engines(node) == ["demo-engine-0"]
        done = kubectl("scale", "mi/demo", "--replicas=0")
        assert done.returncode == 0, done.stderr
        await asleep(resource, node)
