"""Objects that the spec names: each is looked up before pods that need it replace others, and may come and go later.

The fields are found by walking the schema for names of objects, and a pod template has every kind of reference.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster
from spec_changes import BASES, SCHEMA, leaves, owner_of

from megatron_operator.decision.decide import decide
from megatron_operator.decision.references import pod_references
from megatron_operator.decision.world import ANY_KEY, ChildRef
from megatron_operator.render.context import RenderContext
from megatron_operator.render.server import server_deployment
from megatron_operator.resource.spec import parse_spec

RESOLVED_BY_OTHERS = {
    "server.ingress.className",
    "server.ingress.tlsSecretName",  # cert-manager creates it for an Ingress that exists
    "server.service.loadBalancerClass",
    "server.httpRoute.parentRefs[].name",
    "server.httpRoute.parentRefs[].namespace",
    "server.httpRoute.parentRefs[].sectionName",
    "server.inferencePool.endpointPickerRef.name",
}
"""Names that no pod of the resource refers to."""


def _schema(path: str) -> dict[str, Any]:
    found = SCHEMA
    for part in path.split("."):
        found = found["properties"][part.removesuffix("[]")]
        found = found["items"] if part.endswith("[]") else found
    return found


NAMES = [path for path in leaves() if (_schema(path).get("minLength"), _schema(path).get("maxLength")) == (1, 253)]
FIELDS = sorted({*NAMES} - RESOLVED_BY_OTHERS)


def test_the_exceptions_are_names() -> None:
    assert {*NAMES} >= RESOLVED_BY_OTHERS
    assert len(FIELDS) > 8


def _cluster(field: str) -> tuple[Cluster, ChildRef, frozenset[str] | None]:
    """Return a settled resource whose field then names another object, that object, and what it lacks."""
    spec = copy.deepcopy(next(base for base in BASES.values() if owner_of(base, field) is not None))
    cluster = Cluster(spec)
    cluster.settings = replace(cluster.settings, pod_policy=None)
    cluster.settle()
    known = decide(cluster.world()).objects
    owner, name = owner_of(cluster.spec, field), field.rpartition(".")[2]
    assert owner is not None
    owner[name] = "other"
    cluster.generation += 1
    if name == "key":
        ref = ChildRef("Secret", owner["name"])
        return cluster, ref, frozenset({"earlier"})
    (ref,) = decide(cluster.world()).objects - known
    return cluster, ref, None


def _templates(cluster: Cluster) -> dict[str, Any]:
    kinds = ("Deployment", "StatefulSet")
    return {ref.name: obj["spec"]["template"] for ref, obj in cluster.objects.items() if ref.kind in kinds}


@pytest.mark.parametrize("field", FIELDS)
def test_what_a_field_names_is_checked_before_it_is_used_and_may_come_later(field: str) -> None:
    cluster, ref, lacking = _cluster(field)
    before, pods = copy.deepcopy(_templates(cluster)), set(cluster.pods)
    cluster.named[ref] = lacking
    cluster.step()
    for _ in range(4):
        for kind in ("Degraded", "Progressing"):
            assert cluster.condition(kind)["status"] == "True"
            assert f"spec.{field.removesuffix('.key').removesuffix('Ref.name')}" in cluster.condition(kind)["message"]
            assert f"or correct spec.{field.partition('.')[0]}" in cluster.condition(kind)["message"]
        assert cluster.condition("Ready")["status"] == "True"
        assert (_templates(cluster), set(cluster.pods)) == (before, pods)
        cluster.tick()
        cluster.step()
    cluster.named[ref] = frozenset({"other", "token", "keys", "tls.crt", "tls.key"})
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == cluster.condition("Progressing")["status"] == "False"
    assert _templates(cluster) != before


@pytest.mark.parametrize("field", FIELDS)
def test_what_a_field_names_may_be_deleted_and_created_again(field: str) -> None:
    cluster, ref, _ = _cluster(field)
    cluster.settle()
    pods = set(cluster.pods)
    cluster.named[ref] = None
    decision = cluster.step()
    assert cluster.condition("Degraded")["status"] == "True"
    assert cluster.condition("Ready")["status"] == "True"
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 10, "it is looked up again soon"
    cluster.named[ref] = frozenset({ANY_KEY})
    cluster.settle()
    assert (cluster.condition("Degraded")["status"], set(cluster.pods)) == ("False", pods)


@pytest.mark.parametrize("field", FIELDS)
def test_a_new_resource_does_not_wait_for_what_a_field_names(field: str) -> None:
    """Its pods wait: a tool may create the objects in any order."""
    cluster, ref, lacking = _cluster(field)
    created = Cluster(cluster.spec)
    created.settings, created.named = cluster.settings, {ref: lacking}
    created.step()
    deployments = {found.name for found in created.objects if found.kind == "Deployment"}
    assert {"demo-coordinator", "demo-server"} <= deployments
    assert created.condition("Degraded")["status"] == "True"


TEMPLATE: dict[str, Any] = {
    "imagePullSecrets": [{"name": "pull"}],
    "serviceAccountName": "account",
    "priorityClassName": "priority",
    "runtimeClassName": "runtime",
    "volumes": [
        {"name": "a", "secret": {"secretName": "files", "items": [{"key": "k", "path": "p"}]}},
        {"name": "b", "configMap": {"name": "config"}},
        {"name": "c", "projected": {"sources": [{"secret": {"name": "part"}}, {"configMap": {"name": "piece"}}]}},
        {"name": "d", "persistentVolumeClaim": {"claimName": "claim"}},
        {"name": "e", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "publish"}}},
        {"name": "f", "secret": {"secretName": "if-any", "optional": True}},
    ],
    "initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "all"}}, {"configMapRef": {"name": "some"}}]}],
    "containers": [
        {
            "name": "server",
            "env": [
                {"name": "A", "valueFrom": {"secretKeyRef": {"name": "one", "key": "k"}}},
                {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "two", "key": "k", "optional": True}}},
            ],
        }
    ],
    "resourceClaims": [
        {"name": "own", "resourceClaimName": "device"},
        {"name": "each", "resourceClaimTemplateName": "devices"},
    ],
    "nodeSelector": {"secret": "x", "configMap": "y"},
}


def _server(template: dict[str, Any]) -> tuple[RenderContext, dict[str, Any]]:
    spec = parse_spec({**MINIMAL, "server": {"podTemplate": {"spec": template}}})
    ctx = RenderContext("demo", "default", "u", spec, replace(Cluster(MINIMAL).settings, pod_policy=None))
    return ctx, server_deployment(ctx)


def test_every_reference_of_a_pod_template_is_found() -> None:
    found = {(str(each.ref), each.key, each.optional) for each in pod_references(*_server(TEMPLATE))}
    assert found == {
        ("ServiceAccount account", "", False),
        ("PriorityClass priority", "", False),
        ("RuntimeClass runtime", "", False),
        ("PersistentVolumeClaim claim", "", False),
        ("ResourceClaim device", "", False),
        ("ResourceClaimTemplate devices", "", False),
        ("Secret files", "k", False),
        ("ConfigMap two", "k", True),
        ("Secret one", "k", False),
        ("Secret if-any", "", True),
        *((f"Secret {name}", "", False) for name in ("pull", "part", "publish", "all")),
        *((f"ConfigMap {name}", "", False) for name in ("config", "piece", "some")),
    }


@pytest.mark.parametrize("value", [7, "x", [7], {"secret": 7}, [{"secret": {"secretName": 7, "items": {"key": 1}}}]])
@pytest.mark.parametrize("field", ["volumes", "imagePullSecrets", "affinity", "serviceAccountName", "resourceClaims"])
def test_a_pod_template_of_any_form_is_walked(field: str, value: Any) -> None:
    ctx, manifest = _server({})
    manifest["spec"]["template"]["spec"][field] = value
    assert isinstance(pod_references(ctx, manifest), list)


@pytest.mark.parametrize("component", ["coordinator", "server"])
@pytest.mark.parametrize("entry", TEMPLATE["volumes"][:5], ids=lambda entry: entry["name"])
def test_pods_are_not_replaced_by_pods_that_could_not_start(make_cluster: Any, component: str, entry: Any) -> None:
    """A coordinator most of all, because its old pod ends first."""
    cluster: Cluster = make_cluster()
    cluster.settings = replace(cluster.settings, pod_policy=None)
    cluster.settle()
    before = copy.deepcopy(_templates(cluster))
    cluster.spec[component] = {"podTemplate": {"spec": {"volumes": [entry]}}}
    cluster.generation += 1
    refs = decide(cluster.world()).objects
    cluster.named |= dict.fromkeys(refs)
    cluster.play(4)
    assert _templates(cluster) == before
    assert f"spec.{component}.podTemplate" in cluster.condition("Degraded")["message"]
    cluster.named |= dict.fromkeys(refs, frozenset({"k"}))
    cluster.settle()
    assert _templates(cluster) != before
    assert cluster.condition("Degraded")["status"] == "False"


def test_an_engine_is_not_replaced_before_its_own_claim_exists(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(replicas=2)
    cluster.settle()
    first, second = sorted(name for name, pod in cluster.pods.items() if "engine-" in name)
    before = cluster.pods[second]["metadata"]["uid"]
    claim = {"persistentVolumeClaim": {"claimName": "compiled-$(ENGINE_INDEX)"}}
    cluster.patch(engine={"podTemplate": {"spec": {"volumes": [{"name": "cache", **claim}]}}})
    missing = ChildRef("PersistentVolumeClaim", "compiled-1")
    cluster.named |= {ChildRef("PersistentVolumeClaim", "compiled-0"): frozenset({ANY_KEY}), missing: None}
    cluster.play(20)
    assert cluster.pods[second]["metadata"]["uid"] == before
    assert cluster.condition("Degraded")["reason"] == "VolumeMissing"
    assert "create persistentvolumeclaim compiled-1" in cluster.condition("Degraded")["message"]
    cluster.named[missing] = frozenset({ANY_KEY})
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"
    for index, name in enumerate((first, second)):
        volume = {"name": "cache", "persistentVolumeClaim": {"claimName": f"compiled-{index}"}}
        assert volume in _templates(cluster)[name.removesuffix("-0")]["spec"]["volumes"]
    assert cluster.pods[second]["metadata"]["uid"] != before
