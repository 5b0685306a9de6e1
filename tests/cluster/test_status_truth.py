"""The status says what the coordinator knows: a frozen engine at once, a planned departure never as a loss."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from typing import Any

import pytest
from eventually import eventually

from megatron_operator.cluster.kinds import EVENT, POD, SECRET

pytestmark = pytest.mark.cluster


def engines(status: dict[str, Any]) -> list[str]:
    return [entry["state"] for entry in status.get("engines") or ()]


def degraded(status: dict[str, Any]) -> dict[str, Any]:
    return next(entry for entry in status["conditions"] if entry["type"] == "Degraded")


async def test_a_frozen_engine_is_named_and_a_deleted_pod_is_no_loss(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    await resource.create(replicas=2)
    await resource.settled("Running")

    node.signal_engine("demo-engine-1", signal.SIGSTOP)
    status = await resource.until(lambda status: engines(status) == ["RUNNING", "Unresponsive"])
    node.signal_engine("demo-engine-1", signal.SIGCONT)
    assert (degraded(status)["status"], degraded(status)["reason"]) == ("True", "EngineUnresponsive")
    assert (status["state"], status["ready"]) == ("Running", "1/2")
    await resource.until(lambda status: engines(status) == ["RUNNING", "RUNNING"] and status["ready"] == "2/2")

    for name in ("demo-engine-0-0", "demo-engine-1-0"):
        pod = await api.get(POD, namespace, name)
        await api.delete(POD, namespace, name, uid=pod["metadata"]["uid"])
        engine = name.removesuffix("-0")
        await eventually(
            lambda engine=engine, pod=pod: node.runs(engine, unlike=pod), what=f"another pod of {engine} is ready"
        )
        await resource.until(lambda status: status["ready"] == "2/2" and "plan" not in status)
    events = await resource.reported("EngineUnresponsive")
    warnings = {event["reason"] for event in events if event["type"] == "Warning"}
    assert warnings == {"EngineUnresponsive"}


async def test_a_missing_secret_is_named_from_the_kubelets_event(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    node.start_engines = False
    # The kubelet, not the operator, misses it.
    secret = {"metadata": {"name": "hub", "namespace": namespace}, "data": {"token": "eA=="}}
    await api.create(SECRET, secret, manager="test")
    await resource.create(
        model={"source": {"huggingFace": {"repo": "org/model", "tokenSecretRef": {"name": "hub", "key": "token"}}}}
    )
    await resource.until(lambda status: status.get("plan", {}).get("waitingOn", "").startswith("demo-engine-0"))
    pod = await api.get(POD, namespace, "demo-engine-0-0")
    said = 'MountVolume.SetUp failed for volume "token" : secret "hub" not found'
    event = {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": "demo-engine-0-0.mount", "namespace": namespace},
        "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": "kubelet",
        "reportingInstance": "node",
        "action": "Mount",
        "reason": "FailedMount",
        "type": "Warning",
        "note": said,
        "regarding": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": pod["metadata"]["name"],
            "namespace": namespace,
            "uid": pod["metadata"]["uid"],
        },
    }
    await api.create(EVENT, event, manager="test")
    status = await resource.until(lambda status: degraded(status)["reason"] == "ContainerConfigError")
    assert degraded(status)["status"] == "True"
    assert f"pod demo-engine-0-0: FailedMount: {said}" in degraded(status)["message"]
    assert "or correct spec.model.source.huggingFace.tokenSecretRef" in degraded(status)["message"]
