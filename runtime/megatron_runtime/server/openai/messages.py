"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API for conversations.

A request is converted to a chat request, and the chat answer is converted to content blocks of the types thinking, text
and tool_use. Fields and events follow https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    ValidationInfo,
    field_validator,
)
from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.rules import MAX_INT32
from megatron_runtime.server.errors import ApiError, ContextLengthError
from megatron_runtime.server.formats.parser import CallArguments, CallBegin, Event, Reasoning
from megatron_runtime.server.guards import load_json
from megatron_runtime.server.json_prefix import JsonPrefix
from megatron_runtime.server.json_text import JsonResponse, to_json
from megatron_runtime.server.openai.answer import Piece
from megatron_runtime.server.openai.chat import AnswerReader, conversation_of
from megatron_runtime.server.openai.content import MediaPart, content_of
from megatron_runtime.server.openai.fields import COUNT_TOKENS_POLICY, MESSAGES_POLICY, served, within
from megatron_runtime.server.openai.generation import Generation, Usage, generation_of
from megatron_runtime.server.openai.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AllowedTool,
    Body,
    ConvertedRequest,
    FunctionName,
    JsonObject,
    JsonValue,
    MaxTokens,
    Name,
    StopStrings,
    Temperature,
    TopP,
)
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.streaming import EventStream, until_disconnect

_MAX_BLOCKS = 4096
_BLOCK_DEPTH = 8
"""Maximum nesting depth of the arguments of a call in a request."""


class TextBlock(Body):
    type: Literal["text"]
    text: StrictStr


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: StrictStr


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: JsonValue
    """Arguments that the client has assembled from a stream. If the model wrote another value, they are not an object.
    """


_LEFT_OUT = ("container_upload", "fallback", "mcp_tool_listing", "redacted_thinking", "tool_addition", "tool_removal")
_WITH_TEXT = ("document", "search_result", "compaction")


def _as_blocks(value: Any) -> Any:
    """Return `value` as a list of blocks, without the blocks of other servers.

    A document, search result or compaction that has a text becomes a text block. The blocks of other servers are
    encrypted reasoning, calls of tools that the server has run, and their results.
    """
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        return value
    return [_as_text_block(block) for block in value if not _is_of_another_server(block)]


