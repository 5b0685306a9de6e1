"""`SamplingParams`: how the tokens of a request are sampled, and when the request ends. Does not import torch."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from megatron_runtime.protocol.text import printable
from megatron_runtime.requests.rules import (
    FLAG,
    MAX_INT32,
    Rule,
    bounded,
    int_in,
    is_text,
    list_of,
    number_in,
    optional,
)

STRUCTURED_OUTPUT_TYPES = ("json_schema", "json_object", "regex", "grammar", "choice")
"""Types of structured output.

Their values are, in this order: a JSON schema (map), no value, a regular expression, a Lark grammar, a list of texts.
"""

MAX_LOGIT_BIAS_TOKENS = 1024
MAX_TOP_LOGPROBS = 1000
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_CHARACTERS = 4096
"""Maximum total number of characters in the `bad_words` of a request."""
MAX_MARKER_TOKENS = 16
MAX_MARKERS = 256
MAX_MARKER_CHARACTERS = 256
RULE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")

POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")
"""Tasks of pooling models, by vLLM's names: compute a vector or label scores, for the whole text or for each token."""

MIN_TEMPERATURE = 1e-5
"""Minimum temperature.

A lower temperature means greedy sampling, because float32 logit differences are divided by the temperature.
"""
TOKEN_IDS = int_in(0, MAX_INT32)
BIASES = number_in(-100, 100)

MAX_QUOTED_CHARACTERS = 200
"""Maximum number of characters of a value in an error message. A longer value is truncated."""

IGNORE_EOS = -1
"""Value of `termination_id` that disables the model's end-of-sequence tokens."""

MAX_SEED = (1 << 64) - 1
NO_SEED = -1
"""Value of `seed` with which an HTTP request asks for a random seed, as in vLLM."""


class InvalidSamplingParamsError(ValueError):
    """A sampling parameter is out of range. field: the parameter's name. The message has value, range and remedy."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(printable(f"sampling parameter {field}={_brief(value)} is invalid: use {allowed}", lines=True))
        self.field = field
        self.allowed = allowed


def _brief(value: object) -> str:
    """Return a shortened repr(value), even for values with too much nesting or too many digits for repr()."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"<{type(value).__name__}>"
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[:MAX_QUOTED_CHARACTERS] + "…"


def _not_negative(value: int) -> int:
    return max(value, 0)


def _unsigned_seed(value: int) -> int | None:
    return None if value == NO_SEED else value & MAX_SEED


def _biases_by_token(value: Mapping[str, float]) -> dict[int, float]:
    return {int(token): float(bias) for token, bias in value.items()}


def _is_logit_bias(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_LOGIT_BIAS_TOKENS
        and all(TOKEN_IDS(token) and BIASES(bias) for token, bias in value.items())
    )


def _are_allowed_tokens(value: Any) -> bool:
    return list_of(TOKEN_IDS)(value) and len(value) > 0


def _are_bad_words(value: Any) -> bool:
    return (
        list_of(is_text)(value)
        and len(value) <= MAX_BAD_WORDS
        and all(text.strip() for text in value)
        and sum(map(len, value)) <= MAX_BAD_WORDS_CHARACTERS
    )


def _is_marker(value: Any) -> bool:
    return list_of(TOKEN_IDS)(value) and 1 <= len(value) <= MAX_MARKER_TOKENS


def _is_reasoning(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and _is_marker(value.get("closing"))
        and all(_is_marker(value[name]) for name in ("opening", "ending") if name in value)
        and value.get("ending", [])[-len(value["closing"]) :] in ([], value["closing"])
        and isinstance(value.get("is_open"), bool)
        and optional(int_in(0, MAX_INT32))(value.get("budget"))
    )


def _is_call_structure(value: Any) -> bool:
    if value is None:
        return True
    markers = value.get("markers") if isinstance(value, dict) else None
    return (
        isinstance(markers, dict)
        and 1 <= len(markers) <= MAX_MARKERS
        and all(is_text(text) and 0 < len(text) <= MAX_MARKER_CHARACTERS for text in markers)
        and all(isinstance(rule, str) and RULE_NAME.fullmatch(rule) for rule in markers.values())
        and isinstance(value.get("grammar"), str)
    )


