"""Optional features of engines, and the features that the sampling parameters of a request need.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from megatron_runtime.protocol.media import MEDIA_NEED
from megatron_runtime.requests.sampling_params import SamplingParams


class Capability(StrEnum):
    """An optional feature of a backend. Protocol messages contain the member's name, and errors contain its value."""

    SUSPEND = "suspend and resume"
    UPDATE_WEIGHTS = "weight updates"
    ADAPTERS = "LoRA adapters"
    PROFILER = "the CUDA profiler"
    TEXT = "text prompts"
    # Features that a request may need, see NEEDS. Peers exchange the names, so a name keeps its meaning in all
    # releases.
    STRUCTURED_OUTPUT = "structured output"
    STRUCTURE_AFTER_REASONING = "structured output after reasoning"
    CALL_STRUCTURE = "grammars of tool calls"
    LOGIT_BIAS = "logit bias"
    BAD_WORDS = "bad words"
    LOG_PROBS = "log-probabilities"
    PROMPT_LOG_PROBS = "log-probabilities of prompt tokens"
    HIDDEN_STATES = "hidden states"
    HIGH_TEMPERATURE = "temperatures above 2"
    PRIORITY = "priorities"
    PENALTIES = "presence and frequency penalties"
    MIN_P = "min_p"
    KV_TRANSFER = "exchange of KV blocks"
    MEDIA = "images, audio and video"
    """An engine that has this capability announces the name MEDIA_NEED among its parameters."""
    EMBED = "embeddings"
    CLASSIFY = "labels of texts"
    TOKEN_EMBED = "embeddings of tokens"
    TOKEN_CLASSIFY = "labels of tokens"


POOLING: Mapping[str, Capability] = {
    "embed": Capability.EMBED,
    "classify": Capability.CLASSIFY,
    "token_embed": Capability.TOKEN_EMBED,
    "token_classify": Capability.TOKEN_CLASSIFY,
}
"""The capability for each task of a pooling model. A backend that generates tokens has none of these capabilities."""


class Need(NamedTuple):
    """A sampling parameter, and the capability that it needs.

    is_used: returns whether SamplingParams need the capability.
    """

    parameter: str
    capability: Capability
    is_used: Callable[[SamplingParams], bool]


def _pools(params: SamplingParams, task: str) -> bool:
    return params.pooling is not None and params.pooling["task"] == task


NEEDS = (
    Need("structured_output", Capability.STRUCTURED_OUTPUT, lambda params: params.structured_output is not None),
    Need(
        "structured_output",
        Capability.STRUCTURE_AFTER_REASONING,
        lambda params: params.structured_output is not None and "after" in params.structured_output,
    ),
    Need("logit_bias", Capability.LOGIT_BIAS, lambda params: bool(params.logit_bias)),
    Need("bad_words", Capability.BAD_WORDS, lambda params: bool(params.bad_words)),
    Need("return_log_probs", Capability.LOG_PROBS, lambda params: params.return_log_probs),
    Need("top_n_logprobs", Capability.LOG_PROBS, lambda params: params.top_n_logprobs > 0),
    Need("skip_prompt_log_probs", Capability.PROMPT_LOG_PROBS, lambda params: params.wants_prompt_log_probs),
    Need("return_hidden_state", Capability.HIDDEN_STATES, lambda params: params.return_hidden_state),
    Need("temperature", Capability.HIGH_TEMPERATURE, lambda params: params.temperature > 2),
    Need("priority", Capability.PRIORITY, lambda params: params.priority != 0),
    Need("presence_penalty", Capability.PENALTIES, lambda params: params.presence_penalty != 0),
    Need("frequency_penalty", Capability.PENALTIES, lambda params: params.frequency_penalty != 0),
    Need("do_kv_handoff", Capability.KV_TRANSFER, lambda params: params.do_kv_handoff),
    Need("min_p", Capability.MIN_P, lambda params: params.min_p > 0 and not params.is_greedy),
    *(Need("pooling", capability, partial(_pools, task=task)) for task, capability in POOLING.items()),
)
"""The sampling parameters that at least one backend does not support, with the capabilities that they need."""


KNOWN_PARAMETERS = tuple(field.name for field in fields(SamplingParams))
"""The sampling parameters that engines of this release know."""
FIRST_PARAMETERS = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "bad_words", "structured_output", "num_tokens_to_generate", "num_tokens_total", "min_tokens"),
        *("termination_id", "stop_token_ids", "stop_words", "detokenize_stop_sequence", "seed", "return_log_probs"),
        *("top_n_logprobs", "skip_prompt_log_probs", "return_prompt_top_n_logprobs", "return_hidden_state"),
        *("return_prompt_tokens", "return_segments", "return_record", "add_BOS", "streaming", "streaming_interval"),
        *("priority", "cache_salt"),
    }
)
"""The parameters of release 0.1, which every engine knows.

Never change this set. A parameter that is added later is a need of the requests that use it.
"""
BEST_EFFORT_PARAMETERS = frozenset({"call_structure", "reasoning"})
"""Parameters that an engine can ignore. They are never needs of a request."""
LATER_PARAMETERS: dict[str, Any] = {
    field.name: field.default
    for field in fields(SamplingParams)
    if field.name not in FIRST_PARAMETERS | BEST_EFFORT_PARAMETERS
}
"""All other parameters, with their defaults. An engine that does not announce such a parameter would ignore it."""


GENERATE = "generate"
"""The task of an engine that announces no task. Such an engine generates tokens."""
GENERATION = "GENERATION"
"""The feature that engines with a pooling model lack.

Requests do not name it, because every request without `pooling` needs it.
"""


def asks_for_pooling(needs: str) -> bool:
    """Return whether a request with these needs is for a pooling model. needs: as returned by needs_of()."""
    return "pooling" in needs.split()


def needs_of(params: SamplingParams, *, has_media: bool = False) -> str:
    """Return the needs of a request in the format of RequestMeta.needs, which is names separated by spaces.

    A need is the name of a capability that the request uses, or of a parameter in LATER_PARAMETERS whose value is not
    the default. The need of a request with media is MEDIA_NEED. The result is "" for a request without needs.
    """
    names = [need.capability.name for need in NEEDS if need.is_used(params)]
    names += [name for name, default in LATER_PARAMETERS.items() if getattr(params, name) != default]
    names += [MEDIA_NEED] if has_media else []
    return " ".join(dict.fromkeys(names))


def is_parameter(need: str) -> bool:
    """Return whether a need is the name of a sampling parameter. If not, it is the name of a capability."""
    return not need.isupper()


def described(name: str, params: SamplingParams | None = None) -> tuple[str, str]:
    """Return the name of the sampling parameter that needs the capability `name`, and a description of the feature.

    If several parameters need the capability, return the first parameter that `params` uses. The parameter name is ""
    if the capability belongs to a later release.

    params: sampling parameters of the request; None: unknown.
    """
    if name == MEDIA_NEED:
        return "", Capability.MEDIA.value
    if is_parameter(name):
        return name, f"the sampling parameter {name}"
    needs = [need for need in NEEDS if need.capability.name == name]
    used = [need for need in needs if params is not None and need.is_used(params)]
    for need in (*used, *needs):
        return need.parameter, need.capability.value
    return "", name
