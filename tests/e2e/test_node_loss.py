"""A second node is lost with an engine, and with the coordinator: no request fails, and every token is compared.

With a standby, a lost coordinator delays no token by more than ten seconds, with the operator's leader on its node too.
The status is compared with what the processes answer meanwhile.
"""

from __future__ import annotations

import os
import platform as machine
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import yaml
from eventually import LONG_SECONDS
from machine import scaled
from soak import SOAK

from localcluster import installation
from localcluster.cluster import LocalCluster
from localcluster.kubectl import Kubectl
from localcluster.progress import Steps
from megatron_operator.cluster.lease import LeaseSettings

from .conftest import SAMPLE, SECOND, Platform, deploy, own_namespace, printed_when_failed
from .disturbances import pods, settled
from .load_client import HEADING, Disturbance, LoadClient
from .status_watch import StatusWatch, heading

pytestmark = pytest.mark.skipif(not SOAK, reason="takes eight minutes; `make soak` runs it")
WORKERS, TOKENS = 3, 32
HOSTNAME = "kubernetes.io/hostname"
LEASE_SECONDS = LeaseSettings("", "", "").duration
"""Without its leader the status does not change for this long."""
STALL_SECONDS = 10.0
"""Longest wait for a token of a stream when the active coordinator of a pair is lost with its node."""


@pytest.fixture
def two_operators(platform: Platform, cluster: LocalCluster) -> Iterator[Kubectl]:
    """kubectl in the operator's namespace, with an operator on each node."""
    install_operator(platform, "operator.replicas=2")
    yield platform.kube.in_namespace(installation.OPERATOR_NAMESPACE)
    install_operator(platform, "operator.replicas=1")


def install_operator(platform: Platform, *values: str) -> None:
    installation.install_operator(platform.kube, platform.helm, Steps(), values=list(values))


@contextmanager
def lost(cluster: LocalCluster) -> Iterator[None]:
    """The second node: its network is cut off, and its kubelet and containers are frozen."""
    cluster.cut_network(SECOND)
    cluster.freeze_node(SECOND)
    yield
    cluster.restore_network(SECOND)
    cluster.thaw_node(SECOND)


def node_of(kube: Kubectl, component: str) -> set[str]:
    return {pod["spec"]["nodeName"] for pod in pods(kube, component) if "deletionTimestamp" not in pod["metadata"]}


def move_coordinator(kube: Kubectl, *, away_from: str) -> None:
    """Move the coordinator to the other node."""
    kube("cordon", away_from)
    kube("delete", "pod", "-l", "app.kubernetes.io/instance=demo,app.kubernetes.io/component=coordinator")
    settled(kube)
    kube("uncordon", away_from)


def active_node(kube: Kubectl) -> str:
    """Return the node of the coordinator that serves, of a pair."""
    active = []
    for component in ("coordinator", "standby"):
        metrics = httpx.get(f"http://{kube.cluster_ip(f'demo-{component}')}:8080/metrics", timeout=LONG_SECONDS).text
        if "megatron_coordinator_active 1.0" in metrics:
            active += node_of(kube, component)
    (node,) = active
    return node


def holder(system: Kubectl) -> str:
    """Return the name of the pod of the operator that leads."""
    name, _, _ = system.json("lease", "megatron-operator")["spec"]["holderIdentity"].rpartition("_")
    return str(name)


def leading_node(system: Kubectl) -> str:
    """Return the node of the operator that leads."""
    node: str = system.json("pod", holder(system))["spec"]["nodeName"]
    return node


def delete_coordinator(kube: Kubectl, *, node: str) -> None:
    """Delete the coordinator on a node, so that the other one of the pair takes over."""
    found = [*pods(kube, "coordinator"), *pods(kube, "standby")]
    (name,) = (pod["metadata"]["name"] for pod in found if pod["spec"]["nodeName"] == node)
    kube("delete", "pod", name)


def place_on(node: str, where: Callable[[], str], delete: Callable[[], object]) -> None:
    """Delete the pod that is active until the one on `node` is, which takes over."""
    deadline = time.monotonic() + LONG_SECONDS
    while where() != node:
        assert time.monotonic() < deadline, f"nothing took over on {node}"
        delete()
        time.sleep(15)  # the new pod starts


