"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, field_validator

from megatron_runtime.server.schema.bounds import MAX_TOKEN_IDS, Neutral
from megatron_runtime.server.schema.common import (
    MAX_PROMPTS,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    refused_unless,
)

PromptIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
"""The vocabulary check names ids that are out of range."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {"best_of": (None, 1), "suffix": (None, "")}


class CompletionRequest(GenerationRequest):
    """max_tokens may be 0 with echo: the prompt alone, for its log-probabilities."""

    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    prompt: (
        Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Neutral = None
    suffix: Neutral = None

    _not_offered = field_validator(*_NEUTRAL, mode="before")(refused_unless(_NEUTRAL))

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """One prompt or several, as text or as token ids: always a list of prompts afterwards."""
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if not isinstance(prompts, list) or not prompts or len(prompts) > MAX_PROMPTS:
            raise ValueError(f"expected a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either")
        if all(isinstance(item, str) for item in prompts) or all(_is_token_ids(item) for item in prompts):
            return prompts
        raise ValueError("expected all prompts to be strings, or all to be non-empty lists of token ids")


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}
