"""The reference page of the resource, generated from its schema and enumerations. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_operator.model.conditions import ConditionType, Documented, Reason
from megatron_operator.model.crd import COLUMNS, structural_schema
from megatron_operator.model.names import API_VERSION, KIND
from megatron_operator.model.resource import SHORT_NAME, MegatronInferenceSpec
from megatron_operator.model.status import MegatronInferenceStatus
from megatron_runtime.protocol import strict_json as json

Schema = dict[str, Any]


def _rows(schema: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        yield where, field, name in required
        if field.get("type") == "array":
            yield from _rows(field["items"], f"{where}[]")
        else:
            yield from _rows(field, where)


def _kind(field: Schema) -> str:
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    kind = str(field.get("type", "object"))
    low, high = field.get("minimum"), field.get("maximum")
    return f"{kind}, {low}–{high}" if low is not None and high is not None else kind


def _default(field: Schema, required: bool) -> str:
    if required:
        return "required"
    default = field.get("default")
    return "" if default in (None, {}) else f"`{json.dumps(default)}`"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("{", "&#123;")


def _fields(schema: Schema, path: str) -> list[str]:
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for where, field, required in _rows(schema, path):
        cells = (f"`{where}`", _kind(field), _default(field, required), _escape(field.get("description", "")))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _vocabulary(members: Iterable[Documented]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| `{member.value}` | {_escape(member.doc)} |" for member in members)]


def _rules(schema: Schema) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield from textwrap.wrap(f"- {_escape(rule['message'])}", 100, subsequent_indent="  ", break_on_hyphens=False)
    for field in schema.get("properties", {}).values():
        yield from _rules(field)


def reference_page() -> str:
    """Return the page in Markdown."""
    spec, status = structural_schema(MegatronInferenceSpec), structural_schema(MegatronInferenceStatus)
    columns = ", ".join(f"{name.upper()}{' (wide)' if priority else ''}" for name, _, _, priority in COLUMNS)
    lines = [
        f"# {KIND}",
        "",
        f"`{API_VERSION}`, short name `{SHORT_NAME}`. Generated from the types by `make generate`.",
        "",
        *textwrap.wrap(f"Columns of `kubectl get {SHORT_NAME}`: {columns}.", 100),
        "",
        "## spec",
        "",
        *_fields(spec, "spec"),
        "",
        "Rules that span fields, checked by the API server:",
        "",
        *_rules(spec),
        "",
        "## status",
        "",
        *_fields(status, "status"),
        "",
        "## Conditions",
        "",
        *_vocabulary(ConditionType),
        "",
        "## Reasons",
        "",
        *_vocabulary(Reason),
    ]
    return "\n".join(lines) + "\n"
