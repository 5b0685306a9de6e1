"""Converts a validated request to jobs for the engines: sampling parameters, structured output and token budgets."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_runtime.client.pending import TOKEN_BYTES
from megatron_runtime.protocol.media import Media
from megatron_runtime.protocol.messages import pack
from megatron_runtime.requests.rules import is_number
from megatron_runtime.requests.sampling_params import (
    IGNORE_EOS,
    MIN_TEMPERATURE,
    PARAMETERS,
    InvalidSamplingParamsError,
    SamplingParams,
)
from megatron_runtime.sampling.grammar_dialects import normalised, unsupported, with_ascii_classes
from megatron_runtime.sampling.grammar_limits import MAX_GRAMMAR_BYTES, check_structure
from megatron_runtime.server.errors import ApiError, context_length_error, invalid_value, shown
from megatron_runtime.server.formats.reasoning import ReasoningUse
from megatron_runtime.server.guards import load_json
from megatron_runtime.server.openai.fields import HTTP_FIELDS, PARAMETER_OF, converted
from megatron_runtime.server.openai.schema import GenerationRequest
from megatron_runtime.tokenization import Tokenizer

logger = logging.getLogger(__name__)

MAX_JOBS = 1024
MAX_SENT_BYTES = 32 << 20
"""Maximum total bytes of all choices of one request. Each choice is sent to the coordinator with its prompt and
parameters.
"""

MIN_TOP_P = 1e-6
"""Minimum `top_p`. Like every lower value, it keeps only the most likely token. In SamplingParams, 0 means all tokens.
"""

_FIELD_NAMES = {
    **{name: http.name for name, http in HTTP_FIELDS.items()},
    "top_n_logprobs": "logprobs",
    "return_log_probs": "logprobs",
    "pooling": "model",
}
"""Names of request fields by sampling parameter, for error messages."""
_GENERATION_CONFIG = {
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
    },
    "num_tokens_to_generate": "max_new_tokens",
}
"""Keys in generation_config.json by sampling parameter."""
GUIDED_FIELDS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Types of structured output by request field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """The structured output format of an answer.

    structure: as in SamplingParams.
    param:     the request field that sets the format.
    ignored:   keywords in the JSON schema that are not enforced.
    has_reasoning: whether the structure includes the reasoning. If not, it begins after the reasoning.
    """

    structure: dict[str, Any]
    param: str
    ignored: tuple[str, ...] = ()
    has_reasoning: bool = False

    @property
    def is_json(self) -> bool:
        return self.structure["type"] in ("json_object", "json_schema")

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of an output format whose `is_json` is True."""
        return {"type": "object"} if self.structure["type"] == "json_object" else dict(self.structure["value"])


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt.

    param:  the request field that contains the prompt, for errors.
    echoed: text of the prompt if the answer echoes it at the beginning.
    media:  images, audio and video of the prompt.
    """

    tokens: list[int]
    param: str
    echoed: str | None = None
    media: Media | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Generation options that the route sets. They do not include the common fields of requests.

    max_tokens:    maximum number of generated tokens; None: up to the sequence limit; 0: return only the prompt.
    log_probs:     number of most likely tokens to report at each position; None: report no log-probabilities.
    echoes_log_probs: whether to report log-probabilities of a prompt that the answer echoes.
    prompt_log_probs: number of most likely tokens to report at each position of the prompt; None: report no
                      log-probabilities of the prompt.
    output_format: the structured output for the tools of the request; None: use the structured output of the request.
    markers:       special tokens that the answer shows as text.
    reasoning:     how the model marks its reasoning; None: the model does not mark reasoning.
    reasoning_budget: maximum number of reasoning tokens; None: no limit.
    has_tools:     whether the answer can be a tool call.
    call_structure: as in SamplingParams, for an answer that can be a tool call.
    hidden_state:  whether to return the hidden state after the prompt. Requires max_tokens 0.
    """

    max_tokens: int | None
    log_probs: int | None
    echoes_log_probs: bool = False
    prompt_log_probs: int | None = None
    output_format: OutputFormat | None = None
    markers: tuple[str, ...] = ()
    reasoning: ReasoningUse | None = None
    reasoning_budget: int | None = None
    has_tools: bool = False
    call_structure: dict[str, Any] | None = None
    hidden_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice to generate.

    index:   index of the choice in the answer.
    end_ids: tokens that can end the answer and are not part of its text.
    visible: special tokens that the answer shows as text.
    counts_prompt: whether the `usage` of the answer counts the prompt for this choice. True for the first of the n
                   choices of a prompt.
    ignored_keywords: keywords in the JSON schema of the choice that are not enforced.
    """

    index: int
    prompt: Prompt
    params: SamplingParams
    options: Options
    end_ids: frozenset[int]
    visible: frozenset[int]
    counts_prompt: bool
    ignored_keywords: tuple[str, ...] = ()

    @property
    def is_prompt_only(self) -> bool:
        """Whether the answer contains no generated tokens."""
        return self.options.max_tokens == 0


def jobs_of(
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    options: Options,
    *,
    tokenizer: Tokenizer,
    sequence_limit: int | None,
    cache_salt: str | None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[list[Job], dict[str, str]]:
    """Return n jobs per prompt, and a map from sampling parameters to the names of their request fields, for errors.

    sequence_limit: maximum number of tokens of prompt plus answer.
    cache_salt:     prefix cache salt that replaces the salt in the request.
    defaults:       the model's default sampling parameters. Fields of the request take precedence.

    Raises ApiError 400 if a prompt is too long or a sampling parameter is invalid.
    """
    choices = request.n or 1
    format_ = options.output_format or structured_output(request)
    output, field = (None, "tool_choice") if format_ is None else (format_.structure, format_.param)
    use = options.reasoning
    if use is not None and use.is_open and format_ is not None and not format_.has_reasoning:
        output = {**format_.structure, "after": list(use.closing)}
    reasoning = None
    if use is not None and (options.reasoning_budget is not None or options.call_structure is not None):
        reasoning = use.parameter(options.reasoning_budget, has_tools=options.has_tools)
    field_names = {**_FIELD_NAMES, "structured_output": field}
    defaults = defaults or {}
    shared = _sampling_params(
        request,
        tokenizer,
        defaults,
        num_tokens_to_generate=None,  # set per prompt below
        structured_output=output,
        call_structure=options.call_structure if output is None else None,
        reasoning=reasoning,
        cache_salt=cache_salt,
        return_log_probs=options.log_probs is not None or options.prompt_log_probs is not None,
        top_n_logprobs=max(options.log_probs or 0, options.prompt_log_probs or 0),
        skip_prompt_log_probs=not options.echoes_log_probs and options.prompt_log_probs is None,
        streaming_interval=request.streaming_interval or request.stream_interval,
    )
    if options.hidden_state:
        shared.num_tokens_to_generate = 1
        shared.return_hidden_state = True
    _check_sent_bytes(shared, prompts, choices=choices, format_field=field)
    end_ids = frozenset((*(() if request.ignore_eos else tokenizer.eos_ids), *(request.stop_token_ids or ())))
    visible = tokenizer.special_ids
    if request.skip_special_tokens is not False:
        visible = visible & {tokenizer.token_id(marker) for marker in options.markers}
    jobs = []
    for place, prompt in enumerate(prompts):
        wanted = defaults.get("num_tokens_to_generate") if options.max_tokens is None else options.max_tokens
        budget = _budget(prompt, wanted, limit=sequence_limit)
        for choice in range(choices):
            # The copies share lists and maps that have been validated.
            params = copy.copy(shared)
            params.num_tokens_to_generate = budget
            params.seed = choice_seed(shared.seed, choice=choice)
            job = Job(
                index=place * choices + choice,
                prompt=prompt,
                params=params,
                options=options,
                end_ids=end_ids,
                visible=visible,
                counts_prompt=choice == 0,
                ignored_keywords=() if format_ is None else format_.ignored,
            )
            jobs.append(job)
    return jobs, field_names


def structured_output(request: GenerationRequest) -> OutputFormat | None:
    """Return the structured output format of the answer, or None for free text.

    Raises ApiError 400 if the request has several formats, if the format has no grammar, or if a strict schema has a
    keyword that cannot be enforced.
    """
    given: list[tuple[str, str, Any]] = []
    response_format, outputs = request.response_format, request.structured_outputs
    if response_format is not None and response_format.type != "text":
        schema = response_format.schema_of_answer
        given.append(("response_format", "json_object" if schema is None else "json_schema", schema))
    if outputs is not None:
        formats = [(name, value) for name, value in outputs if value not in (None, False)]
        if len(formats) != 1:
            raise invalid_value("structured_outputs", "give exactly one of json, regex, choice, grammar, json_object")
        name, value = formats[0]
        given.append(("structured_outputs", "json_schema" if name == "json_" else name, value))
    guided = [(field, kind, getattr(request, field)) for field, kind in GUIDED_FIELDS.items()]
    given += [item for item in guided if item[2] is not None]
    if not given:
        return None
    field, kind, value = given[0]
    if len(given) > 1:
        raise invalid_value(given[1][0], f"cannot be combined with {field}: give one of them")
    if kind == "json_object":
        return OutputFormat(structure={"type": kind, "value": None}, param=field)
    if kind == "json_schema" and isinstance(value, str):
        if len(value) > MAX_GRAMMAR_BYTES:
            raise invalid_value(field, f"use at most {MAX_GRAMMAR_BYTES} bytes: shorten it (it has {len(value)})")
        try:
            value = load_json(value)
        except ValueError as error:
            raise invalid_value(field, f"the JSON schema is not valid JSON: {error}") from error
    if kind == "json_schema" and not isinstance(value, dict):
        if not isinstance(value, bool):
            raise invalid_value(field, "a JSON schema is an object")
        if not value:
            raise invalid_value(field, "the JSON schema 'false' allows no answer: give an object")
        value = {}
    try:
        check_structure({"type": kind, "value": value})
    except InvalidSamplingParamsError as error:
        raise invalid_value(field, f"use {error.allowed}") from error
    ignored: tuple[str, ...] = ()
    if kind == "json_schema":
        schema_format = None if response_format is None else response_format.json_schema
        is_strict = schema_format is not None and bool(schema_format.strict)
        value, ignored = enforceable(value, param=field, is_strict=is_strict, closes=not is_strict)
    elif kind == "regex":
        if (construct := unsupported(value)) is not None:
            problem = f"{construct} is look-around or a reference to a group, which no grammar has: leave it out"
            raise invalid_value(field, problem)
        value = with_ascii_classes(value)
    return OutputFormat(structure={"type": kind, "value": value}, param=field, ignored=ignored)


def enforceable(
    schema: Mapping[str, Any], *, param: str, is_strict: bool, closes: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a copy of a JSON schema without the keywords that the grammar does not enforce, and the removed keywords.

    param:  the request field that contains the schema, for errors.
    closes: whether to forbid properties that an object's schema does not declare; see normalised().

    Raises ApiError 400 if the schema is strict and contains a keyword that the grammar does not enforce.
    """
    result, ignored = normalised(schema, is_strict=is_strict, closes=closes)
    if is_strict and ignored:
        keywords = ", ".join(ignored)
        raise invalid_value(param, f"the schema has {keywords}, not enforceable: leave that out, or leave strict out")
    return result, tuple(ignored)


