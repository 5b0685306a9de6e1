"""Determines if server-side apply would change a child, from the child's fields that the operator owns.

If another program changes or removes a field, the field is no longer in the operator's entry in `managedFields`. A
child therefore needs no apply if its hash is current and the owned fields include all fields of the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator.decision.world import Manifest
from megatron_runtime.protocol import strict_json as json

Fields = Mapping[str, Any]


def covers(owned_fields: str, manifest: Manifest) -> bool:
    """Return whether the operator owns every field of a manifest.

    owned_fields: the fields that the operator's last apply owns, as JSON (`fieldsV1`).
    """
    if not owned_fields:
        return False
    metadata = {key: value for key, value in manifest["metadata"].items() if key not in ("name", "namespace")}
    content = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata")}
    return _covers(json.loads(owned_fields), {"metadata": metadata, **content})


def _covers(owned: Fields, value: Any) -> bool:
    """Return whether the operator owns all fields of `value`.

    Scalars, and atomic maps and lists, have no subfields in `fieldsV1`.
    """
    if not owned:
        return True
    if isinstance(value, Mapping):
        fields = ((owned.get(f"f:{key}"), each) for key, each in value.items())
        # The server records no owner for an empty list, and may record an owner for an empty map.
        return all(_covers(below, each) if below is not None else each in ([], {}) for below, each in fields)
    if isinstance(value, list):
        return all(_has_item(owned, item) for item in value)
    return True


def _has_item(owned: Fields, item: Any) -> bool:
    """Return whether the operator owns an item of a list.

    An item that is a map is identified by its key fields, which can have default values.
    """
    if not isinstance(item, Mapping):
        return f"v:{json.dumps(item)}" in owned
    for name, fields in owned.items():
        if name.startswith("k:") and all(item.get(key, key_value) == key_value for key, key_value in _key(name)):
            return _covers(fields, item)
    return False


def _key(name: str) -> list[tuple[str, Any]]:
    return list(json.loads(name.removeprefix("k:")).items())
