"""A second node is lost with an engine, and with the coordinator: no request fails, and every token is compared."""

from __future__ import annotations

import os
import platform as machine
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from soak import SOAK

from localcluster.cluster import LocalCluster
from localcluster.kubectl import Kubectl

from .conftest import SAMPLE, SECOND, Platform, deploy, own_namespace, printed_when_failed
from .disturbances import pods, settled
from .load_client import HEADING, Disturbance, LoadClient
from .status_watch import StatusWatch, heading

pytestmark = pytest.mark.skipif(not SOAK, reason="takes four minutes; `make soak` runs it")
WORKERS, TOKENS = 3, 32
HOSTNAME = "kubernetes.io/hostname"


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
            StatusWatch(kube, "demo") as watch,
        ):
            for component in ("engine", "coordinator"):
                if component == "engine" and node_of(kube, "coordinator") != {first}:
                    move_coordinator(kube, away_from=second)
                if component == "coordinator":
                    move_coordinator(kube, away_from=first)
                    assert node_of(kube, "coordinator") == {second}
                with load.during(f"loss of a node with the {component}") as done, watch.during() as record:
                    with lost(cluster):
                        load.answered(2 * WORKERS, seconds=180)
                        assert node_of(kube, "coordinator") == {first}
                    kube("wait", f"node/{second}", "--for=condition=Ready", "--timeout=120s")
                    settled(kube)
                series.append(done)
                false_claims += record.faults(degraded=None)
                print(f"{done.row()} {record.cells()}", *record.faults(degraded=None), flush=True, sep="\n")
    assert {disturbance.what: disturbance.faults for disturbance in series if disturbance.faults} == {}
    assert false_claims == []
    assert all(disturbance.answers for disturbance in series)
