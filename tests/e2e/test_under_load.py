"""Continuous requests during every verb, rollout, eviction and kill of a resource; every token is compared."""

import json
import os
import platform as machine
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from soak import SOAK

from localcluster.kubectl import CommandError, Kubectl

from .conftest import SAMPLE, deploy
from .load_client import HEADING, Disturbance, LoadClient

WORKERS, TOKENS = 3, 32
INSTANCE = "app.kubernetes.io/instance=demo"


def settled(kube: Kubectl) -> None:
    for component in ("coordinator", "server"):
        kube("rollout", "status", f"deployment/demo-{component}")
    kube.wait("mi/demo", "jsonpath={.status.ready}=2/2")
    kube.wait("mi/demo", "condition=EnginesReady")
    kube.wait("mi/demo", "condition=CoordinatorReady")


def pods(kube: Kubectl, component: str) -> list[dict[str, Any]]:
    found = kube.json("pods", "-l", f"{INSTANCE},app.kubernetes.io/component={component}")["items"]
    return sorted(found, key=lambda pod: pod["metadata"]["name"])


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {entry["type"]: entry["status"] for entry in pod["status"].get("conditions", ())}
    return "deletionTimestamp" not in pod["metadata"] and conditions.get("Ready") == "True"


def lose(kube: Kubectl, component: str, how: Callable[[Kubectl, str], None]) -> None:
    """Remove the first pod of a component with `how`, and wait until as many pods as before are ready."""
    before = pods(kube, component)
    lost = before[0]["metadata"]
    how(kube, lost["name"])
    deadline = time.monotonic() + 180
    while True:
        now = pods(kube, component)
        others = lost["uid"] not in {pod["metadata"]["uid"] for pod in now}
        if others and len(now) == len(before) and all(map(is_ready, now)):
            break
        assert time.monotonic() < deadline, f"{lost['name']} is not replaced: {[pod['status'] for pod in now]}"
        time.sleep(0.5)
    settled(kube)


def evict(kube: Kubectl, pod: str) -> None:
    """Evict a pod as a node drain does. Retry while the disruption budget does not count all pods as ready yet."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": kube.namespace}}
    path = f"/api/v1/namespaces/{kube.namespace}/pods/{pod}/eviction"
    deadline = time.monotonic() + 60
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


def roll_out(kube: Kubectl) -> None:
    kube.patch_spec("demo", engine={"batching": {"maxRequests": 12}})
    generation = kube.json("mi", "demo")["metadata"]["generation"]
    kube.wait("mi/demo", f"jsonpath={{.status.observedGeneration}}={generation}")
    kube.wait("mi/demo", "jsonpath={.status.updatedReplicas}=2")
    settled(kube)


def to_and_fro(kube: Kubectl, state: str) -> None:
    kube.patch_spec("demo", desiredState=state)
    kube.wait_state("demo", state)
    kube.patch_spec("demo", desiredState="Running")
    kube.wait_state("demo", "Running")
    settled(kube)


# A killed server breaks its clients' connections, so it is not among these.
LOSSES = (("engine", evict), ("coordinator", evict), ("server", evict), ("engine", kill), ("coordinator", kill))


@pytest.mark.skipif(not SOAK, reason="takes seven minutes; `make soak` runs it")
def test_no_request_fails_during_any_disturbance(kube: Kubectl) -> None:
    spec = yaml.safe_load(SAMPLE.read_text())["spec"]
    # In float32 an answer does not depend on its batch.
    deployed = deploy(
        kube, replicas=2, server={**spec["server"], "replicas": 2}, model={**spec["model"], "dtype": "Float32"}
    )
    settled(kube)
    series: list[Disturbance] = []
    where = f"{os.cpu_count()} CPUs ({machine.machine()})"
    print(f"\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {where}, {WORKERS} clients\n{HEADING}")

    @contextmanager
    def disturbed(what: str) -> Iterator[None]:
        with load.during(what) as done:
            yield
        series.append(done)
        print(done.row(), flush=True)

    with LoadClient(deployed.chat.url, deployed.chat.model, workers=WORKERS, tokens=TOKENS) as load:
        with disturbed("rollout of a changed engine template"):
            roll_out(kube)
        for component, how in LOSSES:
            with disturbed(f"{how.__name__} a pod of the {component}"):
                lose(kube, component, how)
        for state in ("Paused", "Suspended"):
            with disturbed(f"{state} and Running again"):
                to_and_fro(kube, state)
    faults = {disturbance.what: disturbance.faults for disturbance in series if disturbance.faults}
    assert faults == {}
    assert all(disturbance.answers for disturbance in series)