_POOLING_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "task": lambda value: value in POOLING_TASKS,
    "dimensions": int_in(1, MAX_INT32),
    "use_activation": lambda value: isinstance(value, bool),
    "pair": is_text,
    "add_special_tokens": lambda value: isinstance(value, bool),
    "truncate_prompt_tokens": int_in(-1, MAX_INT32),
    "truncation_side": lambda value: value in ("left", "right"),
    "max_tokens_per_query": int_in(1, MAX_INT32),
    "max_tokens_per_doc": int_in(1, MAX_INT32),
}


def _is_pooling(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and "task" in value
        and all(name in _POOLING_FIELDS and _POOLING_FIELDS[name](field) for name, field in value.items())
    )


def _is_structured_output(value: object) -> bool:
    if isinstance(value, dict) and "after" in value and not _is_marker(value["after"]):
        return False
    match value:
        case None | {"type": "json_object"} | {"type": "json_schema", "value": dict()}:
            return True
        case {"type": "regex" | "grammar", "value": str(text)}:
            return bool(text)
        case {"type": "choice", "value": [*texts]}:
            return bool(texts) and all(isinstance(text, str) and text for text in texts)
    return False


@dataclass(frozen=True, slots=True)
class HttpField:
    """A field of the HTTP API that sets a sampling parameter.

    name:    name of the field.
    text:    meaning of the field, if it differs from the meaning of the parameter.
    minimum, maximum: bounds of the field, if they differ from the bounds of the parameter. They differ if the server
                      converts the value, or if OpenAI's API has another limit.
    value:   converts the field's value to the parameter's value; None: the two values are equal.
    """

    name: str
    text: str = ""
    minimum: float | None = None
    maximum: float | None = None
    value: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter: its valid values, its meaning, and its HTTP field if it has one."""

    rule: Rule
    text: str
    http: HttpField | None


def parameter(default: Any, text: str, rule: Rule = FLAG, *, http: HttpField | None = None) -> Any:
    """Return the dataclass field that declares a parameter of SamplingParams."""
    return field(default=default, metadata={"parameter": Parameter(rule, text, http)})


@dataclass(eq=True)
class SamplingParams:
    """Sampling parameters of one request (Megatron-Core's `SamplingParams` with additional fields).

    Each field declares one parameter: its default, meaning, valid values and HTTP field. The rules ensure that no
    number overflows or underflows the float32 or int32 values in an engine's step.

    The engine applies penalties and biases to the logits first, then the temperature, then top-k, top-p and min-p in
    this order.
    """

    temperature: float = parameter(
        1.0,
        "Divides the logits. 0 means greedy, and so does any value below 1e-5 (MIN_TEMPERATURE).",
        bounded(number_in(0, 1_000_000), f"below {MIN_TEMPERATURE:g} is greedy"),
        http=HttpField(
            "temperature", "As OpenAI defines it. 0 is greedy, and so is any value below 0.00001.", maximum=2
        ),
    )
    top_k: int = parameter(
        0,
        "Keep the k most likely tokens. 0 keeps all. 1 means greedy.",
        bounded(int_in(0, MAX_INT32), "0 switches it off"),
        http=HttpField("top_k", "Keep the k most likely tokens. 0 and -1 keep all.", minimum=-1, value=_not_negative),
    )
    top_p: float = parameter(
        0.0,
        "Keep the smallest set of tokens whose probability reaches p. 0 and 1 keep all.",
        bounded(number_in(0, 1), "0 and 1 switch it off"),
        http=HttpField("top_p", "As OpenAI defines it."),
    )
    return_log_probs: bool = parameter(
        False, "Return the log-probability of each generated token: see InferenceConfig.logprobs_mode."
    )
    skip_prompt_log_probs: bool = parameter(
        False,
        "Return no log-probabilities of prompt tokens. They need all logits of the prompt, so the prefix cache "
        "is not used for it.",
    )
    return_segments: bool = parameter(
        False, "Return the text that each token adds. A character comes with its last token."
    )
    num_tokens_to_generate: int | None = parameter(
        None,
        "Maximum number of new tokens. 0 computes the prompt only. None means the engine's sequence limit.",
        bounded(int_in(0, MAX_INT32), "0 computes the prompt only", or_none=True),
        http=HttpField(
            "max_tokens",
            "Maximum number of tokens of the answer. Completions: 16 if absent, and 0 is "
            "allowed with `echo`. Chat: as many as fit. A value that does not fit is cut to what fits.",
            minimum=1,
            maximum=math.inf,
        ),
    )
    num_tokens_total: int | None = parameter(
        None,
        "Maximum number of tokens of prompt and answer together. At most one of the two may be given.",
        bounded(int_in(1, MAX_INT32), or_none=True),
    )
    termination_id: int | None = parameter(
        None,
        "The token that ends the request. None means the model's own, -1 means none.",
        bounded(int_in(IGNORE_EOS, MAX_INT32), "-1 for none, None for the model's own", or_none=True),
    )
    top_n_logprobs: int = parameter(
        0,
        "Return the log-probabilities of the n most likely tokens at each position, too.",
        bounded(int_in(0, MAX_TOP_LOGPROBS)),
    )
    return_prompt_top_n_logprobs: bool = parameter(
        False, "Former name of `not skip_prompt_log_probs`, together with top_n_logprobs. It is set from these two."
    )
    add_BOS: bool = parameter(False, "Put the begin-of-sequence token before a string prompt.")
    stop_words: list[str] | None = parameter(
        None,
        "Texts that end the answer.",
        Rule(optional(list_of(is_text)), "a list of strings, or None"),
        http=HttpField(
            "stop", "A string, or a list. Each has at most 1024 characters. The text ends before the match."
        ),
    )
    detokenize_stop_sequence: bool = parameter(
        False,
        "Keep the matched stop text, or the token that ended the request, in the answer's text.",
        http=HttpField("include_stop_str_in_output"),
    )
    return_prompt_tokens: bool = parameter(False, "Return the prompt's tokens.")
    min_p: float = parameter(
        0.0,
        "Keep tokens at least min_p times as likely as the most likely one. 0 keeps all.",
        bounded(number_in(0, 1), "0 switches it off"),
        http=HttpField("min_p"),
    )
    repetition_penalty: float = parameter(
        1.0,
        "Divides positive and multiplies negative logits of tokens in prompt or answer (Keskar et al. 2019, "
        "arXiv:1909.05858). 1 is off.",
        bounded(number_in(0.01, 100), "1 switches it off"),
        http=HttpField("repetition_penalty"),
    )
    presence_penalty: float = parameter(
        0.0,
        "Subtracted from the logits of tokens in the answer.",
        bounded(number_in(-2, 2), "0 switches it off"),
        http=HttpField("presence_penalty"),
    )
    frequency_penalty: float = parameter(
        0.0,
        "Subtracted from the logit of a token once for each time it is in the answer.",
        bounded(number_in(-2, 2), "0 switches it off"),
        http=HttpField("frequency_penalty"),
    )
    logit_bias: dict[int, float] | None = parameter(
        None,
        "Added to the logits of these tokens.",
        Rule(
            optional(_is_logit_bias),
            f"a map of at most {MAX_LOGIT_BIAS_TOKENS} token ids to numbers from {BIASES.minimum} to "
            f"{BIASES.maximum}, or None",
            BIASES,
        ),
        http=HttpField(
            "logit_bias",
            "Token ids, as decimal strings without leading zeros, to a bias of -100 to 100.",
            value=_biases_by_token,
        ),
    )
    allowed_token_ids: list[int] | None = parameter(
        None,
        "Only these tokens are sampled. This includes the model's end tokens: without them the answer ends at "
        "its longest, or at a stop text.",
        Rule(
            optional(_are_allowed_tokens),
            f"a list of at least one token id, each {TOKEN_IDS}, or None",
            TOKEN_IDS,
        ),
        http=HttpField("allowed_token_ids"),
    )
    bad_words: list[str] | None = parameter(
        None,
        "Texts that may not be in the answer, as in vLLM: the last token of a text's tokens is not generated "
        "where the answer ends with the tokens before it, unless structured output allows no others. Each text "
        "counts with and without a leading space. Text that the model writes with other tokens is not recognised: "
        "add its other spellings, such as `word` and `Word`.",
        Rule(
            optional(_are_bad_words),
            f"a list of at most {MAX_BAD_WORDS} texts that are not only white space, with at most "
            f"{MAX_BAD_WORDS_CHARACTERS} characters in all, or None",
        ),
        http=HttpField("bad_words"),
    )
    structured_output: dict[str, Any] | None = parameter(
        None,
        'A map `{"type": …, "value": …}` that the answer\'s text must match: see STRUCTURED_OUTPUT_TYPES. With '
        '`"after": [token id, …]` only the text that follows these tokens must match, such as the text after '
        "reasoning.",
        Rule(
            _is_structured_output,
            f"a map with a type of {', '.join(STRUCTURED_OUTPUT_TYPES)} and the value that goes with it, or None",
        ),
    )
    call_structure: dict[str, Any] | None = parameter(
        None,
        'A map `{"markers": {text: rule, …}, "grammar": text}`: an answer that begins with one of these texts, '
        "after its reasoning and white space, goes on as this rule of the Lark grammar says. Best effort: an "
        "engine without grammars leaves it out, as do a grammar that is not valid, structured_output and "
        "allowed_token_ids.",
        Rule(
            _is_call_structure,
            f"a map with 1 to {MAX_MARKERS} markers of at most {MAX_MARKER_CHARACTERS} characters, each with the "
            "name of a rule, and a grammar, or None",
        ),
    )
    reasoning: dict[str, Any] | None = parameter(
        None,
        'How the model marks its reasoning, for its budget and call_structure: a map `{"opening": [token id, …], '
        '"closing": [token id, …], "is_open": …, "budget": …}`. is_open: the prompt has opened it. After `budget` '
        'tokens of reasoning the engine writes `"ending"`, which ends with the closing and is equal to it if '
        "absent. Best effort: allowed_token_ids leave the budget out.",
        Rule(
            _is_reasoning,
            f"a map with a closing of 1 to {MAX_MARKER_TOKENS} token ids and is_open, or None",
        ),
    )
    min_tokens: int = parameter(
        0,
        "Number of tokens before an end-of-sequence token or a stop text may end the answer. Tokens that would "
        "end it earlier are not sampled, unless structured output allows no others.",
        bounded(int_in(0, MAX_INT32)),
        http=HttpField("min_tokens"),
    )
    stop_token_ids: list[int] | None = parameter(
        None,
        "Further tokens that end the answer. They are not part of its text.",
        Rule(optional(list_of(TOKEN_IDS)), f"a list of token ids, each {TOKEN_IDS}, or None", TOKEN_IDS),
        http=HttpField("stop_token_ids"),
    )
    seed: int | None = parameter(
        None,
        "64-bit seed. None: the client chooses a random one.",
        bounded(int_in(0, MAX_SEED), or_none=True),
        http=HttpField(
            "seed",
            "Makes a sampled answer repeatable. Choice 0 has this seed, the others have seeds derived from it and "
            "their number. -1 is no seed.",
            minimum=-(1 << 63),
            value=_unsigned_seed,
        ),
    )
    return_hidden_state: bool = parameter(
        False,
        "Return the last hidden state of the last token before the first generated one, after the model's last "
        "norm. Only with num_tokens_to_generate=1.",
    )
    pooling: dict[str, Any] | None = parameter(
        None,
        'What a pooling model computes of the prompt, in place of an answer: a map `{"task": …}` with one of '
        "POOLING_TASKS. Further keys: `dimensions` of a vector, `use_activation` (false: no normalisation, no "
        "sigmoid), `pair` (the text that is classified with the prompt), `add_special_tokens`, "
        "`truncate_prompt_tokens`, `truncation_side`, `max_tokens_per_query` and `max_tokens_per_doc`. The engine "
        "tokenizes a prompt that is text.",
        Rule(
            _is_pooling,
            f"a map with a task of {', '.join(POOLING_TASKS)}, and {', '.join(list(_POOLING_FIELDS)[1:])} as they "
            "are needed, or None",
        ),
    )
    return_record: bool = parameter(
        False,
        "Return the text of the answer and the times of its tokens (`generated_text`, `ttft`, `tpot`), and the "
        "most likely tokens by their text. InferenceClient and MegatronLLM set it; a server that detokenizes "
        "itself does not need it.",
    )
    streaming: bool = parameter(
        False, "Send partial replies.", http=HttpField("stream", "Answer with server-sent events.")
    )
    streaming_interval: int = parameter(
        1,
        "Minimum number of tokens of a partial reply.",
        bounded(int_in(1, MAX_INT32)),
        http=HttpField("streaming_interval", "Minimum number of tokens of an event; 1 if absent."),
    )
    do_kv_handoff: bool = parameter(
        False,
        "Megatron-Core: keep the KV of the prompt for a later request; the answer has `disaggregated_params`. Only "
        "engines with a role can.",
    )
    priority: int = parameter(
        0,
        "Waiting requests with a lower number run first; equal ones in the order of arrival.",
        bounded(int_in(-MAX_INT32 - 1, MAX_INT32)),
        http=HttpField(
            "priority",
            "A lower number runs first, and preempts running requests with a higher number if the engine is full; 0 "
            "if absent. Any other number needs `--allow-priority` (`spec.server.allowPriority`).",
        ),
    )
    cache_salt: str | None = parameter(
        None,
        "Requests share cached prefixes only with requests of the same salt.",
        Rule(
            optional(lambda value: isinstance(value, str) and len(value) <= 256),
            "a text of at most 256 characters, or None",
        ),
    )

    def __post_init__(self) -> None:
        if self.return_prompt_top_n_logprobs is True:
            warnings.warn(
                "return_prompt_top_n_logprobs is deprecated: use skip_prompt_log_probs=False with top_n_logprobs",
                DeprecationWarning,
                stacklevel=3,
            )
            if self.skip_prompt_log_probs:
                raise InvalidSamplingParamsError(
                    "return_prompt_top_n_logprobs", True, "skip_prompt_log_probs=False with it"
                )
        self.validate()

    def validate(self) -> None:
        """Raise InvalidSamplingParamsError for the first field that is out of range."""
        for name, item in PARAMETERS.items():
            value = getattr(self, name)
            if not item.rule.is_valid(value):
                raise InvalidSamplingParamsError(name, value, item.rule.allowed)
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise InvalidSamplingParamsError(
                "num_tokens_total", self.num_tokens_total, "either num_tokens_to_generate or num_tokens_total, not both"
            )
        if self.return_hidden_state and self.num_tokens_to_generate != 1:
            raise InvalidSamplingParamsError(
                "return_hidden_state", True, "False, or True with num_tokens_to_generate=1"
            )
        self.return_prompt_top_n_logprobs = self.top_n_logprobs > 0 and not self.skip_prompt_log_probs

    @classmethod
    def of(cls, params: Any) -> Self:
        """Return SamplingParams with the values of `params`.

        An object of another class is converted through its serialize(). None means the default parameters.
        """
        if isinstance(params, cls):
            return params
        return cls.deserialize({name: value for name, value in params.serialize().items() if value is not None})

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def wants_log_probs(self) -> bool:
        return self.return_log_probs or self.top_n_logprobs > 0

    @property
    def wants_prompt_log_probs(self) -> bool:
        """Whether the request needs the log-probabilities of its prompt.

        The prefix cache contains no log-probabilities, so the engine computes the whole prompt of such a request.
        """
        return self.wants_log_probs and not self.skip_prompt_log_probs

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidSamplingParamsError if a parameter contains a token id outside the model's vocabulary."""
        for name in ("logit_bias", "allowed_token_ids"):
            unknown = next((token for token in getattr(self, name) or () if token >= vocab_size), None)
            if unknown is not None:
                raise InvalidSamplingParamsError(name, unknown, f"token ids from 0 to {vocab_size - 1}")
        written = (self.reasoning or {}).get("ending") or (self.reasoning or {}).get("closing") or ()
        if any(token >= vocab_size for token in written):
            raise InvalidSamplingParamsError("reasoning", written, f"token ids from 0 to {vocab_size - 1}")

    def add_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes, including unknown attributes, which serialize() and deserialize() preserve."""
        known = {item.name for item in fields(self)}
        for name, value in attributes.items():
            if name not in known and hasattr(type(self), name):
                raise InvalidSamplingParamsError(name, value, "another name: this one is a part of the class")
            setattr(self, name, value)
        self.validate()

    def serialize(self) -> dict[str, Any]:
        """Return all attributes as values that msgpack can serialize."""
        return dict(self.__dict__)

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> Self:
        known = {item.name for item in fields(cls)}
        derived = "return_prompt_top_n_logprobs"
        params = cls(**{name: value for name, value in data.items() if name in known and name != derived})
        params.add_attributes({name: value for name, value in data.items() if name not in known})
        return params


PARAMETERS: Mapping[str, Parameter] = {item.name: item.metadata["parameter"] for item in fields(SamplingParams)}
"""All sampling parameters, by name.

The HTTP schema, the conversion of requests and the reference documentation are derived from this table.
"""
