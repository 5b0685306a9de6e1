"""What completions and chat completions have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
)

from megatron_runtime.server.schema.bounds import (
    MAX_STOP_TOKEN_IDS,
    Discarded,
    JsonObject,
    Name,
    TokenId,
)
from megatron_runtime.server.schema.structured import (
    GuidedChoice,
    ResponseFormat,
    StructuredOutputs,
    must_be_alone,
)

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024

Number = StrictInt | StrictFloat
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None


class GenerationRequest(BaseModel):
    """The fields of both endpoints. A validator sees the fields above its own."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: Name
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    seed: Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_BIASES)] | None = None

    # Beyond OpenAI, under the names that other servers gave them.
    top_k: Annotated[StrictInt, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: StrictBool | None = None
    streaming_interval: Annotated[StrictInt, Field(ge=1, lt=1 << 31)] | None = None
    return_token_ids: StrictBool | None = None
    add_BOS: StrictBool | None = None
    skip_prompt_log_probs: StrictBool | None = None
    priority: Annotated[StrictInt, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=1024)] | None = None

    # At most one of these.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | StrictBool | StrictStr | None = None
    guided_regex: Annotated[StrictStr, Field(min_length=1)] | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: Annotated[StrictStr, Field(min_length=1)] | None = None

    # Annotations: accepted, without effect on the answer.
    user: Discarded = None
    metadata: Discarded = None
    store: Discarded = None
    service_tier: Discarded = None
    safety_identifier: Discarded = None
    prompt_cache_key: Discarded = None
    prompt_cache_retention: Discarded = None
    prompt_cache_options: Discarded = None

    _alone = field_validator(
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", mode="after"
    )(must_be_alone)

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: Any) -> list[str]:
        strings = [] if value is None else [value] if isinstance(value, str) else value
        if isinstance(strings, list) and len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} strings are allowed, {len(strings)} were given")
        if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
            raise ValueError("expected a string or a list of strings")
        if any(not 0 < len(item) <= MAX_STOP_CHARACTERS for item in strings):
            raise ValueError(f"each string needs 1 to {MAX_STOP_CHARACTERS} characters")
        return strings

    @field_validator("stream_options")
    @classmethod
    def _options_need_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("stream_options is allowed only with stream: true")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not token.isascii() or not token.isdecimal():
                raise ValueError(f"keys are token ids as decimal strings, not {token[:40]!r}")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token[:40]} is {bias}: use a number from -100 to 100")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def refused_unless(neutral: Mapping[str, tuple[Any, ...]]) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator for fields that are not offered: only values that ask for nothing pass.

    neutral: those values, by field.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        values = neutral[info.field_name or ""]
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values):
            allowed = " or ".join(repr(item) for item in values if item is not None)
            remedy = f"leave it out or use {allowed}" if allowed else "leave it out"
            raise ValueError(f"{info.field_name} is not offered by this server: {remedy}")
        return value

    return check
