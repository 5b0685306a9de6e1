"""The restart budget: what is an incident, when incidents are forgiven, and when a failed engine starts again."""

from __future__ import annotations

import copy
import json
from datetime import timedelta
from typing import Any

import pytest

from megatron_operator.resource.text import parse

LIMIT = {"restartBudget": {"restarts": 5, "windowSeconds": 600}}
ENGINE = "demo-engine-0"


def end(pod: dict[str, Any], restarts: int, message: str = "no such weights", **ended: Any) -> None:
    """Let the container of a pod have ended so often, last with these fields."""
    state = {"exitCode": 3, "reason": "Error", "finishedAt": "x", "message": message, **ended}
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    pod["status"]["containerStatuses"] = [
        {
            "name": "engine",
            "restartCount": restarts,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": state},
        }
    ]


def crash(cluster: Any, restarts: int, **how: Any) -> Any:
    """Make a pass that finds the containers of the first engine with so many restarts."""
    for pod in cluster.pods.values():
        if pod["metadata"]["labels"].get("inference.megatron.dev/engine") == ENGINE:
            end(pod, restarts, **how)
    cluster.tick()
    return cluster.step()


def exhaust(cluster: Any, **how: Any) -> dict[str, Any]:
    """Crash the first engine until its budget is exhausted. Return its status."""
    cluster.broken_engines.add(ENGINE)
    for restarts in range(1, 20):
        crash(cluster, restarts, **how)
        if "diagnosis" in cluster.status["engines"][0]:
            break
    cluster.settle()
    engine: dict[str, Any] = cluster.status["engines"][0]
    assert engine["state"] == "Failed"
    assert not [name for name in cluster.engine_pods() if name.startswith(ENGINE)]
    return engine


def test_a_crashing_engine_is_diagnosed_and_not_restarted_beyond_its_budget(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle=LIMIT)
    cluster.broken_engines.add(ENGINE)
    cluster.settle()
    ready = cluster.condition("Ready")
    assert ready["reason"] == "CrashLooping"
    assert "exit code 3" in ready["message"]
    assert "no such weights" in ready["message"]
    for restarts in range(4, 6):
        crash(cluster, restarts)
        assert "diagnosis" not in cluster.status["engines"][0]
    crash(cluster, 6)
    cluster.settle()
    assert cluster.state == "Failed"
    assert cluster.engine_pods() == []
    assert "no such weights" in cluster.status["engines"][0]["diagnosis"]
    assert "retryAt" not in cluster.status["engines"][0]
    cluster.broken_engines.clear()
    cluster.now += timedelta(days=1)
    cluster.settle()
    assert cluster.state == "Failed"
    cluster.change(engine={"batching": {"maxRequests": 3}})
    assert cluster.state == "Running"


def test_a_lost_rank_of_six_pods_is_one_incident(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle=LIMIT, parallelism={"pipeline": 6}).settled()
    for lost in range(1, 6):
        for number in range(6):
            end(cluster.pods[f"{ENGINE}-{number}"], lost)
            cluster.step()
        assert cluster.status["engines"][0]["restarts"] == lost
        assert "diagnosis" not in cluster.status["engines"][0]
    crash(cluster, 6)
    assert "diagnosis" in cluster.status["engines"][0]


def test_a_pod_that_is_created_again_is_not_charged(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle={"restartBudget": {"restarts": 0}}).settled()
    end(cluster.pods[f"{ENGINE}-0"], 0)
    del cluster.pods[f"{ENGINE}-0"]
    cluster.settle()
    assert cluster.state == "Running"
    crash(cluster, 1)
    assert "diagnosis" in cluster.status["engines"][0]


