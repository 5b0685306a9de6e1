"""Placeholders in the podTemplate of engines, the pods of one engine as a group of a scheduler, required topology."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.decision.decide import decide
from megatron_operator.render.check import check_pod
from megatron_operator.render.context import InvalidPodTemplate, RenderContext
from megatron_operator.render.engine import engine_revision, engine_statefulset
from megatron_operator.render.revision import context_of, revision_child
from megatron_operator.resource.pod_policy import PodPolicy
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

COSCHEDULING = {
    "metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "$(ENGINE_NAME)", "team": "a"}},
    "spec": {"schedulerName": "coscheduling"},
}
VOLCANO = {
    "metadata": {"annotations": {"scheduling.k8s.io/group-name": "group-$(ENGINE_INDEX)", "note": "$(OTHER)"}},
    "spec": {
        "schedulerName": "volcano",
        "resourceClaims": [{"name": "channel", "resourceClaimName": "channel-$(ENGINE_INDEX)"}],
    },
}
OWN_CACHE = {
    "spec": {
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled-$(ENGINE_NAME)"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": "files"}},
        ]
    }
}
KUEUE = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}}
RACK = "example.com/rack"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def context(**engine: Any) -> RenderContext:
    spec = {**MINIMAL, "replicas": 2, "parallelism": {"tensor": 4}, "engine": {"ranksPerPod": 2, **engine}}
    settings = Settings(runtime_image="runtime:1", pod_policy=PodPolicy(metadata=("team", "note")))
    return RenderContext("demo", "default", "u", parse_spec(spec), settings)


def template(ctx: RenderContext, index: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = engine_statefulset(ctx, index, pods=2)["spec"]["template"]
    return found


def test_labels_annotations_and_claims_name_the_engine() -> None:
    assert template(context(podTemplate=COSCHEDULING))["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == (
        "demo-engine-1"
    )
    volcano = template(context(podTemplate=VOLCANO))
    annotations = {"scheduling.k8s.io/group-name": "group-1", "note": "$(OTHER)"}
    assert volcano["metadata"]["annotations"] == annotations
    assert volcano["spec"]["resourceClaims"][0]["resourceClaimName"] == "channel-1"


def claims(pod: dict[str, Any]) -> dict[str, str]:
    """Return the claims of a pod by the names of its volumes."""
    return {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }


def test_each_engine_has_a_claim_for_its_cache_and_the_check_has_an_empty_volume() -> None:
    ctx = context(podTemplate=OWN_CACHE)
    pods = [template(ctx, index)["spec"] for index in range(2)]
    assert [claims(pod) for pod in pods] == [
        {"cache": "compiled-demo-engine-0", "shared": "files"},
        {"cache": "compiled-demo-engine-1", "shared": "files"},
    ]
    check = check_pod(ctx)["spec"]
    assert claims(check) == {"shared": "files"}
    assert {"name": "cache", "emptyDir": {}} in check["volumes"]


def test_the_name_of_a_volume_has_no_placeholder() -> None:
    """The pod policy allows mounts by the names of volumes: `node-0` is mounted writable, `node-$(ENGINE_INDEX)` is a
    directory of the node."""
    volume = {"name": "node-$(ENGINE_INDEX)", "hostPath": {"path": "/srv"}}
    mount = {"name": "node-0", "mountPath": "/mnt"}
    ctx = context(
        podTemplate={"spec": {"volumes": [volume], "containers": [{"name": "engine", "volumeMounts": [mount]}]}}
    )
    allowed = replace(ctx, settings=replace(ctx.settings, pod_policy=PodPolicy(host_paths=("/srv",))))
    assert volume in template(allowed, 0)["spec"]["volumes"]


def test_placeholders_are_not_replaced_in_variables_of_containers() -> None:
    variable = {"name": "A", "value": "$(ENGINE_NAME)"}
    ctx = context(podTemplate={"spec": {"containers": [{"name": "engine", "env": [variable]}]}})
    trusted = replace(ctx, settings=replace(ctx.settings, pod_policy=PodPolicy(profile="trusted")))
    (container,) = template(trusted)["spec"]["containers"]
    assert variable in container["env"]


def test_engines_of_one_spec_have_one_revision_that_depends_on_the_placeholders() -> None:
    ctx = context(podTemplate=COSCHEDULING)
    revisions = {engine_revision(engine_statefulset(ctx, index, pods=2)) for index in range(3)}
    assert len(revisions) == 1
    # Engine 0 has the same template with this one, and engine 1 another.
    fixed = {**COSCHEDULING, "metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "demo-engine-0", "team": "a"}}}
    first = context(podTemplate=fixed)
    assert template(first, 0)["spec"]["schedulerName"] == "coscheduling"
    assert engine_revision(engine_statefulset(first, 0, pods=2)) not in revisions


def test_a_recorded_revision_renders_the_same_engines() -> None:
    ctx = context(podTemplate=COSCHEDULING, topology={"packBy": RACK})
    record = revision_child(ctx)
    revision = record["metadata"]["name"].rpartition("-")[2]
    stored = context_of(replace(ctx, spec=context().spec), record["data"], revision=revision)
    assert stored is not None
    assert engine_statefulset(stored, 1, pods=2) == engine_statefulset(ctx, 1, pods=2)


def test_a_queue_of_kueue_is_that_of_the_statefulset() -> None:
    labels = engine_statefulset(context(podTemplate=KUEUE), 1, pods=2)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "kueue.x-k8s.io/queue-name" not in engine_statefulset(context(), 1, pods=2)["metadata"]["labels"]


@pytest.mark.parametrize("overlay", [COSCHEDULING, VOLCANO, KUEUE], ids=["coscheduling", "Volcano", "Kueue"])
def test_the_pod_that_checks_a_revision_joins_no_group(overlay: dict[str, Any]) -> None:
    metadata = check_pod(context(podTemplate=overlay))["metadata"]
    grouping = ("kueue.x-k8s.io/queue-name", "scheduling.x-k8s.io/pod-group", "scheduling.k8s.io/group-name")
    assert not [key for key in grouping if key in {**metadata["labels"], **metadata["annotations"]}]
    if overlay is COSCHEDULING:
        assert metadata["labels"]["team"] == "a"


def test_all_pods_of_an_engine_must_share_a_domain() -> None:
    affinity = template(context(topology={"packBy": RACK}))["spec"]["affinity"]
    (rule,) = affinity["podAffinity"][REQUIRED]
    assert rule["topologyKey"] == RACK
    labels = template(context(topology={"packBy": RACK}))["metadata"]["labels"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
    other = template(context(topology={"packBy": RACK}), 0)["metadata"]["labels"]
    assert not rule["labelSelector"]["matchLabels"].items() <= other.items()


def test_the_rule_is_added_to_the_affinity_of_the_pod_template_and_the_default_one() -> None:
    own = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "store"}}}
    spread = {"podAntiAffinity": {REQUIRED: [own]}, "podAffinity": {REQUIRED: [own]}}
    overlay = {"spec": {"affinity": spread}}
    affinity = template(context(topology={"packBy": RACK}, podTemplate=overlay))["spec"]["affinity"]
    assert affinity["podAntiAffinity"] == spread["podAntiAffinity"]
    assert [rule["topologyKey"] for rule in affinity["podAffinity"][REQUIRED]] == ["zone", RACK]
    near = template(context(topology={"packBy": RACK}, gpusPerPod=2))["spec"]["affinity"]["podAffinity"]
    assert set(near) == {REQUIRED, "preferredDuringSchedulingIgnoredDuringExecution"}


def test_an_engine_of_one_pod_needs_no_rule() -> None:
    with_one = {"ranksPerPod": 4, "topology": {"packBy": RACK}}
    assert template(context(**with_one)) == template(context(ranksPerPod=4))


@pytest.mark.parametrize("affinity", [[1], "x", {"podAffinity": [1]}, {"podAffinity": {REQUIRED: {"a": 1}}}])
def test_another_type_of_affinity_is_an_error(affinity: Any) -> None:
    ctx = context(topology={"packBy": RACK}, podTemplate={"spec": {"affinity": affinity}})
    with pytest.raises(InvalidPodTemplate, match=r"spec.engine.podTemplate.spec.affinity: is "):
        template(ctx)


@pytest.mark.parametrize("key", ["", "a b", "/rack", "Example.com/rack", "example.com/"])
def test_the_key_is_that_of_a_label(key: str) -> None:
    with pytest.raises(ValueError, match=r"the key of a label of nodes"):
        context(topology={"packBy": key})


def test_the_status_says_that_no_domain_has_room(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(parallelism={"tensor": 2}, engine={"ranksPerPod": 1, "topology": {"packBy": RACK}})
    cluster.settle()
    message = "0/4 nodes are available: 2 Insufficient nvidia.com/gpu, 2 node(s) didn't match pod affinity rules."
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    cluster.pods["demo-engine-0-1"]["status"] = {"phase": "Pending", "conditions": [scheduled]}
    assert cluster.coordinator is not None
    del cluster.coordinator.engines["demo-engine-0"]
    conditions = {entry["type"]: entry for entry in decide(cluster.world()).status["conditions"]}
    assert conditions["Degraded"]["reason"] == "Unschedulable"
    assert "spec.engine.topology.packBy" in conditions["Degraded"]["message"]
