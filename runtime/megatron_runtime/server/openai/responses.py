"""POST /v1/responses: OpenAI's newer API for conversations. The server stores no state.

A request is converted to a chat request, and the chat answer is converted to output items: reasoning, a message, and
function calls.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    StrictBool,
    StrictStr,
    Tag,
    ValidationError,
    field_validator,
)
from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.server.errors import ApiError, from_validation, invalid_value
from megatron_runtime.server.formats.parser import CallBegin, Event, Reasoning, Text
from megatron_runtime.server.guards import load_json
from megatron_runtime.server.json_text import to_json
from megatron_runtime.server.openai.answer import Piece
from megatron_runtime.server.openai.chat import AnswerReader, conversation_of
from megatron_runtime.server.openai.content import MediaPart, content_of
from megatron_runtime.server.openai.fields import RESPONSES_POLICY, served
from megatron_runtime.server.openai.generation import Generation, Usage, generation_of
from megatron_runtime.server.openai.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AllowedTools,
    Body,
    ConvertedRequest,
    Effort,
    Function,
    FunctionName,
    JsonObject,
    MaxTokens,
    Name,
    SampledRequest,
    StructuredOutputs,
    TemplateVariables,
)
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.streaming import EventStream, until_disconnect

_CUSTOM_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Schema of the parameters of the function that represents a custom tool."""


class FunctionTool(Function):
    """A function tool. Unlike in chat requests, its fields are not in an inner object `function`."""

    type: Literal["function"]

    def as_function(self) -> dict[str, Any]:
        """Return the object `function` for this tool in a chat request."""
        return self.model_dump(exclude={"type"}, exclude_none=True)


class CustomFormat(Body):
    """The input format of a custom tool.

    The prompt describes the format to the model, but the server does not enforce it.
    """

    type: StrictStr | None = None
    syntax: StrictStr | None = None
    definition: StrictStr | None = None


class CustomTool(Body):
    """A custom tool, whose input is a text."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None

    def as_function(self) -> dict[str, Any]:
        """Return the object `function` for this tool in a chat request.

        The function has one string parameter, `input`.
        """
        parts = [self.description] if self.description else []
        if self.format is not None and self.format.definition:
            parts.append(f"The input follows this {self.format.syntax or ''} grammar:\n{self.format.definition}")
        return {"name": self.name, "description": "\n\n".join(parts), "parameters": dict(_CUSTOM_INPUT)}


class OtherTool(Body):
    """A tool that OpenAI's servers run and that this server does not support.

    The server does not offer this tool to the model. A tool_choice that forces this tool is an error.
    """

    type: StrictStr


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"a {kind}" if kind in ("function", "custom", "namespace") else "a tool"


def _callable_tools(value: Any) -> Any:
    tools = [] if value is None else value
    return [tool for tool in tools if _kind_of_tool(tool) != "a tool"] if isinstance(tools, list) else tools


# The tags are not identifiers, so that error messages omit them from field names.
_InnerTool = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom")]
    | Annotated[OtherTool, Tag("a tool")],
    Discriminator(_kind_of_tool),
]


class NamespaceTool(Body):
    """A group of tools whose names have a common prefix, such as the tools of one MCP server."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[_InnerTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


_Tool = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom")]
    | Annotated[NamespaceTool, Tag("a namespace")]
    | Annotated[OtherTool, Tag("a tool")],
    Discriminator(_kind_of_tool),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model can call, and its names for the client.

    function: the object `function` for the tool in the chat request.
    name:     name for the client, without the namespace.
    """

    function: Mapping[str, Any]
    name: str
    namespace: str | None
    is_custom: bool


def _joined(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls the function `name` of a namespace; `name` if there is no namespace."""
    return f"{namespace}__{name}" if namespace else name


def _offered(tools: Sequence[FunctionTool | CustomTool | NamespaceTool | OtherTool]) -> Iterator[OfferedTool]:
    """Yield the tools that the model can call."""
    for tool in tools:
        namespace, inner = (tool.name, tool.tools) if isinstance(tool, NamespaceTool) else (None, [tool])
        for member in inner:
            if isinstance(member, FunctionTool | CustomTool):
                function = {**member.as_function(), "name": _joined(namespace, member.name)}
                yield OfferedTool(function, member.name, namespace, isinstance(member, CustomTool))


class OfferedLater(Body):
    """An input item whose tools the model can call from then on. Other tools in the item are left out."""

    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), BeforeValidator(_callable_tools)] = (
        Field(default_factory=list)
    )