@pytest.mark.parametrize(
    ("seconds", "fails"),
    [(59.0, False), (10.0, True)],  # one restart is forgiven in 20 s
)
def test_restarts_are_forgiven_one_after_another(make_cluster: Any, seconds: float, fails: bool) -> None:
    cluster = make_cluster(lifecycle={"restartBudget": {"restarts": 3, "windowSeconds": 60}}).settled()
    for restarts in range(1, 12):
        crash(cluster, restarts)
        if cluster.engine_pods():
            cluster.now += timedelta(seconds=seconds)
    assert ("diagnosis" in cluster.status["engines"][0]) is fails


def test_restarts_from_before_the_budget_are_not_charged(make_cluster: Any) -> None:
    """A restart command begins a new budget. The pods and their restart counts stay."""
    cluster = make_cluster(lifecycle=LIMIT)
    cluster.broken_engines.add(ENGINE)
    cluster.settle()
    cluster.restarted_at = "2026-01-01T00:00:00Z"
    for restarts in (9, 10, 14):
        crash(cluster, restarts)
        assert "diagnosis" not in cluster.status["engines"][0]
    crash(cluster, 15)
    assert "more than 5 restarts" in cluster.status["engines"][0]["diagnosis"]


def test_pods_of_a_reverted_revision_do_not_count(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle=LIMIT).settled()
    cluster.broken_engines.add(ENGINE)
    cluster.change(engine={"batching": {"maxRequests": 3}})
    assert cluster.condition("Ready")["reason"] == "CrashLooping"
    cluster.spec["engine"] = {}
    cluster.patch()
    crashing = copy.deepcopy(cluster.pods)
    cluster.step()
    replaced, cluster.pods = cluster.pods, crashing  # The news of their deletion comes after that of a last restart.
    for pod in crashing.values():
        if "containerStatuses" in pod["status"]:
            pod["status"]["containerStatuses"][0]["restartCount"] = 12
    cluster.step()
    cluster.pods = replaced
    assert "diagnosis" not in cluster.status["engines"][0]
    cluster.broken_engines.clear()
    cluster.settle()
    assert cluster.state == "Running"


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        ({"engine": {"batching": {"maxRequests": 3}}}, True),
        ({"lifecycle": {"restartBudget": {"restarts": 9, "windowSeconds": 600}}}, True),
        ({"replicas": 2}, False),
        ({"server": {"replicas": 2}}, False),
    ],
)
def test_only_other_inputs_of_the_engines_begin_new_budgets(
    make_cluster: Any, change: dict[str, Any], starts: bool
) -> None:
    cluster = make_cluster(lifecycle=LIMIT).settled()
    exhaust(cluster)
    cluster.broken_engines.clear()
    cluster.change(**change)
    assert (f"{ENGINE}-0" in cluster.engine_pods()) is starts


def test_a_restart_command_starts_only_failed_engines_again(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, lifecycle=LIMIT).settled()
    exhaust(cluster)
    other = cluster.pods["demo-engine-1-0"]["metadata"]["uid"]
    cluster.broken_engines.clear()
    cluster.restarted_at = "2026-01-01T00:00:00Z"
    cluster.settle()
    assert cluster.status["ready"] == "2/2"
    assert cluster.pods["demo-engine-1-0"]["metadata"]["uid"] == other


def test_a_resource_that_was_stopped_has_new_budgets(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle=LIMIT).settled()
    exhaust(cluster)
    cluster.broken_engines.clear()
    for goal in ("Stopped", "Running"):
        cluster.change(desiredState=goal)
        assert cluster.state == goal


RANK_LOST = json.dumps({"reason": "RankLost", "rank": 3, "message": "Connection closed by peer", "remedy": ""})


