"""A deleted child of any kind is created again, and a changed one restored, long before the operator lists everything
again (300 s).
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from eventually import eventually

from megatron_operator.cluster.kinds import CHILD_KINDS, HTTP_ROUTE, OPTIONAL_KINDS, POD, SECRET, ObjectKind
from megatron_operator.resource.names import COORDINATOR

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

HOST = "models.example"
KINDS = {kind.kind: kind for kind in (*CHILD_KINDS, SECRET, *OPTIONAL_KINDS)}


async def test_every_kind_of_child_is_created_again_and_a_change_undone(
    resource: Any, make_operator: Any, node: Any, api: Any, namespace: str, gateway_api: None
) -> None:
    operator = make_operator("--allow-hostname", HOST)
    await operator.start()
    route = {"parentRefs": [{"name": "gateway"}], "hostnames": [HOST]}
    pool = {"endpointPickerRef": {"name": "picker", "port": 9003}}
    await resource.create(
        replicas=2,
        server={"replicas": 2, "ingress": {"hosts": [HOST]}, "httpRoute": route, "inferencePool": pool},
    )
    await resource.settled("Running")
    await resource.until(lambda status: "plan" not in status)
    assert await api.get(HTTP_ROUTE, namespace, "demo") is not None
    children = await resource.children()
    for kind in OPTIONAL_KINDS:
        children |= {f"{kind.kind} {obj['metadata']['name']}": obj for obj in await api.list(kind, namespace)}
    assert {name.split()[0] for name in children} == KINDS.keys(), "a kind of child is not tested"

    taken = {}
    for name, obj in children.items():
        kind = KINDS[name.split()[0]]
        await api.delete(kind, namespace, obj["metadata"]["name"], uid=obj["metadata"]["uid"])
        if kind is SECRET:
            await delete_coordinator_pods(api, namespace)  # the operator may not watch Secrets: this is a symptom
        began = time.monotonic()

        async def is_back(kind: ObjectKind = kind, before: dict[str, Any] = obj) -> bool:
            found = await api.get(kind, namespace, before["metadata"]["name"])
            return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

        await eventually(is_back, what=f"{name} is created again")
        taken[name] = time.monotonic() - began
    deployment = KINDS["Deployment"]
    await api.merge_patch(deployment, namespace, "demo-server", {"spec": {"replicas": 3}}, manager="other")

    async def is_undone() -> bool:
        return (await api.get(deployment, namespace, "demo-server"))["spec"]["replicas"] == 2

    await eventually(is_undone, what="a change of a child is undone")
    await resource.settled("Running")
    slowest = max(taken, key=lambda name: taken[name])
    print(f"\n{len(taken)} children; the slowest, {slowest}, took {taken[slowest]:.1f} s")


async def delete_coordinator_pods(api: Any, namespace: str) -> None:
    for pod in await api.list(POD, namespace, selector=f"app.kubernetes.io/component={COORDINATOR}"):
        await api.delete(POD, namespace, pod["metadata"]["name"], uid=pod["metadata"]["uid"])
