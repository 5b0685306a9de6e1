"""A real API server for each pytest process; for each test a namespace, a fake node and an operator of its own."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from eventually import eventually
from go_modules import module_directory
from machine import scaled
from run_record import used
from warm_python import PLATFORM, run_warm

from localcluster import LocalCluster
from localcluster.programs import KUBERNETES_VERSION
from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.auth import load_configuration
from megatron_operator.cluster.kinds import CHILD_KINDS, EVENT, HTTP_ROUTE, INFERENCE_POOL, RESOURCE, SECRET, ObjectKind
from megatron_operator.cluster.watching import watch
from megatron_operator.install import HOME_RULES, NODE_RULES, RESOURCE_RULES, Rule
from megatron_operator.resource.crd import custom_resource_definition

from .api_server_proxy import ApiProxy
from .fake_node import FakeNode, Ports
from .in_process_fleet import InProcessFleet
from .operator_process import OperatorProcess

NAMESPACE = ObjectKind("Namespace", "", "v1", "namespaces")
ACCOUNT = ObjectKind("ServiceAccount", "", "v1", "serviceaccounts")
ROLE = ObjectKind("Role", "rbac.authorization.k8s.io", "v1", "roles")
BINDING = ObjectKind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings")
CLUSTER_ROLE = ObjectKind("ClusterRole", "rbac.authorization.k8s.io", "v1", "clusterroles")
CLUSTER_BINDING = ObjectKind("ClusterRoleBinding", "rbac.authorization.k8s.io", "v1", "clusterrolebindings")
OPTIONAL_CRDS = (
    ("sigs.k8s.io/gateway-api@v1.4.0", "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml", HTTP_ROUTE),
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.1.0",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
        INFERENCE_POOL,
    ),
)
"""Go modules, and the files of their CRDs."""
CRD = ObjectKind("CustomResourceDefinition", "apiextensions.k8s.io", "v1", "customresourcedefinitions")


@pytest.fixture(scope="session")
def control_plane(worker_id: str) -> Iterator[LocalCluster]:
    """The control plane of this process: some tests delete the CRD, restart the API server or act on all namespaces.

    It keeps running if it ran before, or with MEGATRON_KEEP_CLUSTER=1.
    """
    cluster = LocalCluster(name=f"control-{worker_id}", control_plane_only=True)
    was_up = cluster.kubeconfig.exists() and all(component.ready for component in cluster.status())
    cluster.up()
    used("API server, controller manager, etcd", KUBERNETES_VERSION)
    yield cluster
    if not was_up and not os.environ.get("MEGATRON_KEEP_CLUSTER"):
        cluster.down()


@pytest.fixture(scope="session")
def crd(control_plane: LocalCluster) -> None:
    """The generated CRD, established."""
    install_crd(control_plane)


@pytest.fixture
def reinstall_crd(control_plane: LocalCluster) -> Iterator[Callable[[], None]]:
    """A function that installs the CRD again, for a test that deletes it. It also runs at the end of the test."""
    yield lambda: install_crd(control_plane)
    install_crd(control_plane)


def install_crd(cluster: LocalCluster) -> None:
    manifest = json.dumps(custom_resource_definition())
    cluster.run_kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifest)
    wait_until_served(cluster, RESOURCE)


def wait_until_served(cluster: LocalCluster, kind: ObjectKind) -> None:
    """Wait until the API server answers requests for a kind of a new CRD, which follows its condition Established."""
    deadline = time.monotonic() + scaled(30)
    while cluster.run_kubectl("get", "--raw", f"{kind.path(None)}?limit=1", check=False).returncode:
        assert time.monotonic() < deadline, f"the API server does not serve {kind.plural}"
        time.sleep(0.3)


async def until_discovered(cluster: LocalCluster, api_version: str) -> None:
    """Wait until clients discover an API, some moments after its CRD is established."""

    async def is_served() -> bool:
        return api_version in cluster.run_kubectl("api-versions").stdout.split()

    await eventually(is_served, what=f"clients discover {api_version}")


@pytest.fixture
def gateway_api(control_plane: LocalCluster) -> None:
    """The kinds HTTPRoute and InferencePool, from their Go modules. They stay for the tests that follow."""
    for module, file, kind in OPTIONAL_CRDS:
        if control_plane.run_kubectl("get", "crd", f"{kind.plural}.{kind.group}", check=False).returncode:
            control_plane.run_kubectl("apply", "--server-side", "-f", str(module_directory(module) / file))
            wait_until_served(control_plane, kind)


@pytest.fixture
def no_gateway_api(control_plane: LocalCluster) -> None:
    """Neither of these kinds."""
    names = [f"{kind.plural}.{kind.group}" for _, _, kind in OPTIONAL_CRDS]
    control_plane.run_kubectl("delete", "crd", *names, "--ignore-not-found")


@pytest.fixture
async def api(control_plane: LocalCluster) -> AsyncIterator[KubeApi]:
    async with KubeApi(await load_configuration(kubeconfig=control_plane.kubeconfig), timeout=60) as found:
        yield found


@pytest.fixture
async def namespace(api: KubeApi, crd: None) -> AsyncIterator[str]:
    name = f"t-{secrets.token_hex(4)}"
    await api.request("POST", NAMESPACE.path(None), body={"metadata": {"name": name}})
    yield name
    if await api.get(NAMESPACE, None, name) is not None:
        await api.request("DELETE", NAMESPACE.path(None, name))


@pytest.fixture
def ports() -> Ports:
    """The ports of the coordinator that the fake node runs."""
    return Ports()


@pytest.fixture
async def node(api: KubeApi, namespace: str, ports: Ports, tmp_path: Path) -> AsyncIterator[FakeNode]:
    made = FakeNode(api, namespace=namespace, folder=tmp_path, ports=ports)
    made.start()
    yield made
    await made.stop()


@pytest.fixture
async def fleet(api: KubeApi, namespace: str, tmp_path: Path) -> AsyncIterator[InProcessFleet]:
    made = InProcessFleet(api, namespace=namespace, folder=tmp_path)
    made.start()
    yield made
    await made.stop()


@pytest.fixture
async def operator_kubeconfig(
    api: KubeApi, control_plane: LocalCluster, namespace: str, tmp_path: Path
) -> AsyncIterator[Path]:
    """The kubeconfig of an account with the chart's namespaced Role, and its ClusterRole for nodes."""
    meta = {"name": "megatron-operator", "namespace": namespace}
    subject = {"kind": "ServiceAccount", **meta}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "megatron-operator"}
    await api.create(ACCOUNT, {"metadata": meta}, manager="test")
    await api.create(ROLE, {"metadata": meta, "rules": [*RESOURCE_RULES, *HOME_RULES]}, manager="test")
    await api.create(BINDING, {"metadata": meta, "roleRef": role, "subjects": [subject]}, manager="test")
    answer = await api.request(
        "POST", ACCOUNT.path(namespace, "megatron-operator", subresource="token"), body={"spec": {}}
    )
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["users"] = [{"name": "operator", "user": {"token": answer["status"]["token"]}}]
    config["contexts"][0]["context"]["user"] = "operator"
    path = tmp_path / "operator-kubeconfig"
    path.write_text(yaml.safe_dump(config))
    async with granted_everywhere(api, namespace, f"megatron-operator-nodes-{namespace}", NODE_RULES):
        yield path


