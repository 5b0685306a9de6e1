"""The operator is killed at every await of a run with all verbs and restarted: same end, no signal acts twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster
from soak import size

from .operator_task import DirectLink, InMemoryApi, KilledError, Points, Watch, new_operator

LIFE: tuple[dict[str, Any], ...] = (
    {},
    {"desiredState": "Paused"},
    {"desiredState": "Suspended"},
    {"desiredState": "Running"},
    {"engine": {"batching": {"maxRequests": 7}}},
    {"replicas": 1},
    {"rollout": {"maxSurge": 1}, "engine": {"batching": {"maxRequests": 8}}},
    {"lose": "demo-engine-0"},
    {"desiredState": "Stopped"},
    {"desiredState": "Running"},
)
STRIDE = size(37, soak=1)


async def live(points: Points) -> Cluster:
    """One life; a process that ends is followed by another with a higher term."""
    cluster = Cluster({**copy.deepcopy(MINIMAL), "replicas": 2}, security=False)
    api = InMemoryApi(cluster)
    watch = Watch(api)
    term = 1
    watch.show()
    task = new_operator(api, watch, DirectLink(cluster), term=term)
    for change in LIFE:
        if "lose" in change:
            cluster.lose_node(change["lose"])
            watch.show()
        elif change:
            cluster.patch(**change)
            watch.show()
        for _ in range(80):
            try:
                await points.run(task.run_once())
            except KilledError:
                term += 1
                task = new_operator(api, watch, DirectLink(cluster), term=term)
            cluster.tick()
            watch.show()
            if _settled(cluster):
                break
        else:
            raise AssertionError(f"{change} never settles: {cluster.status}")
    return cluster


def _settled(cluster: Cluster) -> bool:
    status = cluster.status
    goal = cluster.spec.get("desiredState", "Running")
    seen = status.get("observedGeneration") == cluster.generation
    terminating = any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())
    return seen and status["state"] == goal and "plan" not in status and not terminating


def outcome(cluster: Cluster) -> tuple[Any, ...]:
    """Where it ended, without times, ids and terms."""
    status = cluster.status
    assert cluster.coordinator is not None
    engines = [{key: value for key, value in engine.items() if key != "forgivenAt"} for engine in status["engines"]]
    objects = sorted(str(ref) for ref in cluster.objects)
    return status["state"], status["ready"], status["updatedReplicas"], engines, objects, sorted(cluster.pods)


@pytest.mark.slow
async def test_an_operator_killed_at_any_await_reaches_the_same_state_and_no_signal_acts_twice() -> None:
    whole = Points()
    reference = await live(whole)
    ids = [signal.operation_id for signal in reference.coordinator.begun]
    assert len(set(ids)) == len(ids)
    tried = range(1, whole.count + 1, STRIDE)
    for point in tried:
        cluster = await live(Points(end_at=point))
        assert outcome(cluster) == outcome(reference), f"killed at await {point}"
        # DRAIN may be repeated under a new id when the operator dies between its end and what it was for.
        assert _verbs(cluster) == _verbs(reference), f"killed at await {point}: {cluster.signals()}"
        begun = [signal.operation_id for signal in cluster.coordinator.begun]
        assert len(set(begun)) == len(begun), f"killed at await {point}: an operation acted twice"
    print(f"{len(tried)} of {whole.count} crash points")
    assert whole.count > 100


def _verbs(cluster: Cluster) -> list[str]:
    return [name for name in cluster.signals() if not name.startswith("DRAIN ")]


@pytest.mark.parametrize("term", [2])
async def test_a_successor_uses_its_own_term(term: int) -> None:
    cluster = await live(Points(end_at=40))
    assert cluster.coordinator is not None
    assert cluster.coordinator.fence == term


async def test_a_check_that_an_earlier_operator_created_is_found_before_the_watch_shows_it() -> None:
    cluster = Cluster({**copy.deepcopy(MINIMAL), "replicas": 2}, security=False)
    api = InMemoryApi(cluster)
    watch = Watch(api)
    watch.show()
    task = new_operator(api, watch, DirectLink(cluster), term=1)

    async def passes(count: int) -> None:
        for _ in range(count):
            await task.run_once()
            cluster.tick()

    for _ in range(20):
        await passes(1)
        watch.show()
    cluster.check = lambda arguments: None
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    watch.show()
    while not cluster.checked:
        await task.run_once()
    task = new_operator(api, watch, DirectLink(cluster), term=2)
    await passes(3)
    assert len(cluster.checked) == 1
    assert cluster.condition("Degraded")["status"] == "False"


async def test_a_foreign_pod_with_the_name_of_a_check_is_kept_and_named() -> None:
    cluster = Cluster({**copy.deepcopy(MINIMAL), "replicas": 2}, security=False)
    api = InMemoryApi(cluster)
    watch = Watch(api)
    task = new_operator(api, watch, DirectLink(cluster), term=1)

    async def passes(count: int) -> None:
        for _ in range(count):
            watch.show()
            await task.run_once()
            cluster.tick()

    await passes(20)
    cluster.check = lambda arguments: None
    cluster.patch(engine={"batching": {"maxRequests": 7}})
    await passes(5)
    (name,) = (name for name in cluster.pods if "-check-" in name)
    cluster.pods[name]["metadata"].pop("ownerReferences")
    await passes(5)
    assert cluster.condition("Degraded")["reason"] == "ChildRefused"
    assert f"Pod {name} in namespace default exists and is not owned" in cluster.condition("Degraded")["message"]
    assert name in cluster.pods
    assert cluster.signals() == []