class NamedFunctionTool(Body):
    """A `tool_choice` that names a function or a custom tool."""

    type: Literal["function", "custom"]
    name: Name
    namespace: Name | None = None


class TextFormat(Body):
    """The field `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None

    def as_response_format(self) -> dict[str, Any]:
        """Return the equivalent `response_format` of a chat request. Raises ApiError 400 if the schema is missing."""
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise invalid_value("text.format.schema", "type 'json_schema' needs a schema, next to its name")
        schema = {"name": self.name or "answer", "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: Effort | None = None


class ResponsesRequest(ConvertedRequest, SampledRequest):
    """The request body of POST /v1/responses."""

    policy = RESPONSES_POLICY
    conversation_field = "input"
    own_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }

    input: StrictStr | Annotated[list[JsonObject], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="A text, or items: messages, reasoning, calls of functions, custom tools and shells, and their "
        "results; also those of an earlier answer. Content is a string, or parts with a text or [an "
        "image](http-api-behaviour.md#images-audio-and-video). Items of tools that another server ran are left out. "
        "`x-ignored-fields` names the other items that are left out, as `input.TYPE`."
    )
    instructions: StrictStr | None = served("The system message, before the input.")
    max_output_tokens: MaxTokens | None = served(
        "Most tokens of the answer, reasoning included. As many as fit if absent."
    )
    stream: StrictBool | None = served(
        "Answer with OpenAI's events, `response.created` to `response.completed` or `response.incomplete`."
    )
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = served(
        "Functions, custom tools and namespaces of them: see [tools](http-api-behaviour.md#tools). Other tools are "
        "left out: the server runs no tools itself."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | AllowedTools | None = served(
        "See [tools](http-api-behaviour.md#tools)."
    )
    parallel_tool_calls: StrictBool | None = served("`false`: the answer has at most one call.")
    text: TextOptions | None = served(
        "`format`: `text`, `json_object`, or `json_schema` with `name` and `schema`. The format is always enforced."
    )
    structured_outputs: StructuredOutputs | None = served(
        "The formats of completions: one of `json`, `regex`, `choice`, `grammar`, `json_object`."
    )
    include_reasoning: StrictBool | None = served("`false`: the answer lacks the reasoning.")
    chat_template_kwargs: TemplateVariables | None = served("Variables of the model's chat template.")
    reasoning: ReasoningOptions | None = served(
        "`effort`: see [reasoning](http-api-behaviour.md#reasoning). The answer has the reasoning itself, without a "
        "summary."
    )
    metadata: JsonObject | None = served("Repeated in the answer.")

    _later_tools: list[FunctionTool | CustomTool | NamespaceTool | OtherTool] = PrivateAttr(default_factory=list)
    _unknown_items: list[str] = PrivateAttr(default_factory=list)

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _can_be_called(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else "function"
        if kind not in ("function", "custom", "allowed_tools"):
            raise ValueError(
                f"it forces a tool of type {str(kind)[:40]!r}, and this server runs no tools itself: name a function "
                "or a custom tool, or use 'auto'"
            )
        return value

    @field_validator("input")
    @classmethod
    def _known_items(cls, value: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if not value:
            raise ValueError("it is empty: give a text, or at least one item")
        for place, item in enumerate(value if isinstance(value, list) else ()):
            if (remedy := _NOT_OFFERED_ITEMS.get(_kind_of_item(item))) is not None:
                raise ValueError(
                    f"item {place} has type {item['type']!r}, which is not offered by this server: {remedy}"
                )
        return value

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the names of the unknown fields, and the unknown types of input items. Call prepared() first."""
        return (*super().ignored, *self._unknown_items)

    def offered(self) -> dict[str, OfferedTool]:
        """Return a map from function names in the chat request to the tools that the model can call."""
        return {tool.function["name"]: tool for tool in _offered((*self._later_tools, *(self.tools or ())))}

    def prepared(self) -> Self:
        """Convert the input to a chat request, drop the original fields, and return `self`.

        Raises ApiError 400.
        """
        for place, item in enumerate(self.input if isinstance(self.input, list) else ()):
            kind = _kind_of_item(item)
            if kind not in _ITEM_KINDS:
                self._unknown_items.append(f"input.{kind}")
            elif kind in _OFFERING:
                try:
                    self._later_tools += OfferedLater.model_validate(item).tools
                except ValidationError as error:
                    cause = from_validation(error.errors(include_url=False, include_context=False))
                    raise invalid_value("input", f"item {place}: {cause.message.removesuffix('.')}") from error
        super().prepared()
        self.input = ""
        return self

    def as_chat(self) -> dict[str, Any]:
        choice, text = self.tool_choice, self.text
        functions = [tool.function for tool in _offered(self.tools or ())]
        names = {function["name"] for function in functions}
        # An item with tools is repeated in the history, so a later tool replaces an earlier one of the same name.
        functions += [tool.function for name, tool in self.offered().items() if name not in names]
        tools = [{"type": "function", "function": dict(function)} for function in functions]
        fields: dict[str, Any] = {
            **{name: getattr(self, name) for name in SampledRequest.model_fields},
            "messages": _messages(self),
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "include_reasoning": self.include_reasoning,
            "chat_template_kwargs": self.chat_template_kwargs,
            "structured_outputs": self.structured_outputs,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": None if text is None or text.format is None else text.format.as_response_format(),
            "tools": tools or None,
            "tool_choice": choice.model_dump() if isinstance(choice, AllowedTools) else choice,
            "continue_final_message": _is_unfinished(self.input) or None,
        }
        if isinstance(choice, NamedFunctionTool):
            name = _joined(choice.namespace, choice.name)
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        return {name: value for name, value in fields.items() if value is not None}


