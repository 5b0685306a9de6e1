"""From a request to the sampling parameters of one of its choices."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

from megatron_runtime.requests.sampling_params import IGNORE_EOS, InvalidSamplingParamsError, SamplingParams
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.schema import GenerationRequest
from megatron_runtime.server.schema.structured import structured_output
from megatron_runtime.tokenization import Tokenizer

FIELD_NAMES = {
    "num_tokens_to_generate": "max_tokens",
    "stop_words": "stop",
    "top_n_logprobs": "logprobs",
    "return_log_probs": "logprobs",
}
"""Sampling parameters that the API knows under another name."""


def form_of(request: GenerationRequest) -> tuple[dict[str, Any], str] | None:
    """Return the form that the answer must have and the field that asks for it. Raises ApiError 400."""
    try:
        return structured_output(dict(request))
    except ValueError as error:
        message, field = error.args
        raise ApiError(400, f"Invalid value for {field}: {message}.", param=field, code="invalid_value") from error


def sampling_params(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    *,
    form: dict[str, Any] | None = None,
    log_probs: int | None = None,
    prompt_log_probs: bool = False,
    cache_salt: str | None = None,
) -> SamplingParams:
    """Return the parameters that all choices share; what the request leaves out is as SamplingParams has it.

    form:      what the answer must look like.
    log_probs: how many of the likeliest tokens to report at each place; None reports no log-probabilities at all.
    cache_salt: the salt of the prefix cache; that of the request itself is not used.
    Raises ApiError 400 that names the field at fault.
    """
    temperature = 1.0 if request.temperature is None else request.temperature
    greedy = temperature == 0
    eos = tokenizer.eos_ids
    ends_at_eos = bool(eos) and not request.ignore_eos
    further = [*(eos[1:] if ends_at_eos else ()), *(request.stop_token_ids or ())]
    chosen: dict[str, Any] = {
        "temperature": temperature,
        "top_k": 1 if greedy else max(request.top_k or 0, 0),
        "top_p": 0.0 if greedy else request.top_p or 0.0,
        "min_p": None if greedy else request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": _biases(request.logit_bias, tokenizer),
        "structured_output": form,
        "min_tokens": request.min_tokens,
        "termination_id": eos[0] if ends_at_eos else IGNORE_EOS,
        "stop_token_ids": _in_vocabulary(further, tokenizer) or None,
        "stop_words": request.stop or None,
        "detokenize_stop_sequence": request.include_stop_str_in_output,
        "priority": request.priority,
        "cache_salt": cache_salt,
        "return_log_probs": log_probs is not None,
        "top_n_logprobs": log_probs,
        "skip_prompt_log_probs": not prompt_log_probs,
        "streaming": request.stream,
        "streaming_interval": request.streaming_interval,
    }
    try:
        return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})
    except InvalidSamplingParamsError as error:
        field = FIELD_NAMES.get(error.field, error.field)
        raise ApiError(400, f"{error}.", param=field, code="invalid_value") from error


def choice_params(shared: SamplingParams, *, budget: int | None, seed: int | None, choice: int) -> SamplingParams:
    """Return the parameters of choice number `choice`. They hold the same lists and maps, validated once, uncopied.

    budget: most tokens to generate, at least 1; None means as many as fit.
    seed:   of the request.
    """
    params = copy.copy(shared)
    params.num_tokens_to_generate = budget
    params.seed = choice_seed(seed, choice=choice)
    return params


def choice_seed(seed: int | None, *, choice: int) -> int | None:
    """Return the 64-bit seed of one of n choices: the given one for the first, derived and independent for the rest."""
    if seed is None:
        return None
    seed &= (1 << 64) - 1
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _biases(given: dict[str, float] | None, tokenizer: Tokenizer) -> dict[int, float] | None:
    if not given:
        return None
    biases = {int(token[:20]): float(bias) for token, bias in given.items()}
    outside = next((token for token in biases if token >= tokenizer.vocab_size), None)
    if outside is not None:
        raise _outside("logit_bias", outside, tokenizer)
    return biases


def _in_vocabulary(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    outside = next((id_ for id_ in ids if id_ >= tokenizer.vocab_size), None)
    if outside is not None:
        raise _outside("stop_token_ids", outside, tokenizer)
    return ids


def _outside(field: str, token: int, tokenizer: Tokenizer) -> ApiError:
    message = f"Invalid value for {field}: token id {token} is not in 0..{tokenizer.vocab_size - 1}."
    return ApiError(400, message, param=field, code="invalid_value")
