"""A spec with fields of a later release: the operator ignores and reports them, and does everything else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_values import GOOD
from in_memory_cluster import Cluster
from pydantic import ValidationError

from megatron_operator.decision.world import ChildRef
from megatron_operator.manifest_file import ResourceFileError, resource_of
from megatron_operator.resource.crd import custom_resource_definition
from megatron_operator.resource.names import API_VERSION, KIND
from megatron_operator.resource.spec import parse_spec, parse_stored_spec

DEFAULTS = Path(__file__).with_name("crd-defaults.json")
SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
LATER = {"laterField": True, "laterSection": {"seconds": 3, "list": [1, {"a": None}]}}


def _defaults(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Return the default of every field of a schema, by path."""
    if "default" in schema:
        yield path, schema["default"]
    for name, field in schema.get("properties", {}).items():
        yield from _defaults(field, f"{path}.{name}")
    if "items" in schema:
        yield from _defaults(schema["items"], f"{path}[]")


def _upgraded(value: Any) -> Any:
    """Add later fields to every object of a spec, as the defaults of a later CRD do; not to untyped ones."""
    if isinstance(value, list):
        return [_upgraded(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    untyped = ("podTemplate", "args", "requests", "labels", "annotations")
    known = {name: entry if name in untyped else _upgraded(entry) for name, entry in value.items()}
    return {**known, **copy.deepcopy(LATER)}


def _full_spec(**fields: Any) -> dict[str, Any]:
    """Return a spec as the API server stores it: with all defaults."""
    spec = {"model": {"source": {"builtin": "smollm2-135m"}}, "replicas": 2, **fields}
    return parse_spec(spec).model_dump(mode="json", by_alias=True, exclude_none=True)


def _unknown(cluster: Cluster) -> dict[str, Any]:
    return cluster.condition("UnknownFields")


def test_a_new_field_has_no_default_in_the_crd() -> None:
    recorded = json.loads(DEFAULTS.read_text())
    new = {path: value for path, value in _defaults(SCHEMA, "spec") if recorded.get(path, ...) != value}
    assert not new, (
        "an operator of an earlier release does not know these defaults and may reject the stored spec; declare each "
        "field as `T | None = None` and apply its default in the operator"
    )


@pytest.mark.parametrize("spec", [GOOD, _full_spec()], ids=["good", "defaults"])
def test_later_fields_are_left_out_at_every_depth_and_named(spec: dict[str, Any]) -> None:
    typed, unknown = parse_stored_spec(_upgraded(spec))
    assert typed == parse_spec(spec)
    assert {"spec.laterField", "spec.model.source.laterSection"} <= set(unknown)
    assert parse_stored_spec(spec) == (typed, ())


def test_a_known_field_with_a_wrong_value_is_still_rejected() -> None:
    with pytest.raises(ValidationError, match="replicas"):
        parse_stored_spec({**_upgraded(GOOD), "replicas": "two"})


def test_offline_commands_reject_unknown_fields() -> None:
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "demo"}, "spec": _upgraded(GOOD)}
    with pytest.raises(ResourceFileError, match=r"spec\.laterField"):
        resource_of(manifest, origin="file.yaml")


def test_a_running_resource_is_not_touched_by_an_upgrade_of_the_crd_or_a_rollback() -> None:
    cluster = Cluster(_full_spec()).settled()
    objects, pods, before = copy.deepcopy(cluster.objects), copy.deepcopy(cluster.pods), cluster.spec
    cluster.spec = _upgraded(cluster.spec)
    cluster.settle()
    assert (cluster.state, cluster.status["ready"]) == ("Running", "2/2")
    assert (cluster.objects, cluster.pods) == (objects, pods)
    found = _unknown(cluster)
    assert (found["status"], found["reason"]) == ("True", "FieldsIgnored")
    assert "spec.laterField" in found["message"]
    assert "upgrade the operator" in found["message"]
    assert [cluster.condition(kind)["status"] for kind in ("Ready", "Degraded")] == ["True", "False"]
    assert [event.reason for event in cluster.events].count("FieldsIgnored") == 1
    cluster.spec = before
    cluster.settle()
    assert _unknown(cluster)["status"] == "False"
    assert (cluster.objects, cluster.pods) == (objects, pods)


def test_verbs_and_healing_go_on_with_later_fields() -> None:
    cluster = Cluster(_upgraded(_full_spec())).settled()
    for goal in ("Paused", "Running", "Suspended", "Running", "Stopped", "Running"):
        cluster.change(desiredState=goal)
        assert cluster.state == goal
    for ref in [ref for ref in cluster.objects if ref.kind in ("Deployment", "StatefulSet", "Service")]:
        del cluster.objects[ref]
        cluster.settle()
        assert ref in cluster.objects
    assert cluster.status["ready"] == "2/2"


def test_a_recorded_revision_of_a_later_release_is_read() -> None:
    cluster = Cluster(_full_spec()).settled()
    record = next(obj for ref, obj in cluster.objects.items() if ref.kind == "ControllerRevision")
    record["data"]["spec"] = _upgraded(record["data"]["spec"])
    cluster.patch(rollout={"paused": True}, engine={"batching": {"maxRequests": 7}})
    cluster.settle()
    revision = cluster.status["engines"][0]["revision"]
    del cluster.objects[ChildRef("StatefulSet", "demo-engine-0", "apps/v1")]
    cluster.settle()
    assert (cluster.status["ready"], cluster.status["engines"][0]["revision"]) == ("2/2", revision)
