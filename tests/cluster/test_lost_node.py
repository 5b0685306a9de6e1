"""A pod that terminates on a lost node is replaced; one on a node that is ready is not deleted by force."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from coordinator_questions import ask_coordinator
from eventually import eventually

from megatron_operator.cluster.kinds import NODE, POD
from megatron_operator.resource.text import stamp_seconds

from .conftest import condition
from .lost_node import GRACE_SECONDS, present, replaced, terminate_on

pytestmark = pytest.mark.cluster

LOST_SECONDS = 2
LIFECYCLE = {"lostNodeSeconds": LOST_SECONDS}


@pytest.fixture
async def make_node(api: Any, namespace: str) -> AsyncIterator[Callable[[str], Any]]:
    """Creates a Node object with a status of its condition Ready, or changes it."""
    name = f"node-{namespace}"

    async def make(ready: str) -> str:
        if await api.get(NODE, None, name) is None:
            await api.request("POST", NODE.path(None), body={"metadata": {"name": name}})
        now = stamp_seconds(datetime.now(UTC))
        condition = {"type": "Ready", "status": ready, "lastTransitionTime": now, "lastHeartbeatTime": now}
        await api.request(
            "PATCH",
            NODE.path(None, name, subresource="status"),
            body={"status": {"conditions": [condition]}},
            content_type="application/strategic-merge-patch+json",
        )
        return name

    yield make
    await api.request("DELETE", NODE.path(None, name))


async def test_a_pod_is_replaced_only_while_its_node_is_lost(
    resource: Any, make_operator: Any, node: Any, api: Any, make_node: Any
) -> None:
    operator = make_operator("--resync-seconds", "1")
    await operator.start()
    await resource.create(replicas=2, lifecycle=LIFECYCLE)
    await resource.settled("Running")
    old = await terminate_on(api, resource.namespace, "demo-engine-1-0", node=await make_node("True"))
    await asyncio.sleep(GRACE_SECONDS + LOST_SECONDS + 1)
    passes = await operator.passes()

    async def considered() -> bool:
        await make_node("True")  # without heartbeats Kubernetes sets Unknown
        return await operator.passes() >= passes + 3

    await eventually(considered, what="the operator decides about the overdue pod", look_seconds=1)
    left = await present(api, old)
    assert left is not None
    assert left["metadata"]["uid"] == old["metadata"]["uid"]

    await make_node("Unknown")
    await eventually(lambda: replaced(api, old), what="the pod is replaced")

    async def reported() -> bool:
        return [event["reason"] for event in await resource.events()].count("PodForceDeleted") == 1

    await eventually(reported, what="one Event")
    await eventually(lambda: node.runs("demo-engine-1", unlike=old), what="the new pod is ready")
    await resource.settled("Running")


async def test_a_process_that_runs_on_does_not_displace_the_new_one(
    resource: Any, operator: Any, node: Any, api: Any, make_node: Any
) -> None:
    """Its pod was replaced, it still reaches the coordinator, also a restarted one, and the engine takes part in verbs
    all the same."""
    await resource.create(replicas=1, lifecycle=LIFECYCLE)
    await resource.settled("Running")
    process = node.cut_off("demo-engine-0")
    old = await terminate_on(api, resource.namespace, "demo-engine-0-0", node=await make_node("False"))
    await eventually(lambda: replaced(api, old), what="the pod is replaced")
    await eventually(lambda: node.runs("demo-engine-0", unlike=old), what="the new pod is ready")
    for state in ("Paused", "Running"):
        await resource.patch(desiredState=state)
        await resource.settled(state)
    # Both register again with the next coordinator, in any order.
    selector = "app.kubernetes.io/component=coordinator,app.kubernetes.io/instance=demo"
    (coordinator,) = await api.list(POD, resource.namespace, selector=selector)
    await api.request("DELETE", POD.path(resource.namespace, coordinator["metadata"]["name"]))

    async def another_serves() -> bool:
        """The status may not tell: the other one may serve before the operator looks."""
        return any(
            condition(pod["status"], "Ready")["status"] == "True"
            for pod in await api.list(POD, resource.namespace, selector=selector)
            if pod["metadata"]["uid"] != coordinator["metadata"]["uid"]
        )

    await eventually(another_serves, what="the next coordinator is ready")

    async def new_one_serves() -> bool:
        (engine,) = (await ask_coordinator(api, resource.namespace, node.ports.admin)).engines or (None,)
        return engine is not None and engine.serving and await node.runs("demo-engine-0", unlike=old)

    await eventually(new_one_serves, what="the new process is registered")
    assert process.poll() is None
    await resource.settled("Running")
