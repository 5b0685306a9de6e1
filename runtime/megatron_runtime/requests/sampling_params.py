"""`SamplingParams`: how the tokens of a request are sampled and when it ends. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from megatron_runtime.protocol.text import printable
from megatron_runtime.requests.rules import (
    MAX_INT32,
    Rule,
    bounded,
    field_rules,
    int_in,
    is_text,
    list_of,
    number_in,
    optional,
)

STRUCTURED_OUTPUT_TYPES = ("json_schema", "json_object", "regex", "grammar", "choice")
"""Their values, in order: a JSON schema (map), none, a regular expression, a Lark grammar, a list of texts."""

MAX_LOGIT_BIAS_TOKENS = 1024
MAX_TOP_LOGPROBS = 1000
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_CHARACTERS = 4096
"""Of all texts together."""
MAX_MARKER_TOKENS = 16

MIN_TEMPERATURE = 1e-5
"""A lower temperature is greedy: differences of logits are divided by it in float32."""
TOKEN_IDS = int_in(0, MAX_INT32)
BIASES = number_in(-100, 100)

MAX_QUOTED_CHARACTERS = 200
"""A longer value is cut in error messages."""

IGNORE_EOS = -1
"""The `termination_id` that disables the model's end-of-sequence tokens."""


class InvalidSamplingParamsError(ValueError):
    """A sampling parameter is out of range. `field` is its name; the message has value, range and remedy."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(printable(f"sampling parameter {field}={_brief(value)} is invalid: use {allowed}", lines=True))
        self.field = field
        self.allowed = allowed


def _brief(value: object) -> str:
    """Return repr(value), shortened. repr() fails for values that are nested too deeply or have too many digits."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"<{type(value).__name__}>"
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[:MAX_QUOTED_CHARACTERS] + "…"


