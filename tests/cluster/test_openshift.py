"""The operator and its resources where admission assigns user and group IDs, as OpenShift's restricted-v2 does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from openshift import API_VERSION, CONSTRAINT, CRD, FIRST_ID, NAMESPACE_ANNOTATIONS, admission

from localcluster import LocalCluster, installation
from megatron_operator.cluster.kinds import POD, kind_of

from .conftest import condition, until_discovered

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def security_api(control_plane: LocalCluster) -> Iterator[None]:
    """OpenShift's security API."""
    control_plane.run_kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(CRD))
    yield
    control_plane.run_kubectl("delete", "crd", CRD["metadata"]["name"])


@pytest.fixture
async def openshift(
    security_api: None, control_plane: LocalCluster, namespace: str, tmp_path: Path
) -> AsyncIterator[None]:
    """OpenShift's security API, and its admission in the namespace of the test."""
    await until_discovered(control_plane, API_VERSION)
    annotations = [f"{key}={value}" for key, value in NAMESPACE_ANNOTATIONS.items()]
    control_plane.run_kubectl("annotate", "namespace", namespace, *annotations)
    with admission([namespace], folder=tmp_path) as webhook:
        control_plane.run_kubectl("create", "-f", "-", stdin=json.dumps(webhook))
        yield
        control_plane.run_kubectl("delete", "mutatingwebhookconfiguration", webhook["metadata"]["name"])


def assigned(pod: dict[str, Any]) -> bool:
    """Return whether a pod has the IDs of the namespace, in every container."""
    spec = pod["spec"]
    users = {each["securityContext"]["runAsUser"] for each in (*spec.get("initContainers", ()), *spec["containers"])}
    constraint = pod["metadata"]["annotations"]["openshift.io/scc"]
    return (constraint, users, spec["securityContext"]["fsGroup"]) == (CONSTRAINT, {FIRST_ID}, FIRST_ID)


async def test_a_resource_runs_with_the_ids_of_its_namespace(
    openshift: None, resource: Any, operator: Any, node: Any, api: Any
) -> None:
    await resource.create(replicas=2, coordinator={"replicas": 2})
    await resource.settled("Running")
    first = (await resource.status())["revision"]
    await resource.patch(engine={"batching": {"maxRequests": 7}})
    await resource.until(
        lambda status: status["revision"] != first and status["updatedReplicas"] == 2 and "plan" not in status
    )
    pods = await api.list(POD, resource.namespace)
    assert {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods} >= {
        "coordinator",
        "standby",
        "server",
        "engine",
    }
    assert [pod["metadata"]["name"] for pod in pods if not assigned(pod)] == []


async def test_fixed_ids_are_rejected_and_the_status_has_the_remedy(
    openshift: None, resource: Any, make_operator: Any, api: Any
) -> None:
    operator = make_operator("--openshift", "false")
    await operator.start()
    await resource.create(replicas=1)
    status = await resource.until(
        lambda status: "security context constraint" in condition(status, "Degraded").get("message", "")
    )
    degraded = condition(status, "Degraded")
    print(f"\n{degraded['reason']}: {degraded['message']}")
    assert "set the chart value openshift to true" in degraded["message"]
    assert await api.list(POD, resource.namespace) == []


async def test_the_chart_installs_an_operator_with_the_ids_of_its_namespace(
    openshift: None, helm: Callable[..., None], api: Any, namespace: str
) -> None:
    helm("install", "megatron", str(installation.CHART), "--set", "crd.install=false")
    try:

        async def created() -> bool:
            return [assigned(pod) for pod in await api.list(POD, namespace)] == [True]

        await eventually(created, what="the operator's pod is created with the IDs of its namespace")
        (deployment,) = await api.list(kind_of("apps/v1", "Deployment"), namespace)
        assert "--openshift" not in deployment["spec"]["template"]["spec"]["containers"][0]["args"], "it detects it"
    finally:
        helm("uninstall", "megatron")
