"""Converts sampling parameters to vLLM's format, and vLLM's outputs to ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams as VllmParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from megatron_runtime.backends.vllm.forced_tokens import BAD_WORDS, FORCED
from megatron_runtime.engine.engine_request import TopLogProbs
from megatron_runtime.requests.sampling_params import SamplingParams

MAX_SEED = (1 << 63) - 1
_STRUCTURES = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
"""Fields of StructuredOutputsParams by the type of our structured output."""


def must_force(params: SamplingParams) -> bool:
    """Return whether vLLM must generate the existing answer tokens again, instead of getting them in the prompt.

    This is necessary for penalties on generated tokens, bad words and grammars, which distinguish prompt and answer.
    """
    has_penalties = params.presence_penalty != 0 or params.frequency_penalty != 0
    return has_penalties or bool(params.bad_words) or params.structured_output is not None


def to_vllm(
    params: SamplingParams,
    *,
    bad_words: Sequence[Sequence[int]] = (),
    stop_ids: Sequence[int],
    max_tokens: int,
    generated: Sequence[int],
    kv: Mapping[str, Any] | None = None,
) -> VllmParams:
    """Return vLLM's sampling parameters for a request that continues after `generated`.

    bad_words:  token sequences of params.bad_words.
    stop_ids:   ids of the tokens that end the answer, including the model's own end tokens.
    max_tokens: maximum number of tokens after the prompt, including `generated`.
    kv:         vLLM's `kv_transfer_params` of a request that exports or imports KV.

    Raises ValueError if vLLM does not support a value. The message names the parameter.
    """
    forced = list(generated) if must_force(params) else []
    extra = {FORCED: forced, BAD_WORDS: [list(sequence) for sequence in bad_words], "kv_transfer_params": kv}
    in_prompt = 0 if forced else len(generated)
    return VllmParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=None if params.seed is None or params.is_greedy else params.seed & MAX_SEED,
        logit_bias=dict(params.logit_bias) if params.logit_bias else None,
        allowed_token_ids=params.allowed_token_ids,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,  # included in stop_token_ids
        max_tokens=max_tokens - in_prompt,
        min_tokens=max(0, min(params.min_tokens, max_tokens) - in_prompt),
        logprobs=params.top_n_logprobs if params.wants_log_probs else None,
        prompt_logprobs=params.top_n_logprobs if params.wants_prompt_log_probs and not generated else None,
        structured_outputs=_structure(params.structured_output),
        extra_args={name: value for name, value in extra.items() if value} or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def _structure(structure: dict[str, Any] | None) -> StructuredOutputsParams | None:
    if structure is None:
        return None
    kind = structure["type"]
    return StructuredOutputsParams(**{_STRUCTURES[kind]: True if kind == "json_object" else structure["value"]})


def log_probs(
    tokens: Sequence[int], details: Sequence[dict[int, Any] | None], *, top: int
) -> tuple[list[float], list[TopLogProbs] | None]:
    """Return the log-probability of each token and the `top` most likely tokens at its position (None if top is 0).

    details: for each token, vLLM's map from token id to log-probability and rank.
    """
    chosen, likeliest = [], []
    for token, found in zip(tokens, details, strict=True):
        assert found is not None
        chosen.append(found[token].logprob)
        ranked = sorted(found.items(), key=lambda item: item[1].rank)
        likeliest.append([(id_, entry.logprob) for id_, entry in ranked[:top]])
    return chosen, likeliest if top else None


def stop_token(output: CompletionOutput) -> int | None:
    """Return the stop token or end-of-sequence token that ended the answer, or None if no token ended it."""
    if output.finish_reason != "stop":
        return None
    return output.stop_reason if isinstance(output.stop_reason, int) else output.token_ids[-1]
