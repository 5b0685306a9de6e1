"""Surge engines and paused rollouts, each played to its end on the small cluster."""

from __future__ import annotations

from typing import Any

import pytest
from in_memory_cluster import Cluster
from soak import size

from megatron_operator.decision.world import ChildRef

CHANGE = {"batching": {"maxRequests": 7}}
SURGE = {"maxSurge": 1}


def play(cluster: Cluster, *, passes: int = 60) -> list[int]:
    """Play until nothing changes; return the number of engines that serve and get requests, after each pass."""
    served = []
    for _ in range(passes):
        cluster.step()
        cluster.tick()
        assert cluster.coordinator is not None
        engines = cluster.coordinator.engines.values()
        served.append(sum(engine.serving and not engine.draining for engine in engines))
        if "plan" not in cluster.status and cluster.status.get("observedGeneration") == cluster.generation:
            break
    cluster.settle()
    return served


def names(cluster: Cluster) -> list[str]:
    return sorted(entry["name"] for entry in cluster.status["engines"])


def test_one_replica_with_one_surge_engine_has_no_outage(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, rollout=SURGE).settled()
    before = cluster.status["revision"]
    cluster.patch(engine=CHANGE)
    served = play(cluster)
    assert min(served) >= 1
    assert max(served) == 2
    assert cluster.status["revision"] != before
    assert cluster.signals() == ["DRAIN demo-engine-0", "DRAIN demo-engine-1"]
    assert cluster.asked == ["demo-engine-1", "demo-engine-0"], "both pass a canary"
    assert names(cluster) == ["demo-engine-0"]
    assert not [ref for ref in cluster.objects if ref.name == "demo-engine-1"], "no child of the surge engine is left"
    assert [entry["revision"] for entry in cluster.status["engines"]] == [cluster.status["revision"]]


def test_a_surge_engine_counts_in_the_status(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, rollout=SURGE).settled()
    cluster.patch(engine=CHANGE)
    ready = set()
    for _ in range(40):
        cluster.step()
        cluster.tick()
        ready.add(cluster.status["ready"])
        assert cluster.condition("Ready")["status"] == "True"
    assert ready == {"1/1"}


def test_a_bad_revision_costs_no_engine_with_surge(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, rollout=SURGE).settled()
    cluster.wrong_engines.add("demo-engine-1")
    cluster.patch(engine=CHANGE)
    served = play(cluster, passes=40)
    assert min(served) >= 1
    assert cluster.status["plan"]["step"].startswith("rolling out")
    assert cluster.condition("Degraded")["reason"] == "CanaryFailed"
    assert "demo-engine-0-0" not in cluster.deleted_pods
    cluster.patch(engine={"batching": {"maxRequests": None}})
    cluster.spec["engine"]["batching"].pop("maxRequests")
    cluster.settle()
    assert names(cluster) == ["demo-engine-0"]
    assert "demo-engine-0-0" not in cluster.deleted_pods


def test_a_surge_engine_that_cannot_start_is_named_and_blocks(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, rollout=SURGE).settled()
    cluster.broken_engines.add("demo-engine-1")
    cluster.patch(engine=CHANGE)
    served = play(cluster, passes=40)
    assert min(served) >= 1
    assert "demo-engine-1" in cluster.condition("Degraded")["message"]
    assert "demo-engine-0-0" not in cluster.deleted_pods


@pytest.mark.slow
def test_an_edit_during_a_surge_has_no_outage(make_cluster: Any) -> None:
    for moment in range(2, 26, size(6, soak=2)):
        cluster = make_cluster(replicas=1, rollout=SURGE).settled()
        cluster.patch(engine=CHANGE)
        served = []
        for number in range(120):
            if number == moment:
                cluster.patch(engine={"batching": {"maxRequests": 8}})
            cluster.step()
            cluster.tick()
            engines = cluster.coordinator.engines.values()
            served.append(sum(engine.serving and not engine.draining for engine in engines))
        assert min(served) >= 1, (moment, served, cluster.log)
        cluster.settle()
        assert names(cluster) == ["demo-engine-0"], moment


def test_scaling_up_takes_a_surge_engine(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, rollout=SURGE).settled()
    cluster.patch(engine=CHANGE)
    while "demo-engine-1" not in cluster.coordinator.engines:
        cluster.step()
        cluster.tick()
    cluster.patch(replicas=2)
    play(cluster)
    assert cluster.status["ready"] == "2/2"
    assert names(cluster) == ["demo-engine-0", "demo-engine-1"]
    assert "demo-engine-1-0" not in cluster.deleted_pods


