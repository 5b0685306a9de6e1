"""Deployments: their rollouts count in Progressing and Degraded, and their remedies name their component."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.decision.diagnosis import termination
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.decision.world import ChildRef

STUCK = {
    "type": "Progressing",
    "status": "False",
    "reason": "ProgressDeadlineExceeded",
    "message": 'ReplicaSet "x" has timed out progressing.',
}
DENIED = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: pods"}
NAMES = ["demo-coordinator", "demo-standby", "demo-server"]


def _rolling(cluster: Cluster, name: str, *conditions: dict[str, Any]) -> None:
    """Let one Deployment of a serving resource have pods of two templates."""
    cluster.objects[ChildRef("Deployment", name, "apps/v1")]["status"] = {
        "replicas": 2,
        "updatedReplicas": 1,
        "readyReplicas": 1,
        "conditions": list(conditions),
    }
    cluster.step()


def _statuses(cluster: Cluster) -> dict[str, str]:
    return {kind: cluster.condition(kind)["status"] for kind in ("Ready", "Progressing", "Degraded")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", ["Running", "Paused"])
def test_a_rollout_of_a_deployment_is_progress(name: str, state: str) -> None:
    cluster = Cluster({**copy.deepcopy(MINIMAL), "coordinator": {"replicas": 2}}).settled()
    cluster.change(desiredState=state)
    assert _statuses(cluster) == {"Ready": "True", "Progressing": "False", "Degraded": "False"}
    _rolling(cluster, name)
    assert _statuses(cluster) == {"Ready": "True", "Progressing": "True", "Degraded": "False"}
    progressing = cluster.condition("Progressing")
    assert progressing["reason"] == "RollingOut"
    assert name in progressing["message"]
    assert name in cluster.status["plan"]["waitingOn"]
    cluster.settle()
    assert cluster.condition("Progressing")["message"] == "all changes are complete"
    assert "plan" not in cluster.status


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("condition", "reason", "words"),
    [(STUCK, "RolloutStuck", "has timed out progressing"), (DENIED, "QuotaExceeded", "exceeded quota")],
    ids=["stuck", "denied"],
)
def test_a_stuck_rollout_is_degraded_while_earlier_pods_serve(
    name: str, condition: dict[str, Any], reason: str, words: str
) -> None:
    cluster = Cluster({**copy.deepcopy(MINIMAL), "coordinator": {"replicas": 2}}).settled()
    _rolling(cluster, name, condition)
    assert _statuses(cluster) == {"Ready": "True", "Progressing": "True", "Degraded": "True"}
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == reason
    assert words in degraded["message"]
    cluster.settle()
    assert _statuses(cluster) == {"Ready": "True", "Progressing": "False", "Degraded": "False"}


@pytest.mark.parametrize(
    ("component", "container", "field", "cache"),
    [
        ("engine", "engine", "spec.engine.podTemplate", True),
        ("engine", "fetch", "spec.engine.podTemplate", False),
        ("check", "engine", "spec.engine.podTemplate", False),
        ("server", "server", "spec.server.podTemplate", False),
        ("coordinator", "coordinator", "spec.coordinator.podTemplate", False),
        ("standby", "coordinator", "spec.coordinator.podTemplate", False),
    ],
)
def test_the_remedy_of_a_memory_limit_is_that_of_the_component(
    component: str, container: str, field: str, cache: bool
) -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:00Z"}}
    kind = "initContainerStatuses" if container == "fetch" else "containerStatuses"
    status = {"phase": "Running", kind: [{"name": container, "restartCount": 1, "lastState": ended}]}
    labels = {"app.kubernetes.io/component": component}
    reason, message = termination(reduce_pod({"metadata": {"name": "p", "labels": labels}, "status": status}))
    assert reason.value == "OutOfMemory"
    assert f"container {container} in {field}" in message
    assert ("kvCacheMemory" in message) is cache