def choice_seed(seed: int | None, *, choice: int) -> int | None:
    """Return the 64-bit seed of one of n choices; None if `seed` is None.

    Choice 0 has `seed`, and all other choices have seeds that are derived from `seed`.
    """
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _sampling_params(
    request: GenerationRequest, tokenizer: Tokenizer, defaults: Mapping[str, Any], **others: Any
) -> SamplingParams:
    """Return the sampling parameters that all choices share.

    If the request omits a field, the parameter has the model's default, or otherwise the default of SamplingParams.

    others: sampling parameters that do not follow from the request alone.
    """
    chosen = {**defaults, **_chosen(request)}
    if _is_greedy(chosen):
        chosen |= {"temperature": 0.0, "top_k": 1, "top_p": None, "min_p": None}
    eos = () if request.ignore_eos else tokenizer.eos_ids
    stop_ids = [*eos[1:], *(request.stop_token_ids or ())]
    for name in ("logit_bias", "allowed_token_ids"):
        check_vocabulary(chosen.get(name, ()), tokenizer, param=name)
    check_vocabulary(stop_ids, tokenizer, param="stop_token_ids")
    chosen |= {"termination_id": eos[0] if eos else IGNORE_EOS, "stop_token_ids": stop_ids, **others}
    try:
        return SamplingParams(**{name: value for name, value in chosen.items() if value not in (None, [], {})})
    except InvalidSamplingParamsError as error:
        param = _FIELD_NAMES.get(error.field, error.field)
        raise ApiError(400, f"{error}.", param=param, code="invalid_value") from error


