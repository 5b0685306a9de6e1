"""Request bodies of the OpenAI API, including fields that this server adds and fields that it does not offer.

`fields.py` lists all other known fields. Every list and map has a maximum length, and validation stops at the first
invalid element.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.rules import MAX_INT32
from megatron_runtime.requests.sampling_params import (
    BIASES,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARACTERS,
    MAX_LOGIT_BIAS_TOKENS,
)
from megatron_runtime.sampling.grammar_limits import MAX_ALTERNATIVES
from megatron_runtime.server.errors import ApiError, from_validation, renamed, shown
from megatron_runtime.server.formats.conversation import THOUGHT_FIELDS
from megatron_runtime.server.formats.parser import MAX_NAME_CHARACTERS
from megatron_runtime.server.guards import JsonScan, load_json
from megatron_runtime.server.openai.content import MediaPart, MixedContent, content_of, media_part
from megatron_runtime.server.openai.fields import (
    CHAT_POLICY,
    COMPLETION_POLICY,
    TOKENIZE_POLICY,
    FieldPolicy,
    NotOffered,
    meaning,
    sampled,
    served,
    with_sampling_fields,
    within,
)

MAX_TOKEN_IDS = 1 << 20
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_CALLS = 1024
"""Maximum number of calls in one message, in a request or an answer."""
MAX_TOOLS = 128
MAX_TOOL_BYTES = 256 * 1024
MAX_TEMPLATE_VARIABLES = 64
MAX_SCHEMA_KEYS = 4096

FREE_JSON = "bounded by JsonScan"
"""Marks a field that can contain any JSON. JsonScan limits the depth and size before the body is parsed."""

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
NonEmpty = Annotated[StrictStr, Field(min_length=1)]
Number = StrictInt | StrictFloat
Temperature = Annotated[float, within("temperature")]
TopP = Annotated[float, within("top_p")]
MaxTokens = Annotated[StrictInt, within("num_tokens_to_generate")]
"""Maximum number of tokens in an answer. A number above the limit is reduced to the limit."""
TopLogProbs = Annotated[StrictInt, within("top_n_logprobs", maximum=MAX_TOP_LOGPROBS)]
StopTokenIds = Annotated[
    list[Annotated[StrictInt, within("stop_token_ids")]], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
]
AllowedTokenIds = Annotated[
    list[Annotated[StrictInt, within("allowed_token_ids")]],
    Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True),
]
TokenId = Annotated[StrictInt, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
PromptIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
"""Token ids, including negative ids. The check against the vocabulary reports ids that are out of range."""
JsonValue = Annotated[Any, FREE_JSON]
JsonObject = Annotated[dict[str, JsonValue], Field(max_length=MAX_SCHEMA_KEYS)]
JsonSchema = JsonObject | StrictBool
TemplateVariables = Annotated[dict[str, JsonValue], Field(max_length=MAX_TEMPLATE_VARIABLES)]
GuidedChoice = Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
OptionalText = Annotated[str | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)]
"""A text. Values of other types, which other servers can produce, become None."""


def only(*neutral: Any) -> BeforeValidator:
    """Return a validator for a field that is not offered. The validator accepts only null and the values `neutral`."""

    def check(value: Any, info: ValidationInfo) -> Any:
        NotOffered(neutral).check(str(info.field_name), value)
        return value

    return BeforeValidator(check)


def only_with(other: str, wanted: Any, problem: str) -> AfterValidator:
    """Return a validator that rejects a value of a field unless the field `other` has the value `wanted`.

    `other` must be declared before the validated field.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get(other) != wanted:
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def without(other: str, problem: str) -> AfterValidator:
    """Return a validator that rejects a value of a field if the field `other` is true.

    `other` must be declared before the validated field.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get(other):
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
    """Base class of the objects in a request. Unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class ModelRequest(Body):
    """Base class of the request bodies that can name a model.

    model: name of the model; None: the model of this server.
    token_field: name of the field that can contain a long list of token ids.
    policy:      policy for fields that the class does not declare.
    own_names:   map from field names in the converted request to the field names on this route.
    """

    model_config = ConfigDict(extra="allow")

    token_field: ClassVar[str | None] = None
    policy: ClassVar[FieldPolicy] = FieldPolicy()
    own_names: ClassVar[Mapping[str, str]] = {}

    model: Name | None = served("The name in `/v1/models`.")

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the names of the unknown fields in this request. Call prepared() first."""
        return tuple(self.__pydantic_extra__ or ())

    def prepared(self) -> Self:
        """Return the request in the form that its route uses.

        Called in the process that has parsed the body.

        Raises ApiError 400 for a field that this server does not support.
        """
        if extra := self.__pydantic_extra__:
            self.__pydantic_extra__ = dict.fromkeys(self.policy.unknown(extra))
        return self


class StreamOptions(Body):
    include_usage: StrictBool | None = None


class JsonSchemaFormat(Body):
    """The `json_schema` of a response format.

    The schema is always enforced. With `strict`, a keyword in the schema that cannot be enforced is an error.
    """

    name: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """The field `response_format` of OpenAI's API.

    The schema can also be in the field `schema`, without an object `json_schema`, as on other servers.
    """

    type: Literal["text", "json_object", "json_schema"]
    schema_: JsonObject | None = Field(default=None, alias="schema")
    json_schema: Annotated[JsonSchemaFormat | None, Field(validate_default=True)] = None

    @field_validator("json_schema")
    @classmethod
    def _belongs_to_its_type(cls, value: JsonSchemaFormat | None, info: ValidationInfo) -> JsonSchemaFormat | None:
        kind = info.data.get("type")
        if kind == "json_schema" and value is None and info.data.get("schema_") is None:
            raise ValueError("type 'json_schema' needs a json_schema object with name and schema")
        if kind in ("text", "json_object") and value is not None:
            raise ValueError(f"type {kind!r} takes no json_schema: leave it out or use type 'json_schema'")
        return value

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer, or None if the format has no schema."""
        return self.schema_ if self.json_schema is None else self.json_schema.schema_


