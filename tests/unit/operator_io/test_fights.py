"""Other programs: a fight over a child, a status that cannot be written, and a network fault of the operator itself."""

from __future__ import annotations

import asyncio
import copy
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.cache import FIGHT_APPLIES, FIGHT_SECONDS, Index, ResourceCache
from megatron_operator.cluster.projection import project_child
from megatron_operator.controller.task import EAGER_PASSES, ResourceTask, TaskSupervisor
from megatron_operator.decision.actions import ApplyChild, DeletePods
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot
from megatron_operator.decision.decide import decide
from megatron_operator.decision.losses import REPLACE_SECONDS, is_isolated
from megatron_operator.decision.world import ChildRef, Contest, manifest_hash

from .operator_task import DirectLink, InMemoryApi, Watch, new_operator

SERVER = ChildRef("Deployment", "demo-server", "apps/v1")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def _server(version: int, manager: str, *, ours: bool = True, **spec: Any) -> dict[str, Any]:
    """ours: whether the operator owns `spec.paused`."""
    fields = {"f:spec": {"f:paused": {}}} if ours else {}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "demo-server",
            "namespace": "prod",
            "uid": "d",
            "resourceVersion": str(version),
            "annotations": {"inference.megatron.dev/hash": "h"},
            "managedFields": [
                {
                    "manager": "megatron-operator",
                    "operation": "Apply",
                    "time": "2026-01-01T00:00:00Z",
                    "fieldsV1": fields,
                },
                {"manager": "kube-controller-manager", "subresource": "status", "time": "2026-01-01T00:00:09Z"},
                {"manager": manager, "time": "2026-01-01T00:00:01Z"},
            ],
        },
        "spec": spec,
    }


def _fight(cache: ResourceCache, index: Any, clock: Clock, *, seconds: float, writes: int = 200) -> int:
    """Let another program change the child after each apply for this time. Return the number of applies."""
    applies, end, version = 0, clock.now + seconds, 1
    while clock.now < end and applies < writes:
        contest = cache.contests().get(SERVER)
        if contest is None or contest.retry_in <= 0:
            version += 1
            cache.applied(project_child(_server(version, "other", paused=False)))
            applies += 1
        clock.now += 0.1
        version += 1
        index.children["prod", "demo"] = [project_child(_server(version, "other", ours=False, paused=True))]
        assert not cache.views()[SERVER].verified
    return applies


def test_a_fight_costs_at_most_one_apply_per_child_and_minute() -> None:
    clock, index = Clock(), Index(children={}, pods={}, resources={})
    cache = ResourceCache(uid="u", key=("prod", "demo"), index=index, clock=clock)
    assert _fight(cache, index, clock, seconds=5.0) == FIGHT_APPLIES
    contest = cache.contests()[SERVER]
    assert contest.opponent == "other"
    assert 0 < contest.retry_in <= FIGHT_SECONDS
    assert _fight(cache, index, clock, seconds=600.0) <= 10
    clock.now += 3 * FIGHT_SECONDS
    assert cache.contests() == {}
    assert _fight(cache, index, clock, seconds=1.0) == FIGHT_APPLIES, "a later fight is a new one"


def test_the_opponent_stays_named_if_the_last_version_does_not_show_it() -> None:
    clock, index = Clock(), Index(children={}, pods={}, resources={})
    cache = ResourceCache(uid="u", key=("prod", "demo"), index=index, clock=clock)
    _fight(cache, index, clock, seconds=5.0)
    index.children["prod", "demo"] = [project_child(_server(90, "megatron-operator", ours=False))]
    cache.applied(project_child(_server(91, "megatron-operator")))
    assert cache.contests()[SERVER].opponent == "other"


def test_another_manifest_or_a_new_object_is_no_fight() -> None:
    clock = Clock()
    cache = ResourceCache(uid="u", key=("prod", "demo"), index=Index(children={}, pods={}, resources={}), clock=clock)
    for version in range(20):
        server = _server(version, "other")
        server["metadata"]["annotations"]["inference.megatron.dev/hash"] = str(version)
        cache.applied(project_child(server))
        server = _server(version, "other")
        server["metadata"]["uid"] = str(version)
        cache.applied(project_child(server))
    assert cache.contests() == {}