def _is_of_another_server(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or (kind == "compaction" and block.get("content")):
        return False
    return kind in _LEFT_OUT or kind.endswith(("_tool_use", "_tool_result", "compaction"))


def _as_text_block(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in _WITH_TEXT:
        return block
    source = block.get("source")
    inner = source if kind == "document" and isinstance(source, dict) else block
    content = inner.get("data") if inner.get("type") == "text" else inner.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        return block
    headings = [block.get(name) for name in ("title", "context", "source")]
    return {"type": "text", "text": "\n".join([text for text in (*headings, *texts) if text and isinstance(text, str)])}


def _as_result(value: Any) -> Any:
    return [] if value is None else _as_blocks(value)


def _readable_source(value: Any) -> Any:
    """Return the source of an image in a tool result, or None if this server does not support the source."""
    is_known = isinstance(value, dict) and value.get("type") in ("base64", "url")
    return value if is_known and all(isinstance(member, str) for member in value.values()) else None


TextBlocks: TypeAlias = Annotated[
    list[TextBlock], Field(max_length=_MAX_BLOCKS, fail_fast=True), BeforeValidator(_as_blocks)
]


class MediaSource(Body):
    """The source of an image: data in the request, or a URL."""

    type: Literal["base64", "url"]
    media_type: StrictStr | None = None
    data: StrictStr | None = None
    url: StrictStr | None = None

    @property
    def as_url(self) -> str:
        """Return a URL of the image, or "" if the source has no image."""
        if self.type == "url":
            return self.url or ""
        return f"data:{self.media_type or 'image/x'};base64,{self.data}" if self.data else ""


class ImageBlock(Body):
    type: Literal["image"]
    source: MediaSource

    @field_validator("source")
    @classmethod
    def _names_an_image(cls, value: MediaSource) -> MediaSource:
        if not value.as_url:
            raise ValueError("an image needs a source of type base64 with data, or of type url with a url")
        return value

    def as_part(self) -> MediaPart:
        return MediaPart("image", self.source.as_url, self.type)


class ResultPart(Body):
    """A part of a tool result. If the model does not accept the part, a placeholder replaces it."""

    type: StrictStr
    text: StrictStr | None = None
    tool_name: StrictStr | None = None
    source: Annotated[MediaSource | None, BeforeValidator(_readable_source)] = None

    def as_part(self) -> str | MediaPart:
        if self.type == "text":
            return self.text or ""
        placeholder = f"[{' '.join(filter(None, (self.type, self.tool_name)))}]"
        url = self.source.as_url if self.type == "image" and self.source is not None else ""
        return MediaPart("image", url, self.type, placeholder) if url else placeholder


class ToolResultBlock(Body):
    """The result of a tool call. `is_error` has no effect, because the content describes the error to the model."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[list[ResultPart], Field(max_length=_MAX_BLOCKS, fail_fast=True), BeforeValidator(_as_result)] = (
        Field(default_factory=list)
    )


_Content: TypeAlias = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


def _as_content(value: Any, info: ValidationInfo) -> Any:
    is_empty_answer = value is None and info.data.get("role") == "assistant"
    return [] if is_empty_answer else _as_blocks(value)


class AnthropicMessage(Body):
    """One turn of a conversation. A string as content means one text block. An assistant turn can have no content."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Content], Field(max_length=_MAX_BLOCKS, fail_fast=True), BeforeValidator(_as_content)] = (
        Field(default=None, validate_default=True)
    )

    def as_chat(self) -> Iterator[dict[str, Any]]:
        """Yield the chat messages of this turn.

        Tool results become separate messages before the text of the turn.
        """
        parts: list[str | MediaPart] = []
        for block in self.content:
            if isinstance(block, TextBlock | ImageBlock):
                parts.append(block.text if isinstance(block, TextBlock) else block.as_part())
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                content = content_of([part.as_part() for part in block.content])
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        if self.content and all(isinstance(block, ToolResultBlock) for block in self.content):
            return
        message: dict[str, Any] = {"role": self.role, "content": content_of(parts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": _as_arguments(call.input)}}
                for call in calls
            ]
        yield message


def _as_arguments(value: Any) -> Any:
    return value if isinstance(value, dict | str) else json.dumps(value)


class AnthropicTool(Body):
    """A function that the client runs. input_schema: JSON schema of the arguments."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: StrictStr | None = None
    input_schema: JsonObject
    strict: StrictBool | None = None


class ServerTool(Body):
    """A tool that Anthropic's servers run or define. This server does not offer the tool to the model."""

    type: StrictStr


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "of the client" if kind in (None, "custom") else "of a server"


# The tags are not identifiers, so that error messages omit them from field names.
_Tool: TypeAlias = Annotated[
    Annotated[AnthropicTool, Tag("of the client")] | Annotated[ServerTool, Tag("of a server")],
    Discriminator(_kind_of_tool),
]


class AnthropicToolChoice(Body):
    """The field `tool_choice`.

    mode, tools: only for the type `allowed_tools`, and the same as in OpenAI's API.
    """

    type: Literal["auto", "any", "tool", "none", "allowed_tools"]
    name: Name | None = None
    disable_parallel_tool_use: StrictBool | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)

    def as_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        if self.type == "allowed_tools":
            tools = [tool.model_dump() for tool in self.tools]
            return {"type": self.type, "mode": self.mode or "auto", "tools": tools}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    """The field `thinking`: whether the model reasons before it answers, and the maximum number of reasoning tokens.

    The model's chat template must be able to turn reasoning on or off as requested.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_INT32)] | None = None


class AnthropicFormat(Body):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    format: AnthropicFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(ConvertedRequest):
    """The request body of POST /v1/messages/count_tokens."""

    policy = COUNT_TOKENS_POLICY
    conversation_field = "messages"
    own_names: ClassVar[Mapping[str, str]] = {
        "chat_template_kwargs": "thinking",
        "max_completion_tokens": "max_tokens",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="Roles user, assistant and system. Content is a string, or blocks of type text, image, thinking, "
        "tool_use and tool_result: also those of an earlier answer. See [images, audio and "
        "video](http-api-behaviour.md#images-audio-and-video)."
    )
    system: TextBlocks | None = Field(default=None, description="The system message: a string, or text blocks.")
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = served(
        "Functions: see [tools](http-api-behaviour.md#tools). Other tools are left out: the server runs no tools "
        "itself."
    )
    tool_choice: AnthropicToolChoice | None = served(
        "`auto`, `any`, `none`, `tool` with a `name`, or `allowed_tools`. With `disable_parallel_tool_use` the "
        "answer has at most one call."
    )
    thinking: Thinking | None = served(
        "`enabled`, `adaptive` or `disabled`: given to the chat template as `enable_thinking`. `budget_tokens`: tokens "
        "of reasoning at most; see [reasoning](http-api-behaviour.md#reasoning)."
    )
    output_config: OutputConfig | None = served(
        "`format`: a JSON schema, which is always enforced. `effort`: see [reasoning](http-api-behaviour.md#reasoning)."
    )

    def prepared(self) -> Self:
        """Convert the conversation to a chat request, drop the original fields, and return `self`.

        Raises ApiError 400.
        """
        super().prepared()
        self.messages, self.system, self.tools = [], None, None
        return self

    def as_chat(self) -> dict[str, Any]:
        messages = [message for turn in self.messages for message in turn.as_chat()]
        if self.system:
            system = "\n".join(block.text for block in self.system)
            messages.insert(0, {"role": "system", "content": system})
        last, choice, output = messages[-1], self.tool_choice, self.output_config or OutputConfig()
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "reasoning_effort": output.effort,
        }
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            fields["continue_final_message"] = True
        tools = [tool for tool in self.tools or () if isinstance(tool, AnthropicTool)]
        if tools:
            fields["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.input_schema,
                        "strict": tool.strict,
                    },
                }
                for tool in tools
            ]
        if choice is not None:
            fields["tool_choice"] = choice.as_chat()
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        if output.format is not None:
            schema = {"name": "answer", "schema": output.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in fields.items() if value is not None}


class MessagesRequest(CountTokensRequest):
    """The request body of POST /v1/messages."""

    policy = MESSAGES_POLICY

    max_tokens: MaxTokens = Field(description="Most tokens of the answer, reasoning included.")
    temperature: Temperature | None = served("As of chat completions, up to 2. 0 is greedy.")
    top_p: TopP | None = served("As of chat completions.")
    top_k: Annotated[StrictInt, within("top_k", minimum=0)] | None = served(
        "Keep the k most likely tokens. 0 keeps all."
    )
    stop_sequences: StopStrings = Field(
        default_factory=list, description="Each has at most 1024 characters. The text ends before the match."
    )
    stream: StrictBool | None = served("Answer with Anthropic's events, `message_start` to `message_stop`.")

    def as_chat(self) -> dict[str, Any]:
        fields = {
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": self.stream,
        }
        return {**super().as_chat(), **{name: value for name, value in fields.items() if value is not None}}


async def create_message(service: Service, request: Request) -> Response:
    """Answer a conversation with content blocks."""
    body = await service.read(request, MessagesRequest)
    chat = body.chat
    conversation = await conversation_of(service, request, chat)
    generation = generation_of(
        service, request, chat, [conversation.prompt], conversation.options, answer=conversation.answer
    )
    model = generation.adapter or service.settings.served_name
    prompt_tokens = len(conversation.prompt.tokens)
    answer = _Answer(conversation.reader(), generation.usage, model=model, prompt_tokens=prompt_tokens)
    if body.stream:
        events = _events(answer, generation)
        seconds = service.settings.keep_alive_seconds
        return EventStream(
            events,
            keep_alive_seconds=seconds,
            expired=service.expired,
            error_events=lambda error: [error_body(error)],
        )
    (piece,) = await until_disconnect(request.receive, generation.collect(), expired=service.expired)
    for _ in answer.take(piece):
        pass
    return service.answer(request, to_json(answer.message()))


async def count_message_tokens(service: Service, request: Request) -> Response:
    """Answer with the number of prompt tokens of a conversation."""
    body = await service.read(request, CountTokensRequest)
    conversation = await conversation_of(service, request, body.chat)
    return JsonResponse({"input_tokens": len(conversation.prompt.tokens)})


async def _events(answer: _Answer, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
    async with aclosing(generation.stream()) as pieces:
        is_begun = False
        async for piece in pieces:
            if not is_begun:
                is_begun = True
                yield {"type": "message_start", "message": answer.message()}
            for event in answer.take(piece):
                yield event
    final = answer.message()
    delta = {"stop_reason": final["stop_reason"], "stop_sequence": final["stop_sequence"]}
    yield {"type": "message_delta", "delta": delta, "usage": final["usage"]}
    yield {"type": "message_stop"}


class _Answer:
    """Collects the content blocks of one answer, and converts each part of the answer to stream events."""

    def __init__(self, reader: AnswerReader, usage: Usage, *, model: str, prompt_tokens: int) -> None:
        self._reader = reader
        self._usage = usage
        self._prompt_tokens = prompt_tokens
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Parts of the text of the last block."""
        self._arguments = JsonPrefix()
        """Arguments of the last call, as the stream has sent them. Anthropic's SDKs parse them, and raise an error if
        they are not JSON.
        """
        self._is_open = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the stream events for a part of the answer."""
        for event in self._reader.read(piece):
            kind = _kind(event)
            if not self._is_open or isinstance(event, CallBegin) or self._blocks[-1]["type"] != kind:
                yield from self._close()
                yield self._open(event, kind)
            if not isinstance(event, CallBegin):
                self._texts.append(event.text)
                text = self._arguments.feed(event.text) if kind == "tool_use" else event.text
                if text:
                    yield self._delta(kind, text)
        if piece.finish_reason is not None:
            yield from self._close()
            self._stop_sequence = piece.stop_text
            if piece.finish_reason == "length":
                self._stop_reason = "max_tokens"
            elif self._reader.calls:
                self._stop_reason = "tool_use"
            else:
                self._stop_reason = "end_turn" if piece.stop_text is None else "stop_sequence"

    def message(self) -> dict[str, Any]:
        """Return the `message` object of the answer, with the content blocks so far."""
        is_ended = self._stop_reason is not None
        cached = self._usage.cached
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": {
                "input_tokens": self._prompt_tokens - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": self._usage.completion if is_ended else 0,
            },
        }

    def _open(self, event: Event, kind: str) -> dict[str, Any]:
        self._texts, self._arguments, self._is_open = [], JsonPrefix(), True
        block: dict[str, Any] = {"type": kind}
        if isinstance(event, CallBegin):
            block |= {"id": event.id or f"toolu_{uuid.uuid4().hex[:24]}", "name": event.name, "input": {}}
        elif kind == "thinking":
            block |= {"thinking": "", "signature": ""}
        else:
            block |= {"text": "", "citations": None}
        self._blocks.append(block)
        return self._event("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[dict[str, Any]]:
        """Yield the stream event that ends the open content block, if a block is open."""
        if not self._is_open:
            return
        self._is_open = False
        block, text = self._blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
            if rest := self._arguments.finish():
                yield self._delta("tool_use", rest)
        else:
            block[block["type"]] = text
        yield self._event("content_block_stop")

    def _delta(self, kind: str, text: str) -> dict[str, Any]:
        delta_type, field = _DELTA[kind]
        return self._event("content_block_delta", delta={"type": delta_type, field: text})

    def _event(self, type_: str, **fields: Any) -> dict[str, Any]:
        return {"type": type_, "index": len(self._blocks) - 1, **fields}


_DELTA = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _kind(event: Event) -> str:
    if isinstance(event, CallBegin | CallArguments):
        return "tool_use"
    return "thinking" if isinstance(event, Reasoning) else "text"


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a tool call.

    A text that is not a JSON object becomes the value of the key `arguments`.
    """
    try:
        value = load_json(text or "{}", depth=_BLOCK_DEPTH)
        json.dumps(value, allow_nan=False)  # json parses 1e999 as infinity
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in the format of Anthropic's API."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextLengthError):
        message = f"prompt is too long: {error.prompt_length} tokens > {error.limit} maximum"
    elif error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    body: dict[str, Any] = {"type": kind, "message": message}
    if error.param == "thread":
        body["details"] = {"error_code": "thread_unsupported_request"}  # Anthropic's SDK then sends all messages again
    return {"type": "error", "error": body}


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error type by HTTP status. Other 4xx: invalid_request_error. Other 5xx: api_error."""