_CALLS: Mapping[str, str] = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "tool_search_call": "arguments",
}
"""Types of items that are calls, with the key of their arguments. In a call without a name, the tool has the name of
the type.
"""
_OUTPUTS: Mapping[str, str] = {
    **{f"{kind}_output": "output" for kind in _CALLS if kind != "tool_search_call"},
    "tool_search_output": "tools",
}
"""Types of items that are results of calls, with the key of the result."""
_LEFT_OUT = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call"),
    *("computer_call_output", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    *("compaction", "compaction_summary", "context_compaction", "ghost_snapshot"),
    *("additional_tools", "agent_reasoning"),
)
"""Types of items that are not included in the prompt, because they contain no text for the model."""
_OFFERING = ("additional_tools", "tool_search_output")
"""Types of items with tools that the model can call from then on."""
_MESSAGES = ("message", "agent_message")
_NOT_OFFERED_ITEMS: Mapping[str, str] = {
    "item_reference": "it keeps no items, so send the item itself",
    "configuration_update": "set the fields of the request",
}
"""Types of items that would change the answer, with the remedy."""
_ITEM_KINDS = frozenset((*_MESSAGES, "reasoning", *_CALLS, *_OUTPUTS, *_LEFT_OUT))
"""Types of items that the server knows. Items of other types are ignored and reported."""
_IMAGE_TEXT = "[image]"
"""Placeholder for an image in a tool result."""


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages of the chat request. Adjacent items of reasoning, text and tool calls become one message."""
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for item in request.input:
        kind, role = _kind_of_item(item), item.get("role")
        if kind in _LEFT_OUT or kind not in _ITEM_KINDS:
            continue
        if kind in _OUTPUTS:
            content = _result_of(item.get(_OUTPUTS[kind]))
            messages.append({"role": "tool", "tool_call_id": _call_id_of(item), "content": content})
        elif kind == "agent_message":  # from another agent of the client
            messages.append({"role": "user", "content": _text_of(item.get("content"))})
        elif kind == "message" and role != "assistant":
            messages.append({"role": role, "content": _text_of(item.get("content"))})
        else:
            if (
                not messages
                or messages[-1]["role"] != "assistant"
                or (kind == "reasoning" and "content" in messages[-1])
            ):
                messages.append({"role": "assistant"})
            answer = messages[-1]
            if kind == "reasoning":
                thought = [answer.get("reasoning_content"), _thought_of(item)]
                answer["reasoning_content"] = "\n".join(text for text in thought if text)
            elif kind == "message":
                text = _text_of(item.get("content") or "")
                answer["content"] = answer.get("content", "") + text if isinstance(text, str) else text
            else:
                call = {"id": _call_id_of(item), "type": "function", "function": _called_function(kind, item)}
                answer.setdefault("tool_calls", []).append(call)
    return messages


def _kind_of_item(item: Mapping[str, Any]) -> str:
    return str(item.get("type") or "message")


def _call_id_of(item: dict[str, Any]) -> Any:
    return item.get("call_id") or item.get("id")


def _called_function(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    """Return the object `function` of a tool call in a chat message. kind: type of the input item."""
    arguments = item.get(_CALLS[kind])
    if kind == "custom_tool_call":
        arguments = {"input": arguments}
    if kind not in ("function_call", "custom_tool_call"):
        return {"name": kind.removesuffix("_call"), "arguments": arguments}
    name, namespace = item.get("name"), item.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = _joined(namespace, name)
    return {"name": name, "arguments": arguments}


def _result_of(output: Any) -> Any:
    """Return the content of the chat message for a tool result.

    An image in `output` becomes a MediaPart with a placeholder. An output that is not text or content parts becomes
    JSON.
    """
    if output is None or isinstance(output, str):
        return output
    parts = [_part_of(part, is_result=True) for part in (output if isinstance(output, list) else [output])]
    if any(part is None for part in parts):
        return json.dumps(output, ensure_ascii=False)
    return content_of([part for part in parts if part is not None])


def _part_of(part: Any, *, is_result: bool) -> str | MediaPart | None:
    """Return the text or the image in a content part. Return None if the part has neither.

    is_result: whether the part belongs to a tool result. If so, the text "[image]" replaces an image without a URL.
    """
    if not isinstance(part, dict):
        return None
    if part.get("type") in ("input_image", "image"):
        value = part.get("image_url")
        url = value.get("url") if isinstance(value, dict) else value
        placeholder = _IMAGE_TEXT if is_result else None
        return MediaPart("image", url, part["type"], placeholder) if isinstance(url, str) and url else placeholder
    # The last member is a message of an agent whose model has not encrypted it, as no model of this server does.
    members = (part.get(name) for name in ("text", "refusal", "encrypted_content"))
    return next((text for text in members if isinstance(text, str)), None)


def _is_unfinished(items: str | list[dict[str, Any]]) -> bool:
    """Return whether the input ends with a truncated assistant message, which the answer then continues."""
    last = items[-1] if isinstance(items, list) else {}
    is_answer = _kind_of_item(last) == "message" and last.get("role") == "assistant"
    return is_answer and last.get("status") in ("in_progress", "incomplete")


def _thought_of(item: dict[str, Any]) -> str:
    """Return the text of a reasoning item, or "" if the item contains only encrypted reasoning from another server."""
    parts = item.get("content") or item.get("summary") or ()
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else [parts]
    return "".join(text for text in texts if isinstance(text, str))


def _text_of(content: Any) -> Any:
    """Return the text and images of `content`, if it is a list of content parts.

    Any other value is returned unchanged. The chat request accepts it if it is text, and otherwise rejects it.
    """
    if not isinstance(content, list):
        return content
    parts = [_part_of(part, is_result=False) for part in content]
    readable = [part for part in parts if part is not None]
    if len(readable) == len(parts):
        return content_of(readable, "")
    return [{"type": part.get("type") if isinstance(part, dict) else None} for part in content]


async def create_response(service: Service, request: Request) -> Response:
    """Answer a conversation with output items."""
    body = await service.read(request, ResponsesRequest)
    chat = body.chat
    conversation = await conversation_of(service, request, chat)
    generation = generation_of(
        service, request, chat, [conversation.prompt], conversation.options, answer=conversation.answer
    )
    model = generation.adapter or service.settings.served_name
    answer = _Answer(body, conversation.reader(), generation.usage, model=model, defaults=service.defaults)
    if body.stream:
        events = _events(answer, generation)
        seconds = service.settings.keep_alive_seconds
        return EventStream(events, keep_alive_seconds=seconds, expired=service.expired, error_events=answer.failed)
    (piece,) = await until_disconnect(request.receive, generation.collect(), expired=service.expired)
    for _ in answer.take(piece):
        pass
    return service.answer(request, to_json(answer.response()))


async def _events(answer: _Answer, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
    async with aclosing(generation.stream()) as pieces:
        is_begun = False
        async for piece in pieces:
            if not is_begun:
                is_begun = True
                for event in answer.begun():
                    yield event
            for event in answer.take(piece):
                yield event
    for event in answer.ended():
        yield event


class _Answer:
    """Collects the output items of one answer, and converts each part of the answer to stream events."""

    def __init__(
        self,
        request: ResponsesRequest,
        reader: AnswerReader,
        usage: Usage,
        *,
        model: str,
        defaults: Mapping[str, Any],
    ) -> None:
        """Create an answer that has no output items yet. defaults: the model's default sampling parameters."""
        self._request = request
        self._tools = request.offered()
        self._defaults = defaults
        self._model = model
        self._reader = reader
        self._usage = usage
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._status = "in_progress"
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Parts of the text of the open item."""
        self._sequence_numbers = itertools.count()

    def begun(self) -> Iterator[dict[str, Any]]:
        """Yield the first stream events."""
        started = self.response()
        yield from self._numbered(
            {"type": f"response.{state}", "response": started} for state in ("created", "in_progress")
        )

    def take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the stream events for a part of the answer."""
        yield from self._numbered(self._read(piece))

    def ended(self) -> Iterator[dict[str, Any]]:
        """Yield the last stream event."""
        yield from self._numbered([{"type": f"response.{self._status}", "response": self.response()}])

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the last stream events of an answer that fails: the error, and the response with the output so far."""
        for _ in self._close("incomplete"):
            pass
        self._status = "failed"
        cause = {"code": "server_error", "message": error.message}
        events = [
            {"type": "error", **error.body(), "code": error.code, "message": error.message, "param": error.param},
            {"type": "response.failed", "response": {**self.response(), "error": cause}},
        ]
        return list(self._numbered(events))

    def _numbered(self, events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            yield {**event, "sequence_number": next(self._sequence_numbers)}

    def _read(self, piece: Piece) -> Iterator[dict[str, Any]]:
        for event in self._reader.read(piece):
            kind = self._kind(event)
            if (
                not self._items
                or self._items[-1]["status"] != "in_progress"
                or isinstance(event, CallBegin)
                or (self._items[-1]["type"] != kind)
            ):
                yield from self._close()
                yield from self._open(event)
            if not isinstance(event, CallBegin):
                self._texts.append(event.text)
                if kind != "custom_tool_call":  # the input text is extracted when the call is complete
                    yield self._event(f"{_PREFIX[kind]}.delta", delta=event.text)
        if piece.finish_reason is not None:
            is_cut = piece.finish_reason == "length"
            self._status = "incomplete" if is_cut else "completed"
            if not self._items:
                yield from self._open(Text(""))
            yield from self._close(self._status)

    def response(self) -> dict[str, Any]:
        """Return the `response` object, with the output items so far."""
        request, is_cut = self._request, self._status == "incomplete"
        usage = _usage(self._usage) if self._status in ("completed", "incomplete") else None
        text = TextOptions() if request.text is None else request.text
        format_ = {"type": "text"} if text.format is None else text.format.model_dump(by_alias=True, exclude_none=True)
        choice = request.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self._defaults.get("temperature", 1.0)
            if request.temperature is None
            else request.temperature,
            "text": {"format": format_},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools or ()],
            "top_p": self._defaults.get("top_p", 1.0) if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": request.metadata or {},
        }

    def _open(self, event: Event) -> Iterator[dict[str, Any]]:
        kind, self._texts = self._kind(event), []
        item: dict[str, Any] = {"id": f"{_ID[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if isinstance(event, CallBegin):
            tool = self._tools.get(event.name)
            item |= {
                "call_id": event.id or f"call_{uuid.uuid4().hex[:24]}",
                "name": event.name if tool is None else tool.name,
                _CALLS[kind]: "",
            }
            if tool is not None and tool.namespace is not None:
                item["namespace"] = tool.namespace
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": dict(item)}
        if kind == "message":
            yield self._event("response.content_part.added", part=_part(kind, ""))

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Yield the stream events that complete the open output item, if there is one. status: status of the item."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item, text = self._items[-1], "".join(self._texts)
        kind, item["status"] = item["type"], status
        if kind == "function_call":
            item["arguments"] = text
            yield self._event(f"{_PREFIX[kind]}.done", arguments=text, name=item["name"])
        elif kind == "custom_tool_call":
            item["input"] = _input_of(text)
            yield self._event(f"{_PREFIX[kind]}.delta", delta=item["input"])
            yield self._event(f"{_PREFIX[kind]}.done", input=item["input"])
        else:
            part = _part(kind, text)
            item["content"] = [part]
            yield self._event(f"{_PREFIX[kind]}.done", text=text)
            if kind == "message":
                yield self._event("response.content_part.done", part=part)
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}

    def _kind(self, event: Event) -> str:
        """Return the type of the output item to which an event belongs."""
        if isinstance(event, Text | Reasoning):
            return "message" if isinstance(event, Text) else "reasoning"
        if not isinstance(event, CallBegin):
            return str(self._items[-1]["type"])
        tool = self._tools.get(event.name)
        return "custom_tool_call" if tool is not None and tool.is_custom else "function_call"

    def _event(self, type_: str, **fields: Any) -> dict[str, Any]:
        item = self._items[-1]
        place: dict[str, Any] = {} if item["type"] in _CALLS else {"content_index": 0}
        if type_.startswith("response.output_text"):
            place["logprobs"] = []
        return {"type": type_, "item_id": item["id"], "output_index": len(self._items) - 1, **place, **fields}


_PREFIX = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_ID = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def _input_of(arguments: str) -> str:
    """Return the input text of a custom tool's call.

    If the arguments are truncated or malformed, return `arguments` unchanged.
    """
    try:
        value = load_json(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
