"""The pod of an engine is deleted by force only while its node is lost, and only after the stated time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from in_memory_cluster import GRACE_SECONDS, Cluster

from megatron_operator.decision.actions import Decision, DeletePods, EmitEvent
from megatron_operator.decision.decide import decide
from megatron_operator.decision.losses import NODE_SECONDS
from megatron_operator.decision.reduce import lost_since, reduce_pod
from megatron_operator.decision.world import World

LIMIT = 60
ENGINE, NODE = "demo-engine-0", "node-of-demo-engine-0"


@pytest.fixture
def cluster(make_cluster: Any) -> Cluster:
    """A resource whose first engine was on a node that has just been lost; its pod is terminating."""
    made: Cluster = make_cluster(replicas=2)
    made.settle()
    made.lose_node(ENGINE)
    return made


def later(world: World, seconds: float) -> World:
    return replace(world, now=world.now + timedelta(seconds=seconds))


def forced(decision: Decision) -> list[str]:
    deletions = [action for action in decision.actions if isinstance(action, DeletePods)]
    return [name for deletion in deletions if deletion.force for name, _ in deletion.pods]


def test_the_pod_is_deleted_by_force_and_created_again(cluster: Cluster) -> None:
    uid = cluster.pods[f"{ENGINE}-0"]["metadata"]["uid"]
    cluster.now += timedelta(seconds=GRACE_SECONDS + LIMIT)
    decision = cluster.step()
    assert forced(decision) == [f"{ENGINE}-0"]
    (event,) = (action for action in decision.actions if isinstance(action, EmitEvent))
    assert (event.reason, NODE in event.message) == ("PodForceDeleted", True)
    cluster.settle()
    assert cluster.pods[f"{ENGINE}-0"]["metadata"]["uid"] != uid
    assert cluster.status["ready"] == "2/2"


def test_it_waits_for_the_grace_period_and_the_stated_time(cluster: Cluster) -> None:
    world = later(cluster.world(), GRACE_SECONDS + LIMIT - 2)
    decision = decide(world)
    assert forced(decision) == []
    assert decision.requeue_after == pytest.approx(2)
    assert forced(decide(later(world, 2))) == [f"{ENGINE}-0"]


def test_the_time_of_the_spec_applies(cluster: Cluster) -> None:
    cluster.patch(lifecycle={"lostNodeSeconds": 0})
    assert forced(decide(later(cluster.world(), GRACE_SECONDS - 1))) == []
    assert forced(decide(later(cluster.world(), GRACE_SECONDS))) == [f"{ENGINE}-0"]


def test_a_pod_on_a_ready_node_is_never_deleted_by_force(cluster: Cluster) -> None:
    """The node is read again meanwhile."""
    cluster.lose_node(ENGINE, ready="True")
    decision = decide(later(cluster.world(), 86400))
    assert forced(decision) == []
    assert decision.requeue_after is not None
    assert decision.requeue_after <= NODE_SECONDS


def test_the_node_must_be_lost_for_the_stated_time(cluster: Cluster) -> None:
    """A node that was ready until now may come back at once."""
    world = later(cluster.world(), 600)
    assert forced(decide(replace(world, lost_nodes={NODE: world.now - timedelta(seconds=LIMIT - 1)}))) == []
    assert forced(decide(replace(world, lost_nodes={NODE: world.now - timedelta(seconds=LIMIT)}))) == [f"{ENGINE}-0"]


def test_a_node_that_does_not_exist_is_lost(cluster: Cluster) -> None:
    world = replace(cluster.world(), lost_nodes={NODE: None})
    assert forced(decide(later(world, GRACE_SECONDS + LIMIT - 1))) == []
    assert forced(decide(later(world, GRACE_SECONDS + LIMIT))) == [f"{ENGINE}-0"]


def test_pods_of_deployments_and_pods_that_are_not_deleted_are_left(cluster: Cluster) -> None:
    world = later(cluster.world(), 600)
    ended = next(pod.ends_at for pod in world.pods if pod.ends_at is not None)
    pods = [replace(pod, node=NODE, ends_at=None if pod.component == "engine" else ended) for pod in world.pods]
    assert forced(decide(replace(world, pods=tuple(pods)))) == []


def test_a_pod_that_a_finalizer_holds_is_deleted_by_force_once(cluster: Cluster) -> None:
    cluster.pods[f"{ENGINE}-0"]["metadata"]["deletionGracePeriodSeconds"] = 0
    assert forced(decide(later(cluster.world(), 600))) == []


def test_a_stop_does_not_wait_for_a_lost_node(cluster: Cluster) -> None:
    cluster.patch(desiredState="Stopped")
    for _ in range(GRACE_SECONDS + LIMIT + 10):
        cluster.step()
        cluster.tick()
    assert cluster.state == "Stopped"


@pytest.mark.parametrize(
    ("conditions", "lost"),
    [
        ([], True),
        ([{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:00:00Z"}], True),
        ([{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}], True),
        ([{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}], False),
    ],
    ids=["no condition", "unreachable", "not ready", "ready"],
)
def test_a_node_is_lost_by_its_condition(conditions: list[dict[str, str]], lost: bool) -> None:
    node = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "status": {"conditions": conditions}}
    assert (lost_since(node) is not None) is lost


def test_the_end_of_the_grace_period_is_the_deletion_timestamp() -> None:
    metadata = {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
    pod = reduce_pod({"metadata": metadata, "spec": {"nodeName": "n"}})
    assert (pod.node, str(pod.ends_at)) == ("n", "2026-01-01 00:00:00+00:00")