def test_a_contested_child_waits_and_its_opponent_is_named() -> None:
    cluster = Cluster(copy.deepcopy(MINIMAL)).settled()
    server = cluster.objects[SERVER]
    cluster.unverified.add(SERVER)
    world = cluster.world()
    assert any(isinstance(action, ApplyChild) and action.ref == SERVER for action in decide(world).actions)
    contest = Contest(
        uid=server["metadata"]["uid"], hash=manifest_hash(server), replicas=0, opponent="meddler", retry_in=42.0
    )
    decision = decide(replace(world, contests={SERVER: contest}))
    assert not [action for action in decision.actions if isinstance(action, ApplyChild)]
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 42.0
    degraded = next(entry for entry in decision.status["conditions"] if entry["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ChildContested")
    assert "Deployment demo-server: field manager meddler" in degraded["message"]
    assert any(getattr(action, "reason", "") == "ChildContested" for action in decision.actions), "an Event"
    for changed in (replace(contest, retry_in=0.0), replace(contest, hash="another"), replace(contest, uid="new")):
        actions = decide(replace(world, contests={SERVER: changed})).actions
        assert any(isinstance(action, ApplyChild) and action.ref == SERVER for action in actions)


class Unwritable(InMemoryApi):
    """Rejects every write of a status."""

    code = 500

    async def _apply_status(self, body: Any) -> Any:
        await asyncio.sleep(0)
        raise KubeApiError(self.code, "Conflict" if self.code == 409 else "InternalError", "etcdserver: too large")


@pytest.mark.parametrize("code", [500, 422, 409])
async def test_an_unwritable_status_does_not_stop_healing(code: int) -> None:
    cluster = Cluster({**copy.deepcopy(MINIMAL), "replicas": 2}, security=False).settled()
    api, lost = Unwritable(cluster), []
    api.code = code
    for ref in list(cluster.objects):
        if ref.kind in ("Deployment", "Service", "StatefulSet"):
            lost.append(ref)
            del cluster.objects[ref]
    cluster.patch(desiredState="Paused")
    watch = Watch(api)
    watch.show()
    link = DirectLink(cluster)
    task = new_operator(api, watch, link, term=1)
    for _ in range(EAGER_PASSES + 2):
        with suppress(KubeApiError):
            await task.run_once()
    assert [ref for ref in lost if ref not in cluster.objects] == []
    assert cluster.coordinator is not None
    assert not cluster.coordinator.begun, "no signal without a durable intent"


@pytest.mark.parametrize(
    ("silent", "answering", "isolated"),
    [
        (["a", "b", "c"], 0, True),
        (["a", "a", "a"], 0, True),
        (["a", "b", "c"], 2, True),
        (["a", "b", "c"], 3, False),
        (["a", "a", "a"], 1, False),
        (["a", "b"], 0, False),
        ([], 5, False),
    ],
)
def test_many_silent_coordinators_accuse_the_operator(silent: list[str], answering: int, isolated: bool) -> None:
    assert is_isolated([frozenset({node}) for node in silent], answering=answering) is isolated


async def test_the_supervisor_counts_the_coordinators_of_its_tasks() -> None:
    class Task:
        def __init__(self, uid: str, silent: bool | None) -> None:
            self.uid, self.key = uid, ("ns", uid)
            self.coordinator = silent, frozenset({f"node-{uid}"})

        async def run(self) -> None:
            await asyncio.Event().wait()

        def wake(self) -> None:
            pass

    states: dict[str, bool | None] = {"1": True, "2": True, "3": True, "4": False, "5": None}

    def make(uid: str, *_: Any) -> ResourceTask:
        task: Any = Task(uid, states[uid])
        return task  # type: ignore[no-any-return]

    supervisor = TaskSupervisor(make)
    for uid in ("1", "2", "4", "5"):
        supervisor.wake_resource(uid, ("ns", uid))
    assert not supervisor.isolated
    supervisor.wake_resource("3", ("ns", "3"))
    assert supervisor.isolated
    await supervisor.stop()


def test_an_isolated_operator_replaces_no_coordinator() -> None:
    cluster = Cluster(copy.deepcopy(MINIMAL)).settled()
    cluster.now += timedelta(seconds=60)
    world = cluster.world()
    pods = tuple(replace(pod, created_at=cluster.now - timedelta(seconds=50)) for pod in world.pods)
    silent = CoordinatorSnapshot(error="silent", lost_seconds=REPLACE_SECONDS + 1, unknown_seconds=10.0)
    world = replace(world, pods=pods, coordinator=silent)
    assert any(isinstance(action, DeletePods) for action in decide(world).actions)
    decision = decide(replace(world, isolated=True))
    assert not [action for action in decision.actions if isinstance(action, DeletePods)]
    degraded = next(entry for entry in decision.status["conditions"] if entry["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "OperatorIsolated")
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 5.0