def _chosen(request: GenerationRequest) -> dict[str, Any]:
    """Return the sampling parameters that fields of the request set, by name."""
    return {
        name: converted(name, value)
        for field in request.model_fields_set
        if (name := PARAMETER_OF.get(field)) is not None and (value := getattr(request, field)) is not None
    }


def _is_greedy(chosen: Mapping[str, Any]) -> bool:
    """Return whether sampling with these parameters can choose only the most likely token."""
    return chosen.get("temperature", 1.0) < MIN_TEMPERATURE or chosen.get("top_p", 1.0) < MIN_TOP_P


def model_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that the content of a generation_config.json sets, as vLLM interprets the file.

    An invalid value is logged and ignored, because the model can be served without it.
    """
    defaults: dict[str, Any] = {}
    for name, key in _GENERATION_CONFIG.items():
        value = config.get(key)
        if value is None:
            continue
        sent = converted(name, value) if is_number(value) else value
        rule, http = PARAMETERS[name].rule, PARAMETERS[name].http
        allowed = rule.allowed
        if rule.is_valid(sent):
            if http is None or http.minimum is None or value >= http.minimum:
                defaults[name] = sent
                continue
            allowed = f"at least {http.minimum}"
        logger.warning("generation_config.json: %s is %s and has no effect: want %s", key, shown(value), allowed)
    return defaults


def check_vocabulary(tokens: Sequence[int] | Mapping[int, Any], tokenizer: Tokenizer, *, param: str) -> None:
    """Raise ApiError 400 if a token id is outside the vocabulary. The error names the first such id."""
    limit = tokenizer.id_limit
    if tokens and not (min(tokens) >= 0 and max(tokens) < limit):
        outside = next(token for token in tokens if not 0 <= token < limit)
        raise invalid_value(param, f"token id {outside} is not in 0..{limit - 1}")


def _budget(prompt: Prompt, wanted: int | None, *, limit: int | None) -> int | None:
    """Return the maximum number of tokens to generate; None: no limit.

    The result is at least 1, because engines reject requests for 0 tokens.
    """
    wanted = None if wanted is None else min(max(wanted, 1), (1 << 31) - 1)
    if limit is None:
        return wanted
    available = limit - len(prompt.tokens)
    if available < 1:
        raise context_length_error(prompt_length=len(prompt.tokens), limit=limit, param=prompt.param)
    return available if wanted is None else min(wanted, available)


def _check_sent_bytes(shared: SamplingParams, prompts: Sequence[Prompt], *, choices: int, format_field: str) -> None:
    """Raise ApiError 400 if all jobs of a request together exceed MAX_SENT_BYTES."""
    try:
        each = len(pack(shared.serialize()))
    except OverflowError as error:
        raise invalid_value(format_field, "it has a number beyond 64 bits; use a smaller one") from error
    sent = choices * sum(each + TOKEN_BYTES * len(prompt.tokens) for prompt in prompts)
    sent += sum(prompt.media.data_bytes for prompt in prompts if prompt.media is not None)  # sent once per prompt
    if sent > MAX_SENT_BYTES:
        message = (
            f"Prompts and parameters of all choices take {sent} bytes, at most {MAX_SENT_BYTES} are allowed: ask for "
            "fewer choices or prompts at once."
        )
        raise ApiError(400, message, param="n", code="request_too_large")
