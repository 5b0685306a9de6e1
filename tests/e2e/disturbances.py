"""Disturbances of the resource `demo`, each of which returns when the resource serves as before."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from eventually import LONG_SECONDS
from machine import scaled

from localcluster.cluster import LocalCluster
from localcluster.kubectl import CommandError, Kubectl

INSTANCE = "app.kubernetes.io/instance=demo"
PROXY_SECONDS = 6.0
"""Time for which kube-proxy is stopped."""
COMPONENTS = ("coordinator", "engine", "server")


def settled(kube: Kubectl, *, replicas: int = 2) -> None:
    for component in ("coordinator", "server"):
        kube("rollout", "status", f"deployment/demo-{component}")
    kube.wait("mi/demo", f"jsonpath={{.status.ready}}={replicas}/{replicas}")
    kube.wait("mi/demo", "condition=EnginesReady")
    kube.wait("mi/demo", "condition=CoordinatorReady")
    kube.wait("mi/demo", "condition=Progressing=False")


def pods(kube: Kubectl, *components: str) -> list[dict[str, Any]]:
    found = kube.json("pods", "-l", f"{INSTANCE},app.kubernetes.io/component in ({','.join(components)})")["items"]
    return sorted(found, key=lambda pod: pod["metadata"]["name"])


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {entry["type"]: entry["status"] for entry in pod["status"].get("conditions", ())}
    return "deletionTimestamp" not in pod["metadata"] and conditions.get("Ready") == "True"


def lose(kube: Kubectl, component: str, how: Callable[[Kubectl, str], None]) -> None:
    """Remove the first pod of a component with `how`, and wait until another is ready."""
    before = pods(kube, component)
    how(kube, before[0]["metadata"]["name"])
    until_replaced(kube, before[:1], len(before), component)


def until_replaced(kube: Kubectl, lost: list[dict[str, Any]], count: int, *components: str) -> None:
    """Wait until the pods `lost` are gone, `count` pods of the components are ready, and the resource is settled."""
    uids = {pod["metadata"]["uid"] for pod in lost}
    deadline = time.monotonic() + LONG_SECONDS
    while True:
        now = pods(kube, *components)
        if not uids & {pod["metadata"]["uid"] for pod in now} and len(now) == count and all(map(is_ready, now)):
            break
        assert time.monotonic() < deadline, f"not replaced: {[(pod['metadata']['name'], pod['status']) for pod in now]}"
        time.sleep(1)
    settled(kube)


def evict(kube: Kubectl, pod: str) -> None:
    """Evict a pod as a node drain does. Retry while the disruption budget does not count all pods as ready yet."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": kube.namespace}}
    path = f"/api/v1/namespaces/{kube.namespace}/pods/{pod}/eviction"
    deadline = time.monotonic() + scaled(60)
    while True:
        try:
            kube("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
            return
        except CommandError as error:
            if "disruption budget" not in error.output or time.monotonic() > deadline:
                raise
            time.sleep(1)


def kill(kube: Kubectl, pod: str) -> None:
    kube("delete", "pod", pod, "--grace-period=0", "--force")


def lose_behind_a_late_proxy(kube: Kubectl, component: str) -> None:
    """Evict a pod while kube-proxy is stopped, as on a loaded node: it sends connections to the pod meanwhile."""
    proxy = next(found.pid for found in LocalCluster().status() if found.name == "kube-proxy")
    assert proxy is not None
    os.kill(proxy, signal.SIGSTOP)
    try:
        evict(kube, pods(kube, component)[0]["metadata"]["name"])
        time.sleep(PROXY_SECONDS)
    finally:
        os.kill(proxy, signal.SIGCONT)
    settled(kube)


def change(kube: Kubectl, *, replicas: int = 2, **spec: Any) -> None:
    """Patch the spec, and wait until every engine has its revision."""
    kube.patch_spec("demo", **spec)
    generation = kube.json("mi", "demo")["metadata"]["generation"]
    kube.wait("mi/demo", f"jsonpath={{.status.observedGeneration}}={generation}")
    kube.wait("mi/demo", f"jsonpath={{.status.updatedReplicas}}={replicas}")
    settled(kube, replicas=replicas)


def change_and_revert(kube: Kubectl, *, to: dict[str, Any], back: dict[str, Any]) -> None:
    change(kube, **to)
    change(kube, **back)


def to_and_fro(kube: Kubectl, state: str) -> None:
    kube.patch_spec("demo", desiredState=state)
    kube.wait_state("demo", state)
    kube.patch_spec("demo", desiredState="Running")
    kube.wait_state("demo", "Running")
    settled(kube)


def evict_all(kube: Kubectl) -> None:
    """Evict every pod at once, each as a node drain does, and wait until all are replaced."""
    before = pods(kube, *COMPONENTS)
    with ThreadPoolExecutor(len(before)) as pool:
        list(pool.map(lambda pod: evict(kube, pod["metadata"]["name"]), before))
    until_replaced(kube, before, len(before), *COMPONENTS)


def drain_node(kube: Kubectl) -> None:
    """Drain the node of the coordinator, which also has an engine, and uncordon it once coordinator and servers serve
    elsewhere."""
    node = pods(kube, "coordinator")[0]["spec"]["nodeName"]
    try:
        kube("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={INSTANCE}")
        for component in ("coordinator", "server"):
            kube("rollout", "status", f"deployment/demo-{component}")
        assert node not in {pod["spec"].get("nodeName") for pod in pods(kube, *COMPONENTS)}
    finally:
        kube("uncordon", node)
    settled(kube)


def reject_and_revert(kube: Kubectl, reason: str, *, to: dict[str, Any], back: dict[str, Any]) -> None:
    """Patch a spec that cannot run, wait until the status has the reason, and revert it."""
    kube.patch_spec("demo", **to)
    kube.wait("mi/demo", f'jsonpath={{.status.conditions[?(@.type=="Degraded")].reason}}={reason}')
    assert kube.json("mi", "demo")["status"]["ready"] == "2/2"
    change(kube, **back)
