"""The sample of an HPA with Kubernetes' own controller. The metrics API builds for minutes: `make soak` runs it.

The coordinator's metrics drive it. The HPA reads them through an external metrics API (`metrics_api/`), and writes the
scale subresource.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from go_modules import own_program
from soak import SOAK

from localcluster import LocalCluster
from megatron_operator.resource.names import COORDINATOR
from megatron_runtime.cli.processes import free_ports

from .client_load import LENGTH, CoordinatorLoad
from .fake_node import FakeNode

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SOAK, reason="builds a metrics API for minutes; `make soak` runs it"),
]

SAMPLE = Path(__file__).parents[2] / "manifests" / "autoscaling" / "hpa.yaml"
METRICS_API = Path(__file__).parent / "metrics_api"
GROUP = "external.metrics.k8s.io"
REQUESTS = 24
SLOW = ("--echo-step-seconds", "0.5", "--max-requests", "1")
"""An engine whose requests take several intervals of the HPA in total."""


def sample(namespace: str) -> dict[str, Any]:
    """Return the sample for a resource in this namespace, not in the namespace default."""
    manifest: dict[str, Any] = yaml.safe_load(SAMPLE.read_text().replace("default", namespace))
    manifest["metadata"]["namespace"] = namespace
    return manifest


def apply(cluster: LocalCluster, *manifests: dict[str, Any]) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
    cluster.run_kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(listed))


@contextmanager
def metrics_api(cluster: LocalCluster, *, url: str, namespace: str, folder: Path) -> Iterator[None]:
    """Serve the metrics of a URL as external metrics, with the labels that the chart's PodMonitor adds."""
    (port,) = free_ports(1)
    kubeconfigs = (
        f"--{name}-kubeconfig={cluster.kubeconfig}" for name in ("authentication", "authorization", "lister")
    )
    command = [
        own_program(METRICS_API),
        *kubeconfigs,
        *("--bind-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={folder}"),
        *(f"--metrics-url={url}", f"--metrics-labels=namespace={namespace},app_kubernetes_io_instance=demo"),
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "metrics-api", "namespace": namespace},
        "spec": {"type": "ExternalName", "externalName": "127.0.0.1"},
    }
    registration = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"v1beta1.{GROUP}"},
        "spec": {
            "group": GROUP,
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": "metrics-api", "namespace": namespace, "port": port},
        },
    }
    meta = {"name": "horizontal-pod-autoscaler-external-metrics"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", **meta}
    rbac = "rbac.authorization.k8s.io/v1"
    rules = [{"apiGroups": [GROUP], "resources": ["*"], "verbs": ["get", "list"]}]
    account = {"kind": "ServiceAccount", "name": "horizontal-pod-autoscaler", "namespace": "kube-system"}
    with (folder / "metrics-api.log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        apply(
            cluster,
            service,
            registration,
            {"apiVersion": rbac, "kind": "ClusterRole", "metadata": meta, "rules": rules},
            {
                "apiVersion": rbac,
                "kind": "ClusterRoleBinding",
                "metadata": meta,
                "roleRef": role,
                "subjects": [account],
            },
        )
        yield
    finally:
        # An APIService without a server delays the deletion of namespaces.
        cluster.run_kubectl("delete", "apiservice", f"v1beta1.{GROUP}")
        cluster.run_kubectl("delete", "clusterrole,clusterrolebinding", meta["name"])
        running.terminate()
        running.wait()


def metrics_url(node: FakeNode) -> str:
    """Return the address of the coordinator's metrics."""
    (coordinator,) = [each for each in node.containers.values() if each.component == COORDINATOR]
    return f"http://127.0.0.1:{coordinator.health_port}/metrics"


@asynccontextmanager
async def requested(node: FakeNode) -> AsyncIterator[asyncio.Future[list[None]]]:
    """Send requests at once; all must be answered as by an undisturbed engine."""
    async with CoordinatorLoad(node, "demo").client() as answer:

        async def one(prompt: list[int]) -> None:
            (await answer(prompt)).check(echo_answer(prompt, LENGTH))

        requests = asyncio.gather(*(one([number, 1, 2, 3]) for number in range(REQUESTS)))
        yield requests
        await asyncio.wait_for(requests, LONG_SECONDS)


async def test_an_hpa_adds_engines_while_requests_wait_and_removes_them(
    resource: Any, operator: Any, node: FakeNode, control_plane: LocalCluster, tmp_path: Path
) -> None:
    node.engine_arguments = SLOW
    await resource.create(lifecycle={"drainSeconds": 30})
    await resource.settled("Running")
    hpa = sample(resource.namespace)
    hpa["spec"]["maxReplicas"] = 2
    hpa["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 0
    with metrics_api(control_plane, url=metrics_url(node), namespace=resource.namespace, folder=tmp_path):
        apply(control_plane, hpa)
        async with requested(node):
            await resource.until(lambda status: status.get("ready") == "2/2")
        await resource.until(lambda status: status.get("ready") == "1/1" and len(status["engines"]) == 1)
