"""A lost coordinator is replaced once, and only if its node, not its process, may be the cause."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from megatron_operator.plan.decide import decide
from megatron_operator.plan.lost_coordinator import REPLACE_SECONDS
from megatron_operator.plan.world import CoordinatorSnapshot, Decision, DeletePods, EmitEvent, PodView, World

AGE = timedelta(minutes=5)


@pytest.fixture
def serving(make_cluster: Any) -> World:
    """A resource that serves, whose pods are five minutes old."""
    cluster = make_cluster(replicas=2)
    cluster.settle()
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
