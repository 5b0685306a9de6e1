"""Fields that fix the form of the answer: JSON, a regular expression, a choice, a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationInfo, field_validator

from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError
from megatron_runtime.sampling.grammar_limits import MAX_ALTERNATIVES, MAX_GRAMMAR_BYTES, check_structure
from megatron_runtime.server.json_limits import load_json
from megatron_runtime.server.schema.bounds import JsonObject

GuidedChoice = Annotated[
    list[Annotated[StrictStr, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True),
]
JsonSchema = JsonObject | StrictBool


class JsonSchemaFormat(BaseModel):
    """The `json_schema` of a response format. `strict` changes nothing: the form is always enforced."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: Annotated[StrictStr, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchemaFormat | None, Field(validate_default=True)] = None

    @field_validator("json_schema")
    @classmethod
    def _belongs_to_its_type(cls, value: JsonSchemaFormat | None, info: ValidationInfo) -> JsonSchemaFormat | None:
        kind = info.data.get("type")
        if kind == "json_schema" and value is None:
            raise ValueError("type 'json_schema' needs a json_schema object with name and schema")
        if kind in ("text", "json_object") and value is not None:
            raise ValueError(f"type {kind!r} takes no json_schema: leave it out or use type 'json_schema'")
        return value

    @property
    def asks_for_a_form(self) -> bool:
        return self.type != "text"


class StructuredOutputs(BaseModel):
    """The same forms under one field. Exactly one is given."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    json_: Annotated[JsonSchema | StrictStr | None, Field(alias="json")] = None
    regex: Annotated[StrictStr, Field(min_length=1)] | None = None
    choice: GuidedChoice | None = None
    grammar: Annotated[StrictStr, Field(min_length=1)] | None = None
    json_object: StrictBool | None = None


_KIND_OF_FIELD = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


def must_be_alone(value: Any, info: ValidationInfo) -> Any:
    """A validator: of the fields that fix the form, the one above must be the only one."""
    if value is None:
        return value
    for other in ("response_format", "structured_outputs", *_KIND_OF_FIELD):
        given = info.data.get(other)
        if given is None or other == info.field_name:
            continue
        if other != "response_format" or given.asks_for_a_form:
            raise ValueError(f"cannot be combined with {other}: give one of them")
    return value


def structured_output(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return the form as SamplingParams has it, and the request field that asked for it; None for free text.

    Raises ValueError, with the field as its second argument, for a form that cannot be one.
    """
    response_format: ResponseFormat | None = fields.get("response_format")
    if response_format is not None and response_format.asks_for_a_form:
        schema = response_format.json_schema.schema_ if response_format.json_schema is not None else None
        kind = "json_object" if schema is None else "json_schema"
        return _form(kind, schema, "response_format"), "response_format"
    outputs: StructuredOutputs | None = fields.get("structured_outputs")
    if outputs is not None:
        given = [name for name in type(outputs).model_fields if getattr(outputs, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar, json_object", "structured_outputs")
        value = getattr(outputs, given[0])
        return _form(_KIND_OF_FIELD[given[0]], value, "structured_outputs"), "structured_outputs"
    for name, kind in _KIND_OF_FIELD.items():
        value = fields.get(name)
        if value is not None:
            return _form(kind, value, name), name
    return None


def _form(kind: str, value: Any, field: str) -> dict[str, Any]:
    if kind == "json_object":
        return {"type": kind, "value": None}
    if kind == "json_schema" and isinstance(value, str):
        if len(value) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"use at most {MAX_GRAMMAR_BYTES} bytes: shorten it (it has {len(value)})", field)
        try:
            value = load_json(value)
        except ValueError as error:
            raise ValueError(f"the JSON schema is not valid JSON: {error}", field) from error
    if kind == "json_schema" and not isinstance(value, dict):
        if not isinstance(value, bool):
            raise ValueError("a JSON schema is an object", field)
        if not value:
            raise ValueError("the JSON schema 'false' allows no answer: give an object", field)
        value = {}
    form = {"type": kind, "value": value}
    try:
        check_structure(form)
    except InvalidSamplingParamsError as error:
        raise ValueError(f"use {error.allowed}", field) from error
    return form