@pytest.mark.parametrize(
    ("how", "retried"),
    [
        ({"message": "the rendezvous timed out"}, True),
        ({"message": "No space left on device"}, True),
        ({"message": "", "reason": "ContainerStatusUnknown", "exitCode": 137}, True),
        ({"message": "", "reason": "Unknown", "exitCode": 255}, True),
        ({"message": RANK_LOST}, True),
        ({"message": "no such weights"}, False),
        ({"message": "", "reason": "OOMKilled", "exitCode": 137}, False),
        ({"message": "Segmentation fault", "exitCode": 139}, False),
    ],
)
def test_an_engine_is_started_again_after_a_cause_in_the_infrastructure(
    make_cluster: Any, how: dict[str, Any], retried: bool
) -> None:
    cluster = make_cluster(lifecycle=LIMIT).settled()
    engine = exhaust(cluster, **how)
    assert ("retryAt" in engine) is retried
    waits = cluster.condition("Ready")["message"]
    assert ("the next start at" if retried else "kubectl megatron restart") in waits
    cluster.broken_engines.clear()
    cluster.now += timedelta(hours=1)
    cluster.settle()
    assert cluster.state == ("Running" if retried else "Failed")


def test_an_engine_whose_gpu_failed_gets_new_pods_at_its_first_incident(make_cluster: Any) -> None:
    """A container that restarts keeps its device. A failed kernel is charged like any other crash."""
    cluster = make_cluster(lifecycle=LIMIT)
    cluster.settle()
    crash(cluster, 1, message="CUDA error: an illegal memory access was encountered")
    assert "diagnosis" not in cluster.status["engines"][0]
    crash(cluster, 2, message="CUDA error: uncorrectable ECC error encountered")
    cluster.settle()
    assert not [name for name in cluster.engine_pods() if name.startswith(ENGINE)]
    engine = cluster.status["engines"][0]
    assert engine["diagnosis"].startswith("a GPU failed: the engine gets new pods elsewhere; ")
    assert "uncorrectable ECC error" in engine["diagnosis"]
    assert parse(engine["retryAt"]) - cluster.now <= timedelta(seconds=60)
    cluster.now += timedelta(seconds=61)
    cluster.settle()
    assert cluster.state == "Running"


def excluded(cluster: Any) -> list[str]:
    """Return the nodes that the pod of the first engine must not use, by each term of its affinity."""
    spec = cluster.pods[f"{ENGINE}-0"]["spec"]
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution", {}
    )
    return [
        name
        for term in required.get("nodeSelectorTerms", ())
        for field in term.get("matchFields", ())
        for name in field["values"]
    ]


def fail_device(cluster: Any, node: str) -> None:
    cluster.pods[f"{ENGINE}-0"]["spec"]["nodeName"] = node
    crash(cluster, 1, message="CUDA error: uncorrectable ECC error encountered")
    cluster.settle()
    cluster.now = parse(cluster.status["engines"][0]["retryAt"])
    cluster.settle()


def test_new_pods_avoid_the_nodes_of_failed_devices_for_a_time(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle=LIMIT).settled()
    revision = cluster.status["revision"]
    for number in range(5):
        fail_device(cluster, f"node-{number}")
        assert excluded(cluster) == [f"node-{each}" for each in range(number + 1)][-3:]
        assert (cluster.state, cluster.status["revision"]) == ("Running", revision)
    uid = cluster.pods[f"{ENGINE}-0"]["metadata"]["uid"]
    cluster.pods[f"{ENGINE}-0"]["spec"]["nodeName"] = "node-9"
    cluster.now = parse(cluster.status["engines"][0]["avoidedUntil"])
    cluster.settle()
    assert "avoidedNodes" not in cluster.status["engines"][0]
    assert cluster.pods[f"{ENGINE}-0"]["metadata"]["uid"] == uid, "an engine that runs is left alone"


def test_a_pod_that_finds_no_other_node_returns_to_that_of_the_failed_device_later(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle=LIMIT).settled()
    fail_device(cluster, "node-0")
    pod = cluster.pods[f"{ENGINE}-0"]
    assert (excluded(cluster), pod["spec"].get("nodeName")) == (["node-0"], None)
    until = parse(cluster.status["engines"][0]["avoidedUntil"])
    cluster.now = until - timedelta(seconds=1)
    assert cluster.step().requeue_after <= 1
    assert cluster.pods[f"{ENGINE}-0"]["metadata"]["uid"] == pod["metadata"]["uid"]
    cluster.now = until
    cluster.settle()
    assert excluded(cluster) == []
    assert cluster.pods[f"{ENGINE}-0"]["metadata"]["uid"] != pod["metadata"]["uid"]
    assert cluster.state == "Running"