@dataclass(eq=True)
class SamplingParams:
    """Sampling parameters of one request (Megatron-Core `SamplingParams`, and the fields this runtime adds).

    Penalties and biases are applied to the logits first, then the temperature, then top-k, top-p and min-p in this
    order.

    temperature:           divides the logits; 0 means greedy, and so does any value below 1e-5 (MIN_TEMPERATURE).
    top_k:                 keep the k most likely tokens; 0 keeps all; 1 means greedy.
    top_p:                 keep the smallest set of tokens whose probability reaches p; 0 and 1 keep all.
    min_p:                 keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
    repetition_penalty:    divides positive and multiplies negative logits of tokens in prompt or answer (Keskar et al.
                           2019, arXiv:1909.05858), 0.01 to 100; 1 is off.
    presence_penalty:      subtracted from the logits of tokens in the answer, -2 to 2.
    frequency_penalty:     subtracted once for each time a token is in the answer, -2 to 2.
    logit_bias:            added to the logits of these tokens, -100 to 100 each.
    bad_words:             texts that may not be in the answer: the last token of a text's token sequence is not sampled
                           where the answer ends with the tokens before it, unless structured output allows no others.
                           Each text counts with and without a leading space, as in vLLM.
    structured_output:     {"type": …, "value": …} that the answer's text must match: see STRUCTURED_OUTPUT_TYPES. With
                           "after": [token id, …] only the text that follows these tokens must match, such as the text
                           after reasoning.
    num_tokens_to_generate: limit of new tokens; 0 computes the prompt only; None means the engine's sequence limit.
    num_tokens_total:      limit of prompt + new tokens; at most one of the two may be given.
    min_tokens:            tokens before an end-of-sequence token or stop text may end the request. Tokens that would
                           end it earlier are not sampled, unless structured output allows no others.
    termination_id:        the token that ends the request; None means the model's own, -1 means none.
    stop_token_ids:        further tokens that end the request; they are not part of the answer's text.
    stop_words:            texts that end the request.
    detokenize_stop_sequence: keep the matched stop text, or the token that ended the request, in the answer's text.
    seed:                  64-bit seed; None: the client chooses a random one.
    return_log_probs:      return the log-probability of each generated token; see InferenceConfig.logprobs_mode.
    top_n_logprobs:        also return the log-probabilities of the n likeliest tokens at each position.
    skip_prompt_log_probs: return no log-probabilities of prompt tokens. Those of a prompt need all its logits, so the
                           prefix cache is not used for it.
    return_prompt_top_n_logprobs: former name of `not skip_prompt_log_probs`, together with top_n_logprobs. It is set
                           from these two.
    return_hidden_state:   return the last hidden state of the last token before the first generated one, after the
                           model's last norm. Only with num_tokens_to_generate=1.
    return_prompt_tokens:  return the prompt's tokens.
    return_segments:       return the text that each token adds; a character comes with its last token.
    return_record:         return the text of the answer and the times of its tokens (`generated_text`, `ttft`, `tpot`),
                           and the likeliest tokens by their text. InferenceClient and MegatronLLM set it; a server that
                           detokenizes itself does not need it.
    add_BOS:               put the begin-of-sequence token before a string prompt.
    streaming:             send partial replies.
    streaming_interval:    minimum number of tokens of a partial reply.
    priority:              waiting requests with a lower number run first; equal ones in the order of arrival.
    cache_salt:            requests share cached prefixes only with requests of the same salt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    return_segments: bool = False
    num_tokens_to_generate: int | None = None
    num_tokens_total: int | None = None
    termination_id: int | None = None
    top_n_logprobs: int = 0
    return_prompt_top_n_logprobs: bool = False
    add_BOS: bool = False
    stop_words: list[str] | None = None
    detokenize_stop_sequence: bool = False
    return_prompt_tokens: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    structured_output: dict[str, Any] | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    return_hidden_state: bool = False
    return_record: bool = False
    streaming: bool = False
    streaming_interval: int = 1
    priority: int = 0
    cache_salt: str | None = None

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
        for name, rule in RULES.items():
            value = getattr(self, name)
            if not rule.is_valid(value):
                raise InvalidSamplingParamsError(name, value, rule.allowed)
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
        """Return `params`, or the parameters that serialize() of another class gives; None there means the default."""
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
        """Whether the whole prompt must be computed, because the prefix cache has no log-probabilities."""
        return self.wants_log_probs and not self.skip_prompt_log_probs

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidSamplingParamsError if a parameter names a token that the model does not have."""
        unknown = [token for token in self.logit_bias or () if token >= vocab_size]
        if unknown:
            raise InvalidSamplingParamsError("logit_bias", {unknown[0]: "…"}, f"token ids from 0 to {vocab_size - 1}")

    def add_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes. Unknown ones are accepted and survive serialize() and deserialize()."""
        known = {field.name for field in fields(self)}
        for name, value in attributes.items():
            if name not in known and hasattr(type(self), name):
                raise InvalidSamplingParamsError(name, value, "another name: this one is a part of the class")
            setattr(self, name, value)
        self.validate()

    def serialize(self) -> dict[str, Any]:
        """Return every attribute, as msgpack-ready values."""
        return dict(self.__dict__)

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> Self:
        known = {field.name for field in fields(cls)}
        derived = "return_prompt_top_n_logprobs"
        params = cls(**{name: value for name, value in data.items() if name in known and name != derived})
        params.add_attributes({name: value for name, value in data.items() if name not in known})
        return params


def _is_logit_bias(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_LOGIT_BIAS_TOKENS
        and all(TOKEN_IDS(token) and BIASES(bias) for token, bias in value.items())
    )


def _are_bad_words(value: Any) -> bool:
    return (
        list_of(is_text)(value)
        and len(value) <= MAX_BAD_WORDS
        and all(text.strip() for text in value)
        and sum(map(len, value)) <= MAX_BAD_WORDS_CHARACTERS
    )


def _is_structured_output(value: object) -> bool:
    if isinstance(value, dict) and "after" in value:
        after = value["after"]
        if not list_of(TOKEN_IDS)(after) or not 1 <= len(after) <= MAX_MARKER_TOKENS:
            return False
    match value:
        case None | {"type": "json_object"} | {"type": "json_schema", "value": dict()}:
            return True
        case {"type": "regex" | "grammar", "value": str(text)}:
            return bool(text)
        case {"type": "choice", "value": [*texts]}:
            return bool(texts) and all(isinstance(text, str) and text for text in texts)
    return False


RULES = field_rules(
    SamplingParams,
    bounded("temperature", number_in(0, 1_000_000), f"below {MIN_TEMPERATURE:g} is greedy"),
    bounded("top_k", int_in(0, MAX_INT32), "0 switches it off"),
    bounded("top_p", number_in(0, 1), "0 and 1 switch it off"),
    bounded("min_p", number_in(0, 1), "0 switches it off"),
    bounded("repetition_penalty", number_in(0.01, 100), "1 switches it off"),
    bounded("presence_penalty frequency_penalty", number_in(-2, 2), "0 switches it off"),
    Rule(
        "logit_bias",
        optional(_is_logit_bias),
        f"a map of at most {MAX_LOGIT_BIAS_TOKENS} token ids to numbers from {BIASES.minimum} to {BIASES.maximum}, or "
        "None",
        BIASES,
    ),
    Rule(
        "bad_words",
        optional(_are_bad_words),
        f"a list of at most {MAX_BAD_WORDS} texts that are not only white space, with at most "
        f"{MAX_BAD_WORDS_CHARACTERS} characters in all, or None",
    ),
    Rule(
        "structured_output",
        _is_structured_output,
        f"a map with a type of {', '.join(STRUCTURED_OUTPUT_TYPES)} and the value that goes with it, or None",
    ),
    bounded("num_tokens_to_generate", int_in(0, MAX_INT32), "0 computes the prompt only", or_none=True),
    bounded("num_tokens_total", int_in(1, MAX_INT32), or_none=True),
    bounded("min_tokens", int_in(0, MAX_INT32)),
    bounded("termination_id", int_in(IGNORE_EOS, MAX_INT32), "-1 for none, None for the model's own", or_none=True),
    Rule("stop_token_ids", optional(list_of(TOKEN_IDS)), f"a list of token ids, each {TOKEN_IDS}, or None", TOKEN_IDS),
    Rule("stop_words", optional(list_of(is_text)), "a list of strings, or None"),
    bounded("seed", int_in(0, (1 << 64) - 1), or_none=True),
    bounded("top_n_logprobs", int_in(0, MAX_TOP_LOGPROBS)),
    bounded("streaming_interval", int_in(1, MAX_INT32)),
    bounded("priority", int_in(-MAX_INT32 - 1, MAX_INT32)),
    Rule(
        "cache_salt",
        optional(lambda value: isinstance(value, str) and len(value) <= 256),
        "a text of at most 256 characters, or None",
    ),
)
"""The one table of what a sampling parameter may be. The HTTP schema takes its bounds from here, and the engine relies
on them: no number overflows or underflows float32 or int32 where a step uses it."""
