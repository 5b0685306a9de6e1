"""What `tools` and `tool_choice` of a request mean for its answer: how calls are read, and whether one is forced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.sampling import form_of
from megatron_runtime.server.schema import ChatRequest, Tool
from megatron_runtime.server.schema.tools import NamedTool
from megatron_runtime.server.tools import NamedParser, RequiredParser, ToolParser

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How the choices of one request may call tools.

    parser:   makes a parser for one choice.
    markers:  special tokens that the parser must see.
    form:     what the answer must look like when a call is forced.
    is_named: the request named the one tool.
    """

    parser: Callable[[], ToolParser]
    markers: tuple[str, ...] = ()
    form: dict[str, Any] | None = None
    is_named: bool = False


def tool_use(request: ChatRequest, *, parser: type[ToolParser] | None) -> ToolUse | None:
    """Return how calls are made, None where none can be. Raises ApiError 400.

    parser: reads the calls that the model makes of its own accord; None where this server offers none.
    """
    tools, choice = request.offered_tools, request.tool_choice
    if not tools:
        return None
    if parser is None:
        raise ApiError(
            400,
            "tools are not offered by this server: leave them out, or start it with another --tool-call-parser.",
            param="tools",
            code="invalid_value",
        )
    if (own := form_of(request)) is not None:
        message = f"{own[1]} cannot be combined with tools: leave one of them out, or use tool_choice 'none'."
        raise ApiError(400, message, param=own[1], code="invalid_value")
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        schema = next(_parameters(tool) for tool in tools if tool.function.name == name)
        return ToolUse(parser=lambda: NamedParser(name), form={"type": "json_schema", "value": schema}, is_named=True)
    if choice == "required":
        schema = _any_call(tools, is_single=request.parallel_tool_calls is False)
        return ToolUse(parser=lambda: RequiredParser(names), form={"type": "json_schema", "value": schema})
    return ToolUse(parser=lambda: parser(names), markers=parser.markers)


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return tool.function.parameters or _NO_PARAMETERS


def _any_call(tools: list[Tool], *, is_single: bool) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": _moved(_parameters(tool), to=f"#/items/anyOf/{place}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]
    limit = {"maxItems": 1} if is_single else {}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}


def _moved(schema: Any, *, to: str) -> Any:
    """A copy of a schema whose references into itself still hold when it stands at the pointer `to`."""
    if isinstance(schema, list):
        return [_moved(item, to=to) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, to=to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved
