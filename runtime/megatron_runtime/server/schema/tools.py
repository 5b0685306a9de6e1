"""Tools of a chat request: what can be called, and whether it must be."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationInfo, field_validator

from megatron_runtime.server.json_limits import JsonLimitError, JsonScan, load_json
from megatron_runtime.server.schema.bounds import JsonObject, Name

MAX_TOOLS = 128
MAX_TOOL_BYTES = 256 * 1024


class Function(BaseModel):
    """One function. `strict` is accepted: arguments follow the schema whenever the call itself is forced."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: StrictBool | None = None

    @field_validator("parameters")
    @classmethod
    def _bounded(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        size = len(json.dumps(value))
        if size > MAX_TOOL_BYTES:
            raise ValueError(f"the schema has {size} bytes: at most {MAX_TOOL_BYTES} are allowed")
        return value


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name


class NamedTool(BaseModel):
    """`tool_choice` that names the one function to call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(BaseModel):
    """A call as a conversation carries it."""

    model_config = ConfigDict(extra="ignore")

    name: Name
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _json_object(cls, value: str, info: ValidationInfo) -> str:
        scan = info.context if isinstance(info.context, JsonScan) else None
        try:
            is_object = isinstance(load_json(value or "{}", scan=scan), dict)
        except JsonLimitError:
            raise
        except ValueError:
            is_object = False
        if not is_object:
            raise ValueError("expected a JSON object as a string")
        return value


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore")

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Templates write arguments out themselves, so they get them as an object."""
        arguments = load_json(self.function.arguments or "{}")
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}