@asynccontextmanager
async def granted_everywhere(api: KubeApi, namespace: str, name: str, rules: Sequence[Rule]) -> AsyncIterator[None]:
    """Grant the operator's account a ClusterRole."""
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    subject = {"kind": "ServiceAccount", "name": "megatron-operator", "namespace": namespace}
    binding = {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}
    await api.request("POST", CLUSTER_ROLE.path(None), body={"metadata": {"name": name}, "rules": list(rules)})
    await api.request("POST", CLUSTER_BINDING.path(None), body=binding)
    yield
    await api.request("DELETE", CLUSTER_BINDING.path(None, name))
    await api.request("DELETE", CLUSTER_ROLE.path(None, name))


@pytest.fixture
async def proxy(operator_kubeconfig: Path) -> AsyncIterator[ApiProxy]:
    made = ApiProxy(operator_kubeconfig)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def cluster_wide(api: KubeApi, namespace: str, operator_kubeconfig: Path) -> AsyncIterator[None]:
    """Grant the operator's account the chart's ClusterRole, and in its own namespace the rules of its home."""
    await api.merge_patch(ROLE, namespace, "megatron-operator", {"rules": HOME_RULES}, manager="test")
    async with granted_everywhere(api, namespace, f"megatron-operator-{namespace}", RESOURCE_RULES):
        yield


