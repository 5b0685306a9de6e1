"""Claims as the cache volumes of engines. No kubelet mounts them here."""

from __future__ import annotations

from typing import Any

import pytest
from eventually import eventually

from megatron_operator.cluster.kinds import CLAIM, POD
from megatron_operator.resource.names import ENGINE, LABEL_COMPONENT

from .conftest import condition

pytestmark = pytest.mark.cluster

CACHE = {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}}
OWN_CACHE = {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled-$(ENGINE_NAME)"}}


async def create_claim(api: Any, namespace: str, name: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    manifest = {"metadata": {"name": name, "namespace": namespace}, "spec": spec}
    made: dict[str, Any] = await api.create(CLAIM, manifest, manager="test")
    return made


async def engine_pods(api: Any, namespace: str) -> list[dict[str, Any]]:
    return list(await api.list(POD, namespace, selector=f"{LABEL_COMPONENT}={ENGINE}"))


async def test_the_claim_of_a_cache_volume_survives_pods_and_a_scale_to_zero(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    made = await create_claim(api, namespace, "compiled")
    await resource.create(engine={"podTemplate": {"spec": {"volumes": [CACHE]}}})
    await resource.settled("Running")
    (first,) = await engine_pods(api, namespace)
    await api.request("DELETE", POD.path(namespace, first["metadata"]["name"]))

    async def is_replaced() -> bool:
        return await node.runs("demo-engine-0", unlike=first)

    await eventually(is_replaced, what="the engine has another pod")
    (second,) = await engine_pods(api, namespace)
    assert CACHE in first["spec"]["volumes"]
    assert CACHE in second["spec"]["volumes"]
    await resource.patch(replicas=0)
    await resource.released()
    kept = await api.get(CLAIM, namespace, "compiled")
    assert (kept["metadata"]["uid"], kept["metadata"].get("ownerReferences")) == (made["metadata"]["uid"], None)


async def test_each_engine_mounts_its_own_claim_and_waits_for_it(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    await create_claim(api, namespace, "compiled-demo-engine-0")
    await resource.create(engine={"podTemplate": {"spec": {"volumes": [OWN_CACHE]}}}, replicas=2)
    remedy = "create persistentvolumeclaim compiled-demo-engine-1"
    status = await resource.until(lambda status: remedy in condition(status, "Degraded").get("message", ""))
    assert condition(status, "Degraded")["reason"] == "VolumeMissing"
    await create_claim(api, namespace, "compiled-demo-engine-1")
    await resource.until(lambda status: condition(status, "Degraded").get("status") == "False")
    await resource.settled("Running")
    volumes = {pod["metadata"]["name"]: pod["spec"]["volumes"] for pod in await engine_pods(api, namespace)}
    assert volumes.keys() == {"demo-engine-0-0", "demo-engine-1-0"}
    for pod, found in volumes.items():
        claim = {"claimName": f"compiled-{pod.removesuffix('-0')}"}
        assert {"name": "cache", "persistentVolumeClaim": claim} in found
