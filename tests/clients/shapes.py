"""The shape of requests: names and types of their fields, without the texts that a client writes.

An object is an object of shapes; a field that some objects lack has a `?` after its name. A list is a list of the
shapes of its items, one for each `type` and `role` of objects. Alternatives are in one text, or below `any of`. Of the
JSON schemas of tools there are only the keywords.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

KINDS = frozenset({"type", "role"})
"""Fields whose values are names of the interface."""
SCHEMAS = frozenset({"parameters", "input_schema", "schema"})
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def shape(values: Iterable[Any], name: str = "") -> Any:
    """Return what the values of a field have in common."""
    values = list(values)
    objects = [value for value in values if isinstance(value, dict)]
    lists = [value for value in values if isinstance(value, list)]
    scalars = [value for value in values if not isinstance(value, dict | list)]
    if objects and name in SCHEMAS:
        return {"keywords": sorted(set().union(*map(_keywords, objects)))}
    groups: dict[str, list[dict[str, Any]]] = {}
    for value in objects:
        groups.setdefault(" ".join(str(value.get(kind, "")) for kind in sorted(KINDS)), []).append(value)
    shapes: list[Any] = [_fields(groups[key]) for key in sorted(groups)]
    if lists:
        items = shape([item for value in lists for item in value]) if any(lists) else {"any of": []}
        shapes.append(items["any of"] if isinstance(items, dict) and "any of" in items else [items])
    if scalars:
        shapes.append(" | ".join(sorted({str(value) if name in KINDS else _TYPES[type(value)] for value in scalars})))
    return shapes[0] if len(shapes) == 1 else {"any of": shapes}


def _fields(objects: list[dict[str, Any]]) -> dict[str, Any]:
    names = sorted(set().union(*objects))
    return {
        name + "?" * any(name not in value for value in objects): shape(
            (value[name] for value in objects if name in value), name
        )
        for name in names
    }


def _keywords(schema: Any) -> set[str]:
    """Return the keywords of a JSON schema, of those below its properties as well."""
    if isinstance(schema, list):
        return set().union(*map(_keywords, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for keyword, value in schema.items():
        has_names = keyword in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
        if has_names and isinstance(value, dict):
            value = list(value.values())
        if keyword not in ("enum", "const", "default", "examples"):
            found |= _keywords(value)
    return found