class StructuredOutputs(Body):
    """The object in the field `structured_outputs`. It sets exactly one format, as each `guided_` field does."""

    json_: Annotated[JsonSchema | StrictStr | None, Field(alias="json")] = None
    regex: NonEmpty | None = None
    choice: GuidedChoice | None = None
    grammar: NonEmpty | None = None
    json_object: StrictBool | None = None


@with_sampling_fields(without=("max_tokens",))
class SampledRequest(ModelRequest):
    """The fields of OpenAI's and vLLM's APIs that have the same names and meanings on all routes that generate text.

    with_sampling_fields() adds the fields for numbers and flags from the declarations of sampling parameters.
    """

    temperature: Temperature | None = sampled("temperature")
    top_p: TopP | None = sampled("top_p")
    stream: StrictBool | None = sampled("stream")
    stop: StopStrings = Field(default_factory=list, description=meaning("stop"))
    seed: Annotated[StrictInt, within("seed")] | None = sampled("seed")
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_LOGIT_BIAS_TOKENS)] | None = sampled("logit_bias")
    bad_words: BadWords | None = sampled("bad_words")
    stop_token_ids: StopTokenIds | None = sampled("stop_token_ids")
    allowed_token_ids: AllowedTokenIds | None = sampled("allowed_token_ids")
    priority: Annotated[StrictInt, within("priority")] | None = sampled("priority")
    streaming_interval: Annotated[StrictInt, within("streaming_interval")] | None = sampled("streaming_interval")
    ignore_eos: StrictBool | None = served("The model's own end tokens do not end the answer.")
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=1024)] | None = served(
        "Cached prefixes are shared only among requests of one salt, and of one API key."
    )
    prompt_cache_key: Annotated[StrictStr, Field(max_length=1024)] | None = served(
        "Requests of one key, and of one API key, go to one engine while it holds their prefix and is not much busier "
        "than others. The header `x-session-id` has the same effect, and the field takes precedence."
    )
    skip_special_tokens: StrictBool | None = served(
        "`false`: the text of the answer has its special tokens, but not the one that ended it."
    )

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not _TOKEN_ID.fullmatch(token):
                raise ValueError(f"keys are token ids as decimal strings, not {shown(token)}")
            if not BIASES(bias):
                raise ValueError(f"the bias of token {token} is {shown(bias)}: use {BIASES}")
        return value


