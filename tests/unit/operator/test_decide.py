"""Decisions as a user sees them: verbs, scaling, rollouts and troubles, each played to its end on the small cluster."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from in_memory_cluster import START
from soak import SOAK, size

from megatron_operator.decision.actions import ApplyChild, DeletePods, EmitEvent, Signal
from megatron_operator.decision.coordinator_snapshot import FailedRequestReport, FormatsReport
from megatron_operator.decision.decide import decide, reject_spec
from megatron_operator.decision.desired import UNREACHABLE_GRACE_SECONDS
from megatron_operator.decision.engines import MAX_STARTING
from megatron_operator.decision.status import condition
from megatron_operator.decision.world import EVENT_SECONDS, LOST_SECONDS, UNKNOWN_SECONDS, ApplyRejection, ChildRef
from megatron_operator.resource.conditions import ConditionType, Reason
from megatron_operator.resource.states import CoordinatorState
from megatron_operator.resource.status import MegatronInferenceStatus

STATES = ("Running", "Paused", "Suspended", "Stopped")
PATHS: dict[tuple[str, str], list[str]] = {
    ("Running", "Paused"): ["PAUSE"],
    ("Running", "Suspended"): ["PAUSE", "SUSPEND"],
    ("Running", "Stopped"): ["DRAIN", "PAUSE", "STOP"],
    ("Paused", "Running"): ["UNPAUSE"],
    ("Paused", "Suspended"): ["SUSPEND"],
    ("Paused", "Stopped"): ["STOP"],
    ("Suspended", "Running"): ["RESUME", "UNPAUSE"],
    ("Suspended", "Paused"): ["RESUME"],
    ("Suspended", "Stopped"): ["STOP"],
    ("Stopped", "Running"): [],
    ("Stopped", "Paused"): ["PAUSE"],
    ("Stopped", "Suspended"): ["PAUSE", "SUSPEND"],
}


CHANGES = [(first, *pair) for first in STATES for pair in itertools.permutations(STATES, 2)]
"""Desired states one after the other. `make test` has each pair of the last two once."""
if not SOAK:
    CHANGES = [change for change in CHANGES if sum(map(STATES.index, change)) % len(STATES) == 0]


def test_a_new_resource_gets_all_children_in_its_first_pass(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2)
    cluster.step()
    assert {(ref.kind, ref.name) for ref in cluster.objects} >= {
        ("Secret", "demo-keys"),
        ("Deployment", "demo-coordinator"),
        ("Deployment", "demo-server"),
        ("StatefulSet", "demo-engine-0"),
        ("StatefulSet", "demo-engine-1"),
        ("Service", "demo"),
    }
    assert cluster.status["plan"]["waitingOn"] == "the coordinator's pod to become ready"


def test_a_new_resource_becomes_ready(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    assert cluster.state == "Running"
    assert cluster.status["ready"] == "2/2"
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Ready")["reason"] == "Serving"
    assert cluster.status["endpoint"] == "http://demo.default.svc/v1"
    assert cluster.status["model"] == "demo"
    assert (cluster.status["replicas"], cluster.status["readyReplicas"], cluster.status["updatedReplicas"]) == (2, 2, 2)
    assert cluster.status["observedGeneration"] == cluster.generation
    assert "plan" not in cluster.status
    assert cluster.signals() == []


@pytest.mark.parametrize(("start", "goal"), sorted(PATHS))
def test_every_verb_takes_its_path(make_cluster: Any, start: str, goal: str) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.change(desiredState=start)
    cluster.coordinator.begun.clear()
    cluster.change(desiredState=goal)
    assert cluster.state == goal
    assert cluster.signals() == PATHS[start, goal]
    assert cluster.condition("LifecycleSettled")["status"] == "True"
    expected = ("True", "Serving" if goal == "Running" else goal)
    assert (cluster.condition("Ready")["status"], cluster.condition("Ready")["reason"]) == expected
    assert bool(cluster.engine_pods()) == (goal != "Stopped")
    assert cluster.status["history"][-1]["to"] == goal


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "third"), CHANGES)
def test_a_desired_state_changed_at_any_moment_is_reached(
    make_cluster: Any, first: str, second: str, third: str
) -> None:
    changing = make_cluster(replicas=1, desiredState=first).settled()
    changing.patch(desiredState=second)
    for moment in range(8):
        cluster = copy.deepcopy(changing)
        cluster.change(desiredState=third)
        assert cluster.state == third, (moment, cluster.log[-5:])
        changing.step()
        changing.tick()


@pytest.mark.parametrize("goal", ["Paused", "Suspended", "Stopped"])
def test_paused_is_claimed_only_when_every_engine_has_confirmed(make_cluster: Any, goal: str) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(desiredState=goal)
    for _ in range(8):
        cluster.step()
        cluster.tick(finish=False)
        assert cluster.state != goal
        assert cluster.condition("LifecycleSettled")["status"] == "False"
        assert cluster.status["plan"]["waitingOn"]


def test_an_intent_is_persisted_before_its_signal_and_the_id_is_kept(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.patch(desiredState="Paused")
    first = cluster.step()
    assert not any(isinstance(action, Signal) for action in first.actions)
    assert first.requeue_after == 0.0
    lifecycle = cluster.status["lifecycle"]
    assert (lifecycle["phase"], lifecycle["signal"]) == ("Pending", "PAUSE")
    second = cluster.step()
    (signal,) = [action for action in second.actions if isinstance(action, Signal)]
    assert signal.operation_id == lifecycle["operationId"]
    assert cluster.status["lifecycle"]["phase"] == "Submitted"


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["Stopped", *size([], soak=["Paused", "Suspended"])])
def test_an_operator_that_dies_anywhere_completes_the_verb_once(make_cluster: Any, goal: str) -> None:
    running = make_cluster(replicas=2).settled()
    running.patch(desiredState=goal)
    reference = copy.deepcopy(running)
    reference.settle()
    for crash_at, survives in itertools.product(range(10), range(3)):
        cluster = copy.deepcopy(running)
        for number in range(10):
            cluster.step(crash_after=survives if number == crash_at else None)
            cluster.tick()
        cluster.settle()
        assert cluster.state == goal
        assert cluster.signals() == reference.signals()


def test_a_lost_signal_is_sent_again_under_the_same_id(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.patch(desiredState="Paused")
    cluster.step()
    cluster.step(crash_after=0)
    persisted = cluster.status["lifecycle"]["operationId"]
    cluster.settle()
    assert [signal.operation_id for signal in cluster.coordinator.begun] == [persisted]


def test_a_coordinator_that_cannot_be_asked_makes_the_phase_unknown(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.patch(desiredState="Paused")
    cluster.step()
    cluster.step()
    coordinator, cluster.coordinator = cluster.coordinator, None
    cluster.step()
    assert cluster.status["lifecycle"]["phase"] == "Unknown"
    assert cluster.state == "Unknown"
    cluster.coordinator = coordinator
    cluster.settle()
    assert cluster.state == "Paused"
    assert len(cluster.signals()) == 1


def test_a_failed_signal_is_retried_after_a_pause_under_a_new_id(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.patch(desiredState="Paused")
    cluster.step()
    cluster.step()
    cluster.coordinator.fail("rank 0 of demo-engine-0 said no")
    decision = cluster.step()
    assert cluster.status["lifecycle"]["phase"] == "Failed"
    assert decision.reason == "SignalFailed"
    assert decision.requeue_after == pytest.approx(5.0)
    assert "rank 0 of demo-engine-0 said no" in cluster.condition("Degraded")["message"]
    rejected = ApplyRejection("of-an-older-manifest", 422, "spec is wrong", cluster.now)
    cluster.rejections[ChildRef("Service", "demo")] = rejected
    assert cluster.step().requeue_after == pytest.approx(5.0), "the first of what is due"
    cluster.rejections.clear()
    cluster.settle()
    assert cluster.state == "Paused"
    assert len({signal.operation_id for signal in cluster.coordinator.begun}) == 2


@pytest.mark.parametrize(
    ("state", "kept"),
    [(CoordinatorState.RUNNING, True), (CoordinatorState.RECOVERING, True), (CoordinatorState.SUSPENDED, False)],
)
def test_an_intent_that_was_not_sent_is_dropped_once_its_signal_is_not_legal(
    make_cluster: Any, state: CoordinatorState, kept: bool
) -> None:
    cluster = make_cluster().settled()
    cluster.patch(desiredState="Stopped")
    cluster.step()
    intent = cluster.status["lifecycle"]["operationId"]
    assert cluster.status["lifecycle"]["phase"] == "Pending"
    cluster.coordinator.state = state
    cluster.step()
    assert (cluster.status["lifecycle"].get("operationId") == intent) is kept


def test_a_drain_past_its_deadline_does_not_hold_up_a_stop(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.patch(desiredState="Stopped")
    cluster.step()
    cluster.step()
    assert cluster.coordinator.begun[-1].deadline_seconds == 60
    cluster.coordinator.fail("3 requests in flight at the deadline", code=504)
    cluster.settle()
    assert cluster.signals() == ["DRAIN", "PAUSE", "STOP"]
    assert cluster.state == "Stopped"


def test_a_running_resource_without_engines_is_stopped(make_cluster: Any) -> None:
    """There is no engine to drain and none to wait for."""
    cluster = make_cluster(replicas=2)
    cluster.broken_engines |= {"demo-engine-0", "demo-engine-1"}
    cluster.play(6)
    assert cluster.coordinator.engines == {}
    assert len(cluster.engine_pods()) == 2
    cluster.change(desiredState="Stopped")
    assert cluster.signals() == ["PAUSE", "STOP"]
    assert cluster.engine_pods() == []
    assert cluster.state == "Stopped"


def test_stop_completes_without_a_coordinator_after_its_deadline(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.patch(desiredState="Stopped")
    cluster.coordinator = None
    requested = cluster.now
    while cluster.engine_pods():
        decision = cluster.step()
        cluster._reconcile_pods()
        cluster.now += timedelta(seconds=decision.requeue_after or 0)
    assert (cluster.now - requested).total_seconds() >= UNREACHABLE_GRACE_SECONDS
    cluster.step()
    assert cluster.state == "Stopped"


def test_a_stop_reverted_before_its_pods_ended_starts_the_next_stop_from_the_beginning(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    for goal in ("Stopped", "Running", "Stopped"):
        cluster.change(desiredState=goal)
    assert cluster.signals() == ["DRAIN", "PAUSE", "STOP"] * 2


def test_release_pods_keeps_pods_until_suspend_is_confirmed(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, lifecycle={"suspend": {"level": "ReleasePods"}}).settled()
    cluster.patch(desiredState="Suspended")
    for _ in range(20):
        assert len(cluster.engine_pods()) == 2
        cluster.step()
        if cluster.signals()[-1:] == ["SUSPEND"]:
            break
        cluster.tick()
    assert len(cluster.engine_pods()) == 2
    cluster.settle()
    assert cluster.engine_pods() == []
    assert cluster.state == "Suspended"
    assert cluster.status["replicas"] == 0
    assert [engine["state"] for engine in cluster.status["engines"]] == ["Released", "Released"]
    assert {ref.name for ref in cluster.objects if ref.kind == "Deployment"} == {"demo-coordinator", "demo-server"}
    cluster.patch(desiredState="Running")
    cluster.step()
    assert [engine["state"] for engine in cluster.status["engines"]] == ["Pending", "Pending"]
    cluster.settle()
    assert cluster.state == "Running"
    assert len(cluster.engine_pods()) == 2


def test_created_suspended_with_release_pods_never_starts_an_engine(make_cluster: Any) -> None:
    cluster = make_cluster(desiredState="Suspended", lifecycle={"suspend": {"level": "ReleasePods"}})
    for _ in range(10):
        cluster.step()
        cluster.tick()
        assert cluster.engine_pods() == []
    assert cluster.state == "Suspended"


def test_offload_keeps_pods_until_it_escalates(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle={"suspend": {"escalateAfterSeconds": 100}}).settled()
    cluster.patch(desiredState="Suspended")
    decision = cluster.settle()
    assert cluster.engine_pods() != []
    assert 0 < decision.requeue_after <= 100
    cluster.now += timedelta(seconds=decision.requeue_after - 0.5)
    decision = cluster.step()
    assert decision.requeue_after == pytest.approx(0.5)
    assert cluster.engine_pods() != []
    cluster.now += timedelta(seconds=decision.requeue_after)
    cluster.settle()
    assert cluster.engine_pods() == []
    assert cluster.state == "Suspended"


def test_no_replicas_behaves_as_release_pods(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1).settled()
    cluster.change(replicas=0)
    assert cluster.signals() == ["PAUSE", "SUSPEND"]
    assert cluster.engine_pods() == []
    assert (cluster.state, cluster.status["ready"]) == ("Suspended", "0/0")
    cluster.change(replicas=2)
    assert (cluster.state, cluster.status["ready"]) == ("Running", "2/2")


@pytest.mark.parametrize(
    "ends",
    [
        {"lifecycle": {"suspend": {"wakeOnRequest": False}}},
        {"replicas": 0},
        {"desiredState": "Paused"},
    ],
)
def test_a_request_wakes_a_suspended_resource_until_its_desired_state_changes(
    make_cluster: Any, ends: dict[str, Any]
) -> None:
    cluster = make_cluster(lifecycle={"suspend": {"wakeOnRequest": True}}, desiredState="Suspended").settled()
    assert cluster.state == "Suspended"
    cluster.coordinator.queue = 1
    cluster.settle()
    assert cluster.state == "Running"
    cluster.coordinator.queue = 0
    cluster.settle()
    assert cluster.state == "Running"
    cluster.change(**ends)
    cluster.change(desiredState="Suspended")
    assert cluster.state == "Suspended"


def test_an_autoscaler_does_not_suspend_a_woken_resource(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle={"suspend": {"wakeOnRequest": True}}, desiredState="Suspended").settled()
    cluster.coordinator.queue = 1
    cluster.settle()
    cluster.coordinator.queue = 0
    before = cluster.signals()
    cluster.change(replicas=2)
    assert (cluster.state, cluster.status["ready"]) == ("Running", "2/2")
    assert cluster.signals() == before


def test_a_woken_resource_with_requests_in_flight_is_not_idle(make_cluster: Any) -> None:
    suspend = {"wakeOnRequest": True, "idleSeconds": 60}
    cluster = make_cluster(lifecycle={"suspend": suspend}, desiredState="Suspended").settled()
    cluster.coordinator.queue = 1
    cluster.settle()
    cluster.coordinator.queue, cluster.coordinator.idle = 0, 61.0
    cluster.coordinator.engines["demo-engine-0"].in_flight = 1
    decision = cluster.settle()
    assert (cluster.state, decision.requeue_after) == ("Running", 60)
    cluster.coordinator.engines["demo-engine-0"].in_flight = 0
    cluster.settle()
    assert cluster.state == "Suspended"


def test_a_woken_resource_that_is_idle_sleeps_again_until_the_next_request(make_cluster: Any) -> None:
    suspend = {"wakeOnRequest": True, "idleSeconds": 60}
    cluster = make_cluster(lifecycle={"suspend": suspend}, desiredState="Suspended")
    assert cluster.settle().attentive
    cluster.coordinator.queue = 1
    decision = cluster.settle()
    assert (cluster.state, decision.requeue_after) == ("Running", 60)
    cluster.coordinator.queue, cluster.coordinator.idle = 0, 61.0
    cluster.settle()
    assert cluster.state == "Suspended"
    assert "woken" not in cluster.status["lifecycle"]
    cluster.coordinator.queue, cluster.coordinator.idle = 1, 0.0
    cluster.settle()
    assert cluster.state == "Running"


def test_scaling_up_touches_no_engine_that_serves(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1).settled()
    uid = cluster.pods["demo-engine-0-0"]["metadata"]["uid"]
    cluster.change(replicas=3)
    assert cluster.status["ready"] == "3/3"
    assert cluster.pods["demo-engine-0-0"]["metadata"]["uid"] == uid
    assert cluster.signals() == []


def test_scaling_down_drains_the_highest_index_first(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=3).settled()
    cluster.change(replicas=1)
    assert cluster.signals() == ["DRAIN demo-engine-2", "DRAIN demo-engine-1"]
    assert cluster.engine_pods() == ["demo-engine-0-0"]
    assert {ref.name for ref in cluster.objects if ref.kind == "StatefulSet"} == {"demo-engine-0"}
    assert {ref.name for ref in cluster.objects if ref.kind == "Service"} == {
        "demo",
        "demo-coordinator",
        "demo-engine-0",
    }
    policies = {ref.name for ref in cluster.objects if ref.kind == "NetworkPolicy"}
    assert policies == {"demo-coordinator", "demo-engine-0", "demo-engines", "demo-server"}
    assert cluster.state == "Running"


def test_a_removal_that_a_killed_operator_left_half_done_is_completed(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    policy = ChildRef("NetworkPolicy", "demo-engine-1", "networking.k8s.io/v1")
    left = cluster.objects[policy]
    cluster.change(replicas=1)
    cluster.objects[policy] = left
    cluster.settle()
    assert policy not in cluster.objects


def test_the_pods_of_an_engine_may_connect_before_the_shared_policy_forbids_it(make_cluster: Any) -> None:
    """An earlier operator allowed the connections of all engines in the shared policy alone."""
    cluster = make_cluster(replicas=2).settled()
    for name in ("demo-engine-0", "demo-engine-1"):
        del cluster.objects[ChildRef("NetworkPolicy", name, "networking.k8s.io/v1")]
    cluster.unverified.add(ChildRef("NetworkPolicy", "demo-engines", "networking.k8s.io/v1"))
    applied = [action.ref.name for action in cluster.step().actions if isinstance(action, ApplyChild)]
    assert applied == ["demo-engine-0", "demo-engine-1", "demo-engines"]


@pytest.mark.parametrize("code", [409, 412, 423, 424])
def test_an_engine_whose_drain_was_rejected_is_drained_again_before_it_goes(make_cluster: Any, code: int) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(replicas=1)
    cluster.step()
    cluster.step()
    cluster.coordinator.fail("nothing was done", code=code)
    cluster.settle()
    assert cluster.signals() == ["DRAIN demo-engine-1"] * 2
    assert cluster.engine_pods() == ["demo-engine-0-0"]


def test_an_engine_that_still_loads_is_removed_without_a_drain(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.coordinator.engines["demo-engine-1"].serving = False
    cluster.change(replicas=1)
    assert cluster.signals() == []
    assert cluster.engine_pods() == ["demo-engine-0-0"]


@pytest.mark.parametrize("desired", ["Running", "Paused", "Suspended"])
def test_engines_that_never_served_are_removed_at_once(make_cluster: Any, desired: str) -> None:
    cluster = make_cluster(replicas=2, desiredState=desired).settled()
    before = cluster.signals()
    cluster.broken_engines |= {f"demo-engine-{index}" for index in range(2, 40)}
    cluster.change(replicas=40)
    assert len(cluster.engine_pods()) == 40
    cluster.patch(replicas=2)
    cluster.step()
    assert {ref.name for ref in cluster.objects if ref.kind == "StatefulSet"} == {"demo-engine-0", "demo-engine-1"}
    cluster.settle()
    assert (cluster.state, cluster.status["ready"]) == (desired, "2/2")
    assert cluster.signals() == before


def test_a_bounded_number_of_engines_starts_at_a_time(make_cluster: Any) -> None:
    def statefulsets() -> int:
        return sum(ref.kind == "StatefulSet" for ref in cluster.objects)

    cluster = make_cluster(replicas=MAX_STARTING + 2)
    cluster.broken_engines |= {f"demo-engine-{index}" for index in range(1, MAX_STARTING)}
    for _ in range(2):
        cluster.step()
        assert statefulsets() == MAX_STARTING
    cluster.tick()
    for pod in cluster.pods.values():
        pod["status"].pop("containerStatuses", None)
    cluster.step()
    assert statefulsets() == MAX_STARTING + 1, "one serves"
    assert f"1 more start then, at most {MAX_STARTING} at a time" in cluster.condition("EnginesReady")["message"]
    for name in ("demo-engine-1", "demo-engine-2"):
        ref = ChildRef("StatefulSet", name, "apps/v1")
        cluster.objects[ref]["status"] = {"readyReplicas": 1}
    cluster.step()
    assert statefulsets() == MAX_STARTING + 2


def test_an_engine_without_its_statefulset_keeps_its_revision_in_the_status(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    before = cluster.status["engines"]
    assert before[0]["revision"]
    del cluster.objects[ChildRef("StatefulSet", "demo-engine-0", "apps/v1")]
    cluster.step()
    assert cluster.status["engines"][0]["revision"] == before[0]["revision"]


def test_a_coordinator_that_does_not_answer_is_reported_with_its_error(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.coordinator = None
    cluster.step()
    assert cluster.condition("Ready")["reason"] == "CoordinatorUnreachable"
    assert "the coordinator to answer (rejected)" in cluster.condition("Ready")["message"]


def test_scaling_down_waits_while_paused(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.change(desiredState="Paused", replicas=1)
    assert len(cluster.engine_pods()) == 2
    assert "demo-engine-1" in cluster.condition("Ready")["message"]
    cluster.change(desiredState="Running")
    assert len(cluster.engine_pods()) == 1


def test_a_reverted_scale_down_undrains_its_engine(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(replicas=1)
    cluster.step()
    cluster.step()
    assert cluster.coordinator.engines["demo-engine-1"].draining
    cluster.change(replicas=2)
    assert not any(engine.draining for engine in cluster.coordinator.engines.values())
    assert cluster.status["ready"] == "2/2"


def test_a_new_pod_is_not_restarted_because_its_drained_predecessor_is_still_reported(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(replicas=1)
    cluster.play_until(lambda: cluster.coordinator.engines["demo-engine-1"].draining)
    drained = cluster.coordinator.engines["demo-engine-1"]
    cluster.patch(replicas=2)
    cluster.play_until(lambda: cluster.deleted_pods == ["demo-engine-1-0"])
    cluster.tick()
    cluster.coordinator.engines["demo-engine-1"] = drained
    cluster.pods["demo-engine-1-0"]["status"] = {"phase": "Pending"}
    cluster.step()
    assert cluster.deleted_pods == ["demo-engine-1-0"]


def test_a_new_template_replaces_one_engine_at_a_time(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=3).settled()
    old = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    for _ in range(40):
        cluster.step()
        assert len(cluster.coordinator.engines) >= 2
        cluster.tick()
    cluster.settle()
    assert cluster.signals() == [f"DRAIN demo-engine-{index}" for index in (2, 1, 0)]
    assert all(cluster.pods[name]["metadata"]["uid"] != old[name] for name in cluster.engine_pods())
    assert cluster.status["updatedReplicas"] == 3
    assert {engine["revision"] for engine in cluster.status["engines"]} == {cluster.status["revision"]}


CPU = {"ranksPerPod": 1}
GPU = {"gpusPerPod": 1}


@pytest.mark.parametrize(
    ("engine", "tensor", "changed", "pods"),
    [
        (CPU, 1, {"parallelism": {"tensor": 2}}, (1, 2)),
        (CPU, 2, {"parallelism": {"tensor": 1}}, (2, 1)),
        (CPU, 2, {"engine": {"ranksPerPod": 2}}, (2, 1)),
        (GPU, 2, {"engine": {"gpusPerPod": 2}}, (2, 1)),
        (GPU, 4, {"engine": {"gpusPerPod": 2}}, (4, 2)),
    ],
)
def test_the_number_of_pods_changes_with_the_template_in_each_engines_turn(
    make_cluster: Any, engine: dict[str, Any], tensor: int, changed: dict[str, Any], pods: tuple[int, int]
) -> None:
    cluster = make_cluster(replicas=3, engine=engine, parallelism={"tensor": tensor}).settled()
    first = cluster.status["revision"]
    cluster.patch(**changed)
    for _ in range(60):
        cluster.step()
        for ref, obj in cluster.objects.items():
            if ref.kind == "StatefulSet":
                old = obj["spec"]["template"]["metadata"]["labels"]["inference.megatron.dev/revision"] == first
                assert obj["spec"]["replicas"] == pods[not old]
        assert sum(not engine.draining for engine in cluster.coordinator.engines.values()) >= 2
        cluster.tick()
    assert cluster.status["updatedReplicas"] == 3
    assert len(cluster.engine_pods()) == 3 * pods[1]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_rejected_template_with_another_number_of_pods_resizes_no_engine(
    make_cluster: Any, before: int, after: int
) -> None:
    cluster = make_cluster(replicas=2, parallelism={"tensor": before}).settled()
    held = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.reject |= {ChildRef("StatefulSet", f"demo-engine-{index}", "apps/v1") for index in range(2)}
    cluster.change(parallelism={"tensor": after})
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == held


def test_a_revert_during_a_rollout_leaves_unchanged_engines_alone(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=3).settled()
    untouched = cluster.pods["demo-engine-0-0"]["metadata"]["uid"]
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.play_until(lambda: "demo-engine-2-0" in cluster.deleted_pods)
    cluster.change(engine={"batching": {}})
    assert cluster.pods["demo-engine-0-0"]["metadata"]["uid"] == untouched
    assert cluster.status["updatedReplicas"] == 3


def test_a_bad_revision_stops_at_the_first_engine(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=3).settled()
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.broken_engines.add("demo-engine-2")
    decision = cluster.settle()
    assert set(cluster.deleted_pods) == {"demo-engine-2-0"}
    assert sorted(cluster.coordinator.engines) == ["demo-engine-0", "demo-engine-1"]
    assert decision.policy == "rollout"
    assert cluster.condition("Degraded")["reason"] == "CrashLooping"
    cluster.broken_engines.clear()
    cluster.change(engine={"batching": {}})
    assert cluster.status["ready"] == "3/3"


def test_a_rollout_waits_while_paused_except_for_engines_that_do_not_serve(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, desiredState="Paused")
    cluster.broken_engines.add("demo-engine-1")
    cluster.settle()
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.play_until(lambda: cluster.deleted_pods)
    cluster.broken_engines.clear()
    cluster.settle()
    assert cluster.state == "Paused"
    assert cluster.deleted_pods == ["demo-engine-1-0"]
    cluster.change(desiredState="Running")
    assert sorted(cluster.deleted_pods) == ["demo-engine-0-0", "demo-engine-1-0"]


def test_a_new_model_is_never_served_beside_the_old_one(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    server = ChildRef("Deployment", "demo-server", "apps/v1")
    before = cluster.objects[server]["spec"]["template"]
    cluster.patch(model={"source": {"builtin": "other"}})
    cluster.step()
    assert cluster.objects[server]["spec"]["template"] == before
    cluster.play_until(lambda: cluster.deleted_pods)
    assert cluster.objects[server]["spec"]["template"] != before
    assert sorted(cluster.deleted_pods) == ["demo-engine-0-0", "demo-engine-1-0"]
    cluster.settle()
    assert cluster.signals() == ["DRAIN", "PAUSE", "UNPAUSE"]
    assert not any(engine.draining for engine in cluster.coordinator.engines.values())
    assert not cluster.coordinator.all_draining
    assert cluster.state == "Running"


def test_after_a_change_of_model_requests_wait_until_the_old_engines_are_gone(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(model={"source": {"builtin": "other"}})
    cluster.play_until(lambda: cluster.deleted_pods)
    old = cluster.world().pods[0]
    lingering = replace(old, component="engine", engine="demo-engine-1", revision="old", deleting=True)
    for _ in range(6):
        world = cluster.world()
        decision = decide(replace(world, pods=(*world.pods, lingering)))
        assert not [action for action in decision.actions if isinstance(action, Signal | DeletePods)]
        cluster.tick()


def test_each_engine_shows_the_digest_of_its_weights(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    world = cluster.world()
    one, other = world.coordinator.engines
    engines = (replace(one, digest="5eed"), other)
    status = decide(replace(world, coordinator=replace(world.coordinator, engines=engines))).status
    MegatronInferenceStatus.model_validate(status)
    assert [engine.get("digest") for engine in status["engines"]] == ["5eed", None]


def test_an_interrupted_swap_deletes_the_old_pods_later(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.play_until(lambda: any(isinstance(action, ApplyChild) for action in decide(cluster.world()).actions))
    cluster.step(crash_after=1)
    assert cluster.deleted_pods == []
    cluster.settle()
    assert cluster.deleted_pods == ["demo-engine-0-0"]
    assert cluster.status["updatedReplicas"] == 1


def test_a_settled_resource_writes_nothing(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    writes = cluster.status_writes
    for _ in range(20):
        cluster.coordinator.queue += 1
        decision = cluster.step()
        assert decision.actions == ()
        cluster.tick()
    assert cluster.status_writes == writes


def test_a_changed_or_unverified_child_is_applied_again(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    service = ChildRef("Service", "demo")
    cluster.unverified.add(service)
    decision = cluster.step()
    assert [action.ref for action in decision.actions if isinstance(action, ApplyChild)] == [service]
    del cluster.objects[service]
    cluster.step()
    assert service in cluster.objects


def test_a_rejected_template_is_reported_and_does_not_block_verbs(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.reject.add(ChildRef("Deployment", "demo-server", "apps/v1"))
    cluster.change(server={"podTemplate": {"spec": {"schedulerName": "x"}}})
    assert cluster.condition("Degraded")["reason"] == "InvalidPodTemplate"
    assert "spec.template is wrong" in cluster.condition("Degraded")["message"]
    cluster.change(desiredState="Paused")
    assert cluster.state == "Paused"
    cluster.reject.clear()
    cluster.patch(server={}, desiredState="Running")
    cluster.spec["server"] = {}
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"


def test_a_rejected_policy_of_an_engine_is_reported(make_cluster: Any) -> None:
    cluster = make_cluster()
    cluster.reject.add(ChildRef("NetworkPolicy", "demo-engine-0", "networking.k8s.io/v1"))
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "ChildRefused"
    assert "NetworkPolicy demo-engine-0" in cluster.condition("Degraded")["message"]
    cluster.reject.clear()
    cluster.now += timedelta(seconds=20)
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"


def test_a_template_rejected_in_a_dry_run_replaces_no_engine(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    held = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.reject |= {ChildRef("StatefulSet", f"demo-engine-{index}", "apps/v1") for index in range(2)}
    cluster.change(engine={"podTemplate": {"spec": {"priorityClassName": "no-such-class"}}})
    assert cluster.signals() == []
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == held
    assert cluster.condition("Degraded")["reason"] == "InvalidPodTemplate"
    assert cluster.status["readyReplicas"] == 2
    writes, tried = cluster.status_writes, cluster.rejections[ChildRef("StatefulSet", "demo-engine-1", "apps/v1")].at
    cluster.play(40)
    assert cluster.rejections[ChildRef("StatefulSet", "demo-engine-1", "apps/v1")].at > tried
    assert cluster.status_writes == writes, "a second rejection says nothing new"

    cluster.reject.clear()
    cluster.now += timedelta(minutes=5)
    cluster.settle()
    assert cluster.status["updatedReplicas"] == 2
    assert cluster.condition("Degraded")["status"] == "False"


def test_a_rejected_server_template_keeps_the_old_model_serving(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.reject.add(ChildRef("Deployment", "demo-server", "apps/v1"))
    cluster.patch(model={"source": {"builtin": "other"}}, server={"podTemplate": {"spec": {"priorityClassName": "x"}}})
    cluster.play(30)
    assert cluster.signals() == []
    assert cluster.status["readyReplicas"] == 2
    assert cluster.condition("Degraded")["reason"] == "InvalidPodTemplate"
    cluster.reject.clear()
    cluster.settle()
    assert cluster.status["updatedReplicas"] == 2
    assert cluster.condition("Degraded")["status"] == "False"


def test_a_reverted_rejected_template_changes_nothing(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    before = cluster.status["revision"], cluster.engine_pods()
    cluster.reject.add(ChildRef("StatefulSet", "demo-engine-0", "apps/v1"))
    cluster.change(engine={"podTemplate": {"spec": {"priorityClassName": "no-such-class"}}})
    cluster.spec["engine"] = {}
    cluster.change()
    assert (cluster.status["revision"], cluster.engine_pods()) == before
    assert cluster.condition("Degraded")["status"] == "False"
    assert cluster.signals() == []


@pytest.mark.parametrize(
    ("said", "reason", "words"),
    [
        ("pods is forbidden: exceeded quota: compute", "QuotaExceeded", "raise the ResourceQuota"),
        ("pods is forbidden: failed quota: q: must specify limits.cpu for: engine", "LimitRequired", "LimitRange in"),
        ("maximum cpu usage per Container is 1, but limit is 2", "LimitRangeViolated", "within the LimitRange"),
        (
            "unable to validate against any security context constraint: []",
            "InvalidPodTemplate",
            "chart value openshift",
        ),
        ('pod violates PodSecurity "restricted:latest"', "InvalidPodTemplate", "correct spec.engine.podTemplate"),
        ("Internal error occurred", "ChildRefused", "Internal error occurred"),
    ],
)
def test_pods_that_cannot_be_created_are_explained(make_cluster: Any, said: str, reason: str, words: str) -> None:
    cluster = make_cluster()
    cluster.step()
    cluster.failed_creations["demo-engine-0"] = said
    cluster.step()
    assert cluster.condition("Degraded")["reason"] == reason
    assert words in cluster.condition("Degraded")["message"]


def test_a_pod_of_an_engine_that_cannot_be_created_is_explained(make_cluster: Any) -> None:
    """A quota may have room for some pods of an engine."""
    cluster = make_cluster(parallelism={"tensor": 2}).settled()
    del cluster.coordinator.engines["demo-engine-0"]
    cluster.pods = {name: pod for name, pod in cluster.pods.items() if name != "demo-engine-0-1"}
    cluster.step()
    cluster.now += timedelta(seconds=LOST_SECONDS)
    assert cluster.step().requeue_after == EVENT_SECONDS, "Events are read again soon"
    assert "the StatefulSet of demo-engine-0 to create its pods" in cluster.condition("Ready")["message"]
    cluster.failed_creations["demo-engine-0"] = "pods is forbidden: exceeded quota: compute"
    cluster.step()
    assert cluster.condition("Degraded")["reason"] == cluster.condition("Ready")["reason"] == "QuotaExceeded"


@pytest.mark.parametrize(
    ("name", "component"), [("coordinator", "coordinator"), ("standby", "coordinator"), ("server", "server")]
)
def test_shared_pods_that_cannot_be_created_are_explained(make_cluster: Any, name: str, component: str) -> None:
    cluster = make_cluster(coordinator={"replicas": 2})
    cluster.step()
    deployment = cluster.objects[ChildRef("Deployment", f"demo-{name}", "apps/v1")]
    said = 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'
    deployment["status"] = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": said}]}
    cluster.step()
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "InvalidPodTemplate"
    assert degraded["message"] == f"its pods cannot be created: {said}; correct spec.{component}.podTemplate"


@pytest.mark.parametrize("component", ["coordinator", "server", "engine"])
def test_a_pod_that_waits_for_a_missing_secret_is_explained(make_cluster: Any, component: str) -> None:
    cluster = make_cluster().settled()
    name, pod = next((name, pod) for name, pod in cluster.pods.items() if f"-{component}-" in name)
    pod["status"] = {"phase": "Pending"}
    assert cluster.step().requeue_after == EVENT_SECONDS, "Events are read again soon"
    said = 'MountVolume.SetUp failed for volume "x" : secret "gone" not found'
    pod["status"] |= {"reason": "FailedMount", "message": said}
    cluster.step()
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "ContainerConfigError"
    assert f"{name}: FailedMount: {said}; create secret gone" in degraded["message"]


def test_a_template_that_cannot_be_merged_names_its_field(make_cluster: Any) -> None:
    cluster = make_cluster(engine={"podTemplate": {"spec": {"containers": [{"image": "x"}]}}}).settled()
    assert cluster.step().requeue_after == 60.0
    assert cluster.condition("Ready")["reason"] == "InvalidPodTemplate"
    assert "spec.engine.podTemplate.spec.containers[0]" in cluster.condition("Ready")["message"]


def test_an_engine_whose_template_became_invalid_can_still_be_stopped(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.change(engine={"podTemplate": {"spec": {"containers": "x"}}})
    assert cluster.state == "Running"
    cluster.change(desiredState="Stopped")
    assert cluster.state == "Stopped"


@pytest.mark.parametrize(
    ("version", "kind", "name"),
    [
        ("v1", "Service", "demo"),
        ("v1", "Secret", "demo-keys"),
        ("apps/v1", "Deployment", "demo-coordinator"),
        ("apps/v1", "Deployment", "demo-server"),
        ("v1", "Service", "demo-engines"),
        ("apps/v1", "StatefulSet", "demo-engine-0"),
    ],
)
def test_an_object_of_another_owner_is_never_touched(make_cluster: Any, version: str, kind: str, name: str) -> None:
    cluster = make_cluster()
    ref = ChildRef(kind, name, version)
    foreign: dict[str, Any] = {"apiVersion": version, "kind": kind, "metadata": {"name": name, "uid": "theirs"}}
    cluster.objects[ref] = foreign
    untouched = copy.deepcopy(foreign)
    for _ in range(3):
        decision = cluster.step()
        assert decision.reason == "ChildNotOwned"
        assert f"{kind} {name}" in decision.message
        assert [action for action in decision.actions if not isinstance(action, EmitEvent)] == []
        assert cluster.condition("Degraded")["reason"] == "ChildNotOwned"
    assert cluster.objects == {ref: untouched}
    del cluster.objects[ref]
    cluster.settle()
    assert cluster.state == "Running"


def test_a_statefulset_that_is_being_deleted_is_not_applied(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle={"suspend": {"level": "ReleasePods"}}, desiredState="Suspended").settled()
    ref = ChildRef("StatefulSet", "demo-engine-0", "apps/v1")
    cluster.objects[ref]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.patch(desiredState="Running")
    for _ in range(3):
        applied = [action.ref for action in cluster.step().actions if isinstance(action, ApplyChild)]
        assert ref not in applied
        cluster.tick()
    del cluster.objects[ref]
    cluster.settle()
    assert cluster.state == "Running"


def test_an_engine_that_cannot_be_rendered_is_created_without_pods(make_cluster: Any) -> None:
    cluster = make_cluster(
        lifecycle={"suspend": {"level": "ReleasePods"}},
        desiredState="Suspended",
        engine={"podTemplate": {"spec": {"containers": "x"}}},
    ).settled()
    assert cluster.objects[ChildRef("StatefulSet", "demo-engine-0", "apps/v1")]["spec"]["replicas"] == 0
    assert cluster.state == "Suspended"


def test_after_the_loss_of_the_lease_verbs_use_a_fence_above_the_coordinators(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.coordinator.fence = 9
    cluster.change(desiredState="Paused")
    assert cluster.state == "Paused"
    assert cluster.coordinator.begun[-1].fence == 10
    assert cluster.status["lifecycle"]["fenceOffset"] == 9
    cluster.term = 2  # a later leader: above the one before, whose offset it found in the status
    cluster.change(desiredState="Running")
    assert cluster.coordinator.begun[-1].fence == 11
    assert cluster.status["lifecycle"]["fenceOffset"] == 9


@pytest.mark.parametrize("fence", [1 << 64, (1 << 64) - 1, 1 << 53, 1_000_001])
def test_a_fence_that_no_leader_sent_is_not_followed(make_cluster: Any, fence: int) -> None:
    cluster = make_cluster().settled()
    honest, cluster.coordinator.fence = cluster.coordinator.fence, fence
    cluster.patch(desiredState="Paused")
    decision = cluster.step()
    assert decision.reason == "StaleFence"
    for told in (f"fence {fence}", "at most 1000000", "delete the pod of demo-coordinator"):
        assert told in decision.message
    degraded = next(entry for entry in decision.status["conditions"] if entry["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "StaleFence")
    cluster.settle()
    assert cluster.coordinator.begun == []
    assert "fenceOffset" not in cluster.status["lifecycle"]
    cluster.coordinator.fence = honest  # it was restarted
    cluster.settle()
    assert cluster.state == "Paused"


def test_a_fence_within_the_bound_is_followed_to_the_last(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.coordinator.fence = 1_000_000
    cluster.change(desiredState="Paused")
    assert cluster.coordinator.begun[-1].fence == 1_000_001


def test_a_resource_whose_coordinator_claims_a_fence_can_be_stopped(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.coordinator.fence = (1 << 64) - 1
    cluster.change(desiredState="Stopped")
    assert cluster.state != "Stopped"
    cluster.now += timedelta(seconds=cluster.world().resource.spec.lifecycle.drain_seconds + 121)
    cluster.settle()
    assert cluster.state == "Stopped"
    assert cluster.engine_pods() == []


def test_weights_are_not_updated_beyond_the_last_epoch(make_cluster: Any) -> None:
    cluster = make_cluster(**_on_volume("6")).settled()
    cluster.coordinator.epoch = 1 << 53
    cluster.change(weights={"revision": "7"})
    assert cluster.coordinator.begun == []
    assert f"epoch {1 << 53}" in cluster.status["plan"]["waitingOn"]


def test_a_recovering_coordinator_is_waited_for(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.coordinator.state = CoordinatorState.RECOVERING
    cluster.patch(desiredState="Paused")
    decision = cluster.step()
    assert decision.reason == "CoordinatorRecovering"
    cluster.coordinator.state = CoordinatorState.RUNNING
    cluster.settle()
    assert cluster.state == "Paused"


def test_a_deleted_resource_is_left_alone(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    world = cluster.world()
    decision = decide(replace(world, resource=replace(world.resource, deleting=True)))
    assert decision.actions == ()
    assert decision.status == cluster.status


def test_each_transition_is_an_event(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.change(desiredState="Paused")
    states = [event.reason for event in cluster.events if " -> " in event.message]
    assert states == ["Pending", "Running", "Pausing", "Paused"]


@pytest.mark.parametrize("goal", STATES[1:])
def test_a_verb_without_an_error_emits_no_warning(make_cluster: Any, goal: str) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.change(desiredState=goal)
    cluster.change(desiredState="Running")
    assert [event for event in cluster.events if event.type == "Warning"] == []


def test_the_status_names_the_formats_that_servers_read(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1).settled()
    assert "formats" not in cluster.status
    for formats in (FormatsReport("mistral", ""), FormatsReport("", "think")):
        cluster.coordinator.formats = formats
        cluster.settle()
        assert cluster.status["formats"] == {
            "toolCalls": formats.tool_calls or "none",
            "reasoning": formats.reasoning or "none",
        }
    settled = copy.deepcopy(cluster.status)
    cluster.coordinator.formats = None  # no server is registered
    assert decide(cluster.world()).status == settled
    MegatronInferenceStatus.model_validate(settled)


def failed_request(number: int) -> FailedRequestReport:
    return FailedRequestReport(f"{number:032x}", ("demo-engine-0", "demo-engine-1"), START + timedelta(seconds=number))


def test_a_request_that_crashes_engines_is_in_the_status_and_in_one_event(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.coordinator.failed_requests = [failed_request(1), failed_request(2)]
    cluster.settle()
    settled = copy.deepcopy(cluster.status)
    assert settled["failedRequests"] == [
        {"id": f"{n:032x}", "engines": ["demo-engine-0", "demo-engine-1"], "time": f"2026-01-01T00:00:0{n}.000Z"}
        for n in (1, 2)
    ]
    events = [event for event in cluster.events if event.reason == "RequestEndsEngines"]
    assert [event.type for event in events] == ["Warning", "Warning"]
    assert f"{1:032x}" in events[0].message
    for _ in range(3):
        assert decide(cluster.world()).status == settled
        assert not [action for action in decide(cluster.world()).actions if isinstance(action, EmitEvent)]
    # The next coordinator knows nothing of them.
    cluster.coordinator.failed_requests = []
    assert decide(cluster.world()).status == settled
    MegatronInferenceStatus.model_validate(settled)


def test_only_the_last_failed_requests_are_kept_and_the_status_does_not_flap(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    for first in (0, 10, 20):
        cluster.coordinator.failed_requests = [failed_request(first + n) for n in range(16)]
        cluster.settle()
        settled = copy.deepcopy(cluster.status)
        assert len(settled["failedRequests"]) == 16
        assert settled["failedRequests"][-1]["id"] == f"{first + 15:032x}"
        assert decide(cluster.world()).status == settled


def engine_states(cluster: Any) -> list[str]:
    return [entry["state"] for entry in cluster.status["engines"]]


def test_an_engine_with_ready_pods_that_stays_unregistered_is_reported_lost(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    del cluster.coordinator.engines["demo-engine-1"]
    assert cluster.step().requeue_after == LOST_SECONDS
    assert (engine_states(cluster), cluster.status["ready"]) == (["RUNNING", "Pending"], "1/2")
    assert cluster.condition("Degraded")["status"] == "False", "its kubelet or a new registration may explain it"
    cluster.now += timedelta(seconds=LOST_SECONDS)
    cluster.step()
    assert cluster.condition("Degraded")["reason"] == "EngineLost"
    assert (engine_states(cluster), cluster.status["ready"]) == (["RUNNING", "Lost"], "1/2")
    assert cluster.condition("Ready")["status"] == "True"


def test_a_frozen_engine_is_unresponsive_then_lost_and_never_starting(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    frozen = cluster.coordinator.engines["demo-engine-1"]
    frozen.suspect = True
    cluster.step()
    assert (engine_states(cluster), cluster.status["ready"], cluster.state) == (
        ["RUNNING", "Unresponsive"],
        "1/2",
        "Running",
    )
    assert cluster.condition("Degraded")["reason"] == "EngineUnresponsive"
    assert "engine demo-engine-1 sends no heartbeats" in cluster.condition("Degraded")["message"]
    assert cluster.condition("EnginesReady")["reason"] == "EngineUnresponsive"

    # The coordinator removes it, then its readiness probe fails.
    del cluster.coordinator.engines["demo-engine-1"]
    pod = cluster.pods["demo-engine-1-0"]
    running = {"name": "engine", "ready": True, "started": True, "restartCount": 0, "state": {"running": {}}}
    for ready in (True, False):
        status = "True" if ready else "False"
        pod["status"]["conditions"] = [{"type": "Ready", "status": status}]
        pod["status"]["containerStatuses"] = [{**running, "ready": ready}]
        cluster.step()
        assert engine_states(cluster) == ["RUNNING", "Lost"]
        assert cluster.condition("Degraded")["reason"] == "EngineLost"

    # The kubelet restarts its container.
    pod["status"]["containerStatuses"] = [{**running, "ready": False, "started": False, "restartCount": 1}]
    cluster.step()
    assert engine_states(cluster) == ["RUNNING", "Pending"]
    assert cluster.condition("Degraded")["status"] == "False"


def test_the_only_engine_that_does_not_respond_makes_the_resource_not_ready(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.coordinator.engines["demo-engine-0"].suspect = True
    cluster.step()
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"], cluster.status["ready"]) == ("False", "EngineUnresponsive", "0/1")


def test_an_engine_whose_pod_is_deleted_is_not_lost(make_cluster: Any) -> None:
    """An eviction, kubectl delete pod, or the node's shutdown: the engine leaves before its pod is gone."""
    cluster = make_cluster(replicas=2).settled()
    cluster.pods["demo-engine-1-0"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for suspect in (True, False):
        if suspect:
            cluster.coordinator.engines["demo-engine-1"].suspect = True
        else:
            del cluster.coordinator.engines["demo-engine-1"]
        cluster.now += timedelta(seconds=LOST_SECONDS)
        cluster.step()
        cluster.now += timedelta(seconds=LOST_SECONDS)
        cluster.step()
        assert cluster.condition("Degraded")["status"] == "False"
    assert [event for event in cluster.events if event.type == "Warning"] == []


def test_a_restart_of_the_coordinator_changes_no_engine_in_the_status(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    engines, coordinator = copy.deepcopy(cluster.status["engines"]), cluster.coordinator
    pod = next(pod for name, pod in cluster.pods.items() if "-coordinator-" in name)
    ready = pod["status"]["conditions"]

    def check(reason: str) -> None:
        cluster.step()
        assert (cluster.status["ready"], cluster.status["readyReplicas"]) == ("2/2", 2)
        assert cluster.status["engines"] == engines
        assert cluster.condition("Ready")["reason"] == reason
        assert cluster.condition("EnginesReady")["status"] == "Unknown"
        assert cluster.condition("Degraded")["status"] == "False"

    cluster.coordinator = None
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    check("CoordinatorStarting")
    del pod["metadata"]["deletionTimestamp"]
    pod["status"]["conditions"] = []
    check("CoordinatorStarting")
    pod["status"]["conditions"] = ready
    check("CoordinatorUnreachable")
    survivors = coordinator.engines
    cluster.coordinator = dataclasses.replace(coordinator, state=CoordinatorState.RECOVERING, engines={})
    cluster.now += timedelta(seconds=UNKNOWN_SECONDS - 1)
    check("CoordinatorRecovering")
    cluster.coordinator.engines = {"demo-engine-0": survivors["demo-engine-0"]}
    check("CoordinatorRecovering")
    cluster.coordinator = dataclasses.replace(coordinator, engines=survivors)
    cluster.settle()
    assert cluster.state == "Running"

    # An engine that died with the coordinator does not count as serving for long.
    cluster.coordinator = dataclasses.replace(coordinator, engines={"demo-engine-0": survivors["demo-engine-0"]})
    cluster.step()
    assert cluster.status["ready"] == "1/2"


@pytest.mark.parametrize(
    ("pods", "kind"),
    [
        ({"old": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, "Normal"),
        ({"old": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "new": {}}, "Normal"),
        ({}, "Normal"),
        ({"new": {}}, "Normal"),
        ({"old": {"creationTimestamp": "2000-01-01T00:00:00Z"}}, "Warning"),
    ],
    ids=["terminating", "terminating-and-new-one-ready", "none", "new-one-ready", "ready"],
)
def test_the_event_of_an_absent_coordinator_is_a_warning_unless_its_pod_is_replaced(
    make_cluster: Any, pods: dict[str, dict[str, Any]], kind: str
) -> None:
    cluster = make_cluster().settled()
    cluster.coordinator = None
    name = next(name for name in cluster.pods if "-coordinator-" in name)
    pod = cluster.pods.pop(name)
    for suffix, metadata in pods.items():
        now = cluster.now.isoformat()
        changed = {**pod["metadata"], "name": f"{name}-{suffix}", "uid": suffix, "creationTimestamp": now, **metadata}
        cluster.pods[f"{name}-{suffix}"] = {**pod, "metadata": changed}
    cluster.step()
    assert [(event.type, event.reason) for event in cluster.events[-1:]] == [(kind, "Unknown")]


def test_a_rollout_waits_for_an_engine_that_does_not_respond(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=3).settled()
    cluster.coordinator.engines["demo-engine-0"].suspect = True
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.play(10)
    assert cluster.signals() == []
    cluster.coordinator.engines["demo-engine-0"].suspect = False
    cluster.settle()
    assert cluster.status["updatedReplicas"] == 3


@pytest.mark.parametrize(
    ("status", "reason", "kept"),
    [
        ("True", Reason.PAUSED, True),
        ("True", Reason.SUSPENDED, True),
        ("False", Reason.PAUSED, False),
        ("Unknown", Reason.SUSPENDED, False),
    ],
)
def test_a_condition_changes_its_time_with_its_status(status: str, reason: Reason, kept: bool) -> None:
    def made(finding: tuple[str, Reason, str], before: dict[str, Any] | None, now: str) -> dict[str, Any]:
        return condition(ConditionType.READY, finding, generation=1, before=before, now=now)

    before = made(("True", Reason.PAUSED, "first"), None, "then")
    after = made((status, reason, "second"), before, "now")
    assert (after["status"], after["reason"], after["message"]) == (status, reason.value, "second")
    assert after["lastTransitionTime"] == ("then" if kept else "now")


def test_history_names_the_operation_and_keeps_sixteen(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    for goal in ("Paused", "Running") * 10:
        cluster.change(desiredState=goal)
    history = cluster.status["history"]
    assert len(history) == 16
    assert (history[-1]["from"], history[-1]["to"]) == ("Paused", "Running")
    assert history[-1]["operationId"] == cluster.status["lifecycle"]["operationId"]
    assert history[-1]["seconds"] > 0


def test_a_spec_that_cannot_be_parsed_is_rejected_in_the_status(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    decision = reject_spec(status=cluster.status, generation=2, error="spec.next: unknown", now=cluster.now)
    ready = next(entry for entry in decision.status["conditions"] if entry["type"] == "Ready")
    assert (ready["status"], ready["reason"], ready["message"]) == ("False", "InvalidSpec", "spec.next: unknown")
    conditions = {entry["type"]: entry["status"] for entry in decision.status["conditions"]}
    columns = (conditions["Ready"], conditions["Progressing"], decision.status["state"])
    assert columns == ("False", "Unknown", "Pending"), "the change is not carried out"
    again = reject_spec(status=decision.status, generation=2, error="spec.next: unknown", now=cluster.now)
    assert again.status == decision.status


def test_a_replaced_engine_is_asked_for_a_canary_before_the_next_is_taken(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.play_until(lambda: cluster.asked)
    assert cluster.signals() == ["DRAIN demo-engine-1"]
    assert cluster.status["updatedReplicas"] == 0
    cluster.settle()
    assert cluster.asked == ["demo-engine-1", "demo-engine-0"]
    assert [engine["canary"] for engine in cluster.status["engines"]] == ["Passed", "Passed"]
    assert cluster.status["updatedReplicas"] == 2


def test_a_rollout_is_not_complete_while_the_last_engine_is_reported_with_its_earlier_revision(
    make_cluster: Any,
) -> None:
    cluster = make_cluster(replicas=2).settled()
    old = replace(cluster.coordinator.engines["demo-engine-0"], draining=True)
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.play_until(lambda: "demo-engine-0-0" in cluster.deleted_pods)
    cluster.tick()
    new = cluster.coordinator.engines["demo-engine-0"]
    assert new.revision != old.revision
    cluster.coordinator.engines["demo-engine-0"] = old
    cluster.step()
    assert cluster.status["updatedReplicas"] == 1
    assert cluster.status["plan"]["waitingOn"] == "demo-engine-0 to register"
    assert cluster.condition("Progressing")["status"] == "True"
    cluster.coordinator.engines["demo-engine-0"] = new
    cluster.settle()
    assert cluster.status["updatedReplicas"] == 2
    assert "plan" not in cluster.status


def test_a_wrong_canary_stops_the_rollout_and_removes_the_engine_until_the_spec_changes(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.wrong_engines.add("demo-engine-1")
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "CanaryFailed"
    assert "log-prob nan" in cluster.condition("Degraded")["message"]
    assert cluster.coordinator.engines["demo-engine-1"].draining
    assert cluster.deleted_pods == ["demo-engine-1-0"]
    cluster.wrong_engines.clear()
    cluster.change(engine={"batching": {}})
    assert cluster.deleted_pods == ["demo-engine-1-0", "demo-engine-1-0"]
    assert not cluster.coordinator.engines["demo-engine-1"].draining
    assert cluster.condition("Degraded")["status"] == "False"


def test_a_lost_child_of_an_outdated_engine_is_re_created_from_its_own_revision(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=3).settled()
    first = ChildRef("StatefulSet", "demo-engine-0", "apps/v1")
    old = cluster.objects[first]
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.broken_engines.add("demo-engine-2")
    cluster.settle()
    del cluster.objects[first]
    cluster.step()
    made = cluster.objects[first]
    assert {**made, "metadata": {**made["metadata"], "uid": ""}} == {**old, "metadata": {**old["metadata"], "uid": ""}}
    made["spec"]["template"]["spec"]["containers"][0]["args"] = ["--foreign"]
    cluster.unverified.add(first)
    cluster.step()
    assert cluster.objects[first]["spec"] == old["spec"]


def test_revisions_are_recorded_before_their_engines_and_forgotten_after_them(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1)
    kinds = [action.ref.kind for action in decide(cluster.world()).actions if isinstance(action, ApplyChild)]
    assert kinds.index("ControllerRevision") < kinds.index("StatefulSet")
    cluster.settle()
    first = {ref for ref in cluster.objects if ref.kind == "ControllerRevision"}
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.step()
    assert first < {ref for ref in cluster.objects if ref.kind == "ControllerRevision"}
    cluster.settle()
    (left,) = [ref for ref in cluster.objects if ref.kind == "ControllerRevision"]
    assert left.name == f"demo-rev-{cluster.status['revision']}"


def test_a_revision_that_a_new_operator_renders_differently_is_kept_until_its_turn(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    (record,) = [ref for ref in cluster.objects if ref.kind == "ControllerRevision"]
    cluster.objects[record]["data"]["spec"]["engine"]["startupSeconds"] = 99
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.unverified.add(ChildRef("StatefulSet", "demo-engine-0", "apps/v1"))
    applied = [action.ref.name for action in decide(cluster.world()).actions if isinstance(action, ApplyChild)]
    assert "demo-engine-0" not in applied


def test_one_unproven_engine_at_a_time_when_all_are_down(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=3).settled()
    cluster.broken_engines |= {f"demo-engine-{index}" for index in range(3)}
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.coordinator.engines.clear()
    cluster.play_until(lambda: cluster.deleted_pods)
    cluster.play(5)
    assert cluster.deleted_pods == ["demo-engine-2-0"]
    cluster.broken_engines.clear()
    cluster.settle()
    assert cluster.status["ready"] == "3/3"
    assert cluster.status["updatedReplicas"] == 3


def _on_volume(revision: str) -> dict[str, Any]:
    source = {"persistentVolumeClaim": {"claimName": "models", "path": "/x/{revision}"}}
    return {"model": {"source": source}, "weights": {"revision": revision}}


def test_new_weights_are_loaded_in_place(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, **_on_volume("6")).settled()
    pods = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.change(weights={"revision": "7"})
    assert cluster.signals() == ["UPDATE_WEIGHTS"]
    assert cluster.coordinator.sources == ["/model/x/7"]
    assert (cluster.status["weights"]["revision"], cluster.status["epoch"]) == ("7", 1)
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == pods
    server = cluster.objects[ChildRef("Deployment", "demo-server", "apps/v1")]
    assert server["spec"]["template"]["metadata"]["labels"]["inference.megatron.dev/weights"] == "6"
    engine = cluster.objects[ChildRef("StatefulSet", "demo-engine-0", "apps/v1")]
    assert "/model/x/7" in engine["spec"]["template"]["spec"]["containers"][0]["args"]
    cluster.change(weights={"revision": "6"})
    assert (cluster.status["weights"]["revision"], cluster.status["epoch"]) == ("6", 2)


def test_a_pod_that_starts_before_new_weights_are_confirmed_starts_with_the_old(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, **_on_volume("6")).settled()
    cluster.coordinator.bad_sources.add("/model/x/7")
    cluster.patch(weights={"revision": "7"})
    cluster.play(6)
    assert cluster.condition("Degraded")["reason"] == "SignalFailed"
    assert "no weights at /model/x/7" in cluster.condition("Degraded")["message"]
    engine = cluster.objects[ChildRef("StatefulSet", "demo-engine-0", "apps/v1")]
    assert "/model/x/6" in engine["spec"]["template"]["spec"]["containers"][0]["args"]
    cluster.change(weights={"revision": "6"})
    assert cluster.condition("Degraded")["status"] == "False"
    assert cluster.coordinator.sources == []


def test_weights_that_no_engine_can_start_with_are_corrected_by_another_revision(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1, **_on_volume("missing"))
    cluster.broken_engines.add("demo-engine-0")
    cluster.settle()
    cluster.broken_engines.clear()
    cluster.change(weights={"revision": "6"})
    assert cluster.state == "Running"
    assert cluster.pods["demo-engine-0-0"]["metadata"]["labels"]["inference.megatron.dev/weights"] == "6"
    assert cluster.signals() == []


@pytest.mark.parametrize("crash_at", range(6))
def test_weights_are_updated_once_if_the_operator_dies_at_any_action(make_cluster: Any, crash_at: int) -> None:
    cluster = make_cluster(**_on_volume("6")).settled()
    cluster.patch(weights={"revision": "7"})
    for number in range(6):
        cluster.step(crash_after=0 if number == crash_at else None)
        cluster.tick()
    cluster.settle()
    assert cluster.coordinator.sources == ["/model/x/7"]
    assert cluster.status["epoch"] == 1


def test_new_weights_wait_while_suspended(make_cluster: Any) -> None:
    cluster = make_cluster(**_on_volume("6"), desiredState="Suspended").settled()
    cluster.change(weights={"revision": "7"})
    assert cluster.coordinator.sources == []
    cluster.change(desiredState="Running")
    assert cluster.coordinator.sources == ["/model/x/7"]


def _reboot(cluster: Any, *engines: str) -> None:
    """Restart the containers of the coordinator and of these engines in their pods: they know of no update."""
    cluster.coordinator.epoch = 0
    cluster.coordinator.source_revisions.clear()
    for name in engines:
        cluster.coordinator.engines[name].epoch = 0
        cluster.coordinator.engines[name].source = ""


@pytest.mark.parametrize("engines", [("demo-engine-0", "demo-engine-1"), ("demo-engine-1",)])
def test_weights_that_a_reboot_reverted_are_updated_again(make_cluster: Any, engines: tuple[str, ...]) -> None:
    cluster = make_cluster(replicas=2, **_on_volume("6")).settled()
    cluster.change(weights={"revision": "7"})
    assert [engine["weights"] for engine in cluster.status["engines"]] == ["7", "7"]
    pods = cluster.engine_pods()
    _reboot(cluster, *engines)
    cluster.now += timedelta(minutes=1)
    decision = cluster.step()
    assert decision.reason == "RefreshingWeights"
    assert f"{', '.join(engines)} serve other weights than revision 7" in cluster.condition("Ready")["message"]
    assert cluster.condition("Degraded")["reason"] == "WrongWeights"
    assert {engine["name"] for engine in cluster.status["engines"] if engine["weights"] == "6"} == set(engines)
    cluster.settle()
    assert cluster.signals() == ["UPDATE_WEIGHTS"] * 2
    assert cluster.coordinator.sources == ["/model/x/7"] * 2
    assert cluster.coordinator.epoch == 2, "an epoch is not used again"
    assert cluster.condition("Degraded")["status"] == "False"
    assert cluster.engine_pods() == pods
    assert cluster.status["weights"] == {**cluster.status["weights"], "revision": "7", "epoch": 2}


def test_engines_of_a_coordinator_without_sources_are_judged_by_their_epoch(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, **_on_volume("6")).settled()
    cluster.change(weights={"revision": "7"})
    for engine in cluster.coordinator.engines.values():
        engine.source = None
    cluster.settle()
    assert cluster.signals() == ["UPDATE_WEIGHTS"]
    cluster.coordinator.engines["demo-engine-1"].epoch = 0
    cluster.now += timedelta(minutes=1)
    assert cluster.step().reason == "RefreshingWeights"


def test_wrong_weights_wait_while_suspended(make_cluster: Any) -> None:
    cluster = make_cluster(**_on_volume("6")).settled()
    cluster.change(weights={"revision": "7"})
    cluster.change(desiredState="Suspended")
    _reboot(cluster, "demo-engine-0")
    cluster.settle()
    assert cluster.signals() == ["UPDATE_WEIGHTS", "PAUSE", "SUSPEND"]
    cluster.change(desiredState="Running")
    assert cluster.signals()[3:] == ["RESUME", "UNPAUSE", "UPDATE_WEIGHTS"]


def test_an_engine_that_still_reports_other_weights_after_an_update_gets_the_next_one_later(make_cluster: Any) -> None:
    cluster = make_cluster(**_on_volume("6")).settled()
    cluster.change(weights={"revision": "7"})
    cluster.coordinator.engines["demo-engine-0"].source = "/model/x/5"
    cluster.now += timedelta(minutes=1)
    for _ in range(3):
        cluster.step()
        cluster.tick()
        cluster.coordinator.engines["demo-engine-0"].source = "/model/x/5"
    decision = cluster.step()
    assert cluster.signals() == ["UPDATE_WEIGHTS"] * 2
    assert (decision.reason, 0 < decision.requeue_after <= 30) == ("WrongWeights", True)


@pytest.mark.parametrize("spec", [{}, _on_volume("6")])
def test_different_files_are_reported_if_the_engines_were_never_updated(
    make_cluster: Any, spec: dict[str, Any]
) -> None:
    cluster = make_cluster(replicas=2, **spec).settled()
    for name, digest in (("demo-engine-0", "aaaa"), ("demo-engine-1", "bbbb")):
        cluster.coordinator.engines[name].digest = digest
    cluster.settle()
    assert cluster.signals() == []
    assert "aaaa, bbbb; make the files" in cluster.condition("Degraded")["message"]
    assert cluster.state == "Running"


def test_different_files_of_one_revision_are_loaded_again_once_and_then_reported(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, **_on_volume("6")).settled()
    cluster.change(weights={"revision": "7"})
    cluster.coordinator.begun.clear()
    cluster.now += timedelta(minutes=1)
    for name, digest in (("demo-engine-0", "aaaa"), ("demo-engine-1", "bbbb")):
        cluster.coordinator.engines[name].digest = digest
    cluster.settle()
    assert cluster.signals() == ["UPDATE_WEIGHTS"]
    assert cluster.status["weights"]["differentDigests"] == ["aaaa", "bbbb"]
    assert "aaaa, bbbb; make the files" in cluster.condition("Degraded")["message"]
    cluster.now += timedelta(days=1)
    cluster.change(desiredState="Paused")
    assert cluster.signals() == ["UPDATE_WEIGHTS", "PAUSE"]
    for engine in cluster.coordinator.engines.values():
        engine.digest = "aaaa"
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"
    assert "differentDigests" not in cluster.status["weights"]


# --- The check of a new revision --------------------------------------------------------------------------------------

TYPO = {"source": {"builtin": "smollm2-153m"}}
NO_MODEL = '{"reason": "ModelSourceError", "rank": 0, "message": "model builtin:smollm2-153m does not exist"}'


def _rejects(word: str, *, code: int = 1, message: str = NO_MODEL) -> Callable[[list[str]], tuple[int, str]]:
    """Return a check that fails if an argument of the engine contains `word`."""
    return lambda arguments: (code, message) if any(word in argument for argument in arguments) else (0, "")


def _failing(make_cluster: Any, **fields: Any) -> Any:
    """Return a cluster of two engines whose last change has failed its check."""
    cluster = make_cluster(replicas=2)
    cluster.check = _rejects("smollm2-153m", **fields)
    cluster.settle()
    cluster.patch(model=TYPO)
    cluster.play_until(lambda: cluster.condition("Degraded")["status"] == "True")
    return cluster


def test_a_first_start_and_verbs_need_no_check(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    for state in ("Paused", "Suspended", "Running", "Stopped", "Running"):
        cluster.change(desiredState=state)
    cluster.change(replicas=3)
    assert cluster.checked == []
    assert cluster.status["verifiedRevisions"] == [cluster.status["revision"]]


@pytest.mark.parametrize("change", [{"model": TYPO}, {"engine": {"batching": {"maxRequests": 7}}}])
def test_nothing_is_drained_while_the_check_runs(make_cluster: Any, change: dict[str, Any]) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.check = lambda arguments: None
    cluster.change(**change)
    revision = cluster.status["revision"]
    assert cluster.status["plan"]["waitingOn"] == f"pod demo-check-{revision} to check revision {revision}"
    assert cluster.condition("Degraded")["status"] == "False"
    assert cluster.condition("Ready")["status"] == "True"
    assert (cluster.signals(), cluster.deleted_pods) == ([], [])
    cluster.check = lambda arguments: (0, "")
    cluster.settle()
    assert cluster.checked == [revision]
    assert cluster.status["updatedReplicas"] == 2
    assert not any("-check-" in name for name in cluster.pods)


def test_a_model_that_does_not_exist_costs_no_engine_and_its_correction_rolls_out(make_cluster: Any) -> None:
    cluster = _failing(make_cluster)
    cluster.settle()
    assert (cluster.signals(), cluster.deleted_pods) == ([], [])
    assert cluster.state == "Running"
    assert cluster.condition("Ready")["status"] == "True"
    degraded, progressing = cluster.condition("Degraded"), cluster.condition("Progressing")
    assert (degraded["reason"], progressing["reason"]) == ("WeightsMissing", "WeightsMissing")
    assert "model builtin:smollm2-153m does not exist; correct spec.model.source" in degraded["message"]
    assert "no engine is replaced" in progressing["message"]
    writes = cluster.status_writes
    cluster.settle()
    assert (cluster.status_writes, len(cluster.checked)) == (writes, 1)

    cluster.change(model={"source": {"builtin": "gemma3-270m"}})
    assert cluster.signals() == ["DRAIN", "PAUSE", "UNPAUSE"]
    assert cluster.status["updatedReplicas"] == 2
    assert cluster.condition("Degraded")["status"] == "False"
    assert len(cluster.checked) == 2
    assert not any("-check-" in name for name in cluster.pods)


def test_a_revert_of_a_failed_change_needs_no_check(make_cluster: Any) -> None:
    cluster = _failing(make_cluster)
    cluster.change(model={"source": {"builtin": "smollm2-135m"}})
    assert (cluster.signals(), cluster.deleted_pods, len(cluster.checked)) == ([], [], 1)
    assert "plan" not in cluster.status
    assert not any("-check-" in name for name in cluster.pods)


def test_a_return_to_a_revision_that_served_needs_no_check(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    for limit in (7, 64, 7):
        cluster.change(engine={"batching": {"maxRequests": limit}})
    assert len(cluster.checked) == len(set(cluster.checked)) == 2
    assert cluster.status["verifiedRevisions"][-1] == cluster.status["revision"]


@pytest.mark.parametrize("state", ["Paused", "Suspended", "Stopped", "Released"])
def test_verbs_work_on_the_revision_that_serves_while_a_check_has_failed(make_cluster: Any, state: str) -> None:
    cluster = _failing(make_cluster)
    before = {engine["revision"] for engine in cluster.status["engines"]}
    if state == "Released":
        state = "Suspended"
        cluster.patch(lifecycle={"suspend": {"level": "ReleasePods"}})
    cluster.change(desiredState=state)
    assert cluster.state == state
    cluster.change(desiredState="Running")
    assert cluster.status["ready"] == "2/2"
    assert {engine["revision"] for engine in cluster.status["engines"]} == before
    assert cluster.condition("Degraded")["reason"] == "WeightsMissing"
    assert len(cluster.checked) == 1


@pytest.mark.parametrize("begun", [True, False])
def test_engines_added_after_zero_replicas_do_not_get_a_revision_whose_check_has_not_passed(
    make_cluster: Any, begun: bool
) -> None:
    """begun: the check still runs when the engines are removed."""
    cluster = make_cluster(replicas=2)
    cluster.check = (lambda arguments: None) if begun else _rejects("smollm2-153m")
    cluster.settle()
    server = ChildRef("Deployment", "demo-server", "apps/v1")
    before, template = cluster.status["revision"], cluster.objects[server]["spec"]["template"]
    cluster.patch(model=TYPO)
    cluster.play_until(lambda: cluster.checked)
    cluster.settle()
    cluster.change(replicas=0)
    assert (cluster.state, cluster.engine_pods()) == ("Suspended", [])
    cluster.check = _rejects("smollm2-153m")
    cluster.change(replicas=2)
    assert (cluster.state, cluster.status["ready"]) == ("Running", "2/2")
    assert {engine["revision"] for engine in cluster.status["engines"]} == {before}
    assert cluster.objects[server]["spec"]["template"] == template
    assert cluster.condition("Degraded")["reason"] == "WeightsMissing"
    cluster.change(model={"source": {"builtin": "gemma3-270m"}})
    assert cluster.status["updatedReplicas"] == 2
    assert cluster.condition("Degraded")["status"] == "False"


def test_engines_added_after_zero_replicas_get_a_revision_whose_check_passed_meanwhile(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.check = lambda arguments: None
    cluster.patch(model={"source": {"builtin": "gemma3-270m"}})
    cluster.play_until(lambda: cluster.checked)
    cluster.change(replicas=0)
    cluster.check = lambda arguments: (0, "")
    cluster.settle()
    assert not any("-check-" in name for name in cluster.pods)
    cluster.change(replicas=2)
    assert (cluster.status["ready"], cluster.status["updatedReplicas"]) == ("2/2", 2)
    assert cluster.signals().count("DRAIN") <= 1
    assert len(cluster.checked) == 1


def test_a_stopped_resource_takes_a_revision_whose_check_was_deleted(make_cluster: Any) -> None:
    """The engines of a resource that does not serve report errors themselves."""
    cluster = _failing(make_cluster)
    cluster.change(desiredState="Stopped")
    cluster.remove("Pod", _check_pod(cluster)["metadata"]["name"], _check_pod(cluster)["metadata"]["uid"])
    cluster.settle()
    assert {engine["revision"] for engine in cluster.status["engines"]} == {cluster.status["revision"]}
    assert len(cluster.checked) == 1


def test_scaling_and_upkeep_continue_with_the_revision_that_serves(make_cluster: Any) -> None:
    cluster = _failing(make_cluster)
    serving = cluster.objects[ChildRef("StatefulSet", "demo-engine-0", "apps/v1")]
    del cluster.objects[ChildRef("StatefulSet", "demo-engine-1", "apps/v1")]
    cluster.change(replicas=3)
    assert cluster.status["ready"] == "3/3"
    for index in (1, 2):
        made = cluster.objects[ChildRef("StatefulSet", f"demo-engine-{index}", "apps/v1")]
        labels = (each["spec"]["template"]["metadata"]["labels"] for each in (made, serving))
        assert len({found["inference.megatron.dev/revision"] for found in labels}) == 1
    cluster.change(replicas=1)
    assert cluster.status["ready"] == "1/1"
    assert cluster.condition("Degraded")["reason"] == "WeightsMissing"


def test_an_engine_that_restarts_does_not_get_a_revision_whose_check_failed(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=1)
    cluster.check = _rejects("--max-requests")
    cluster.settle()
    before = cluster.status["engines"][0]["revision"]
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.play_until(lambda: cluster.condition("Degraded")["status"] == "True")
    cluster.coordinator.engines.clear()
    cluster.step()
    cluster.settle()
    assert (cluster.status["ready"], cluster.status["engines"][0]["revision"]) == ("1/1", before)


@pytest.mark.slow
def test_a_transient_failure_is_checked_again_with_a_growing_pause(make_cluster: Any) -> None:
    message = '{"reason": "HubUnavailableError", "message": "the hub does not answer"}'
    cluster = _failing(make_cluster, code=75, message=message)
    pauses = []
    for count in range(2, 6):
        failed = cluster.now
        while len(cluster.checked) < count:
            decision = cluster.step()
            cluster.now += timedelta(seconds=decision.requeue_after or 0)
            cluster.tick()
        pauses.append((cluster.now - failed).total_seconds())
    # The first pause began before the condition was Degraded.
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(pauses[1:])), pauses
    cluster.play(3)
    assert cluster.signals() == []
    assert "the hub does not answer" in cluster.condition("Degraded")["message"]
    cluster.check = lambda arguments: (0, "")
    cluster.play_until(lambda: cluster.status["updatedReplicas"] == 2, limit=400)


def test_a_deleted_check_runs_again(make_cluster: Any) -> None:
    cluster = _failing(make_cluster)
    cluster.check = lambda arguments: (0, "")
    cluster.remove("Pod", f"demo-check-{cluster.status['revision']}", _check_pod(cluster)["metadata"]["uid"])
    cluster.settle()
    assert len(cluster.checked) == 2
    assert cluster.status["updatedReplicas"] == 2


def _check_pod(cluster: Any) -> Any:
    return next(pod for name, pod in cluster.pods.items() if "-check-" in name)


def test_a_passed_check_is_remembered_by_the_next_operator(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.play_until(lambda: cluster.status["revision"] in cluster.status["verifiedRevisions"])
    cluster.vetted.clear()
    cluster.settle()
    assert len(cluster.checked) == 1
    assert cluster.status["updatedReplicas"] == 2


def test_the_last_of_many_edits_is_checked_alone(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.check = lambda arguments: None
    for limit in (5, 6, 7):
        cluster.patch(engine={"batching": {"maxRequests": limit}})
        cluster.play(4)
        assert sum("-check-" in name for name in cluster.pods) == 1
    assert _check_pod(cluster)["metadata"]["name"] == f"demo-check-{cluster.status['revision']}"


def test_engines_drained_for_a_change_serve_again_if_the_next_change_fails_its_check(make_cluster: Any) -> None:
    for change in ({"model": {"source": {"builtin": "gemma3-270m"}}}, {"engine": {"batching": {"maxRequests": 7}}}):
        cluster = make_cluster(replicas=2)
        cluster.check = _rejects("smollm2-153m")
        cluster.settle()
        cluster.patch(**change)
        cluster.play_until(lambda cluster=cluster: cluster.signals())
        cluster.change(model=TYPO)
        assert cluster.condition("Degraded")["reason"] == "WeightsMissing"
        assert cluster.status["ready"] == "2/2"
        assert not any(engine.draining for engine in cluster.coordinator.engines.values())


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "taint"}
                ]
            },
            "Unschedulable",
            "has no node: taint; add a toleration",
        ),
        (
            {"containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "ImagePullFailed",
            "check the image's name",
        ),
        (
            {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'},
            "ContainerConfigError",
            "create secret hub in the namespace of the resource, or correct "
            "spec.model.source.huggingFace.tokenSecretRef",
        ),
        (
            {"reason": "CreateContainerConfigError", "message": 'configmap "gone" not found'},
            "ContainerConfigError",
            "create configmap gone in the namespace of the resource, or correct spec.engine.podTemplate",
        ),
    ],
)
def test_a_check_pod_that_does_not_start_is_diagnosed(
    make_cluster: Any, status: dict[str, Any], reason: str, words: str
) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.check = lambda arguments: None
    hub = {"repo": "org/model", "tokenSecretRef": {"name": "hub", "key": "token"}}
    cluster.change(model={"source": {"huggingFace": hub}})
    _check_pod(cluster)["status"] = {"phase": "Pending", **status}
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == cluster.condition("Progressing")["reason"] == reason
    assert words in cluster.status["plan"]["waitingOn"]
    assert cluster.signals() == []


def test_a_check_pod_that_cannot_be_created_is_offered_again(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    cluster.step()
    pod = ChildRef("Pod", f"demo-check-{cluster.status['revision']}")
    cluster.reject.add(pod)
    cluster.play_until(lambda: cluster.condition("Degraded")["status"] == "True")
    assert cluster.condition("Degraded")["reason"] == "QuotaExceeded"
    assert cluster.signals() == []
    cluster.rejections[pod] = replace(cluster.rejections[pod], message='violates PodSecurity "restricted:latest"')
    cluster.step()
    assert cluster.condition("Degraded")["reason"] == "InvalidPodTemplate"
    assert cluster.condition("Degraded")["message"].endswith("; correct spec.engine.podTemplate")
    cluster.reject.clear()
    cluster.play_until(lambda: cluster.status["updatedReplicas"] == 2, limit=60)


def test_only_pods_of_this_resource_are_its_checks(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.check = lambda arguments: None
    cluster.change(engine={"batching": {"maxRequests": 7}})
    pod = _check_pod(cluster)
    pod["metadata"]["ownerReferences"][0]["uid"] = "another"
    pod["status"] = {"phase": "Succeeded"}
    cluster.reject.add(ChildRef("Pod", pod["metadata"]["name"]))
    cluster.play(20)
    assert cluster.signals() == []
    assert pod["metadata"]["name"] in cluster.pods


def test_weights_that_engines_hold_are_kept_while_another_model_fails_its_check(make_cluster: Any) -> None:
    source = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "/a/{revision}"}}}
    cluster = make_cluster(replicas=1, model=source, weights={"revision": "1"})
    cluster.check = _rejects("/typo/")
    cluster.settle()
    held = cluster.status["weights"]
    typo = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "/typo/{revision}"}}}
    cluster.change(model=typo, weights={"revision": "2"})
    assert cluster.status["weights"] == held
    cluster.change(model=source)
    assert cluster.coordinator.sources == ["/model/a/2"]
