"""The answer to a prompt of a program, from the reply map of an engine or a client."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from megatron_runtime.requests.request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron_runtime.requests.sampling_params import SamplingParams


class TextOfTokens(Protocol):
    """Converts token ids to text."""

    def detokenize(self, tokens: Iterable[int]) -> str: ...


def answered_request(
    reply: dict[str, Any],
    *,
    prompt: str | list[int],
    prompt_tokens: list[int],
    sampling_params: SamplingParams,
    text: TextOfTokens | None,
) -> DynamicInferenceRequest:
    """Return the request of a reply map, with its texts.

    prompt: as the caller passed it. A prompt of tokens is also converted to text.
    text:   None for an engine whose tokens have no text.
    """
    request = DynamicInferenceRequestRecord.from_reply(reply).merge()
    request.sampling_params = copy.copy(sampling_params)  # a copy, because the caller may reuse the object
    request.prompt_tokens = prompt_tokens
    request.prompt = prompt if isinstance(prompt, str) else None
    for name in ("policy_staleness", "kv_cache_staleness"):
        if (staleness := getattr(request, name)) is not None:
            setattr(request, name, torch.from_numpy(staleness))
    if request.routing_indices is not None:
        request.routing_indices = torch.as_tensor(request.routing_indices).long()
    if text is None:
        return request
    if request.prompt is None:
        request.prompt = text.detokenize(prompt_tokens)
    if request.generated_text is None:
        tokens = request.generated_tokens
        ended_by_token = isinstance(request.stop_reason, int) and tokens[-1:] == [request.stop_reason]
        request.generated_text = text.detokenize(tokens[:-1] if ended_by_token else tokens)
    if sampling_params.return_segments:
        request.generated_segments = [text.detokenize([token]) for token in request.generated_tokens]
    return request