class GenerationRequest(SampledRequest):
    """The common fields of completions and chat completions.

    A validator can read only the fields that are declared before its own field.

    answer_id:     prefix of the answer's `id`.
    answer_object: value of `object` in an answer without streaming.
    chunk_object:  value of `object` in a stream event.
    """

    answer_id: ClassVar[str]
    answer_object: ClassVar[str]
    chunk_object: ClassVar[str]

    max_tokens: MaxTokens | None = sampled("max_tokens")
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = served(
        "Choices of each prompt. Prompts times `n` may be at most 1024."
    )
    stream_options: Annotated[
        StreamOptions | None, only_with("stream", True, "stream_options is allowed only with stream: true")
    ] = served("`include_usage`: a last event with the usage.")
    return_token_ids: StrictBool | None = served("Each choice, or chunk, has `token_ids`.")
    add_BOS: StrictBool | None = served("The prompt begins with the model's first token, unless it does already.")

    add_special_tokens: StrictBool | None = served(
        "Put what the model expects before a text, such as its begin-of-sequence token. Completions: `true` if absent. "
        "Chat: `false` if absent, because the chat template writes it."
    )
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1, le=MAX_INT32)] | None = served(
        "Keep this many tokens of each prompt. -1 keeps as many as fit with `max_tokens`."
    )
    truncation_side: Literal["left", "right"] | None = served(
        "The side that `truncate_prompt_tokens` removes; `left` if absent."
    )
    return_tokens_as_token_ids: StrictBool | None = served(
        "Log-probabilities name a token `token_id:N` instead of its text."
    )
    prompt_logprobs: Annotated[
        TopLogProbs | None,
        without("stream", "prompt_logprobs is not allowed with stream: true: leave one of them out"),
    ] = served(
        "Log-probabilities of the prompt's tokens and of the most likely ones at their places, in `prompt_logprobs`: "
        "by token id `logprob`, `rank` (null for a token that is not among the most likely) and `decoded_token`. Not "
        "with `stream`."
    )
    stream_interval: Annotated[StrictInt, within("streaming_interval")] | None = served(
        "Another name of `streaming_interval`."
    )

    # A request can have at most one of these fields.
    response_format: ResponseFormat | None = served(
        "`text`, `json_object`, or `json_schema` with `json_schema: {name, schema}`. The format is always enforced, "
        "with `strict` in [every keyword](structured-output.md#json-schemas). A `schema` may replace `json_schema`."
    )
    structured_outputs: StructuredOutputs | None = served(
        "The same formats under one field: one of `json`, `regex`, `choice`, `grammar`, `json_object`."
    )
    guided_json: JsonSchema | StrictStr | None = served(
        "A JSON schema. One structured output per request; see "
        "[limits](structured-output.md#limits-of-structured-output)."
    )
    guided_regex: NonEmpty | None = served("A regular expression.")
    guided_choice: GuidedChoice | None = served("One of these texts.")
    guided_grammar: NonEmpty | None = served("A grammar in Lark's syntax, or in GBNF or EBNF.")

    @property
    def answer_limit(self) -> int | None:
        """Return the maximum number of answer tokens that the request sets, or None if it sets no maximum."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """The request body of POST /v1/completions.

    With `echo`, `max_tokens` can be 0. In this case, the answer is the prompt with its log-probabilities.
    """

    answer_id, answer_object, chunk_object = "cmpl", "text_completion", "text_completion"
    token_field = "prompt"
    policy = COMPLETION_POLICY

    max_tokens: Annotated[StrictInt, within("num_tokens_to_generate", minimum=0)] | None = sampled("max_tokens")
    prompt: (
        Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(
        description="A string, a list of token ids, or a list of either. Choices come in the order of the prompts."
    )
    echo: StrictBool | None = served("The prompt before the answer; with `max_tokens: 0` the prompt alone.")
    logprobs: TopLogProbs | None = served(
        "Tokens, their log-probabilities, the most likely ones (and the token itself), and offsets into the text; with "
        "`echo` those of the prompt, too. A token that is part of a character reads `bytes:\\xNN`."
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """Return `value` as a list of prompts. `value` is one prompt or a list of prompts, as texts or token ids."""
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if not isinstance(prompts, list) or not prompts or len(prompts) > MAX_PROMPTS:
            raise ValueError(f"expected a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either")
        if all(isinstance(item, str) for item in prompts) or all(_is_token_ids(item) for item in prompts):
            return prompts
        raise ValueError("expected all prompts to be strings, or all to be non-empty lists of token ids")


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


FunctionName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model can call.

    If tool_choice forces a call of the function, the server enforces the schema of the arguments. With `strict`, a
    keyword in the schema that cannot be enforced is an error.
    """

    name: FunctionName
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
    type: Literal["function"] = "function"
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTool(Body):
    """A tool in a list of allowed tools. In chat requests, the name of a function is in an inner object `function`."""

    type: StrictStr | None = None
    name: Name | None = None
    function: NamedFunction | None = None
    namespace: Name | None = None

    @property
    def full_name(self) -> str | None:
        """Return the name that the tool's function has in a chat request.

        Returns None for a tool that this server does not support.
        """
        name = self.name if self.function is None else self.function.name
        return f"{self.namespace}__{name}" if self.namespace and name else name


