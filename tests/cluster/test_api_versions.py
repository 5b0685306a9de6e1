"""v1alpha1 and v1beta1 are served side by side, and stored objects are migrated from one to the other."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually

from localcluster import LocalCluster
from megatron_operator.cluster.api import ApiError, KubeApi
from megatron_operator.cluster.kinds import RESOURCE
from megatron_operator.model.crd import CRD_NAME, custom_resource_definition

from .audit_log import AuditLog
from .conftest import CRD, install_crd, wait_until_established

pytestmark = pytest.mark.cluster

CHART = Path(__file__).parents[2] / "charts/megatron-inference"
ALPHA = replace(RESOURCE, version="v1alpha1")
BETA = replace(RESOURCE, version="v1beta1")


def crd_with_only(version: str) -> dict[str, Any]:
    """Return the CRD of a release that has one version of the API."""
    crd = copy.deepcopy(custom_resource_definition())
    (entry,) = [entry for entry in crd["spec"]["versions"] if entry["name"] == version]
    kept = {key: value for key, value in entry.items() if key not in ("deprecated", "deprecationWarning")}
    crd["spec"]["versions"] = [{**kept, "served": True, "storage": True}]
    return crd


def apply_crd(cluster: LocalCluster, crd: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = ("apply", "--server-side", "--force-conflicts", "-f", "-")
    return cluster.run_kubectl(*command, stdin=json.dumps(crd), check=False)


def delete_crd(cluster: LocalCluster) -> None:
    cluster.run_kubectl("delete", f"crd/{CRD_NAME}", "--ignore-not-found", "--timeout=120s")


@pytest.fixture
def earlier_crd(control_plane: LocalCluster, crd: None) -> Iterator[None]:
    """The CRD as a release without v1beta1 has it, instead of the current one, which returns at the end."""
    delete_crd(control_plane)
    applied = apply_crd(control_plane, crd_with_only("v1alpha1"))
    assert applied.returncode == 0, applied.stderr
    wait_until_established(control_plane, CRD_NAME)
    yield
    delete_crd(control_plane)
    install_crd(control_plane)


def manifest(namespace: str, name: str, version: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{RESOURCE.group}/{version}",
        "kind": RESOURCE.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"source": {"builtin": "echo"}}},
    }


async def stored_versions(api: KubeApi) -> list[str]:
    found = await api.get(CRD, None, CRD_NAME)
    assert found is not None
    versions: list[str] = found["status"]["storedVersions"]
    return versions


async def test_an_upgrade_serves_and_migrates_resources_that_were_stored_as_v1alpha1(
    earlier_crd: None,
    namespace: str,
    resource: Any,
    make_operator: Any,
    node: Any,
    api: KubeApi,
    control_plane: LocalCluster,
    helm: Callable[..., None],
    plugin: Any,
) -> None:
    await api.create(ALPHA, manifest(namespace, "demo", "v1alpha1"), manager="test")
    # No operator serves the namespace default, so only the migration writes this one.
    await api.create(ALPHA, manifest("default", "untouched", "v1alpha1"), manager="test")
    assert await stored_versions(api) == ["v1alpha1"]
    too_early = await plugin("migrate")
    assert too_early.returncode == 1
    assert "upgrade the CRD first" in too_early.stderr

    # The new operator may be up before the new CRD: it waits.
    log = AuditLog(control_plane.audit_log, user=f"system:serviceaccount:{namespace}:megatron-operator")
    operator = make_operator()
    await operator.start(phase="waiting for the CRD")
    await asyncio.to_thread(helm, "upgrade", "--install", "trial", "--take-ownership", str(CHART))
    await operator.reaches("leading")
    status = await resource.settled("Running")

    # Both versions are read and written.
    for kind in (ALPHA, BETA):
        found = await api.get(kind, namespace, "demo")
        assert found is not None
        assert (found["apiVersion"], found["status"]["state"]) == (kind.api_version, "Running")
    await api.merge_patch(ALPHA, namespace, "demo", {"spec": {"desiredState": "Paused"}}, manager="test")
    await resource.settled("Paused")
    await api.merge_patch(BETA, namespace, "demo", {"spec": {"desiredState": "Running"}}, manager="test")
    await resource.settled("Running")
    listed = control_plane.run_kubectl("get", f"megatroninferences.v1alpha1.{RESOURCE.group}", "-n", namespace)
    assert "v1alpha1 MegatronInference is deprecated; use inference.megatron.dev/v1beta1" in listed.stderr
    versions = {request.version for request in log.requests() if request.group == RESOURCE.group and request.code < 300}
    assert versions == {"v1beta1"}, "the operator uses one version"

    # v1alpha1 cannot be removed while objects may be stored in it.
    assert await stored_versions(api) == ["v1alpha1", "v1beta1"]
    assert "status.storedVersions" in apply_crd(control_plane, crd_with_only("v1beta1")).stderr

    before = await snapshot(api, namespace)
    done = await plugin("migrate")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "stored versions were v1alpha1, v1beta1; 2 resources rewritten in v1beta1\n"
    assert await stored_versions(api) == ["v1beta1"]
    assert (await plugin("migrate")).stdout == "nothing to migrate: the only stored version is v1beta1\n"
    assert await snapshot(api, namespace) == before
    assert (await resource.settled("Running"))["revision"] == status["revision"]

    # The API server could not read an object that is still stored as v1alpha1.
    removed = apply_crd(control_plane, crd_with_only("v1beta1"))
    assert removed.returncode == 0, removed.stderr
    await eventually(lambda: no_longer_served(api, namespace), seconds=30, what="v1alpha1 is not served")
    assert await snapshot(api, namespace) == before


async def snapshot(api: KubeApi, namespace: str) -> list[tuple[str, int, Any]]:
    """Return UID, generation and spec of both resources."""
    found = [await api.get(BETA, namespace, "demo"), await api.get(BETA, "default", "untouched")]
    return [(obj["metadata"]["uid"], obj["metadata"]["generation"], obj["spec"]) for obj in found if obj is not None]


async def no_longer_served(api: KubeApi, namespace: str) -> bool:
    try:
        await api.request("GET", ALPHA.path(namespace))
    except ApiError as error:
        return error.not_found
    return False
