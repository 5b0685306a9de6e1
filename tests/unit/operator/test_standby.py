"""A coordinator with a standby: both are created together, replaced one after the other, and the standby is removed."""

from __future__ import annotations

from typing import Any

import pytest
from in_memory_cluster import Cluster

from megatron_operator.decision.actions import ApplyChild, DeleteChild
from megatron_operator.decision.decide import decide
from megatron_operator.decision.reduce import reduce_child
from megatron_operator.decision.world import ChildRef

FIRST, SECOND = (ChildRef("Deployment", f"demo-{name}", "apps/v1") for name in ("coordinator", "standby"))
SERVICE, BUDGET = ChildRef("Service", "demo-standby"), ChildRef("PodDisruptionBudget", "demo-coordinator", "policy/v1")
PAIR = {"replicas": 2}
ROLLED_OUT = {"observedGeneration": 4, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}


def applied(cluster: Cluster) -> set[ChildRef]:
    """The coordinators that the next pass applies."""
    actions = decide(cluster.world()).actions
    return {action.ref for action in actions if isinstance(action, ApplyChild)} & {FIRST, SECOND}


def roll_out(cluster: Cluster, ref: ChildRef) -> None:
    cluster.objects[ref]["metadata"]["generation"] = 4
    cluster.objects[ref]["status"] = dict(ROLLED_OUT)


@pytest.fixture
def pair(make_cluster: Any) -> Cluster:
    """A resource with a standby, which serves."""
    cluster: Cluster = make_cluster(coordinator=PAIR)
    cluster.settle()
    roll_out(cluster, FIRST)
    roll_out(cluster, SECOND)
    return cluster


def test_both_are_created_together(make_cluster: Any) -> None:
    assert applied(make_cluster(coordinator=PAIR)) == {FIRST, SECOND}


def test_a_standby_is_ready_before_the_coordinator_restarts_with_its_address(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.patch(coordinator=PAIR)
    assert applied(cluster) == {SECOND}
    cluster.step()
    assert applied(cluster) == set(), "it starts"
    roll_out(cluster, SECOND)
    assert applied(cluster) == {FIRST}


def test_a_change_replaces_one_at_a_time(pair: Cluster) -> None:
    pair.patch(coordinator={"routing": {"policy": "RoundRobin"}})
    assert applied(pair) == {SECOND}
    pair.step()
    roll_out(pair, SECOND)
    pair.objects[SECOND]["status"]["observedGeneration"] -= 1
    assert applied(pair) == set(), "its pod is still that of the old template"
    roll_out(pair, SECOND)
    assert applied(pair) == {FIRST}


def test_one_coordinator_again_removes_the_standby(pair: Cluster) -> None:
    pair.patch(coordinator={"replicas": 1})
    decision = decide(pair.world())
    deleted = {action.ref for action in decision.actions if isinstance(action, DeleteChild)}
    assert deleted == {SECOND, SERVICE, BUDGET}
    pair.settle()
    assert deleted.isdisjoint(pair.objects)


@pytest.mark.parametrize(
    "change",
    [
        {"observedGeneration": 3},
        {"readyReplicas": None},
        {"updatedReplicas": 0},
        {"replicas": 2},
    ],
    ids=["not observed", "not ready", "not updated", "an old pod is left"],
)
def test_a_deployment_is_rolled_out_when_its_one_pod_is_new_and_ready(change: dict[str, Any]) -> None:
    metadata = {"name": "demo-standby", "generation": 4}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"replicas": 1}}
    assert reduce_child({**deployment, "status": ROLLED_OUT}, owner_uid="u").rolled_out
    assert not reduce_child({**deployment, "status": {**ROLLED_OUT, **change}}, owner_uid="u").rolled_out
    assert not reduce_child(deployment, owner_uid="u").rolled_out