class AllowedTools(Body):
    """A `tool_choice` with the tools that the model can call, and whether the model must call one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]

    @model_validator(mode="before")
    @classmethod
    def _without_level(cls, value: Any) -> Any:
        """Move the fields of the inner object `allowed_tools`, which chat requests have, to the outer object."""
        inner = value.get("allowed_tools") if isinstance(value, dict) else None
        return {**value, **inner} if isinstance(inner, dict) else value

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the allowed functions in the chat request."""
        return frozenset(name for tool in self.tools if (name := tool.full_name) is not None)


def _arguments(value: Any, info: ValidationInfo) -> dict[str, Any] | str:
    """Return the arguments of a tool call, parsed if they are a string.

    A string that contains no JSON object is returned unchanged, because a model can write any text as arguments.
    """
    if value is None or isinstance(value, dict):
        return value or {}
    if not isinstance(value, str):
        raise ValueError("expected a JSON object as a string")
    scan = info.context if isinstance(info.context, JsonScan) else None
    try:
        loaded = load_json(value or "{}", scan=scan)
        json.dumps(loaded, allow_nan=False)  # json parses 1e999 as infinity
    except ValueError:
        return value
    return loaded if isinstance(loaded, dict) else value


class CalledFunction(Body):
    """The object `function` of a tool call in a conversation.

    `arguments` is an object, which the chat template formats.
    """

    name: Name
    arguments: Annotated[Any, FREE_JSON, WithJsonSchema({"type": "string"}), BeforeValidator(_arguments)] = Field(
        default_factory=dict
    )


class ToolCall(Body):
    id: Name
    type: Literal["function"] | None = None
    function: CalledFunction


_ABSENT = object()
_MEDIA_CHARACTERS = 8192
_TEXT_PARTS: Mapping[Any, str] = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
"""Member with the text, by type of content part. The last two types are parts of the Responses API."""


class ChatMessage(Body):
    """One message of a conversation.

    A client can send the message of an answer back unchanged, because all its fields are accepted. Fields without
    effect are dropped. The content of an assistant message can be missing or empty.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Name | None = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None,
        only_with("role", "assistant", "only messages of role 'assistant' have tool_calls: leave it out"),
    ] = None
    tool_call_id: Annotated[Name | None, Field(validate_default=True)] = None
    refusal: OptionalText = None
    content: Annotated[
        str | MixedContent,
        Field(default_factory=lambda: _ABSENT, validate_default=True),
        WithJsonSchema({"type": "string"}),
    ]
    function_call: Annotated[Any, FREE_JSON, only()] = None
    audio: Annotated[Any, FREE_JSON, only()] = None
    prompt_token_ids: TokenIds | None = None
    generation_token_ids: TokenIds | None = None
    reasoning: OptionalText = None
    reasoning_content: OptionalText = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any, info: ValidationInfo) -> str | MixedContent:
        role = info.data.get("role")
        if isinstance(value, MixedContent):
            if role == "assistant":
                raise ValueError("messages of role 'assistant' have text only")
            return value
        if isinstance(value, str) and value:
            return value
        if role == "assistant" and (value is _ABSENT or not value):
            return info.data.get("refusal") or ""
        if isinstance(value, str) or (role == "tool" and value in (None, [])):
            return ""
        if value is _ABSENT:
            raise PydanticCustomError("missing", "Field required")
        if isinstance(value, list) and value:
            return content_of([_part(part, role) for part in value])
        raise ValueError("expected a string or a non-empty list of text parts")

    @field_validator("tool_call_id")
    @classmethod
    def _answers_a_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("role") != "tool":
            return None  # without effect
        if value is None:
            raise PydanticCustomError("missing", "Field required")
        return value

    @property
    def text(self) -> str:
        """Return the text of the message's content."""
        return self.content if isinstance(self.content, str) else self.content.text

    @property
    def size(self) -> int:
        """Return the number of characters in the message. Each image, audio or video counts as a long text."""
        content = self.content
        media = 0 if isinstance(content, str) else sum(not isinstance(part, str) for part in content.parts)
        return len(self.text) + len(self.thought) + _MEDIA_CHARACTERS * media

    @property
    def thought(self) -> str:
        """Return the reasoning of an assistant message, or "" if the message has no reasoning."""
        return (self.reasoning_content or self.reasoning or "") if self.role == "assistant" else ""

    def for_template(self, takes: Collection[str], numbers: Iterator[int]) -> dict[str, Any]:
        """Return the message in the format of chat templates. The role `developer` becomes `system`, its older name.

        takes, numbers: as for MixedContent.for_template().
        """
        content = self.content if isinstance(self.content, str) else self.content.for_template(takes, numbers)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.thought:
            message |= dict.fromkeys(THOUGHT_FIELDS, self.thought)
        if self.tool_calls:
            message["tool_calls"] = [{**call.model_dump(), "type": "function"} for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _part(part: Any, role: Any) -> str | MediaPart:
    """Return the text of a content part, or a MediaPart for an image, audio or video. role: role of the message."""
    media = media_part(part) if isinstance(part, dict) else None
    if media is not None:
        if role == "assistant":
            raise ValueError(f"messages of role 'assistant' have text only, not {media.named!r}")
        return media
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise ValueError(f"this model reads text only: every content part needs type 'text' and a text, not {kind!r}")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"a content part of type {kind!r} needs a string {_TEXT_PARTS[kind]!r}, not {shown(text)}")
    return text


