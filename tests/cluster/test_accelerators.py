"""Engines on MIG profiles, other accelerators and DRA claims, placed by a real kube-scheduler.

Nodes are objects. Their devices are an extended resource, as a device plugin reports it, or a ResourceSlice, as a DRA
driver publishes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from eventually import eventually
from soak import size

from localcluster import LocalCluster
from megatron_operator.cluster.kinds import POD, RESOURCE_CLAIM, RESOURCE_CLAIM_TEMPLATE, ObjectKind
from megatron_operator.resource.names import ENGINE, LABEL_COMPONENT

from .conftest import condition
from .real_scheduler import Nodes, running_scheduler

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

DEVICE_CLASS = ObjectKind("DeviceClass", "resource.k8s.io", "v1", "deviceclasses")
RESOURCE_SLICE = ObjectKind("ResourceSlice", "resource.k8s.io", "v1", "resourceslices")
DRIVER = "gpu.example.com"
MISSING = "ContainerConfigError"


@pytest.fixture(scope="module")
def scheduler(control_plane: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_scheduler(control_plane, tmp_path_factory.mktemp("scheduler")):
        yield


@pytest.fixture
async def make_nodes(api: Any, namespace: str, scheduler: None) -> AsyncIterator[Callable[[str], Nodes]]:
    """Function that returns nodes with devices of an extended resource. A scheduler places pods on them."""
    made: list[Nodes] = []
    heartbeats: list[asyncio.Task[None]] = []

    def make(resource: str) -> Nodes:
        made.append(Nodes(api, namespace, resource=resource))
        heartbeats.append(asyncio.create_task(made[-1].keep_ready()))
        return made[-1]

    yield make
    for heartbeat in heartbeats:
        heartbeat.cancel()
    for nodes in made:
        await nodes.delete()


async def engine_pods(api: Any, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await api.list(POD, namespace, selector=f"{LABEL_COMPONENT}={ENGINE}")
    return found


async def bound(api: Any, namespace: str, pods: int) -> None:
    """Wait until this many pods of engines have a node."""

    async def reached() -> bool:
        return sum("nodeName" in pod["spec"] for pod in await engine_pods(api, namespace)) == pods

    await eventually(reached, what=f"{pods} pods of engines have a node")


async def degraded(resource: Any, *words: str, reason: str = "Unschedulable") -> str:
    """Return the message of the condition Degraded once it contains these words."""
    status = await resource.until(
        lambda status: all(word in condition(status, "Degraded").get("message", "") for word in words)
    )
    assert condition(status, "Degraded")["reason"] == reason
    return str(condition(status, "Degraded")["message"])


@pytest.mark.parametrize(
    ("name", "backend"), [("nvidia.com/mig-1g.10gb", "Native"), *size((), soak=(("amd.com/gpu", "VLLM"),))]
)
async def test_engines_run_on_nodes_with_the_named_resource(
    resource: Any, operator: Any, api: Any, make_nodes: Callable[[str], Nodes], name: str, backend: str
) -> None:
    nodes = make_nodes(name)
    await nodes.set(0, place="one")
    await resource.create(replicas=1, engine={"backend": backend, "gpusPerPod": 1, "accelerator": {"resource": name}})
    print(f"\n{await degraded(resource, f'Insufficient {name}', 'spec.engine.accelerator.resource')}")
    place = await nodes.set(1, place="one")
    await bound(api, resource.namespace, 1)
    (pod,) = await engine_pods(api, resource.namespace)
    assert pod["spec"]["nodeName"] == place
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {name: "1"}


async def test_native_engines_on_another_accelerator_are_rejected_with_the_remedy(
    resource: Any, operator: Any, api: Any
) -> None:
    await resource.create(replicas=1, engine={"gpusPerPod": 1, "accelerator": {"resource": "amd.com/gpu"}})
    status = await resource.until(lambda status: condition(status, "Degraded").get("status") == "True")
    assert condition(status, "Degraded")["reason"] == "UnsupportedByBackend"
    assert "set spec.engine.backend to VLLM" in condition(status, "Degraded")["message"]
    assert await engine_pods(api, resource.namespace) == []


@pytest.fixture
async def device_class(api: Any, namespace: str) -> AsyncIterator[str]:
    """DeviceClass of the devices of this test."""
    expression = f"device.driver == '{DRIVER}'"
    body = {"metadata": {"name": namespace}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}
    await api.request("POST", DEVICE_CLASS.path(None), body=body)
    yield namespace
    await api.request("DELETE", DEVICE_CLASS.path(None, namespace))


@pytest.fixture
async def publish(api: Any, namespace: str) -> AsyncIterator[Callable[..., Any]]:
    """Function that publishes the devices of a node."""
    names: list[str] = []

    async def call(node: str, devices: int) -> None:
        spec = {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"gpu-{index}"} for index in range(devices)],
        }
        await api.request("POST", RESOURCE_SLICE.path(None), body={"metadata": {"name": node}, "spec": spec})
        names.append(node)

    yield call
    for name in names:
        await api.request("DELETE", RESOURCE_SLICE.path(None, name))


async def test_each_engine_gets_a_device_of_its_claim(
    resource: Any,
    operator: Any,
    api: Any,
    make_nodes: Callable[[str], Nodes],
    device_class: str,
    publish: Callable[..., Any],
) -> None:
    node = await make_nodes("example.com/none").set(0, place="one")
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu", "request": "gpu"}]
    await resource.create(replicas=1, engine={"gpusPerPod": 1, "accelerator": {"claims": claims}})
    print(f"\n{await degraded(resource, 'one-gpu', 'accelerator.claims', reason=MISSING)}")

    request = {"name": "gpu", "exactly": {"deviceClassName": device_class}}
    template = {
        "metadata": {"name": "one-gpu", "namespace": resource.namespace},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
    await api.create(RESOURCE_CLAIM_TEMPLATE, template, manager="test")
    print(await degraded(resource, "cannot allocate all claims", "free devices"))
    await publish(node, 2)
    await resource.patch(replicas=2)
    await bound(api, resource.namespace, 2)
    allocated = [
        result["device"]
        for claim in await api.list(RESOURCE_CLAIM, resource.namespace)
        for result in claim["status"]["allocation"]["devices"]["results"]
    ]
    assert sorted(allocated) == ["gpu-0", "gpu-1"]
    for pod in await engine_pods(api, resource.namespace):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["claims"] == [{"name": "gpu", "request": "gpu"}]
        assert "limits" not in container["resources"], "no GPU of a device plugin in addition"


async def test_a_claim_that_does_not_exist_is_named(
    resource: Any, operator: Any, api: Any, make_nodes: Callable[[str], Nodes]
) -> None:
    await make_nodes("example.com/none").set(0, place="one")
    claims = [{"name": "gpu", "resourceClaimName": "shared"}]
    await resource.create(replicas=1, engine={"gpusPerPod": 1, "accelerator": {"claims": claims}})
    words = ("create resourceclaim shared", "spec.engine.accelerator.claims[].resourceClaimName")
    print(f"\n{await degraded(resource, *words, reason=MISSING)}")
