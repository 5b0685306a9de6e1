"""Deletion is immediate and never hangs, in any order of resource, namespace, CRD and operator."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from eventually import eventually
from soak import SOAK

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.kinds import POD, RESOURCE, ObjectKind

pytestmark = pytest.mark.cluster

NAMESPACE = ObjectKind("Namespace", "", "v1", "namespaces")
CRD = ObjectKind("CustomResourceDefinition", "apiextensions.k8s.io", "v1", "customresourcedefinitions")
CRD_NAME = f"{RESOURCE.plural}.{RESOURCE.group}"


async def gone(api: Any, kind: ObjectKind, name: str) -> None:
    async def absent() -> bool:
        return await api.get(kind, None, name) is None

    await eventually(absent, what=f"{kind.kind} {name} is gone")


async def test_a_deleted_resource_can_be_created_again(resource: Any, operator: Any, node: Any) -> None:
    await resource.create()
    await resource.settled("Running")
    await resource.delete()
    assert await resource.get() is None
    await resource.until_gone()

    await resource.create()
    await resource.settled("Running")
    await operator.logs("resource gone")


async def test_children_of_an_orphaning_deletion_are_adopted_by_the_next_resource(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    await resource.create()
    await resource.settled("Running")
    pods = {pod["metadata"]["uid"] for pod in await api.list(POD, namespace)}
    orphan = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Orphan"}
    await api.request("DELETE", RESOURCE.path(namespace, resource.name), body=orphan)

    async def is_gone() -> bool:
        return await resource.get() is None

    await eventually(is_gone, what="the resource is gone")
    await resource.create(desiredState="Paused")
    await resource.settled("Paused")
    await resource.patch(desiredState="Running")
    await resource.settled("Running")
    uid = (await resource.get())["metadata"]["uid"]

    async def adopted() -> bool:
        metadata = [child["metadata"] for child in (await resource.children()).values()]
        return {owner["uid"] for each in metadata for owner in each.get("ownerReferences", [{"uid": ""}])} == {uid}

    await eventually(adopted, what="every child has the new owner")
    assert pods <= {pod["metadata"]["uid"] for pod in await api.list(POD, namespace)}


async def test_a_resource_is_deleted_without_a_running_operator(resource: Any, operator: Any, node: Any) -> None:
    await resource.create()
    await resource.until(lambda status: bool(status))
    operator.kill()

    await resource.delete()
    assert await resource.get() is None
    await resource.until_gone()


async def test_deleting_the_namespace_deletes_its_resources(
    resource: Any, operator: Any, api: Any, namespace: str
) -> None:
    await resource.create()
    await resource.until(lambda status: bool(status))
    await api.request("DELETE", NAMESPACE.path(None, namespace))
    await gone(api, NAMESPACE, namespace)


async def test_deleting_the_crd_deletes_resources_and_it_can_be_reinstalled(
    resource: Any, operator: Any, node: Any, api: Any, reinstall_crd: Any, verify: Any
) -> None:
    await resource.create()
    await resource.settled("Running")
    await api.request("DELETE", CRD.path(None, CRD_NAME))
    await gone(api, CRD, CRD_NAME)
    await resource.until_gone()

    await operator.reaches("waiting for the CRD")
    failed = await verify("--operator-url", f"http://127.0.0.1:{operator.health_port}", "--timeout", "0")
    assert failed.returncode == 1
    assert "check failed that the API server serves the resource: 404" in failed.stderr
    assert "install the CRD" in failed.stderr
    reinstall_crd()
    await operator.reaches("leading")
    await resource.create()
    await resource.settled("Running")


THINGS = ("resource", "namespace", "CRD", "operator")
ORDERS = list(permutations(THINGS)) if SOAK else [THINGS[::-1]]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_uninstalling_in_any_order_leaves_no_object(
    order: tuple[str, ...], resource: Any, operator: Any, node: Any, api: Any, namespace: str, reinstall_crd: Any
) -> None:
    """Each deletion is requested before the previous one has finished."""
    await resource.create()
    await resource.until(lambda status: bool(status))
    for thing in order:
        if thing == "operator":
            operator.stop()
            continue
        path = {
            "resource": RESOURCE.path(namespace, resource.name),
            "namespace": NAMESPACE.path(None, namespace),
            "CRD": CRD.path(None, CRD_NAME),
        }[thing]
        try:
            await api.request("DELETE", path)
        except KubeApiError as error:
            if not error.not_found:
                raise
    await gone(api, CRD, CRD_NAME)
    await gone(api, NAMESPACE, namespace)
