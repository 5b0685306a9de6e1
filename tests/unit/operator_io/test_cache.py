"""The cache never trails what this process wrote, and never shows what is proven gone."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_operator.cluster.cache import WATCH_LAG_SECONDS, Index, ResourceCache
from megatron_operator.cluster.projection import project_child, project_resource
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.decision.world import ChildRef
from megatron_operator.resource.names import ANNOTATION_HASH

KEY = ("prod", "demo")
REF = ChildRef("Deployment", "demo-coordinator", "apps/v1")
OWNER = {"apiVersion": "inference.megatron.dev/v1beta1", "kind": "MegatronInference", "name": "demo", "uid": "u"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def deployment(
    version: int, *, uid: str = "d1", owner: bool = True, owned: tuple[str, ...] = ("f:replicas",), **spec: Any
) -> dict[str, Any]:
    """owned: fields of the spec that the operator's applies own."""
    ours = {"manager": "megatron-operator", "operation": "Apply", "fieldsV1": {"f:spec": {name: {} for name in owned}}}
    other = {"manager": "other", "operation": "Update", "fieldsV1": {"f:spec": {"f:paused": {}}}}
    metadata: dict[str, Any] = {"name": REF.name, "namespace": "prod", "uid": uid, "resourceVersion": str(version)}
    metadata["managedFields"] = [ours, other]
    if owner:
        metadata["ownerReferences"] = [OWNER]
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"replicas": 1, **spec}}


def resource(version: int, **status: Any) -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "prod", "uid": "u", "resourceVersion": str(version), "generation": 1}
    return {"metadata": metadata, "spec": {}, "status": status}


@pytest.fixture
def index() -> Index:
    return Index(children={}, pods={}, resources={"u": [project_resource(resource(5))]})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(index: Index, clock: Clock) -> ResourceCache:
    return ResourceCache(uid="u", key=KEY, index=index, clock=clock)


def test_written_status_is_read_before_the_watch_shows_it(index: Index, cache: ResourceCache) -> None:
    cache.wrote_resource(project_resource(resource(9, state="Paused")))
    seen = cache.resource()
    assert seen is not None
    assert seen.status == {"state": "Paused"}

    index.resources["u"] = [project_resource(resource(12, state="Other"))]
    seen = cache.resource()
    assert seen is not None
    assert seen.version == 12


def test_gone_resource_is_none(index: Index, cache: ResourceCache) -> None:
    cache.wrote_resource(project_resource(resource(9)))
    index.resources.clear()
    assert cache.resource() is None


def test_applied_child_is_there_and_verified_before_and_after_the_watch_shows_it(
    index: Index, cache: ResourceCache
) -> None:
    cache.applied(project_child(deployment(20)))
    view = cache.views()[REF]
    assert (view.owned, view.verified) == (True, True)

    index.children[KEY] = [project_child({**deployment(25), "status": {"readyReplicas": 1}})]
    view = cache.views()[REF]
    assert (view.verified, view.ready_replicas) == (True, 1)


def test_older_watch_event_does_not_hide_the_write(index: Index, cache: ResourceCache) -> None:
    index.children[KEY] = [project_child(deployment(10))]
    cache.applied(project_child(deployment(20, replicas=3)))
    assert cache.views()[REF].replicas == 3


def test_a_child_changed_by_another_manager_is_not_verified(index: Index, cache: ResourceCache) -> None:
    cache.applied(project_child(deployment(20)))
    index.children[KEY] = [project_child(deployment(30, paused=True))]
    assert cache.views()[REF].verified, "a field that the operator does not apply"
    index.children[KEY] = [project_child(deployment(31, owned=(), replicas=7))]
    assert not cache.views()[REF].verified


