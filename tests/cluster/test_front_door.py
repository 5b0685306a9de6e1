"""The API server accepts the front door's objects, and a cluster without the Gateway API serves everything else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from eventually import eventually
from machine import scaled

from megatron_operator.cluster.kinds import HTTP_ROUTE, SERVICE, kind_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

INGRESS = kind_of("networking.k8s.io/v1", "Ingress")
SERVER = {
    "service": {"type": "LoadBalancer", "loadBalancerClass": "example.com/lb", "annotations": {"example.com/a": "b"}},
    "ingress": {"hosts": ["demo.example"], "className": "nginx", "tlsSecretName": "certificate"},
    "httpRoute": {
        "parentRefs": [{"name": "gateway", "namespace": "infra", "sectionName": "https"}],
        "hostnames": ["models.example"],
        "pathPrefix": "/demo",
        "modelHeader": "x-model",
    },
}


async def test_the_objects_are_accepted_kept_and_removed(
    resource: Any, operator: Any, gateway_api: None, node: Any, api: Any
) -> None:
    await resource.create(replicas=1, server=SERVER)
    await resource.settled("Running")
    service, ingress, route = [await found(api, resource, kind) for kind in (SERVICE, INGRESS, HTTP_ROUTE)]
    assert service["spec"]["loadBalancerClass"] == "example.com/lb"
    assert service["metadata"]["annotations"]["example.com/a"] == "b"
    assert ingress["spec"]["rules"][0]["host"] == "demo.example"
    assert route["spec"]["rules"][0]["matches"][0]["headers"][0]["value"] == "demo"
    await asyncio.sleep(scaled(3))  # time for a write without a change
    assert (await found(api, resource, HTTP_ROUTE))["metadata"]["resourceVersion"] == route["metadata"][
        "resourceVersion"
    ]

    await resource.patch(server=dict.fromkeys(SERVER))

    async def removed() -> bool:
        kinds = (INGRESS, HTTP_ROUTE)
        left = [await api.get(kind, resource.namespace, resource.name) for kind in kinds]
        return left == [None, None] and (await found(api, resource, SERVICE))["spec"]["type"] == "ClusterIP"

    await eventually(removed, seconds=60, what="Ingress and HTTPRoute are deleted")


async def test_without_the_gateway_api_everything_else_serves(
    resource: Any, operator: Any, node: Any, api: Any
) -> None:
    await resource.create(replicas=1, server=SERVER)
    status = await resource.until(lambda status: status.get("ready") == "1/1" and reason(status, "Ready"), seconds=90)
    assert reason(status, "Degraded") == "GatewayApiMissing"
    await found(api, resource, INGRESS)
    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")
    await resource.patch(desiredState="Running", server={"httpRoute": None})
    await resource.until(lambda status: reason(status, "Degraded") == "AllWell", seconds=60)


async def found(api: Any, resource: Any, kind: Any) -> dict[str, Any]:
    obj: dict[str, Any] | None = await api.get(kind, resource.namespace, resource.name)
    assert obj is not None
    return obj


def reason(status: dict[str, Any], kind: str) -> str:
    return next((entry["reason"] for entry in status.get("conditions", ()) if entry["type"] == kind), "")
