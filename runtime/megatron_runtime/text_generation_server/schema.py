"""Requests as the OpenAI API defines them, and what this server adds or does not offer.

A field that would change the answer and is not offered is refused by name; one that only annotates is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationInfo, field_validator

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_PROMPTS = 1024

TokenIds = list[int]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
}
"""Fields of the API that are not offered, with the values that ask for nothing."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: list[str] = Field(default_factory=list)
    seed: Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 64)] | None = None

    # Beyond OpenAI, under the names that other servers gave them.
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: list[Annotated[StrictInt, Field(ge=0)]] | None = None

    # Annotations: accepted, without effect on the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    # Not offered: see _NEUTRAL.
    logprobs: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None

    @field_validator(*_NEUTRAL, mode="before", check_fields=False)
    @classmethod
    def _not_offered(cls, value: Any, info: ValidationInfo) -> Any:
        neutral = _NEUTRAL[info.field_name or ""]
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral):
            allowed = " or ".join(repr(item) for item in neutral if item is not None)
            remedy = f"leave it out or use {allowed}" if allowed else "leave it out"
            raise ValueError(f"{info.field_name} is not offered by this server: {remedy}")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: Any) -> list[str]:
        strings = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
            raise ValueError("expected a string or a list of strings")
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} strings are allowed, {len(strings)} were given")
        if any(not 0 < len(item) <= MAX_STOP_CHARACTERS for item in strings):
            raise ValueError(f"each string needs 1 to {MAX_STOP_CHARACTERS} characters")
        return strings

    @field_validator("stream_options")
    @classmethod
    def _options_need_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("stream_options is allowed only with stream: true")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: list[str] | list[TokenIds]
    echo: StrictBool | None = None
    best_of: Any = None
    suffix: Any = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """One prompt or several, as text or as token ids: always a list of prompts afterwards."""
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if not isinstance(prompts, list) or not prompts or len(prompts) > MAX_PROMPTS:
            raise ValueError(f"expected a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either")
        if all(isinstance(item, str) for item in prompts) or all(_is_token_ids(item) for item in prompts):
            return prompts
        raise ValueError("expected all prompts to be strings, or all to be non-empty lists of token ids")


class TextPart(BaseModel):
    """The one kind of content part that a text model reads."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn of a conversation. Unset companions that SDKs echo back (`refusal: null`, …) are dropped."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            if all(isinstance(part, dict) and part.get("type") == "text" for part in value):
                return "\n".join(TextPart.model_validate(part).text for part in value)
            raise ValueError("this model reads text only: every content part needs type 'text'")
        raise ValueError("expected a string or a non-empty list of text parts")

    @field_validator("tool_calls", "function_call")
    @classmethod
    def _no_tools(cls, value: Any, info: ValidationInfo) -> Any:
        if value:
            raise ValueError(f"{info.field_name} is not offered by this server: leave it out")
        return value

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it; `developer` is the newer name of `system`."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **named}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: Any = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


def _is_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )
