"""Waits that end in Degraded, a server that crashes repeatedly, and the warning of a single server."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.decision.actions import DeletePods, EmitEvent
from megatron_operator.decision.decide import decide
from megatron_operator.decision.status import WAIT_SECONDS
from megatron_operator.decision.world import OPTIONAL_SECONDS


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(entry for entry in status["conditions"] if entry["type"] == kind)


def test_a_wait_that_does_not_end_becomes_degraded() -> None:
    cluster = Cluster(copy.deepcopy(MINIMAL))
    cluster.step()
    world = cluster.world()
    plan = decide(world).status["plan"]
    waiting = (plan["step"], plan["waitingOn"])
    early = decide(replace(world, waiting=waiting, waiting_seconds=WAIT_SECONDS - 1)).status
    assert condition(early, "Degraded")["status"] == "False"
    late = decide(replace(world, waiting=waiting, waiting_seconds=WAIT_SECONDS))
    degraded = condition(late.status, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "DeadlineExceeded")
    assert plan["waitingOn"] in degraded["message"]
    assert any(isinstance(action, EmitEvent) and action.reason == "DeadlineExceeded" for action in late.actions)
    moved = decide(replace(world, waiting=(plan["step"], "another pod"), waiting_seconds=WAIT_SECONDS)).status
    assert condition(moved, "Degraded")["status"] == "False", "it makes progress"


def server_pod(cluster: Cluster, *, seconds: int, waiting: str = "CrashLoopBackOff") -> dict[str, Any]:
    """Return the server's pod, whose container has ended after this time."""
    pod = next(
        pod for pod in cluster.pods.values() if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "server"
    )
    ended = {
        "exitCode": 137,
        "reason": "OOMKilled",
        "startedAt": "2026-11-27T00:00:00Z",
        "finishedAt": f"2026-11-27T00:{seconds // 60:02}:{seconds % 60:02}Z",
    }
    container = {"name": "server", "restartCount": 3, "ready": False, "state": {"waiting": {"reason": waiting}}}
    pod["status"]["containerStatuses"] = [{**container, "lastState": {"terminated": ended}}]
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]
    return pod


@pytest.mark.parametrize(("seconds", "replaced"), [(120, True), (20, True), (5, False)])
def test_a_server_that_had_served_does_not_wait_for_the_kubelet(seconds: int, replaced: bool) -> None:
    cluster = Cluster(copy.deepcopy(MINIMAL)).settled()
    pod = server_pod(cluster, seconds=seconds)
    decision = decide(cluster.world())
    deletions = [action for action in decision.actions if isinstance(action, DeletePods)]
    assert [deletion.pods for deletion in deletions] == (
        [((pod["metadata"]["name"], pod["metadata"]["uid"]),)] if replaced else []
    )
    assert [action for action in decision.healing if isinstance(action, DeletePods)] == deletions
    told = [
        action.message for action in decision.actions if isinstance(action, EmitEvent) and "replacing" in action.message
    ]
    assert bool(told) is replaced


def test_a_server_whose_container_restarts_at_once_is_left_to_its_kubelet() -> None:
    cluster = Cluster(copy.deepcopy(MINIMAL)).settled()
    server_pod(cluster, seconds=120, waiting="ContainerCreating")
    assert not any(isinstance(action, DeletePods) for action in decide(cluster.world()).actions)


def test_a_single_server_is_a_warning() -> None:
    cluster = Cluster(copy.deepcopy(MINIMAL)).settled()
    assert condition(cluster.status, "SingleServer")["status"] == "True"
    cluster.patch(server={"replicas": 2})
    cluster.step()
    assert condition(cluster.status, "SingleServer")["status"] == "False"


def test_objects_that_are_not_watched_are_looked_at_within_15_seconds() -> None:
    assert OPTIONAL_SECONDS < 15
    cluster = Cluster(
        {**copy.deepcopy(MINIMAL), "server": {"httpRoute": {"parentRefs": [{"name": "gateway"}]}}}
    ).settled()
    due = decide(cluster.world()).requeue_after
    assert due is not None
    assert due <= OPTIONAL_SECONDS
