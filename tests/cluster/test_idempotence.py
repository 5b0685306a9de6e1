"""The operator restores changed children, and a pass that finds no difference writes nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from eventually import LONG_SECONDS, eventually

from megatron_operator.cluster.cache import FIGHT_APPLIES, FIGHT_SECONDS
from megatron_operator.cluster.kinds import CHILD_KINDS, POD, RESOURCE, SECRET, SERVICE, kind_of
from megatron_operator.resource.names import FIELD_MANAGER

from .conftest import condition

pytestmark = pytest.mark.cluster

PART_OF = "app.kubernetes.io/component"
DEPLOYMENT = kind_of("apps/v1", "Deployment")
KINDS = {kind.kind: kind for kind in (*CHILD_KINDS, SECRET)}


def written(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the operator's managed fields of each object. Kubernetes' controllers also write statuses."""
    return {
        name: [entry for entry in obj["metadata"]["managedFields"] if entry["manager"] == FIELD_MANAGER]
        for name, obj in objects.items()
    }


async def test_neither_resyncs_nor_foreign_fields_nor_a_restart_cause_a_write_to_a_settled_resource(
    resource: Any, make_operator: Any, node: Any, api: Any, namespace: str
) -> None:
    operator = make_operator("--resync-seconds", "1")
    await operator.start()
    await resource.create()
    await resource.settled("Running")
    await resource.until(lambda status: "plan" not in status)
    await operator.passed(await operator.passes() + 2)  # the last Events and conditions are written
    before, children = await operator.writes(), written(await resource.children())
    assert all(children.values())
    passes = await operator.passes()

    await operator.passed(passes + 4)
    assert await operator.writes() == before
    for number in range(2):
        mark = {"other.example/number": str(number)}
        note = {"metadata": {"labels": mark, "annotations": mark}}
        for name, obj in (await resource.children()).items():
            await api.merge_patch(KINDS[name.split()[0]], namespace, obj["metadata"]["name"], note, manager="other")
        for pod in await api.list(POD, namespace):
            await api.merge_patch(POD, namespace, pod["metadata"]["name"], note, manager="other")
        await api.merge_patch(RESOURCE, namespace, "demo", note, manager="other")
        await operator.passed(await operator.passes() + 2)
    assert await operator.writes() == before
    assert written(await resource.children()) == children

    version = (await resource.get())["metadata"]["resourceVersion"]
    assert operator.stop() == 0
    await operator.start()
    await operator.passed(3)
    assert written(await resource.children()) == children
    assert (await resource.get())["metadata"]["resourceVersion"] == version
    assert await operator.writes() == {}, "nothing differs after the restart"

    assert operator.stop() == 0
    await api.merge_patch(SERVICE, namespace, "demo", {"metadata": {"labels": {PART_OF: None}}}, manager="other")
    await operator.start()

    async def restored() -> bool:
        return PART_OF in (await api.get(SERVICE, namespace, "demo"))["metadata"]["labels"]

    await eventually(restored, what="a change without an operator is undone")
    # The operator counts a write when it has read the answer.
    await operator.passed(await operator.passes() + 2)
    assert await operator.writes() == {"apply Service": 1.0}


async def test_a_fight_costs_at_most_one_write_per_minute(
    resource: Any, make_operator: Any, node: Any, api: Any, namespace: str
) -> None:
    operator = make_operator("--resync-seconds", "1")
    await operator.start()
    await resource.create(server={"replicas": 1})
    await resource.settled("Running")
    await resource.until(lambda status: "plan" not in status)
    before = await operator.writes()

    async def meddle() -> None:
        while True:
            await api.merge_patch(DEPLOYMENT, namespace, "demo-server", {"spec": {"replicas": 0}}, manager="meddler")
            await asyncio.sleep(0.1)

    meddling = asyncio.create_task(meddle())
    began = time.monotonic()
    # The other program is named once the operator has seen one of its writes that is not yet undone.
    status = await resource.until(
        lambda status: "field manager meddler" in condition(status, "Degraded").get("message", "")
    )
    assert condition(status, "Degraded")["reason"] == "ChildContested"
    await resource.reported("ChildContested")
    await operator.passed(await operator.passes() + 5)
    assert not meddling.done()
    meddling.cancel()
    writes = await operator.writes()
    applies = writes["apply Deployment"] - before["apply Deployment"]
    assert 1 <= applies <= FIGHT_APPLIES + (time.monotonic() - began) // FIGHT_SECONDS


async def test_the_number_of_servers_belongs_to_an_autoscaler_unless_the_spec_has_it(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str, kubectl: Any
) -> None:
    async def servers_after(change: dict[str, Any]) -> int:
        """Change the server in the spec. Return the number of servers when the operator has applied the change."""
        await resource.patch(server=change)
        flag, wanted = "--allow-priority", change["allowPriority"]
        async with asyncio.timeout(LONG_SECONDS):
            while True:
                spec = (await api.get(DEPLOYMENT, namespace, "demo-server"))["spec"]
                if (flag in spec["template"]["spec"]["containers"][0]["args"]) is wanted:
                    return int(spec["replicas"])
                await asyncio.sleep(0.1)

    await resource.create()
    await resource.settled("Running")
    assert await servers_after({"replicas": 2, "allowPriority": True}) == 2
    assert await servers_after({"replicas": None, "allowPriority": False}) == 2, "it keeps the last number"
    for count in (3, 1):
        scaled_to = kubectl("scale", "deployment/demo-server", f"--replicas={count}")
        assert scaled_to.returncode == 0, scaled_to.stderr
        assert await servers_after({"allowPriority": count == 3}) == count
    assert await servers_after({"replicas": 2, "allowPriority": True}) == 2


async def test_a_foreign_object_is_kept_and_named_in_the_status(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo-coordinator", "namespace": namespace},
        "spec": {"ports": [{"port": 1}]},
    }
    await api.create(SERVICE, foreign, manager="other")
    await resource.create()

    status = await resource.until(lambda status: "not owned by this resource" in str(status))
    assert status["state"] == "Pending"
    kept = await api.get(SERVICE, namespace, "demo-coordinator")
    assert "ownerReferences" not in kept["metadata"]
    assert [port["port"] for port in kept["spec"]["ports"]] == [1]

    await api.delete(SERVICE, namespace, "demo-coordinator", uid=kept["metadata"]["uid"])
    assert operator.stop() == 0
    await operator.start()
    await resource.settled("Running")
