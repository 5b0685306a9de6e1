"""The objects that pods refer to by name and that the operator does not create."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_operator.decision.world import ChildRef
from megatron_operator.render.context import Manifest, RenderContext
from megatron_operator.render.pod import config_name

CLAIM = "PersistentVolumeClaim"
_KINDS = {
    "secret": "Secret",
    "secretRef": "Secret",
    "secretKeyRef": "Secret",
    "nodePublishSecretRef": "Secret",
    "imagePullSecrets": "Secret",
    "configMap": "ConfigMap",
    "configMapRef": "ConfigMap",
    "configMapKeyRef": "ConfigMap",
    "persistentVolumeClaim": CLAIM,
}
"""Kinds of objects that fields anywhere in a pod can name."""
_OF_PODS = {
    "serviceAccountName": ("ServiceAccount", "v1"),
    "priorityClassName": ("PriorityClass", "scheduling.k8s.io/v1"),
    "runtimeClassName": ("RuntimeClass", "node.k8s.io/v1"),
}
"""Kinds and API versions of the objects that top-level fields of a pod's spec name."""
_OF_CLAIMS = {"resourceClaimName": "ResourceClaim", "resourceClaimTemplateName": "ResourceClaimTemplate"}
"""Kinds of the objects that entries of a pod's `resourceClaims` name."""
_NAMES = ("name", "secretName", "claimName")


@dataclass(frozen=True, slots=True)
class PodReference:
    """An object that a pod refers to.

    key:      key that the object must contain; empty if it needs no key.
    optional: whether the pod starts without the object.
    """

    ref: ChildRef
    key: str = ""
    optional: bool = False


def pod_references(ctx: RenderContext, manifest: Manifest) -> list[PodReference]:
    """Return the objects that the pods of a Deployment or StatefulSet refer to.

    The objects that the operator creates are left out.
    """
    pod = manifest["spec"]["template"]["spec"]
    named = ((kind, pod.get(field), version) for field, (kind, version) in _OF_PODS.items())
    found = [PodReference(ChildRef(*each)) for each in named if isinstance(each[1], str)]
    found += [*_claims(pod), *_references(pod)]
    ours = {("Secret", ctx.keys_name), ("ConfigMap", config_name(ctx)), ("ServiceAccount", ctx.name)}
    return [each for each in dict.fromkeys(found) if (each.ref.kind, each.ref.name) not in ours]


def _claims(pod: Manifest) -> Iterator[PodReference]:
    claims = pod.get("resourceClaims")
    for claim in claims if isinstance(claims, list) else ():
        for field, kind in _OF_CLAIMS.items():
            name = claim.get(field) if isinstance(claim, dict) else None
            if isinstance(name, str):
                yield PodReference(ChildRef(kind, name, "resource.k8s.io/v1"))


def _references(node: dict[str, Any] | list[Any]) -> Iterator[PodReference]:
    """Yield the objects that a part of a pod refers to.

    A podTemplate may have set this part, so it can have any structure.
    """
    for field, value in node.items() if isinstance(node, dict) else enumerate(node):
        if field in _KINDS:
            for entry in value if field == "imagePullSecrets" and isinstance(value, list) else [value]:
                if isinstance(entry, dict):
                    yield from _named(_KINDS[field], entry)
        if isinstance(value, dict | list):
            yield from _references(value)


def _named(kind: str, source: dict[str, Any]) -> Iterator[PodReference]:
    name = next((source[field] for field in _NAMES if isinstance(source.get(field), str)), "")
    items = source.get("items")
    entries = [source, *(items if isinstance(items, list) else [])]
    keys = [entry["key"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("key"), str)]
    for key in keys or [""]:
        if name:
            yield PodReference(ChildRef(kind, name), key, bool(source.get("optional")))