def _continues(value: bool | None, info: ValidationInfo) -> bool | None:
    if value and info.data.get("add_generation_prompt"):
        raise ValueError("add_generation_prompt begins a new message: leave one of the two out")
    return value


ContinueFinalMessage = Annotated[StrictBool | None, AfterValidator(_continues)]
"""Whether the answer continues the last message. The prompt then ends within this message."""


class ChatRequest(GenerationRequest):
    """The request body of POST /v1/chat/completions.

    add_generation_prompt: whether the prompt ends with the beginning of the assistant message (default).
    """

    answer_id, answer_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    policy = CHAT_POLICY

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="Roles system, developer (the same), user, assistant, tool. Content is a string, or parts of type "
        "text, and for models that take them [images, audio and video](http-api-behaviour.md#images-audio-and-video)."
    )
    max_completion_tokens: MaxTokens | None = served("The newer name of `max_tokens`.")
    chat_template_kwargs: TemplateVariables | None = served(
        "Variables of the model's chat template, such as `enable_thinking`."
    )
    prevent_retokenization: StrictBool | None = served(
        "The message of the answer has `prompt_token_ids` and `generation_token_ids`. Sent back as history, the next "
        "prompt begins with exactly these tokens, not with those that the text would have. For training."
    )
    return_tokenized_data: StrictBool | None = served("The message has the same two lists.")
    return_raw_text: StrictBool | None = served(
        "The message has `raw_text`: prompt and answer as the model saw them, special tokens included."
    )
    logprobs: StrictBool | None = served(
        "Log-probabilities of the tokens of the answer. A message that carries its tokens then carries "
        "`generation_log_probs`, too: one number for each token, the end token included."
    )
    top_logprobs: Annotated[
        TopLogProbs | None,
        only_with("logprobs", True, "top_logprobs is allowed only with logprobs: true"),
    ] = served("The most likely tokens at each position, and their bytes. Needs `logprobs`.")
    tools: Tools | None = served("See [tools](http-api-behaviour.md#tools).")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = served(
        "See [tools](http-api-behaviour.md#tools)."
    )
    parallel_tool_calls: StrictBool | None = served("`false`: the answer has at most one call.")
    include_reasoning: StrictBool | None = served("`false`: the answer lacks the reasoning.")
    reasoning_effort: Effort | None = served(
        "`none` to `max`, given to a chat template that reads `reasoning_effort` or `enable_thinking`. See "
        "[reasoning](http-api-behaviour.md#reasoning)."
    )
    thinking_token_budget: Annotated[StrictInt, Field(ge=-1, le=MAX_INT32)] | None = served(
        "Tokens of reasoning at most, where the model marks its end. -1: any number. See "
        "[reasoning](http-api-behaviour.md#reasoning)."
    )
    add_generation_prompt: StrictBool | None = served(
        "End the prompt with the start of the assistant's message. `false` leaves it out."
    )
    continue_final_message: ContinueFinalMessage = served(
        "Continue the last message: the prompt ends within it, and the answer has only what follows."
    )

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
    def _chooses_a_tool(
        cls, value: str | NamedTool | AllowedTools | None, info: ValidationInfo
    ) -> str | NamedTool | AllowedTools | None:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if isinstance(value, AllowedTools) and "tools" in info.data:
            allowed = value.names.intersection(names)
            if value.mode == "required" and not allowed:
                raise ValueError("it forces a call, and none of the tools that it allows is among the tools")
            return value
        if value in (None, "none", "auto") or "tools" not in info.data:
            return value
        if not names:
            raise ValueError("it forces a call, and there are no tools: give tools, or leave it out")
        if isinstance(value, NamedTool) and value.function.name not in names:
            raise ValueError(f"there is no function {value.function.name!r} among the tools: {', '.join(names)}")
        return value

    @property
    def answer_limit(self) -> int | None:
        """Return the maximum number of answer tokens that the request sets, or None if it sets no maximum."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[Tool]:
        """Return the tools that the model can call."""
        choice, tools = self.tool_choice, self.tools or []
        if isinstance(choice, AllowedTools):
            return [tool for tool in tools if tool.function.name in choice.names]
        return [] if choice == "none" else tools

    @property
    def requires_a_call(self) -> bool:
        """Return whether the answer must be a tool call, of any of the offered tools."""
        choice = self.tool_choice
        return choice == "required" or (isinstance(choice, AllowedTools) and choice.mode == "required")


class ConvertedRequest(ModelRequest):
    """Base class of the request bodies of other APIs, which are converted to chat requests.

    conversation_field: name of the field that contains the conversation.
    """

    conversation_field: ClassVar[str]

    _chat: ChatRequest | None = PrivateAttr(None)

    @property
    def chat(self) -> ChatRequest:
        """Return the chat request to which this request was converted. Call prepared() first."""
        assert self._chat is not None
        return self._chat

    def prepared(self) -> Self:
        """Convert this request to a chat request, which `chat` then returns. Return `self`.

        Raises ApiError 400 for values that are not allowed in chat requests.
        """
        super().prepared()
        try:
            self._chat = ChatRequest.model_validate(self.as_chat())
        except ValidationError as error:
            cause, name = (
                from_validation(error.errors(include_url=False, include_context=False)),
                self.conversation_field,
            )
            if not (cause.param or "messages").startswith("messages"):
                raise renamed(cause, self.own_names) from error
            message = f"Invalid value for {name}: as a chat request, {cause.message}"
            raise ApiError(400, message, param=name, code=cause.code) from error
        return self

    def as_chat(self) -> dict[str, Any]:
        """Return the body of the chat request, as a JSON object."""
        raise NotImplementedError


class TokenizeRequest(ModelRequest):
    """The request body of POST /v1/tokenize: either `prompt`, or `messages` and their options."""

    policy = TOKENIZE_POLICY

    prompt: str | None = served("A text. Either this or `messages`.")
    messages: Annotated[
        list[ChatMessage] | None, Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, validate_default=True)
    ] = served("A conversation. Either this or `prompt`.")
    tools: Tools | None = served("Tools that the chat template describes.")
    chat_template_kwargs: TemplateVariables | None = served("Variables of the chat template.")
    add_special_tokens: StrictBool | None = served(
        "Put what the model expects before a prompt, such as its begin-of-sequence token."
    )
    add_generation_prompt: StrictBool | None = served("End with the start of the assistant's message.")
    continue_final_message: ContinueFinalMessage = served(
        "End within the last message, which an answer would continue."
    )
    return_token_strs: StrictBool | None = served("Answer with the text of each token, too.")

    @field_validator("messages")
    @classmethod
    def _one_of_two(cls, value: Any, info: ValidationInfo) -> Any:
        if "prompt" in info.data and (value is None) == (info.data["prompt"] is None):
            raise ValueError("give either prompt or messages")
        return value


class DetokenizeRequest(ModelRequest):
    """The request body of POST /v1/detokenize."""

    token_field = "tokens"

    tokens: TokenIds = Field(description="Token ids. Special tokens are written out in the answer.")
