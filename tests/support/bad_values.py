"""Invalid values of every field of the spec, generated from its schema: wrong type, out of range, unknown."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_operator.resource.crd import structural_schema
from megatron_operator.resource.spec import MegatronInferenceSpec

Schema = dict[str, Any]
GOOD: dict[str, Any] = {"model": {"source": {"builtin": "smollm2-135m"}}}
WEDGES: list[dict[str, Any]] = [
    {"engine": {"image": "registry.example/none:1"}},
    {"engine": {"podTemplate": {"spec": {"containers": [{"name": "engine", "command": ["false"]}]}}}},
    {"engine": {"podTemplate": {"spec": {"nodeSelector": {"no": "node"}}}}},
    {"engine": {"podTemplate": {"spec": {"containers": "x"}}}},
    {"engine": {"gpusPerPod": 1}},
    {"engine": {"backend": "VLLM"}},
    {"engine": {"backend": "VLLM", "vllm": {"args": {"colour": 1}}}},
    {"engine": {"startupSeconds": 10}},
    {"engine": {"batching": {"kvCacheMemory": "1Ti"}}},
    {"model": {"source": {"builtin": "no-such-model"}}},
    {"model": {**GOOD["model"], "format": "TorchDist"}},
    {"model": {**GOOD["model"], "maxSequenceLength": 16_777_216}},
    {"parallelism": {"tensor": 3}},
    {"coordinator": {"podTemplate": {"spec": {"containers": 7}}}},
    {"server": {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}}},
    {"replicas": 0},
]
"""Changes of the spec that the schema accepts and with which no engine of the test cluster can run."""
WRONG_TYPE: dict[str, Any] = {
    "string": 7,
    "integer": "7",
    "number": "half",
    "boolean": "yes",
    "object": "x",
    "array": "x",
}


@dataclass(frozen=True)
class BadValue:
    path: tuple[str, ...]
    value: Any
    why: str

    @property
    def field(self) -> str:
        return ".".join(("spec", *self.path))

    def spec(self) -> dict[str, Any]:
        """Return a spec in which only this field is invalid."""
        spec = copy.deepcopy(GOOD)
        if self.path[:2] == ("model", "source") and len(self.path) > 2:
            spec["model"]["source"] = {}
        at = spec
        for name, schema in _along(self.path[:-1]):
            if name not in at:
                at[name] = _minimal(schema)
            at = at[name]
        at[self.path[-1]] = self.value
        return spec


@cache
def _schema() -> Schema:
    return structural_schema(MegatronInferenceSpec, "spec")


def _along(path: tuple[str, ...]) -> Iterator[tuple[str, Schema]]:
    schema = _schema()
    for name in path:
        schema = schema["properties"][name]
        yield name, schema


def _minimal(schema: Schema) -> Any:
    """Return a minimal valid value, so that only the one field is invalid."""
    if schema.get("type") == "array":
        return [_minimal(schema["items"])]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "integer":
        return schema.get("minimum", 1)
    if schema.get("type") != "object":
        return "org/name" if "org/name" in schema["description"] else "x"
    return {name: _minimal(schema["properties"][name]) for name in schema.get("required", ())}


def bad_values() -> list[BadValue]:
    """Return all invalid values in the order of the schema."""
    return list(_of(_schema(), ()))


def _of(schema: Schema, path: tuple[str, ...]) -> Iterator[BadValue]:
    for name, field in schema.get("properties", {}).items():
        where = (*path, name)
        yield from _wrong(field, where)
        yield from _of(field, where)
    if "properties" in schema:
        yield BadValue((*path, "noSuchField"), 1, "unknown field")


def _wrong(field: Schema, path: tuple[str, ...]) -> Iterator[BadValue]:
    kind = field["type"]
    yield BadValue(path, WRONG_TYPE[kind], f"not {kind}")
    if kind == "integer":
        yield BadValue(path, 1.5, "not whole")
        yield BadValue(path, "many", "not a number")
    if kind in ("integer", "number"):
        if "minimum" in field:
            yield BadValue(path, field["minimum"] - 1, "too small")
        if "maximum" in field:
            yield BadValue(path, field["maximum"] + 1, "too large")
    if "enum" in field:
        yield BadValue(path, "Sometimes", "not one of the words")
        yield BadValue(path, field["enum"][0].upper() + "x", "misspelt")
    if "x-kubernetes-validations" in field and kind == "string":
        yield BadValue(path, " ?", "malformed")
    if field.get("minLength"):
        yield BadValue(path, "", "empty")
    if "maxLength" in field:
        yield BadValue(path, "a" * (field["maxLength"] + 1), "too long")
