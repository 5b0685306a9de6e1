"""The answer to a prompt of a program, from the reply map of an engine or a client."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatron_runtime.requests.request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron_runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # tokenizers take long to import: they are loaded at first use
    from megatron_runtime.tokenization import Detokenizer


class TextOfTokens(Protocol):
    """Converts token ids to text."""

    def detokenize(self, tokens: Iterable[int]) -> str: ...

    def detokenizer(self, *, after: Sequence[int] = ()) -> Detokenizer: ...


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
        detokenizer = text.detokenizer(after=prompt_tokens)
        request.generated_text = detokenizer.feed(tokens[:-1] if ended_by_token else tokens) + detokenizer.finish()
    if sampling_params.return_segments:
        detokenizer = text.detokenizer(after=prompt_tokens)
        segments = [detokenizer.feed([token]) for token in request.generated_tokens]
        request.generated_segments = [*segments[:-1], segments[-1] + detokenizer.finish()] if segments else []
    return request
