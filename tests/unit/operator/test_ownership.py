"""A child that is as it was applied needs no apply after a restart: the operator owns every field of its manifest."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.decision.ownership import covers
from megatron_operator.decision.world import ChildRef

KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "imagePullSecrets": ("name",),
}
MAY_BE_EMPTY = ("f:emptyDir", "f:podSelector", "f:namespaceSelector")
"""Maps that are applied without content, so that nothing is lost with them."""
PORTS = {"Service": ("port", "protocol"), "other": ("containerPort", "protocol")}


def fields_of(value: Any, kind: str, name: str = "") -> dict[str, Any]:
    """Return what the API server records for an applied value: the schema gives some lists keys, all others are owned
    as a whole."""
    if isinstance(value, dict):
        return {f"f:{key}": fields_of(each, kind, key) for key, each in value.items() if each != []}
    keys = PORTS.get(kind, PORTS["other"]) if name == "ports" and kind != "NetworkPolicy" else KEYS.get(name)
    if not isinstance(value, list) or keys is None:
        return {}
    defaults = {"protocol": "TCP"}
    return {
        "k:" + json.dumps({key: item.get(key, defaults.get(key)) for key in keys}): {".": {}, **fields_of(item, kind)}
        for item in value
    }


def manifests() -> list[dict[str, Any]]:
    cluster = Cluster(copy.deepcopy(MINIMAL)).settled()
    found = []
    for ref, stored in cluster.objects.items():
        if ref.kind in ("Secret", "ControllerRevision"):
            continue
        manifest = copy.deepcopy(stored)
        for key in ("uid", "resourceVersion", "creationTimestamp", "generation"):
            manifest["metadata"].pop(key, None)
        manifest.pop("status", None)
        found.append(manifest)
    return found


def owned(manifest: dict[str, Any]) -> dict[str, Any]:
    content = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata")}
    metadata = {key: value for key, value in manifest["metadata"].items() if key not in ("name", "namespace")}
    return fields_of({"metadata": metadata, **content}, manifest["kind"])


def without_each(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fields without each of them in turn, as after a change by another program."""
    for name, below in fields.items():
        if name == ".":
            continue
        rest = {key: each for key, each in fields.items() if key != name}
        if (
            rest and name not in MAY_BE_EMPTY
        ):  # a map that lost all its fields is not recorded any more, and its parent has lost it
            yield name, rest
        for path, smaller in without_each(below):
            yield f"{name}/{path}", {**fields, name: smaller}


@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: str(ChildRef.of(each)))
def test_any_field_that_another_program_takes_is_noticed(manifest: dict[str, Any]) -> None:
    fields = owned(manifest)
    assert covers(json.dumps(fields), manifest)
    lost = [path for path, smaller in without_each(fields) if covers(json.dumps(smaller), manifest)]
    assert lost == []


def test_a_child_that_was_never_applied_is_not_covered() -> None:
    assert not covers("", {"kind": "Service", "apiVersion": "v1", "metadata": {"name": "a"}})


def test_items_are_found_by_keys_with_defaults_and_values_by_themselves() -> None:
    manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "a", "finalizers": ["x"]},
        "spec": {"ports": [{"port": 1}]},
    }
    port = {'k:{"port":1,"protocol":"TCP"}': {".": {}, "f:port": {}}}
    fields = {"f:metadata": {"f:finalizers": {'v:"x"': {}}}, "f:spec": {"f:ports": port}}
    assert covers(json.dumps(fields), manifest)
    manifest["spec"]["ports"].append({"port": 2})  # type: ignore[index]
    assert not covers(json.dumps(fields), manifest)