def test_an_avoided_node_is_excluded_beside_the_affinity_of_the_pod_template(make_cluster: Any) -> None:
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}}
    template = {"spec": {"affinity": {"nodeAffinity": required}}}
    cluster = make_cluster(lifecycle=LIMIT, engine={"podTemplate": template}).settled()
    fail_device(cluster, "node-0")
    assert excluded(cluster) == ["node-0", "node-0"], "a pod needs one term only"
    terms = cluster.pods[f"{ENGINE}-0"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert [term["matchExpressions"] for term in terms] == [zone["matchExpressions"] for zone in zones]


def test_a_cause_in_one_pod_is_that_of_the_ranks_that_lost_it(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle={"restartBudget": {"restarts": 1}}, parallelism={"pipeline": 2}).settled()
    for restarts in (1, 2):
        end(cluster.pods[f"{ENGINE}-0"], restarts, RANK_LOST)
        end(cluster.pods[f"{ENGINE}-1"], restarts, "", reason="OOMKilled", exitCode=137)
        cluster.tick()
        cluster.step()
    engine = cluster.status["engines"][0]
    assert "retryAt" not in engine
    assert "killed at its memory limit" in engine["diagnosis"]


def test_the_time_between_attempts_grows_and_ends_with_the_cause(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle=LIMIT).settled()
    exhaust(cluster, message="the rendezvous timed out")
    waits = []
    for _ in range(7):
        cluster.tick()
        left = cluster.step().requeue_after
        retry_at = parse(cluster.status["engines"][0]["retryAt"])
        assert left <= (retry_at - cluster.now).total_seconds()
        cluster.now = retry_at
        cluster.step()
        cluster.tick()
        crash(cluster, 1, message="the rendezvous timed out")
        engine = cluster.status["engines"][0]
        assert engine["state"] == "Failed"
        waits.append((parse(engine["retryAt"]) - cluster.now).total_seconds())
    assert waits == [120, 240, 480, 960, 1800, 1800, 1800]
    cluster.broken_engines.clear()
    cluster.now += timedelta(seconds=1800)
    cluster.settle()
    assert cluster.state == "Running"
    cluster.now += timedelta(seconds=601)
    assert exhaust(cluster, message="the rendezvous timed out").get("retries") is None


def test_an_engine_that_is_killed_at_each_start_fails_however_slowly(make_cluster: Any) -> None:
    """The backoff of a kubelet (300 s) is longer than the time in which one restart is forgiven (120 s)."""
    cluster = make_cluster(lifecycle=LIMIT)
    cluster.broken_engines.add(ENGINE)
    cluster.step()
    cluster.tick()
    for restarts in range(1, 8):
        crash(cluster, restarts, message="", reason="OOMKilled", exitCode=137)
        cluster.now += timedelta(seconds=300)
    cluster.settle()
    engine = cluster.status["engines"][0]
    assert (cluster.state, engine["state"]) == ("Failed", "Failed")
    assert "spec.engine.podTemplate, or lower spec.engine.batching.kvCacheMemory" in engine["diagnosis"]


def test_an_engine_that_served_in_between_has_its_restarts_forgiven_by_time(make_cluster: Any) -> None:
    cluster = make_cluster(lifecycle=LIMIT).settled()
    for restarts in range(1, 12):
        crash(cluster, restarts)
        cluster.coordinator.engines.pop(ENGINE, None)
        cluster.step()
        cluster.pods[f"{ENGINE}-0"]["status"]["conditions"][0]["status"] = "True"
        cluster.settle()
        assert "incidents" not in cluster.status["engines"][0]
        cluster.now += timedelta(seconds=300)
    assert cluster.state == "Running"