@pytest.fixture
def make_operator(
    operator_kubeconfig: Path, namespace: str, ports: Ports, tmp_path: Path
) -> Iterator[Callable[..., OperatorProcess]]:
    made: list[OperatorProcess] = []

    def make(
        *arguments: str,
        pod: str = "operator-0",
        everywhere: bool = False,
        kubeconfig: Path = operator_kubeconfig,
        coordinator_port: int = ports.admin,
        **options: Any,
    ) -> OperatorProcess:
        process = OperatorProcess(
            kubeconfig=kubeconfig,
            namespace=namespace,
            coordinator_port=coordinator_port,
            log=tmp_path / f"operator-{len(made)}.log",
            arguments=arguments,
            pod=pod,
            everywhere=everywhere,
            **options,
        )
        made.append(process)
        return process

    yield make
    for process in made:
        if process.running:
            process.kill()


@pytest.fixture
async def operator(make_operator: Callable[..., OperatorProcess]) -> OperatorProcess:
    process = make_operator()
    await process.start()
    return process


@pytest.fixture
def helm(control_plane: LocalCluster, namespace: str) -> Callable[..., None]:
    """helm in the test's namespace. A failure of the command fails the test."""
    program = control_plane.program("helm")

    def call(*arguments: str) -> None:
        command = [program, "--kubeconfig", control_plane.kubeconfig, "--namespace", namespace, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return call


class Resource:
    """One MegatronInference as a user sees it."""

    def __init__(self, api: KubeApi, namespace: str, name: str = "demo") -> None:
        self.name, self.namespace = name, namespace
        self._api = api

    async def create(self, **spec: Any) -> dict[str, Any]:
        body = {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.kind,
            "metadata": {"name": self.name, "namespace": self.namespace},
            # The engines are echo engines; the canary of smollm2 would expect smollm2's answer.
            "spec": {"model": {"source": {"builtin": "echo"}}, **spec},
        }
        return await self._api.create(RESOURCE, body, manager="test")

    async def patch(self, **spec: Any) -> None:
        await self._api.merge_patch(RESOURCE, self.namespace, self.name, {"spec": spec}, manager="test")

    async def get(self) -> dict[str, Any] | None:
        return await self._api.get(RESOURCE, self.namespace, self.name)

    async def status(self) -> dict[str, Any]:
        found = await self.get()
        return (found or {}).get("status") or {}

    async def until(self, condition: Callable[[dict[str, Any]], bool], *, seconds: float = 120) -> dict[str, Any]:
        """Return the first status of the current spec that meets the condition.

        The status of an earlier generation does not count: the operator has not read the last change of the spec.
        A status may still be older than any other cause, such as a killed pod: wait for an effect of that first.
        """
        found: dict[str, Any] = {}
        query = {"fieldSelector": f"metadata.name={self.name}"}
        try:
            async with (
                asyncio.timeout(scaled(seconds)),
                aclosing(watch(self._api, RESOURCE.path(self.namespace), query, retry_seconds=(0.5,))) as changes,
            ):
                async for change in changes:
                    if change.kind in ("open", "error"):
                        continue
                    found = change.objects[0] if change.objects and change.kind != "delete" else {}
                    status: dict[str, Any] = found.get("status") or {}
                    is_current = status.get("observedGeneration") == found.get("metadata", {}).get("generation", 0)
                    if is_current and condition(status):
                        return status
        except TimeoutError:
            shown = {
                "metadata": {"generation": found.get("metadata", {}).get("generation")},
                "status": found.get("status"),
            }
            raise AssertionError(f"not met within {scaled(seconds):g} s: {json.dumps(shown, indent=1)}") from None
        raise AssertionError("the watch ended")

    async def settled(self, state: str, *, seconds: float = 120) -> dict[str, Any]:
        """Return the status once the desired state is confirmed; for Running, by every engine."""
        conditions = ["LifecycleSettled", "EnginesReady"] if state == "Running" else ["LifecycleSettled"]
        return await self.until(
            lambda status: (
                status.get("state") == state and all(condition(status, kind)["status"] == "True" for kind in conditions)
            ),
            seconds=seconds,
        )

    async def released(self, *, seconds: float = 120) -> dict[str, Any]:
        """Return the status once it is suspended and the engines' pods are deleted, which follows settled(). A kubelet
        learns that a moment later."""
        return await self.until(
            lambda status: (
                status["state"] == "Suspended"
                and condition(status, "LifecycleSettled")["status"] == "True"
                and condition(status, "EnginesReady")["reason"] == "Suspended"
            ),
            seconds=seconds,
        )

    async def delete(self) -> None:
        await self._api.request("DELETE", RESOURCE.path(self.namespace, self.name))

    async def events(self) -> list[dict[str, Any]]:
        """Return its Events, oldest first."""
        events = [
            event
            for event in await self._api.list(EVENT, self.namespace)
            if event["regarding"]["name"] == self.name and event["regarding"]["kind"] == RESOURCE.kind
        ]
        return sorted(events, key=lambda event: str(event["eventTime"]))

    async def reported(self, *reasons: str) -> list[dict[str, Any]]:
        """Return its Events once they contain these reasons. An Event is written after the status that it is about."""

        async def reports() -> bool:
            found = Counter(event["reason"] for event in await self.events())
            return found >= Counter(reasons)

        await eventually(reports, what=f"Events of {', '.join(reasons)}", look_seconds=0.2)
        return await self.events()

    async def children(self) -> dict[str, dict[str, Any]]:
        """Return the objects with the resource's labels, and its keys, by "Kind name"."""
        found: dict[str, dict[str, Any]] = {}
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/managed-by=megatron-operator"
        for kind in CHILD_KINDS:
            for item in await self._api.list(kind, self.namespace, selector=selector):
                if any(owner["kind"] == "StatefulSet" for owner in item["metadata"].get("ownerReferences", ())):
                    continue  # a StatefulSet's own ControllerRevision
                found[f"{kind.kind} {item['metadata']['name']}"] = item
        keys = await self._api.get(SECRET, self.namespace, f"{self.name}-keys")
        return {**found, f"Secret {self.name}-keys": keys} if keys else found

    async def until_gone(self, *, seconds: float = 120) -> None:
        """Wait until the resource and all its children are deleted."""

        async def gone() -> bool:
            return await self.get() is None and not await self.children()

        await eventually(gone, seconds=seconds, what="resource and children are gone", look_seconds=0.5)


def percentile_ms(seconds: Sequence[float], share: float) -> int:
    """Return the smallest time in milliseconds that at least `share` of the times do not exceed."""
    return round(1000 * sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)])


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((entry for entry in status.get("conditions", ()) if entry["type"] == kind), {"status": "Unknown"})


