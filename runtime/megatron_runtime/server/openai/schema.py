"""Request bodies of the OpenAI API, with the fields that this server adds and those that it does not offer.

A field that would change the answer and is not offered is rejected by name. A field that only annotates is accepted.
Every list and map has a maximum length, and validation stops at its first wrong element.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.sampling_params import (
    BIASES,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARACTERS,
    MAX_LOGIT_BIAS_TOKENS,
    RULES,
)
from megatron_runtime.sampling.grammar_limits import MAX_ALTERNATIVES
from megatron_runtime.server.errors import shown
from megatron_runtime.server.guards import JsonScan, load_json
from megatron_runtime.server.tools import MAX_NAME_CHARACTERS

MAX_TOKEN_IDS = 1 << 20
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20
MAX_TEMPERATURE = 2
MAX_MESSAGES = 4096
MAX_CALLS = 1024
"""Of one message, of a client or of an answer."""
MAX_TOOLS = 128
MAX_TOOL_BYTES = 256 * 1024
MAX_TEMPLATE_VARIABLES = 64
MAX_SCHEMA_KEYS = 4096

FREE_JSON = "bounded by JsonScan"
"""Marks JSON of any structure: JsonScan limits its depth and size before the body is parsed."""

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which chat templates read the reasoning of a message: Qwen and DeepSeek, gpt-oss, Gemma."""

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def within(name: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """Return the bounds of the sampling parameter `name`, for the field of a body that becomes it.

    minimum, maximum: of this API, if they differ: a value that the server translates, or the limit of OpenAI.
    """
    bounds = RULES[name].bounds
    assert bounds is not None, f"{name} is a number"
    limits: dict[str, Any] = {"ge": bounds.minimum if minimum is None else minimum}
    highest = bounds.maximum if maximum is None else maximum
    if highest != math.inf:
        limits["le"] = highest
    if not bounds.is_whole:
        limits["allow_inf_nan"] = False
    return Field(**limits)


Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
NonEmpty = Annotated[StrictStr, Field(min_length=1)]
Number = StrictInt | StrictFloat
Temperature = Annotated[float, within("temperature", maximum=MAX_TEMPERATURE)]
TopP = Annotated[float, within("top_p")]
MaxTokens = Annotated[StrictInt, within("num_tokens_to_generate", minimum=1, maximum=math.inf)]
"""A number that does not fit is cut to what fits."""
TopLogProbs = Annotated[StrictInt, within("top_n_logprobs", maximum=MAX_TOP_LOGPROBS)]
StopTokenIds = Annotated[
    list[Annotated[StrictInt, within("stop_token_ids")]], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
]
TokenId = Annotated[StrictInt, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
PromptIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
"""Ids of any sign: the check against the vocabulary reports those that are out of range."""
JsonValue = Annotated[Any, FREE_JSON]
JsonObject = Annotated[dict[str, JsonValue], Field(max_length=MAX_SCHEMA_KEYS)]
JsonSchema = JsonObject | StrictBool
TemplateVariables = Annotated[dict[str, JsonValue], Field(max_length=MAX_TEMPLATE_VARIABLES)]
GuidedChoice = Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True)]
OptionalText = Annotated[str | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)]
"""A text; a value of another type, which another server may have written, is dropped."""
Discarded = Annotated[Any, BeforeValidator(lambda _: None)]
"""A field that is accepted without effect: its value, of any type, is dropped."""


def only(*neutral: Any) -> BeforeValidator:
    """Return a validator for a field that is not offered. It accepts null and `neutral`, which change nothing."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # True equals 1 in Python.
        if value is None or any(value == item and (value is True) == (item is True) for item in neutral):
            return value
        remedy = " or use " + " or ".join(map(repr, neutral)) if neutral else ""
        raise ValueError(f"{info.field_name} is not offered by this server: leave it out{remedy}")

    return BeforeValidator(check)


def only_with(other: str, wanted: Any, problem: str) -> AfterValidator:
    """Return a validator that rejects a value unless the field `other`, which is above this one, is `wanted`."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get(other) != wanted:
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _as_strings(value: Any) -> list[Any]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list):
        raise ValueError("expected a string or a list of strings")
    return strings


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
    BeforeValidator(_as_strings),
]

BadWords = Annotated[
    list[Annotated[StrictStr, Field(min_length=1, max_length=MAX_BAD_WORDS_CHARACTERS)]],
    Field(max_length=MAX_BAD_WORDS, fail_fast=True),
]


class Body(BaseModel):
    """An object of a request: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ModelRequest(Body):
    """The body of a request to the model. model: None takes the one that is served.

    token_field: field that may have a long list, of token ids.
    """

    token_field: ClassVar[str | None] = None

    model: Name | None = None

    def prepared(self) -> Self:
        """Return the request in the form that its route reads. Called where the body was parsed."""
        return self


class StreamOptions(Body):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None


class JsonSchemaFormat(Body):
    """The `json_schema` of a response format. `strict` changes nothing: the format is always enforced."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

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


