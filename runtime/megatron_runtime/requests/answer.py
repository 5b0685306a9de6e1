"""From a reply of token ids to the request that a user of the Python interface gets: with its texts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol

from megatron_runtime.requests.dynamic import DynamicInferenceRequest
from megatron_runtime.requests.record import DynamicInferenceRequestRecord
from megatron_runtime.requests.sampling_params import SamplingParams


class TextOfTokens(Protocol):
    """What makes text of token ids."""

    def detokenize(self, tokens: Iterable[int]) -> str: ...


def answered_request(
    reply: dict[str, Any],
    *,
    prompt: str | list[int],
    prompt_tokens: list[int],
    sampling_params: SamplingParams,
    text: TextOfTokens | None,
) -> DynamicInferenceRequest:
    """The request of a reply map.

    prompt: as the caller gave it; tokens get their text here.
    text:   None for an engine whose tokens are no text.
    """
    request = DynamicInferenceRequestRecord.from_reply(reply).merge()
    request.sampling_params = copy.copy(sampling_params)  # its own: the caller may use the object for others
    request.prompt_tokens = prompt_tokens
    request.prompt = prompt if isinstance(prompt, str) else None
    if text is None:
        return request
    if request.prompt is None:
        request.prompt = text.detokenize(prompt_tokens)
    if request.generated_text is None:
        request.generated_text = text.detokenize(_without_stop_token(request))
    if sampling_params.return_segments:
        request.generated_segments = [text.detokenize([token]) for token in request.generated_tokens]
    for name in ("prompt_top_n_logprobs", "generated_top_n_logprobs"):
        setattr(request, name, _by_text(getattr(request, name), text))
    return request


def _without_stop_token(request: DynamicInferenceRequest) -> list[int]:
    tokens = request.generated_tokens
    return tokens[:-1] if isinstance(request.stop_reason, int) and tokens[-1:] == [request.stop_reason] else tokens


def _by_text(positions: list[Any] | None, text: TextOfTokens) -> list[dict[str, float]] | None:
    """Wire lists of [id, log-probability] as maps by the token's text. Of tokens with one text the likeliest counts."""
    if positions is None:
        return None
    found = []
    for position in positions:
        likeliest: dict[str, float] = {}
        for token, log_prob in position:
            name = text.detokenize([token])
            likeliest[name] = max(log_prob, likeliest.get(name, float("-inf")))
        found.append(likeliest)
    return found