@pytest.mark.parametrize("state", ["Paused", "Suspended", "Stopped"])
def test_verbs_work_during_a_surge(make_cluster: Any, state: str) -> None:
    for moment in range(3, 24, 4):
        cluster = make_cluster(replicas=1, rollout=SURGE).settled()
        cluster.patch(engine=CHANGE)
        cluster.play(moment)
        cluster.change(desiredState=state)
        assert cluster.state == state, (moment, cluster.log[-4:])
        cluster.change(desiredState="Running")
        assert cluster.status["ready"] == "1/1"
        assert names(cluster) == ["demo-engine-0"]


def test_a_change_of_the_model_adds_no_engine(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, rollout=SURGE).settled()
    cluster.change(model={"source": {"builtin": "smollm2-135m"}, "maxSequenceLength": 512})
    assert cluster.status["ready"] == "1/1"
    assert not any(event.reason == "EngineAdded" for event in cluster.events)


def test_a_paused_rollout_stops_where_it_is(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=3).settled()
    cluster.patch(engine=CHANGE)
    while cluster.status["updatedReplicas"] != 1:
        cluster.step()
        cluster.tick()
    cluster.change(rollout={"paused": True})
    replaced = [entry["name"] for entry in cluster.status["engines"] if entry["revision"] == cluster.status["revision"]]
    assert replaced == ["demo-engine-2"]
    assert cluster.status["ready"] == "3/3"
    found = cluster.condition("Progressing")
    assert (found["status"], found["reason"]) == ("Unknown", "RolloutPaused")
    assert "2 of 3 engines" in found["message"]
    assert not any(engine.draining for engine in cluster.coordinator.engines.values())
    cluster.change(rollout={"paused": False})
    assert cluster.status["updatedReplicas"] == 3


def test_while_paused_engines_keep_their_revision_and_scaling_and_verbs_go_on(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, rollout={"paused": True}).settled()
    old = cluster.status["revision"]
    cluster.change(engine=CHANGE)
    for lost in ("demo-engine-0-0", "demo-engine-1-0"):
        cluster._remove_pod(lost)
        cluster.settle()
    cluster.change(replicas=3)
    for state in ("Paused", "Suspended", "Stopped", "Running"):
        cluster.change(desiredState=state)
        assert cluster.state == state
    assert {entry["revision"] for entry in cluster.status["engines"]} == {old}
    assert cluster.status["ready"] == "3/3"
    assert cluster.deleted_pods == []
    cluster.change(replicas=1)
    assert names(cluster) == ["demo-engine-0"]


def test_while_paused_a_change_of_the_model_waits(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, rollout={"paused": True}).settled()
    cluster.change(model={"source": {"builtin": "smollm2-135m"}, "maxSequenceLength": 512})
    assert cluster.signals() == []
    assert cluster.deleted_pods == []
    cluster.change(rollout={"paused": False})
    assert cluster.deleted_pods == ["demo-engine-0-0"]


@pytest.mark.parametrize("change", [{"engine": CHANGE}, {"model": {"source": {"builtin": "gemma3-270m"}}}])
def test_while_paused_engines_added_after_zero_replicas_keep_the_earlier_revision(
    make_cluster: Any, change: dict[str, Any]
) -> None:
    cluster = make_cluster(replicas=2, rollout={"paused": True}).settled()
    server = ChildRef("Deployment", "demo-server", "apps/v1")
    old, template = cluster.status["revision"], cluster.objects[server]["spec"]["template"]
    cluster.change(**change)
    for replicas in (0, 2, 0, 1):
        cluster.change(replicas=replicas)
        assert cluster.condition("Progressing")["reason"] == "RolloutPaused"
        assert {entry["revision"] for entry in cluster.status["engines"]} <= {old}
        assert cluster.objects[server]["spec"]["template"] == template
    assert (cluster.state, cluster.status["ready"], cluster.checked) == ("Running", "1/1", [])
    cluster.change(rollout={"paused": False})
    assert {entry["revision"] for entry in cluster.status["engines"]} == {cluster.status["revision"]} != {old}
    assert len(cluster.checked) == 1


def test_a_paused_rollout_that_continues_without_engines_gives_new_ones_the_desired_revision(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, rollout={"paused": True}).settled()
    cluster.change(engine=CHANGE)
    cluster.change(replicas=0)
    cluster.patch(rollout={"paused": False})
    cluster.change(replicas=1)
    assert (cluster.status["ready"], cluster.status["updatedReplicas"]) == ("1/1", 1)
