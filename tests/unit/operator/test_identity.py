"""Whose pods and containers count: labels that no podTemplate overrides, pods by controller, our containers only."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.cluster.cache import Index, ResourceCache
from megatron_operator.cluster.kinds import CHILD_SELECTOR, POD_SELECTOR
from megatron_operator.cluster.projection import project_resource
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.render.check import check_pod
from megatron_operator.render.children import all_children
from megatron_operator.render.context import RenderContext, scale_selector
from megatron_operator.resource.names import (
    GROUP,
    LABEL_COMPONENT,
    LABEL_ENGINE,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_REVISION,
    LABEL_WEIGHTS,
)
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

OWN = (LABEL_NAME, LABEL_INSTANCE, LABEL_COMPONENT, LABEL_MANAGED_BY, LABEL_ENGINE, LABEL_REVISION, LABEL_WEIGHTS)
LABELS = st.dictionaries(
    st.sampled_from([*OWN, f"{GROUP}/later", "team", "app"]),
    st.sampled_from(
        [None, "", "Helm", "demo", "engine", "server", "coordinator", "demo-engine-1", "megatron-inference"]
    ),
)
COMPONENTS = ("engine", "server", "coordinator")


def _context(overlays: Mapping[str, Mapping[str, Any]]) -> RenderContext:
    """Return the context of a recorded spec, whose podTemplates no policy checks any more."""
    fields: dict[str, Any] = {
        name: {"podTemplate": {"metadata": {"labels": dict(overlays[name])}}} for name in overlays
    }
    fields["coordinator"] = {**fields.get("coordinator", {}), "replicas": 2}
    spec = parse_spec({**copy.deepcopy(MINIMAL), "replicas": 2, "parallelism": {"tensor": 2}, **fields})
    return RenderContext("demo", "default", "uid", spec, Settings(runtime_image="runtime:1", pod_policy=None))


def _pods(ctx: RenderContext) -> dict[str, dict[str, str]]:
    """Return the labels of the pods of every workload, by the name of the workload, and of the check."""
    workloads = [child for child in all_children(ctx) if "template" in child.get("spec", {})]
    found = {child["metadata"]["name"]: child["spec"]["template"]["metadata"]["labels"] for child in workloads}
    return {**found, "check": check_pod(ctx)["metadata"]["labels"]}


def _selectors(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Return every selector of pods in a manifest, by path."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _selectors(entry, f"{path}[{index}]")
    elif isinstance(value, dict):
        if "matchLabels" in value or "matchExpressions" in value:
            yield path, value
        elif path.endswith(".selector") and value:
            yield path, {"matchLabels": value}
        else:
            for key, entry in value.items():
                yield from _selectors(entry, f"{path}.{key}")


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", ())
    )


def _selected(ctx: RenderContext) -> dict[str, list[str]]:
    """Return the workloads that each selector matches, also those of watches and of the scale subresource."""
    pods = _pods(ctx)
    chosen = dict(
        pair
        for child in all_children(ctx)
        for pair in _selectors(child, f"{child['kind']}/{child['metadata']['name']}")
        if "namespaceSelector" not in pair[0]
    )
    for text in (CHILD_SELECTOR, POD_SELECTOR, scale_selector(ctx).partition(",apps.kubernetes.io/pod-index")[0]):
        chosen[text] = {"matchLabels": dict(part.split("=") for part in text.split(",") if "pod-index" not in part)}
    return {path: [name for name, labels in pods.items() if _matches(rule, labels)] for path, rule in chosen.items()}


EXPECTED = _selected(_context({}))


@given(overlays=st.fixed_dictionaries({name: LABELS for name in COMPONENTS}))
def test_no_label_of_a_pod_template_changes_what_a_selector_matches(overlays: dict[str, dict[str, Any]]) -> None:
    ctx = _context(overlays)
    assert len(EXPECTED) > 15
    assert all(EXPECTED.values()), "each selector matches pods"
    assert _selected(ctx) == EXPECTED
    plain = _pods(_context({}))
    for name, labels in _pods(ctx).items():
        own = {key: value for key, value in labels.items() if key in OWN or key.startswith(f"{GROUP}/")}
        expected = {**plain[name], **({LABEL_REVISION: labels[LABEL_REVISION]} if LABEL_REVISION in labels else {})}
        assert own == expected


def _pod(name: str, labels: dict[str, str], *, controller: tuple[str, str, str] | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "uid": f"uid-{name}", "labels": {LABEL_INSTANCE: "demo", **labels}}
    if controller is not None:
        kind, owner, uid = controller
        group = f"{GROUP}/v1beta1" if kind == "MegatronInference" else "apps/v1"
        reference = {"apiVersion": group, "kind": kind, "name": owner, "uid": uid, "controller": True}
        metadata["ownerReferences"] = [reference]
    return {"metadata": metadata, "status": {"phase": "Running"}}


@pytest.mark.parametrize(
    ("component", "controller", "ours"),
    [
        ("engine", ("StatefulSet", "demo-engine-0", "s"), True),
        ("engine", ("StatefulSet", "other", "s"), False),
        ("server", ("ReplicaSet", "demo-server-5d9c7b", "r"), True),
        ("server", ("ReplicaSet", "shop-5d9c7b", "r"), False),
        ("coordinator", ("ReplicaSet", "demo-coordinator-1", "r"), True),
        ("coordinator", ("ReplicaSet", "demo-server-1", "r"), False),
        ("server", ("Job", "demo-server", "j"), False),
        ("check", ("MegatronInference", "demo", "u"), True),
        ("check", ("MegatronInference", "demo", "an earlier one"), False),
        ("engine", None, True),
    ],
)
@pytest.mark.parametrize("manager", ["megatron-operator", "Helm"])
def test_pods_are_found_by_their_controller(
    component: str, controller: tuple[str, str, str] | None, ours: bool, manager: str
) -> None:
    labels = {LABEL_COMPONENT: component, LABEL_MANAGED_BY: manager}
    if component == "engine":
        labels[LABEL_ENGINE] = "demo-engine-0"
    pod = reduce_pod(_pod("pod", labels, controller=controller))
    metadata = {"name": "demo", "namespace": "prod", "uid": "u", "resourceVersion": "1", "generation": 1}
    index = Index(
        children={}, pods={("prod", "demo"): [pod]}, resources={"u": [project_resource({"metadata": metadata})]}
    )
    assert bool(ResourceCache(uid="u", key=("prod", "demo"), index=index).pods()) is ours


def _sidecar(restarts: int, *, name: str = "istio-proxy") -> dict[str, Any]:
    ended = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:00Z", "message": "sidecar"}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    return {
        "name": name,
        "ready": False,
        "restartCount": restarts,
        "state": waiting,
        "lastState": {"terminated": ended},
    }


@pytest.mark.parametrize("place", ["containerStatuses", "initContainerStatuses"], ids=["sidecar", "native sidecar"])
@pytest.mark.parametrize("component", ["engine", "server", "coordinator"])
def test_a_crashing_sidecar_does_not_count(component: str, place: str) -> None:
    cluster = Cluster({**copy.deepcopy(MINIMAL), "lifecycle": {"restartBudget": {"restarts": 1}}}).settled()
    name = next(name for name in cluster.pods if f"-{component}-" in name)
    uid = cluster.pods[name]["metadata"]["uid"]
    ours = {"name": component, "ready": True, "started": True, "restartCount": 0, "state": {"running": {}}}
    for restarts in range(1, 12):
        status = {
            "phase": "Running",
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
            ],
            "initContainerStatuses": [],
            "containerStatuses": [ours],
        }
        status[place] = [*status[place], _sidecar(restarts)]  # type: ignore[misc]
        cluster.pods[name]["status"] = status
        cluster.step()
        cluster.tick()
    assert cluster.pods[name]["metadata"]["uid"] == uid
    assert [cluster.condition(kind)["status"] for kind in ("Ready", "Degraded")] == ["True", "False"]
    assert [entry["count"] for entry in cluster.status["restarts"]] == [0, 0, 0]
    assert cluster.status["engines"][0]["restarts"] == 0
    assert not [event for event in cluster.events if event.reason.endswith("Crashed")]


def test_an_init_container_of_a_webhook_that_blocks_a_pod_is_named() -> None:
    cluster = Cluster(copy.deepcopy(MINIMAL)).settled()
    cluster.coordinator.engines.clear()
    cluster.pods["demo-engine-0-0"]["status"] = {
        "phase": "Pending",
        "conditions": [
            {"type": "Initialized", "status": "False"},
            {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
        ],
        "initContainerStatuses": [_sidecar(4, name="istio-init")],
        "containerStatuses": [
            {"name": "engine", "restartCount": 0, "state": {"waiting": {"reason": "PodInitializing"}}}
        ],
    }
    view = reduce_pod(cluster.pods["demo-engine-0-0"])
    assert (view.ended, view.reason, view.restarts) == ("istio-init", "CrashLoopBackOff", 0)


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (1, "Failed")])
def test_a_check_ends_with_its_container_although_a_sidecar_runs_on(code: int, phase: str) -> None:
    pod = _pod("demo-check-1", {LABEL_COMPONENT: "check"}, controller=("MegatronInference", "demo", "u"))
    ended = {"terminated": {"exitCode": code, "reason": "x", "finishedAt": "2026-01-01T00:00:00Z"}}
    pod["status"] = {
        "phase": "Running",
        "containerStatuses": [{"name": "engine", "state": ended}, {"name": "istio-proxy", "state": {"running": {}}}],
    }
    assert reduce_pod(pod).phase == phase
