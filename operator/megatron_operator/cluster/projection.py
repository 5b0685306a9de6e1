"""Projections of watched objects: the fields that decisions read, and the fields that identify a version of an
object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_operator.cluster.kinds import SECRET, ObjectKind
from megatron_operator.decision.reduce import owner_uid, reduce_child
from megatron_operator.decision.world import ChildRef, ChildView
from megatron_operator.resource.names import ANNOTATION_RESTARTED, ANNOTATION_UPDATE, FIELD_MANAGER, LABEL_INSTANCE

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SeenChild:
    """One version of a child, reduced to the fields that decisions read and the fields that identify the version."""

    ref: ChildRef
    version: int
    owner_uid: str
    """UID of the resource that owns the child; empty without an owner."""
    view: ChildView
    """The view for decisions. `owned` and `verified` are set when a World is created."""
    cluster_ip: str = ""
    """Virtual address of a Service; empty for a headless Service."""
    changed_by: str = ""
    """The other field manager that last changed the child, ignoring its status; empty if there is none."""
    owns_replicas: bool = False
    """Whether this operator's applies own `spec.replicas`."""

    @property
    def uid(self) -> str:
        return self.view.uid

    def may_be_of(self, owner_uid: str) -> bool:
        """Return whether the custom resource with this UID owns the child, or may adopt it.

        A keys Secret is adopted only if this operator created it (see `Observer`). Any other author of the keys could
        pose as the coordinator.
        """
        return self.owner_uid == owner_uid or (self.view.orphan and self.ref.kind != SECRET.kind)


@dataclass(frozen=True, slots=True)
class SeenResource:
    """One version of the custom resource, reduced to the fields that the operator reads."""

    name: str
    namespace: str
    uid: str
    version: int
    generation: int
    spec: Object
    status: Object
    deleting: bool
    changed_by: str
    restarted_at: str
    update_to: str


def version_of(obj: Object) -> int:
    """Return the resource version of an object as a number, which increases with each version of the object
    (KEP-5504).
    """
    return int(obj["metadata"].get("resourceVersion") or 0)


def instance_of(obj: Object) -> str:
    """Return the name of the custom resource to which a child or pod belongs, from its labels."""
    return str((obj["metadata"].get("labels") or {}).get(LABEL_INSTANCE, ""))


def project_child(obj: Object, kind: ObjectKind | None = None) -> SeenChild:
    """Return the fields of a child that decisions read, and those that identify its version.

    kind: kind of the child if `obj` comes from a list and has neither `apiVersion` nor `kind`.
    """
    if kind is not None:
        obj = {**obj, "apiVersion": kind.api_version, "kind": kind.kind}
    owner = owner_uid(obj)
    view = reduce_child(obj, owner_uid=owner or "none", verified=False)
    cluster_ip = str((obj.get("spec") or {}).get("clusterIP") or "") if obj["kind"] == "Service" else ""
    return SeenChild(
        ref=view.ref,
        version=version_of(obj),
        owner_uid=owner,
        view=view,
        cluster_ip="" if cluster_ip == "None" else cluster_ip,
        changed_by=_other_manager(obj["metadata"]),
        owns_replicas=any(entry.get("manager") == FIELD_MANAGER for entry in _owners(obj["metadata"], "f:replicas")),
    )


def project_resource(obj: Object) -> SeenResource:
    metadata = obj["metadata"]
    annotations = metadata.get("annotations") or {}
    return SeenResource(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        version=version_of(obj),
        generation=int(metadata.get("generation") or 0),
        spec=obj.get("spec") or {},
        status=obj.get("status") or {},
        deleting=metadata.get("deletionTimestamp") is not None,
        changed_by=_changed_by(metadata),
        restarted_at=str(annotations.get(ANNOTATION_RESTARTED, "")),
        update_to=str(annotations.get(ANNOTATION_UPDATE, "")),
    )


def _changed_by(metadata: Object) -> str:
    """Return the field manager that wrote last among those that own `spec.desiredState`.

    Returns an empty string if no field manager owns the field.
    """
    owners = _owners(metadata, "f:desiredState")
    latest = max(owners, key=lambda entry: str(entry.get("time") or ""), default=None)
    return str(latest.get("manager", "")) if latest else ""


def _other_manager(metadata: Object) -> str:
    others = [
        entry
        for entry in metadata.get("managedFields") or ()
        if entry.get("manager") != FIELD_MANAGER and not entry.get("subresource")
    ]
    latest = max(others, key=lambda entry: str(entry.get("time") or ""), default=None)
    return str(latest.get("manager") or "") if latest else ""


def _owners(metadata: Object, field: str) -> list[Object]:
    """Return the entries of `managedFields` whose managers own the field `field` of the spec."""
    return [
        entry
        for entry in metadata.get("managedFields") or ()
        if field in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]
