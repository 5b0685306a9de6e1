"""Crashes that a kubelet repairs while the resource stays Running: one Event each, with its cause and its counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.decision.restarts import REPORT_SECONDS, WINDOW_SECONDS


def running(replicas: int = 3) -> Cluster:
    cluster = Cluster({**copy.deepcopy(MINIMAL), "replicas": replicas}).settled()
    cluster.events.clear()
    return cluster


def crash(cluster: Cluster, name: str, *, code: int = 137, message: str = "", restarts: int = 1) -> None:
    """The container of a pod ended and runs again."""
    pod = cluster.pods[name]
    ended = {"exitCode": code, "reason": "Error", "message": message, "finishedAt": cluster.now.isoformat()}
    container = {"name": pod["spec"]["containers"][0]["name"], "restartCount": restarts, "ready": True}
    pod["status"]["containerStatuses"] = [{**container, "lastState": {"terminated": ended}}]


def pass_time(cluster: Cluster, seconds: float) -> None:
    cluster.step()
    cluster.now += timedelta(seconds=seconds)
    cluster.step()


def crashes(cluster: Cluster) -> list[tuple[str, str]]:
    return [(event.reason, event.message) for event in cluster.events if event.reason.endswith("Crashed")]


@pytest.mark.parametrize(
    ("component", "reason"),
    [("coordinator", "CoordinatorCrashed"), ("server", "ServerCrashed"), ("engine-0", "EngineCrashed")],
)
def test_a_crash_of_each_component_is_one_event_with_its_cause(component: str, reason: str) -> None:
    cluster = running()
    name = next(name for name in cluster.pods if f"demo-{component}" in name)
    crash(cluster, name, code=139)
    assert cluster.step().requeue_after == REPORT_SECONDS
    assert crashes(cluster) == [], "other containers may end from the same cause"
    pass_time(cluster, REPORT_SECONDS)
    ((found, message),) = crashes(cluster)
    assert found == reason
    assert "restarted once" in message
    assert f"pod {name}" in message
    assert "exit code 139, it crashed with a segmentation fault" in message
    assert cluster.state == "Running"

    written = cluster.status_writes
    for _ in range(5):
        pass_time(cluster, 60)
    assert (len(crashes(cluster)), cluster.status_writes) == (1, written)


def test_engines_that_end_together_are_one_event() -> None:
    cluster = running()
    crash(cluster, "demo-engine-1-0", message="CUDA error: an illegal memory access was encountered")
    cluster.step()
    for index in (0, 2):
        cluster.now += timedelta(seconds=1)
        crash(cluster, f"demo-engine-{index}-0", code=1, message="a peer was lost")
        cluster.step()
    pass_time(cluster, REPORT_SECONDS)
    ((_, message),) = crashes(cluster)
    assert "demo-engine-0, demo-engine-1, demo-engine-2" in message
    assert "3 times" in message
    assert "illegal memory access" in message, "the first to end names the cause"


def test_a_storm_of_restarts_is_one_event_in_a_window() -> None:
    cluster = running()
    for restarts in range(1, 6):
        crash(cluster, "demo-server-0", restarts=restarts)
        pass_time(cluster, 30)
    assert len(crashes(cluster)) == 1
    cluster.now += timedelta(seconds=WINDOW_SECONDS)
    crash(cluster, "demo-server-0", restarts=6)
    pass_time(cluster, REPORT_SECONDS)
    first, second = (message for _, message in crashes(cluster))
    assert "restarted once" in second, "restarts of the earlier incident do not count again"
    assert first != ""


def _roll_out(cluster: Cluster) -> None:
    cluster.patch(engine={"batching": {"maxRequests": 7}})


def _stop_and_start(cluster: Cluster) -> None:
    cluster.change(desiredState="Stopped")
    cluster.patch(desiredState="Running")


def _scale(cluster: Cluster) -> None:
    cluster.patch(replicas=1)


@pytest.mark.parametrize("change", [_roll_out, _stop_and_start, _scale])
def test_a_planned_change_is_no_incident_and_hides_none(change: Callable[[Cluster], None]) -> None:
    cluster = running()
    crash(cluster, "demo-engine-0-0", restarts=2)
    pass_time(cluster, REPORT_SECONDS)
    cluster.events.clear()
    change(cluster)
    cluster.settle()
    pass_time(cluster, 2 * WINDOW_SECONDS)
    assert crashes(cluster) == []
    restarts = 1 if cluster.pods["demo-engine-0-0"]["status"].get("containerStatuses") is None else 3
    crash(cluster, "demo-engine-0-0", restarts=restarts)
    pass_time(cluster, REPORT_SECONDS)
    ((_, message),) = crashes(cluster)
    assert "restarted once" in message


def test_an_operator_that_first_sees_a_resource_reports_no_old_restart() -> None:
    cluster = running()
    del cluster.status["restarts"]
    crash(cluster, "demo-server-0", restarts=4)
    pass_time(cluster, REPORT_SECONDS)
    assert crashes(cluster) == []


def test_the_message_of_a_foreign_image_is_not_quoted() -> None:
    cluster = running()
    cluster.pods["demo-server-0"]["spec"]["containers"][0]["image"] = "registry.example/other:1"
    crash(cluster, "demo-server-0", message="the secret")
    pass_time(cluster, REPORT_SECONDS)
    ((_, message),) = crashes(cluster)
    assert "the secret" not in message
