"""From the frames of a stream to pieces of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_runtime.requests.request import DynamicInferenceRequest, TextOfTokens, answered_request
from megatron_runtime.requests.sampling_params import SamplingParams


class GrowingText(Protocol):
    """Text of tokens as they come; an unfinished character is kept back."""

    def feed(self, ids: list[int]) -> str: ...


class Texts(TextOfTokens, Protocol):
    def detokenizer(self) -> GrowingText: ...


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of an answer. The texts of all pieces together are the answer's text, their tokens its tokens.

    log_probs: of the tokens, where they were asked for.
    request:   in the last piece, the whole request; a failed one has status FAILED.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    request: DynamicInferenceRequest | None = None


class ChunkReader:
    """Makes the pieces of one answer. What was given out is never taken back."""

    def __init__(
        self,
        *,
        prompt: str | list[int],
        prompt_tokens: list[int],
        sampling_params: SamplingParams,
        text: Texts | None,
    ) -> None:
        self._prompt = prompt
        self._prompt_tokens = prompt_tokens
        self._sampling_params = sampling_params
        self._text = text
        self._growing = text.detokenizer() if text is not None else None
        self._shown = 0
        """Characters given out."""
        self._told = 0
        """Tokens given out."""

    def read(self, item: dict[str, Any]) -> Iterator[GenerationChunk]:
        if "partial" in item:
            frame = item["partial"]
            tokens: list[int] = frame["new_tokens"]
            piece = self._growing.feed(tokens) if self._growing is not None else ""
            self._shown += len(piece)
            self._told += len(tokens)
            yield GenerationChunk(piece, tokens, frame.get("new_log_probs"))
            return
        request = answered_request(
            item["final"],
            prompt=self._prompt,
            prompt_tokens=self._prompt_tokens,
            sampling_params=self._sampling_params,
            text=self._text,
        )
        rest = request.generated_tokens[self._told :]
        log_probs = request.generated_log_probs
        yield GenerationChunk(
            (request.generated_text or "")[self._shown :],
            rest,
            log_probs[-len(rest) :] if log_probs and rest else None,
            request,
        )
