"""Merges a podTemplate into a rendered pod, as `kubectl patch --type strategic` does."""

from __future__ import annotations

from typing import Any

from megatron_operator.render.context import InvalidPodTemplate

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Lists of objects that merge by a key. All other lists are replaced."""


def merge_template(base: dict[str, Any], overlay: dict[str, Any] | None, *, field: str) -> dict[str, Any]:
    """Merge `overlay` into the pod template `base`: objects merge, keyed lists merge by key, null removes a field, all
    other values replace.

    Args:
        field: path of the overlay in the resource, for messages.

    Raises:
        InvalidPodTemplate: the two have different types, or an entry of a keyed list lacks its key.
    """
    if overlay is None:
        return base
    unknown = sorted(set(overlay) - {"metadata", "spec"})
    if unknown:
        raise InvalidPodTemplate(f"{field}: unknown field {unknown[0]!r}; a pod template has metadata and spec only")
    return _merge_object(base, overlay, field)


def _merge_object(base: dict[str, Any], overlay: Any, path: str) -> dict[str, Any]:
    if not isinstance(overlay, dict):
        raise InvalidPodTemplate(f"{path}: is {overlay!r}; give an object")
    merged = dict(base)
    for key, value in overlay.items():
        where = f"{path}.{key}"
        if value is None:
            merged.pop(key, None)
        elif key in MERGE_KEYS:
            merged[key] = _merge_keyed(base.get(key, []), value, MERGE_KEYS[key], where)
        elif isinstance(base.get(key), dict):
            merged[key] = _merge_object(base[key], value, where)
        else:
            merged[key] = value
    return merged


def _merge_keyed(base: list[dict[str, Any]], overlay: Any, key: str, path: str) -> list[dict[str, Any]]:
    if not isinstance(overlay, list):
        raise InvalidPodTemplate(f"{path}: is {overlay!r}; give a list")
    merged = list(base)
    for index, entry in enumerate(overlay):
        where = f"{path}[{index}]"
        if not isinstance(entry, dict) or key not in entry:
            raise InvalidPodTemplate(f"{where}: has no {key!r}; entries of this list are merged by it, so set it")
        for position, known in enumerate(merged):
            if known.get(key) == entry[key]:
                merged[position] = _merge_object(known, entry, where)
                break
        else:
            merged.append(entry)
    return merged