def spread_spec(first: str) -> dict[str, Any]:
    """Two engines on different nodes; server and coordinator begin on the first node."""
    spec = yaml.safe_load(SAMPLE.read_text())["spec"]
    labels = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": "engine"}
    spread = {
        "maxSkew": 1,
        "topologyKey": HOSTNAME,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": labels},
    }
    return {
        "replicas": 2,
        # In float32 an answer does not depend on its batch.
        "model": {**spec["model"], "dtype": "Float32"},
        "engine": {**spec["engine"], "podTemplate": {"spec": {"topologySpreadConstraints": [spread]}}},
        # A lost server breaks its clients' connections.
        "server": {**spec["server"], "podTemplate": {"spec": {"nodeSelector": {HOSTNAME: first}}}},
    }


def test_no_request_fails_when_a_node_is_lost(
    platform: Platform, cluster: LocalCluster, request: pytest.FixtureRequest
) -> None:
    first, second = (node.name for node in cluster.settings.nodes)
    series: list[Disturbance] = []
    false_claims: list[str] = []
    with own_namespace(platform) as kube, printed_when_failed(platform, kube, request):
        deployed = deploy(kube, **spread_spec(first))
        settled(kube)
        assert node_of(kube, "engine") == {first, second}
        print(
            f"\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} CPUs ({machine.machine()})\n{heading(HEADING)}"
        )
        with (
            LoadClient(deployed.chat.url, deployed.chat.model, workers=WORKERS, tokens=TOKENS) as load,
            StatusWatch(kube, "demo", last_token=lambda: load.last_token) as watch,
        ):
            for component in ("engine", "coordinator"):
                if component == "engine" and node_of(kube, "coordinator") != {first}:
                    move_coordinator(kube, away_from=second)
                if component == "coordinator":
                    move_coordinator(kube, away_from=first)
                    assert node_of(kube, "coordinator") == {second}
                with load.during(f"loss of a node with the {component}") as done, watch.during() as record:
                    with lost(cluster):
                        load.answered(2 * WORKERS)
                        assert node_of(kube, "coordinator") == {first}
                    kube("wait", f"node/{second}", "--for=condition=Ready", "--timeout=120s")
                    settled(kube)
                series.append(done)
                false_claims += record.faults(degraded=None)
                print(done.row(), record.cells(), record.longest, flush=True)
    assert {disturbance.what: disturbance.faults for disturbance in series if disturbance.faults} == {}
    assert false_claims == []
    assert all(disturbance.answers for disturbance in series)


def test_a_standby_takes_over_from_a_lost_node(
    platform: Platform, cluster: LocalCluster, two_operators: Kubectl, request: pytest.FixtureRequest
) -> None:
    first, second = (node.name for node in cluster.settings.nodes)
    series: list[Disturbance] = []
    false_claims: list[str] = []
    with own_namespace(platform) as kube, printed_when_failed(platform, kube, request):
        spec = spread_spec(first)
        deployed = deploy(kube, **spec, coordinator={"replicas": 2})
        settled(kube)
        kube("wait", "deployment/demo-standby", "--for=condition=Available", "--timeout=120s")
        print(
            f"\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} CPUs ({machine.machine()})\n{heading(HEADING)}"
        )
        with (
            LoadClient(deployed.chat.url, deployed.chat.model, workers=WORKERS, tokens=TOKENS) as load,
            StatusWatch(kube, "demo", last_token=lambda: load.last_token) as watch,
        ):
            for operator_at in (first, second):
                place_on(second, lambda: active_node(kube), lambda: delete_coordinator(kube, node=first))
                place_on(
                    operator_at,
                    lambda: leading_node(two_operators),
                    lambda: two_operators("delete", "pod", holder(two_operators)),
                )
                assert node_of(kube, "coordinator") | node_of(kube, "standby") == {first, second}
                what = "an engine and the active coordinator" + (" and the operator" if operator_at == second else "")
                with load.during(f"loss of a node with {what}") as done, watch.during() as record:
                    with lost(cluster):
                        load.answered(2 * WORKERS)
                    kube("wait", f"node/{second}", "--for=condition=Ready", "--timeout=120s")
                    settled(kube)
                    load.answered(2 * WORKERS)
                    assert active_node(kube) == first, "the coordinator of the lost node took over when it returned"
                series.append(done)
                absent = LEASE_SECONDS if operator_at == second else 0.0
                false_claims += record.faults(degraded=None, absent_seconds=absent)
                print(done.row(), record.cells(), record.longest, flush=True)
    assert {disturbance.what: disturbance.faults for disturbance in series if disturbance.faults} == {}
    assert false_claims == []
    assert max(disturbance.stall for disturbance in series) <= scaled(STALL_SECONDS)
