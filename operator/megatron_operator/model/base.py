"""Base classes of the models of the custom resource."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

T = TypeVar("T", bound=BaseModel)
Name = Annotated[str, Field(min_length=1, max_length=253)]
"""Name of another object."""


class ApiModel(BaseModel):
    """A part of the resource: frozen, camelCase in JSON; unknown keys are rejected."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=False,
    )


def section(model: type[T], description: str) -> Any:
    """Return a field for an object with defaults of its own, in Python and (`default: {}`) in the CRD."""
    return Field(default_factory=model, description=description, json_schema_extra={"default": {}})


def cel(rule: str, message: str, *, expression: str | None = None, field_path: str | None = None) -> dict[str, Any]:
    """Return an entry of `x-kubernetes-validations`. `expression` is CEL for the message with the invalid value."""
    entry: dict[str, Any] = {"rule": rule, "message": message}
    if expression is not None:
        entry["messageExpression"] = expression
    if field_path is not None:
        entry["fieldPath"] = field_path
    return entry
