"""The samples for autoscalers, with Kubernetes' own HPA controller and with KEDA. The Go programs build for minutes:
`make soak` runs them.

The coordinator's metrics drive both, and both write the scale subresource. The HPA reads the metrics through an
external metrics API (`metrics_api/`), KEDA through Prometheus.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from go_modules import built_program, module_directory, own_program
from prometheus import prometheus
from soak import SOAK

from localcluster import LocalCluster
from megatron_operator.resource.names import COORDINATOR
from megatron_runtime.cli.processes import free_ports

from .client_load import LENGTH, CoordinatorLoad
from .conftest import condition, until_discovered
from .fake_node import FakeNode

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SOAK, reason="builds Go programs for minutes; `make soak` runs it"),
]

SAMPLES = Path(__file__).parents[2] / "manifests" / "autoscaling"
KEDA = "github.com/kedacore/keda/v2@v2.21.0"
METRICS_API = Path(__file__).parent / "metrics_api"
GROUP = "external.metrics.k8s.io"
REQUESTS = 24
SLOW = ("--echo-step-seconds", "0.5", "--max-requests", "1")
"""An engine whose requests take several intervals of the HPA in total."""


def sample(name: str, *, namespace: str) -> dict[str, Any]:
    """Return a sample for a resource in this namespace, not in the namespace default."""
    manifest: dict[str, Any] = yaml.safe_load((SAMPLES / name).read_text().replace("default", namespace))
    manifest["metadata"]["namespace"] = namespace
    return manifest


def apply(cluster: LocalCluster, *manifests: dict[str, Any]) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
    cluster.run_kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(listed))


@contextmanager
def running(command: list[Any], *, log: Path, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a program; if it ends by itself, the test fails with the end of its log."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | (environment or {}))
    try:
        yield
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        process.wait()


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
    with running(command, log=folder / "metrics-api.log"):
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


def metrics_address(node: FakeNode) -> str:
    """Return host and port of the coordinator's metrics."""
    (coordinator,) = [each for each in node.containers.values() if each.component == COORDINATOR]
    return f"127.0.0.1:{coordinator.health_port}"


@contextmanager
def prometheus_of(address: str, *, namespace: str, folder: Path) -> Iterator[str]:
    """Scrape an address, with the labels that the chart's PodMonitor adds. Yield the URL of Prometheus."""
    (port,) = free_ports(1)
    labels = {"namespace": namespace, "app_kubernetes_io_instance": "demo"}
    target = {"job_name": "coordinator", "static_configs": [{"targets": [address], "labels": labels}]}
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}))
    command = [
        prometheus(),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with running(command, log=folder / "prometheus.log"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def keda_kinds(cluster: LocalCluster) -> Iterator[None]:
    files = module_directory(KEDA).joinpath("config", "crd", "bases").glob("*.yaml")
    definitions = [yaml.safe_load(path.read_text()) for path in files]
    apply(cluster, *definitions)
    yield
    cluster.run_kubectl("delete", "crd", *(each["metadata"]["name"] for each in definitions), "--wait=false")


@contextmanager
def keda(cluster: LocalCluster, *, namespace: str, folder: Path) -> Iterator[None]:
    """Run KEDA's operator for the ScaledObjects of one namespace. Its metrics server, by which an HPA scales above one,
    does not run."""
    program = built_program(KEDA, "./cmd/operator")
    self_signed = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=keda"
    key, certificate = folder / "tls.key", folder / "tls.crt"
    subprocess.run([*self_signed.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    (folder / "ca.crt").write_bytes(certificate.read_bytes())
    metrics, health, service = free_ports(3)
    command = [
        program,
        f"--kubeconfig={cluster.kubeconfig}",
        f"--cert-dir={folder}",
        f"--metrics-bind-address=127.0.0.1:{metrics}",
        f"--health-probe-bind-address=127.0.0.1:{health}",
        f"--metrics-service-bind-address=127.0.0.1:{service}",
    ]
    variables = ("WATCH_NAMESPACE", "POD_NAMESPACE", "KEDA_CLUSTER_OBJECT_NAMESPACE")
    with running(command, log=folder / "keda.log", environment=dict.fromkeys(variables, namespace)):
        try:
            yield
        finally:
            # KEDA removes its finalizers, for which the deletion of the namespace would wait.
            cluster.run_kubectl("delete", "scaledobjects.keda.sh", "--all", "-n", namespace)


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
    hpa = sample("hpa.yaml", namespace=resource.namespace)
    hpa["spec"]["maxReplicas"] = 2
    hpa["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 0
    url = f"http://{metrics_address(node)}/metrics"
    with metrics_api(control_plane, url=url, namespace=resource.namespace, folder=tmp_path):
        apply(control_plane, hpa)
        async with requested(node):
            await resource.until(lambda status: status.get("ready") == "2/2")
        await resource.until(lambda status: status.get("ready") == "1/1" and len(status["engines"]) == 1)


async def test_keda_starts_an_engine_for_requests_that_wait_and_removes_it_when_none_is_open(
    resource: Any, operator: Any, node: FakeNode, control_plane: LocalCluster, tmp_path: Path
) -> None:
    made = await resource.create(replicas=0)
    await resource.until(lambda status: condition(status, "CoordinatorReady").get("status") == "True")
    manifest = sample("keda.yaml", namespace=resource.namespace)
    manifest["spec"] |= {"pollingInterval": 1, "cooldownPeriod": 5}
    (trigger,) = manifest["spec"]["triggers"]
    scraped = prometheus_of(metrics_address(node), namespace=resource.namespace, folder=tmp_path)
    with scraped as url, keda_kinds(control_plane):
        await until_discovered(control_plane, manifest["apiVersion"])
        trigger["metadata"]["serverAddress"] = url
        with keda(control_plane, namespace=resource.namespace, folder=tmp_path):
            apply(control_plane, manifest)
            async with requested(node):
                pass
            # KEDA has written the resource twice: one replica, then none.
            await resource.until(
                lambda status: (
                    status["observedGeneration"] >= made["metadata"]["generation"] + 2
                    and condition(status, "EnginesReady").get("reason") == "Suspended"
                )
            )
    assert (await resource.get())["spec"]["replicas"] == 0