class StructuredOutputs(Body):
    """The formats of the guided_ fields under one field. Exactly one is given."""

    json_: Annotated[JsonSchema | StrictStr | None, Field(alias="json")] = None
    regex: NonEmpty | None = None
    choice: GuidedChoice | None = None
    grammar: NonEmpty | None = None
    json_object: StrictBool | None = None


class GenerationRequest(ModelRequest):
    """The common fields of completions and chat completions. A validator has access to the fields above its own.

    answer_id, answer_object, chunk_object: prefix of the answer's `id`, and `object` of a whole answer and of an event.
    """

    answer_id: ClassVar[str]
    answer_object: ClassVar[str]
    chunk_object: ClassVar[str]

    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: Annotated[
        StreamOptions | None, only_with("stream", True, "stream_options is allowed only with stream: true")
    ] = None
    stop: StopStrings = Field(default_factory=list)
    seed: Annotated[StrictInt, within("seed", minimum=-(1 << 63))] | None = None
    presence_penalty: Annotated[float, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_LOGIT_BIAS_TOKENS)] | None = None

    # Additions to OpenAI's fields, under the names that other servers use.
    top_k: Annotated[StrictInt, within("top_k", minimum=-1)] | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    min_tokens: Annotated[StrictInt, within("min_tokens")] | None = None
    bad_words: BadWords | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: StrictBool | None = None
    streaming_interval: Annotated[StrictInt, within("streaming_interval")] | None = None
    return_token_ids: StrictBool | None = None
    add_BOS: StrictBool | None = None
    skip_prompt_log_probs: StrictBool | None = None
    priority: Annotated[StrictInt, within("priority")] | None = None
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=1024)] | None = None

    # At most one of these is given.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | StrictStr | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: NonEmpty | None = None

    # Annotations, without effect on the answer.
    user: Discarded = None
    metadata: Discarded = None
    store: Discarded = None
    service_tier: Discarded = None
    safety_identifier: Discarded = None
    prompt_cache_key: Discarded = None
    prompt_cache_retention: Discarded = None
    prompt_cache_options: Discarded = None

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not _TOKEN_ID.fullmatch(token):
                raise ValueError(f"keys are token ids as decimal strings, not {shown(token)}")
            if not BIASES(bias):
                raise ValueError(f"the bias of token {token} is {shown(bias)}: use {BIASES}")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. With echo max_tokens may be 0, for the prompt and its log-probabilities alone."""

    answer_id, answer_object, chunk_object = "cmpl", "text_completion", "text_completion"
    token_field = "prompt"

    max_tokens: Annotated[StrictInt, within("num_tokens_to_generate", minimum=0, maximum=math.inf)] | None = None
    prompt: (
        Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    echo: StrictBool | None = None
    logprobs: TopLogProbs | None = None
    best_of: Annotated[Any, FREE_JSON, only(1)] = None
    suffix: Annotated[Any, FREE_JSON, only("")] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """Return a list of prompts, from one prompt or several, as text or as token ids."""
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if not isinstance(prompts, list) or not prompts or len(prompts) > MAX_PROMPTS:
            raise ValueError(f"expected a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either")
        if all(isinstance(item, str) for item in prompts) or all(_is_token_ids(item) for item in prompts):
            return prompts
        raise ValueError("expected all prompts to be strings, or all to be non-empty lists of token ids")


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


class Function(Body):
    """One function. `strict` changes nothing: arguments follow the schema if tool_choice forces the call."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: StrictBool | None = None

    @field_validator("parameters")
    @classmethod
    def _bounded(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        size = len(json.dumps(value, allow_nan=False))
        if size > MAX_TOOL_BYTES:
            raise ValueError(f"the schema has {size} bytes: at most {MAX_TOOL_BYTES} are allowed")
        return value


class Tool(Body):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    """`tool_choice` that names the one function to call."""

    type: Literal["function"]
    function: NamedFunction


def _arguments(value: Any, info: ValidationInfo) -> dict[str, Any] | str:
    """Return the object that a string of the body contains, or the string: a model may write any text."""
    if value is None or isinstance(value, dict):
        return value or {}
    if not isinstance(value, str):
        raise ValueError("expected a JSON object as a string")
    scan = info.context if isinstance(info.context, JsonScan) else None
    try:
        found = load_json(value or "{}", scan=scan)
        json.dumps(found, allow_nan=False)  # 1e999 is no number
    except ValueError:
        return value
    return found if isinstance(found, dict) else value


class CalledFunction(BaseModel):
    """The function of a call in a conversation. Chat templates format arguments themselves, as an object."""

    model_config = ConfigDict(extra="ignore")

    name: Name
    arguments: Annotated[Any, FREE_JSON, WithJsonSchema({"type": "string"}), BeforeValidator(_arguments)] = Field(
        default_factory=dict
    )


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore")

    id: Name
    type: Literal["function"] | None = None
    function: CalledFunction


_ABSENT = object()


class ChatMessage(BaseModel):
    """One message of a conversation. What an answer has is accepted back, and fields without effect are dropped.

    The content of an answer may be missing or empty.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Name | None = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None,
        only_with("role", "assistant", "only messages of role 'assistant' have tool_calls: leave it out"),
    ] = None
    tool_call_id: Annotated[Name | None, Field(validate_default=True)] = None
    refusal: OptionalText = None
    content: Annotated[str, Field(default_factory=lambda: _ABSENT, validate_default=True)]
    function_call: Annotated[Any, FREE_JSON, only()] = None
    audio: Annotated[Any, FREE_JSON, only()] = None
    prompt_token_ids: TokenIds | None = None
    generation_token_ids: TokenIds | None = None

    generation_log_probs: Discarded = None
    raw_text: Discarded = None
    annotations: Discarded = None
    reasoning: OptionalText = None
    reasoning_content: Annotated[
        str | None,
        only_with("role", "assistant", "only messages of role 'assistant' have reasoning_content: leave it out"),
    ] = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any, info: ValidationInfo) -> str:
        if isinstance(value, str) and value:
            return value
        role = info.data.get("role")
        if role == "assistant" and (value is _ABSENT or not value):
            return info.data.get("refusal") or ""
        if isinstance(value, str) or (role == "tool" and value in (None, [])):
            return ""
        if value is _ABSENT:
            raise PydanticCustomError("missing", "Field required")
        if isinstance(value, list) and value:
            return "\n".join(_text_of_part(part) for part in value)
        raise ValueError("expected a string or a non-empty list of text parts")

    @field_validator("tool_call_id")
    @classmethod
    def _answers_a_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "tool":
            raise PydanticCustomError("missing", "Field required")
        if value is not None and info.data.get("role") != "tool":
            raise ValueError("only messages of role 'tool' have a tool_call_id: leave it out")
        return value

    @property
    def thought(self) -> str:
        """Return the reasoning of an answer."""
        return (self.reasoning_content or self.reasoning or "") if self.role == "assistant" else ""

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it; `developer` is the newer name of `system`."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.thought:
            message |= dict.fromkeys(THOUGHT_FIELDS, self.thought)
        if self.tool_calls:
            message["tool_calls"] = [{**call.model_dump(), "type": "function"} for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise ValueError(f"this model reads text only: every content part needs type 'text' and a text, not {kind!r}")
    return text


def _continues(value: bool | None, info: ValidationInfo) -> bool | None:
    if value and info.data.get("add_generation_prompt"):
        raise ValueError("add_generation_prompt begins a new message: leave one of the two out")
    return value


ContinueFinalMessage = Annotated[StrictBool | None, AfterValidator(_continues)]
"""The answer continues the last message, so the prompt ends within it."""


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. add_generation_prompt: begin the answer's message, which is the default."""

    answer_id, answer_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: MaxTokens | None = None
    chat_template_kwargs: TemplateVariables | None = None
    prevent_retokenization: StrictBool | None = None
    return_tokenized_data: StrictBool | None = None
    return_raw_text: StrictBool | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[
        TopLogProbs | None,
        only_with("logprobs", True, "top_logprobs is allowed only with logprobs: true"),
    ] = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: ContinueFinalMessage = None

    functions: Annotated[Any, FREE_JSON, only([])] = None
    function_call: Annotated[Any, FREE_JSON, only("none", "auto")] = None
    modalities: Annotated[Any, FREE_JSON, only(["text"])] = None
    audio: Annotated[Any, FREE_JSON, only()] = None
    prediction: Annotated[Any, FREE_JSON, only()] = None
    web_search_options: Annotated[Any, FREE_JSON, only()] = None
    verbosity: Annotated[Any, FREE_JSON, only("medium")] = None
    moderation: Annotated[Any, FREE_JSON, only()] = None

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
        """Return the tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeRequest(ModelRequest):
    """POST /v1/tokenize: either `prompt`, or `messages` and their options.

    add_special_tokens: add the special tokens that the model expects, such as its begin-of-sequence token.
    return_token_strs:  answer with the text of each token too.
    """

    prompt: str | None = None
    messages: Annotated[
        list[ChatMessage] | None, Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, validate_default=True)
    ] = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: ContinueFinalMessage = None
    return_token_strs: StrictBool | None = None

    @field_validator("messages")
    @classmethod
    def _one_of_two(cls, value: Any, info: ValidationInfo) -> Any:
        if "prompt" in info.data and (value is None) == (info.data["prompt"] is None):
            raise ValueError("give either prompt or messages")
        return value


class DetokenizeRequest(ModelRequest):
    """POST /v1/detokenize."""

    token_field = "tokens"

    tokens: TokenIds
