"""Optional features of engines, and which of them a request needs by its sampling parameters. No torch."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from megatron_runtime.requests.sampling_params import SamplingParams


class Capability(StrEnum):
    """Optional features of a backend. The value names the feature in errors, the member's name in messages."""

    SUSPEND = "suspend and resume"
    UPDATE_WEIGHTS = "weight updates"
    ADAPTERS = "LoRA adapters"
    PROFILER = "the CUDA profiler"
    TEXT = "text prompts"
    # Of a request, see NEEDS. A name keeps its meaning in all releases, because peers exchange it.
    STRUCTURED_OUTPUT = "structured output"
    STRUCTURE_AFTER_REASONING = "structured output after reasoning"
    LOGIT_BIAS = "logit bias"
    BAD_WORDS = "bad words"
    ALLOWED_TOKENS = "allowed tokens"
    LOG_PROBS = "log-probabilities"
    PROMPT_LOG_PROBS = "log-probabilities of prompt tokens"
    HIDDEN_STATES = "hidden states"
    HIGH_TEMPERATURE = "temperatures above 2"
    PRIORITY = "priorities"


class Need(NamedTuple):
    """A sampling parameter that needs a capability if `is_used` is true."""

    parameter: str
    capability: Capability
    is_used: Callable[[SamplingParams], bool]


NEEDS = (
    Need("structured_output", Capability.STRUCTURED_OUTPUT, lambda params: params.structured_output is not None),
    Need(
        "structured_output",
        Capability.STRUCTURE_AFTER_REASONING,
        lambda params: params.structured_output is not None and "after" in params.structured_output,
    ),
    Need("logit_bias", Capability.LOGIT_BIAS, lambda params: bool(params.logit_bias)),
    Need("bad_words", Capability.BAD_WORDS, lambda params: bool(params.bad_words)),
    Need("allowed_token_ids", Capability.ALLOWED_TOKENS, lambda params: params.allowed_token_ids is not None),
    Need("return_log_probs", Capability.LOG_PROBS, lambda params: params.return_log_probs),
    Need("top_n_logprobs", Capability.LOG_PROBS, lambda params: params.top_n_logprobs > 0),
    Need("skip_prompt_log_probs", Capability.PROMPT_LOG_PROBS, lambda params: params.wants_prompt_log_probs),
    Need("return_hidden_state", Capability.HIDDEN_STATES, lambda params: params.return_hidden_state),
    Need("temperature", Capability.HIGH_TEMPERATURE, lambda params: params.temperature > 2),
    Need("priority", Capability.PRIORITY, lambda params: params.priority != 0),
)
"""Every sampling parameter that some backend does not support."""


def needs_of(params: SamplingParams) -> str:
    """Return the names of the capabilities that a request needs, as RequestMeta has them; empty for most requests."""
    return " ".join(dict.fromkeys(need.capability.name for need in NEEDS if need.is_used(params)))


def described(name: str) -> tuple[str, str]:
    """Return the sampling parameter that needs the capability of this name, and the feature in words.

    A name of a later release has no parameter here.
    """
    for need in NEEDS:
        if need.capability.name == name:
            return need.parameter, need.capability.value
    return "", name