@pytest.fixture
def resource(api: KubeApi, namespace: str) -> Resource:
    return Resource(api, namespace)


@pytest.fixture
def make_resource(api: KubeApi, namespace: str) -> Callable[[str], Resource]:
    return lambda name: Resource(api, namespace, name)


@pytest.fixture
def kubectl(control_plane: LocalCluster, namespace: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return control_plane.run_kubectl("--namespace", namespace, *arguments, stdin=stdin, check=False)

    return call


@pytest.fixture
def plugin(control_plane: LocalCluster) -> Callable[..., Awaitable[subprocess.CompletedProcess[str]]]:
    """Run `kubectl megatron` with the cluster's kubectl, as its administrator or with another kubeconfig."""

    async def call(*arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
        path = f"{control_plane.kubectl.parent}{os.pathsep}{os.environ['PATH']}"
        variables = {"KUBECONFIG": str(kubeconfig or control_plane.kubeconfig), "PATH": path}
        return await _run("megatron_kubectl.cli", *arguments, **variables)

    return call


@pytest.fixture
def verify(control_plane: LocalCluster) -> Callable[..., Awaitable[subprocess.CompletedProcess[str]]]:
    """Run `megatron-operator verify` with options."""
    return partial(_run, "megatron_operator.cli", "verify", "--kubeconfig", str(control_plane.kubeconfig))


async def _run(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of a module."""
    environment = {**os.environ, **variables}
    return await asyncio.to_thread(run_warm, "-m", module, *arguments, environment=environment, modules=PLATFORM)
