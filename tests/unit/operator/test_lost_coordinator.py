"""A lost coordinator is replaced once, and only if its node may be the cause, not its process. The status shows it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from in_memory_cluster import Cluster

from megatron_operator.decision.actions import Decision, DeletePods, EmitEvent
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot
from megatron_operator.decision.decide import decide
from megatron_operator.decision.losses import REPLACE_SECONDS
from megatron_operator.decision.world import LOST_SECONDS, UNKNOWN_SECONDS, PodView, World
from megatron_operator.resource.states import CoordinatorState

AGE = timedelta(minutes=5)


@pytest.fixture
def serving(make_cluster: Any) -> World:
    """A resource that serves, whose pods are five minutes old."""
    cluster = make_cluster(replicas=2).settled()
    world: World = cluster.world()
    return replace(world, pods=tuple(replace(pod, created_at=world.now - AGE) for pod in world.pods))


def lost(world: World, seconds: float | None, **pod: Any) -> World:
    """The world in which the coordinator does not answer; `pod`: changed fields of its pod."""
    pods = tuple(replace(each, **pod) if each.component == "coordinator" else each for each in world.pods)
    return replace(world, pods=pods, coordinator=CoordinatorSnapshot(error="no answer", lost_seconds=seconds))


def coordinator_pod(world: World) -> PodView:
    return next(pod for pod in world.pods if pod.component == "coordinator")


def deleted(decision: Decision) -> list[tuple[str, str]]:
    return [pod for action in decision.actions if isinstance(action, DeletePods) for pod in action.pods]


def test_the_pod_of_a_lost_coordinator_is_deleted_by_uid_with_an_event(serving: World) -> None:
    decision = decide(lost(serving, REPLACE_SECONDS))
    pod = coordinator_pod(serving)
    assert deleted(decision) == [(pod.name, pod.uid)]
    events = [action for action in decision.actions if isinstance(action, EmitEvent) and pod.name in action.message]
    assert [event.reason for event in events] == ["CoordinatorUnreachable"]


def test_the_next_pass_comes_when_the_pod_is_to_be_replaced(serving: World) -> None:
    decision = decide(lost(serving, REPLACE_SECONDS - 1))
    assert deleted(decision) == []
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 1


@pytest.mark.parametrize(
    "pod",
    [{"ready": False}, {"deleting": True}, {"created_at": None}],
    ids=["the kubelet restarts it", "deleted already", "age unknown"],
)
def test_the_pod_stays_if_another_pod_would_not_help(serving: World, pod: dict[str, Any]) -> None:
    assert deleted(decide(lost(serving, 60, **pod))) == []


def test_a_pod_that_never_answered_is_not_replaced(serving: World) -> None:
    assert deleted(decide(lost(serving, None))) == []
    younger = serving.now - timedelta(seconds=30)
    assert deleted(decide(lost(serving, 31, created_at=younger))) == []
    assert deleted(decide(lost(serving, 29, created_at=younger))) != []


def test_a_coordinator_that_answers_is_not_replaced(serving: World) -> None:
    assert deleted(decide(serving)) == []


def test_both_pods_of_a_pair_are_replaced(serving: World) -> None:
    pod = coordinator_pod(serving)
    standby = replace(pod, name="demo-standby-0", uid="s", component="standby")
    both = replace(serving, pods=(*serving.pods, standby))
    assert deleted(decide(lost(both, REPLACE_SECONDS))) == [(pod.name, pod.uid), ("demo-standby-0", "s")]


# --- The status -----------------------------------------------------------------------------------------------------


def step(cluster: Cluster, *, seconds: float, lost_seconds: float | None = None) -> Decision:
    """Let time pass, and run one pass whose link lost its connection `lost_seconds` ago; None: it is connected.

    The pods are five minutes old.
    """
    cluster.now += timedelta(seconds=seconds)
    world = cluster.world()
    pods = tuple(replace(pod, created_at=world.now - AGE) for pod in world.pods)
    decision = decide(replace(world, pods=pods, coordinator=replace(world.coordinator, lost_seconds=lost_seconds)))
    cluster.status = decision.status
    return decision


def engine_states(cluster: Cluster) -> list[str]:
    return [engine["state"] for engine in cluster.status["engines"]]


@pytest.fixture
def served(make_cluster: Any) -> Cluster:
    """A resource of two engines that serves."""
    cluster: Cluster = make_cluster(replicas=2)
    cluster.settle()
    return cluster


def test_without_a_coordinator_the_engines_count_as_before_for_some_seconds_only(served: Cluster) -> None:
    before = served.status["engines"]
    served.coordinator = None
    decision = step(served, seconds=UNKNOWN_SECONDS - 1, lost_seconds=0.5)
    assert (served.status["ready"], engine_states(served)) == ("2/2", ["RUNNING", "RUNNING"])
    assert served.condition("Degraded")["status"] == "False"
    assert decision.requeue_after == 1.0

    step(served, seconds=1.0, lost_seconds=1.5)
    assert (served.status["ready"], served.status["readyReplicas"]) == ("0/2", 0)
    assert served.status["engines"] == [{**engine, "state": "Unknown"} for engine in before]
    # The next leader has just begun to count.
    served.known_at = served.now
    step(served, seconds=0.1)
    assert engine_states(served) == ["Unknown", "Unknown"]


def test_an_engine_lost_with_its_coordinator_is_reported_until_it_registers(served: Cluster) -> None:
    coordinator, served.coordinator = served.coordinator, None
    assert coordinator is not None
    engines = dict(coordinator.engines)
    lost = step(served, seconds=UNKNOWN_SECONDS, lost_seconds=1.5)
    degraded = [action for action in lost.actions if isinstance(action, EmitEvent) and "unknown" in action.message]
    assert [(event.type, event.reason) for event in degraded] == [("Warning", "CoordinatorUnreachable")]
    # Its pod was deleted; the next coordinator starts and recovers.
    name = next(name for name in served.pods if "-coordinator-" in name)
    served.pods[name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for recovering in (False, True):
        if recovering:
            served.coordinator = replace(coordinator, state=CoordinatorState.RECOVERING, engines={})
        step(served, seconds=2.0)
        assert engine_states(served) == ["Unknown", "Unknown"]
        assert served.condition("Degraded")["reason"] == "CoordinatorUnreachable"

    served.coordinator = replace(coordinator, engines={name: engines[name] for name in ["demo-engine-0"]})
    step(served, seconds=1.5)
    assert (served.status["ready"], engine_states(served)) == ("1/2", ["RUNNING", "Lost"])
    assert served.condition("Degraded")["reason"] == "EngineLost"
    served.coordinator = replace(coordinator, engines=engines)
    step(served, seconds=60.0)
    assert (served.status["ready"], served.condition("Degraded")["status"]) == ("2/2", "False")


def test_a_planned_restart_of_the_coordinator_is_no_error_however_long_it_takes(served: Cluster) -> None:
    coordinator, served.coordinator = served.coordinator, None
    assert coordinator is not None
    name = next(name for name in served.pods if "-coordinator-" in name)
    served.pods[name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    step(served, seconds=3 * UNKNOWN_SECONDS, lost_seconds=3 * UNKNOWN_SECONDS)
    assert engine_states(served) == ["Unknown", "Unknown"]
    served.coordinator = replace(coordinator, engines={})
    step(served, seconds=1.5)
    assert engine_states(served) == ["Pending", "Pending"]
    assert served.condition("Degraded")["status"] == "False"
    step(served, seconds=LOST_SECONDS)
    assert served.condition("Degraded")["reason"] == "EngineLost"
