"""The API server accepts the front door's objects, and a cluster without the Gateway API serves everything else."""

from __future__ import annotations

from typing import Any

import pytest
from eventually import eventually

from megatron_operator.cluster.kinds import HTTP_ROUTE, INFERENCE_POOL, POD, SERVICE, kind_of

pytestmark = pytest.mark.cluster

INGRESS = kind_of("networking.k8s.io/v1", "Ingress")
SERVER = {
    "service": {
        "type": "LoadBalancer",
        "loadBalancerClass": "example.com/lb",
        "annotations": {"prometheus.io/scrape": "false"},
    },
    "ingress": {"hosts": ["demo.example"], "className": "nginx", "tlsSecretName": "certificate"},
    "httpRoute": {
        "parentRefs": [{"name": "gateway", "namespace": "infra", "sectionName": "https"}],
        "hostnames": ["models.example"],
        "pathPrefix": "/demo",
        "modelHeader": "x-model",
    },
    "inferencePool": {"endpointPickerRef": {"name": "picker", "port": 9003, "failureMode": "FailOpen"}},
}


@pytest.fixture
async def operator(make_operator: Any) -> Any:
    hosts = ("--allow-hostname", "demo.example", "--allow-hostname", "models.example")
    process = make_operator(*hosts, "--allow-tls-secret", "certificate", "--resync-seconds", "1")
    await process.start()
    return process


async def test_without_the_gateway_api_everything_else_serves(
    resource: Any, operator: Any, no_gateway_api: None, node: Any, api: Any
) -> None:
    await resource.create(replicas=1, server=SERVER)
    await resource.until(
        lambda status: status.get("ready") == "1/1" and reason(status, "Degraded") == "GatewayApiMissing"
    )
    await found(api, resource, INGRESS)
    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")
    await resource.patch(desiredState="Running", server={"httpRoute": None})
    await resource.until(lambda status: reason(status, "Degraded") == "InferenceExtensionMissing")
    await resource.patch(server={"inferencePool": None})
    await resource.until(lambda status: reason(status, "Degraded") == "AllWell")


async def test_the_objects_are_accepted_kept_and_removed_alone_or_with_the_resource(
    resource: Any, operator: Any, gateway_api: None, node: Any, api: Any
) -> None:
    await resource.create(replicas=1, server=SERVER)
    await resource.until(lambda status: status["state"] == "Running" and "plan" not in status)
    kinds = (SERVICE, INGRESS, HTTP_ROUTE, INFERENCE_POOL)
    service, ingress, route, pool = [await found(api, resource, kind) for kind in kinds]
    assert service["spec"]["loadBalancerClass"] == "example.com/lb"
    assert service["metadata"]["annotations"]["prometheus.io/scrape"] == "false"
    assert ingress["spec"]["rules"][0]["host"] == "demo.example"
    assert route["spec"]["rules"][0]["matches"][0]["headers"][0]["value"] == "demo"
    assert route["spec"]["rules"][0]["backendRefs"][0]["kind"] == "InferencePool"
    owner = pool["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["controller"]) == ((await resource.get())["metadata"]["uid"], True)
    assert pool["spec"]["endpointPickerRef"] == {
        "group": "",
        "kind": "Service",
        "name": "picker",
        "port": {"number": 9003},
        "failureMode": "FailOpen",
    }
    selector = ",".join(f"{key}={value}" for key, value in pool["spec"]["selector"]["matchLabels"].items())
    names = [pod["metadata"]["name"] for pod in await api.list(POD, resource.namespace, selector=selector)]
    assert names
    assert all(name.startswith("demo-server-") for name in names)
    await operator.passed(await operator.passes() + 3)
    for kind, before in ((HTTP_ROUTE, route), (INFERENCE_POOL, pool)):
        now = await found(api, resource, kind)
        assert now["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]

    await resource.patch(server=dict.fromkeys(SERVER))

    async def removed() -> bool:
        kinds = (INGRESS, HTTP_ROUTE, INFERENCE_POOL)
        left = [await api.get(kind, resource.namespace, resource.name) for kind in kinds]
        return left == [None] * 3 and (await found(api, resource, SERVICE))["spec"]["type"] == "ClusterIP"

    await eventually(removed, what="Ingress, HTTPRoute and InferencePool are deleted")

    # The pool of a deleted resource.
    await resource.patch(server={"inferencePool": SERVER["inferencePool"]})

    async def pooled() -> bool:
        return await api.get(INFERENCE_POOL, resource.namespace, resource.name) is not None

    await eventually(pooled, what="the InferencePool is created again")
    await resource.delete()

    async def gone() -> bool:
        return await api.get(INFERENCE_POOL, resource.namespace, resource.name) is None

    await eventually(gone, what="the garbage collector deletes the InferencePool")


async def found(api: Any, resource: Any, kind: Any) -> dict[str, Any]:
    obj: dict[str, Any] | None = await api.get(kind, resource.namespace, resource.name)
    assert obj is not None
    return obj


def reason(status: dict[str, Any], kind: str) -> str:
    return next((entry["reason"] for entry in status.get("conditions", ()) if entry["type"] == kind), "")