def test_an_annotation_of_another_program_begins_no_rollout(index: Index, cache: ResourceCache) -> None:
    def rolled_out(version: int, *, generation: int, observed: int, **spec: Any) -> bool:
        obj = deployment(version, **spec)
        obj["metadata"] |= {"generation": generation, "annotations": {ANNOTATION_HASH: spec.get("hash", "1")}}
        obj["status"] = {"observedGeneration": observed, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
        index.children[KEY] = [project_child(obj)]
        return cache.views()[REF].rolled_out

    assert not rolled_out(20, generation=2, observed=1), "this process does not know what has changed"
    assert rolled_out(21, generation=2, observed=2)
    assert rolled_out(22, generation=3, observed=2), "neither the manifest nor its fields' owner has changed"
    assert rolled_out(23, generation=3, observed=3)
    assert not rolled_out(24, generation=4, observed=3, hash="2"), "another manifest was applied"
    assert rolled_out(25, generation=4, observed=4, hash="2")
    assert not rolled_out(26, generation=5, observed=4, hash="2", owned=()), "another program has changed our field"


def test_child_never_applied_by_this_process_is_not_verified(index: Index, cache: ResourceCache) -> None:
    index.children[KEY] = [project_child(deployment(20))]
    assert not cache.views()[REF].verified


def test_child_of_another_owner_is_not_owned(index: Index, cache: ResourceCache) -> None:
    index.children[KEY] = [project_child(deployment(20, owner=False))]
    assert not cache.views()[REF].owned


def test_write_that_the_watch_never_shows_is_looked_up_and_dropped_if_gone(cache: ResourceCache, clock: Clock) -> None:
    cache.applied(project_child(deployment(20)))
    assert cache.lagging() == []
    clock.now += WATCH_LAG_SECONDS + 1
    assert cache.lagging() == [REF]

    cache.observed(REF, None, before=cache.child(REF))
    assert cache.views() == {}


def test_a_child_that_is_made_while_an_older_one_is_found_gone_stays(index: Index, cache: ResourceCache) -> None:
    cache.applied(project_child(deployment(20)))
    before = cache.child(REF)
    index.children[KEY] = [project_child(deployment(30, uid="d2"))]

    cache.observed(REF, None, before=before)

    found = cache.child(REF)
    assert found is not None
    assert found.uid == "d2"


def test_deletion_shows_as_deleting_until_the_watch_drops_it(index: Index, cache: ResourceCache) -> None:
    index.children[KEY] = [project_child(deployment(20))]
    cache.deleted("d1")
    assert cache.views()[REF].deleting

    index.children[KEY] = [project_child(deployment(40, uid="d2"))]
    assert not cache.views()[REF].deleting


def test_the_audit_finds_a_missed_deletion(index: Index, cache: ResourceCache) -> None:
    index.children[KEY] = [project_child(deployment(20))]
    index.pods[KEY] = [reduce_pod(pod("a", "p1")), reduce_pod(pod("b", "p2"))]

    cache.audited([], [reduce_pod(pod("b", "p2"))], before=cache.uids())

    assert cache.views() == {}
    assert [view.name for view in cache.pods()] == ["b"]


def test_an_object_deleted_during_the_audit_is_not_restored_by_it(index: Index, cache: ResourceCache) -> None:
    index.children[KEY] = [project_child(deployment(20))]
    before = cache.uids()
    index.children[KEY] = []

    cache.audited([project_child(deployment(20))], [], before=before)

    assert cache.views() == {}


def test_an_object_created_during_the_audit_is_kept(index: Index, cache: ResourceCache, clock: Clock) -> None:
    """Or a pod that begins in that moment would be hidden for its whole life, and never be replaced."""
    index.pods[KEY] = [reduce_pod(pod("a", "p1"))]
    before = cache.uids()
    index.pods[KEY] = [reduce_pod(pod("a", "p1")), reduce_pod(pod("b", "p2"))]
    index.children[KEY] = [project_child(deployment(20))]
    clock.now = 2 * WATCH_LAG_SECONDS

    cache.audited([], [reduce_pod(pod("a", "p1"))], before=before)
    assert [pod.uid for pod in cache.pods()] == ["p1", "p2"]
    assert REF in cache.views()

    cache.audited([], [reduce_pod(pod("b", "p2"))], before=cache.uids())
    assert [pod.uid for pod in cache.pods()] == ["p2"]
    assert cache.views() == {}


def test_audit_leaves_alone_what_was_just_written_and_adds_what_the_watch_missed(
    index: Index, cache: ResourceCache
) -> None:
    cache.applied(project_child(deployment(20)))
    service = {**deployment(7, uid="s1"), "apiVersion": "v1", "kind": "Service"}
    service["spec"] = {"clusterIP": "10.96.0.9"}

    cache.audited([project_child(service)], [], before=cache.uids())

    assert set(cache.views()) == {REF, ChildRef("Service", REF.name, "v1")}
    child = cache.child(ChildRef("Service", REF.name, "v1"))
    assert child is not None
    assert child.cluster_ip == "10.96.0.9"


def pod(name: str, uid: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "prod", "uid": uid, "resourceVersion": "3"}, "status": {}}


def test_changed_by_is_the_manager_that_wrote_desired_state_last() -> None:
    raw = resource(3)
    wanted = {"f:spec": {"f:desiredState": {}}}
    raw["metadata"]["managedFields"] = [
        {"manager": "helm", "time": "2026-01-01T00:00:00Z", "fieldsV1": wanted},
        {"manager": "kubectl-patch", "time": "2026-01-02T00:00:00Z", "fieldsV1": wanted},
        {"manager": "megatron-operator", "time": "2026-01-03T00:00:00Z", "fieldsV1": {"f:status": {}}},
    ]
    assert project_resource(raw).changed_by == "kubectl-patch"


def test_a_created_pod_is_there_before_the_watch_shows_it_and_not_after_its_deletion(
    index: Index, cache: ResourceCache
) -> None:
    cache.created(reduce_pod(pod("a", "p1")))
    assert [view.uid for view in cache.pods()] == ["p1"]
    cache.deleted("p1")
    assert [view.deleting for view in cache.pods()] == [True]

    index.pods[KEY] = [reduce_pod(pod("a", "p1"))]
    assert [view.uid for view in cache.pods()] == ["p1"]
    index.pods[KEY] = []
    assert cache.pods() == ()


def test_the_audit_forgets_a_created_pod_that_the_watch_never_showed(cache: ResourceCache) -> None:
    cache.created(reduce_pod(pod("a", "p1")))
    before = cache.uids()
    cache.created(reduce_pod(pod("b", "p2")))
    cache.audited([], [], before=before)
    assert [view.uid for view in cache.pods()] == ["p2"]
