"""Base classes of the models of the custom resource."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

T = TypeVar("T", bound=BaseModel)
FIELD = "{field}"
"""Placeholder for the path of a field in the message of a rule. The generator of the CRD replaces it."""
Name = Annotated[str, Field(min_length=1, max_length=253)]
"""Name of another object."""
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


@dataclass(frozen=True, slots=True)
class SpecRule:
    """A rule about several fields of an object, in CEL for the API server and in Python for the offline commands.

    cel, holds: the condition that a valid object fulfils, in CEL and in Python.
    message:    error message with the field and the remedy.
    expression: CEL expression for the error message that includes the invalid value.
    value:      returns the text of the invalid value, which the offline commands add to the message.
    """

    cel: str
    holds: Callable[[Any], object]
    message: str
    expression: str | None = None
    value: Callable[[Any], object] | None = None

    def schema(self) -> dict[str, Any]:
        return cel(self.cel, self.message, expression=self.expression)


def require(rules: Iterable[SpecRule], value: Any) -> None:
    """Raise ValueError with the message of the first rule that `value` violates."""
    for rule in rules:
        if not rule.holds(value):
            raise ValueError(rule.message + (f" (is {rule.value(value)})" if rule.value is not None else ""))


class ApiModel(BaseModel):
    """Base class of the custom resource's objects, which are frozen, have camelCase keys and reject unknown keys."""

    RULES: ClassVar[tuple[SpecRule, ...]] = ()

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=False,
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        require(self.RULES, self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        if cls.RULES:
            handler.resolve_ref_schema(schema)["x-kubernetes-validations"] = [rule.schema() for rule in cls.RULES]
        return schema


@dataclass(frozen=True, slots=True)
class Matches:
    """Annotation that requires a string field to match a pattern. The error describes valid values in words.

    An error for a `pattern` in the schema would show only the regular expression. So this annotation adds a CEL rule to
    the schema, and a validator for the offline commands (`render`, `plan`).

    pattern: regular expression that must match the whole value.
    want:    description of valid values, which follows "must be" in the error.
    without: text that the value must not contain.
    """

    pattern: str
    want: str
    without: str | None = None

    def validated(self, value: str) -> str:
        if re.fullmatch(self.pattern, value, re.ASCII) is None or (self.without is not None and self.without in value):
            raise ValueError(f"is {value!r}; must be {self.want}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.validated, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        rule = cel(
            f"self.matches(r'{self.pattern}')" + (f" && !self.contains('{self.without}')" if self.without else ""),
            f"{FIELD}: must be {self.want}",
            expression=f"'{FIELD}: is ' + self + '; must be {self.want}'",
        )
        return {**handler(core), "x-kubernetes-validations": [rule]}


def section(model: type[T], description: str) -> Any:
    """Return a field for a nested object. If the object is missing, its defaults apply (`default: {}` in the CRD)."""
    return Field(default_factory=model, description=description, json_schema_extra={"default": {}})


def list_by(key: str) -> dict[str, Any]:
    """Return the JSON schema keywords of a list of objects that is merged by the key `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def cel(rule: str, message: str, *, expression: str | None = None) -> dict[str, Any]:
    """Return an entry of `x-kubernetes-validations`.

    expression: CEL expression for the error message that includes the invalid value.
    """
    entry: dict[str, Any] = {"rule": rule, "message": message}
    if expression is not None:
        entry["messageExpression"] = expression
    return entry


Selector = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
"""A part of a NetworkPolicy peer. The API server validates it with the policy."""
PodTemplate = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
