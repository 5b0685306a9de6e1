"""A claim as the cache volume of engines. No kubelet mounts it here."""

from __future__ import annotations

from typing import Any

import pytest
from eventually import eventually

from megatron_operator.cluster.kinds import CLAIM, POD
from megatron_operator.resource.names import ENGINE, LABEL_COMPONENT

pytestmark = pytest.mark.cluster

CACHE = {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}}


async def test_the_claim_of_a_cache_volume_survives_pods_and_a_scale_to_zero(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    manifest = {"metadata": {"name": "compiled", "namespace": namespace}, "spec": spec}
    made = await api.create(CLAIM, manifest, manager="test")

    async def pods() -> list[dict[str, Any]]:
        return list(await api.list(POD, namespace, selector=f"{LABEL_COMPONENT}={ENGINE}"))

    await resource.create(engine={"podTemplate": {"spec": {"volumes": [CACHE]}}})
    await resource.settled("Running")
    (first,) = await pods()
    await api.request("DELETE", POD.path(namespace, first["metadata"]["name"]))

    async def is_replaced() -> bool:
        return await node.runs("demo-engine-0", unlike=first)

    await eventually(is_replaced, what="the engine has another pod")
    (second,) = await pods()
    assert CACHE in first["spec"]["volumes"]
    assert CACHE in second["spec"]["volumes"]
    await resource.patch(replicas=0)
    await resource.released()
    kept = await api.get(CLAIM, namespace, "compiled")
    assert (kept["metadata"]["uid"], kept["metadata"].get("ownerReferences")) == (made["metadata"]["uid"], None)
