from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.logprobs import Logprob


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[Any] | None = None
    metrics: Any = field(default=None)
    kv_transfer_params: dict[str, Any] | None = None
