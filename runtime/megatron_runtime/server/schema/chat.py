"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from megatron_runtime.server.schema.bounds import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TEMPLATE_VARIABLES,
    Discarded,
    JsonValue,
    Name,
    Neutral,
    TokenIds,
)
from megatron_runtime.server.schema.common import (
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    refused_unless,
)
from megatron_runtime.server.schema.tools import MAX_TOOLS, NamedTool, Tool, ToolCall

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "moderation": (None,),
}
"""Fields of the API that are not offered, with the values that ask for nothing."""

_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {"function_call": (None,), "audio": (None,)}

_ABSENT = object()


class ChatMessage(BaseModel):
    """One turn of a conversation. Companions that SDKs echo back from an answer (`refusal`, …) are dropped."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[Name | None, Field(validate_default=True)] = None
    content: Annotated[str, Field(default_factory=lambda: _ABSENT, validate_default=True)]
    function_call: Neutral = None
    audio: Neutral = None
    prompt_token_ids: TokenIds | None = None
    generation_token_ids: TokenIds | None = None

    generation_log_probs: Discarded = None
    raw_text: Discarded = None
    refusal: Discarded = None
    annotations: Discarded = None
    reasoning: Discarded = None
    reasoning_content: Discarded = None

    _not_offered = field_validator(*_NEUTRAL_IN_MESSAGE, mode="before")(refused_unless(_NEUTRAL_IN_MESSAGE))

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any, info: ValidationInfo) -> str:
        if isinstance(value, str):
            return value
        if (value is _ABSENT or value is None) and info.data.get("tool_calls"):
            return ""
        if value is _ABSENT:
            raise PydanticCustomError("missing", "Field required")
        if isinstance(value, list) and value:
            return "\n".join(_part(part) for part in value)
        raise ValueError("expected a string or a non-empty list of text parts")

    @field_validator("tool_calls")
    @classmethod
    def _made_by_the_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role") != "assistant":
            raise ValueError("only messages of role 'assistant' have tool_calls: leave it out")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _answers_a_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "tool":
            raise PydanticCustomError("missing", "Field required")
        if value is not None and info.data.get("role") != "tool":
            raise ValueError("only messages of role 'tool' have a tool_call_id: leave it out")
        return value

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it; `developer` is the newer name of `system`."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise ValueError(f"this model reads text only: every content part needs type 'text' and a text, not {kind!r}")
    return text


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    prevent_retokenization: StrictBool | None = None
    return_tokenized_data: StrictBool | None = None
    return_raw_text: StrictBool | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None

    functions: Neutral = None
    function_call: Neutral = None
    modalities: Neutral = None
    audio: Neutral = None
    prediction: Neutral = None
    web_search_options: Neutral = None
    reasoning_effort: Neutral = None
    verbosity: Neutral = None
    moderation: Neutral = None

    _not_offered = field_validator(*_NEUTRAL, mode="before")(refused_unless(_NEUTRAL))

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("top_logprobs is allowed only with logprobs: true")
        return value

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, value: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in value or ()]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"there are several functions named {repeated!r}: give each its own name")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _chooses_a_tool(cls, value: str | NamedTool | None, info: ValidationInfo) -> str | NamedTool | None:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if value in (None, "none", "auto") or "tools" not in info.data:
            return value
        if not names:
            raise ValueError("it forces a call, and there are no tools: give tools, or leave it out")
        if isinstance(value, NamedTool) and value.function.name not in names:
            raise ValueError(f"there is no function {value.function.name!r} among the tools: {', '.join(names)}")
        return value

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []
