"""What the scheduler needs to know. Frozen; every component gets its own slice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig:
    """Limits of one engine (Megatron-Core `InferenceConfig`, as far as the scheduler reads it).

    max_requests:        requests generated at once.
    max_tokens:          most tokens of one step, prefill and decode together.
    max_sequence_length: prompt + generated tokens of one request; None means what the executor allows.
    max_waiting:         requests kept waiting for a slot; more are refused.
    enable_chunked_prefill: a prompt may be spread over several steps; otherwise it must fit max_tokens.
    """

    max_requests: int = 64
    max_tokens: int = 2048
    max_sequence_length: int | None = None
    max_waiting: int = 4096
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_waiting"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: want an integer >= 1")
        if self.max_tokens < self.max_requests:
            raise ValueError(
                f"max_tokens={self.max_tokens} is less than max_requests={self.max_requests}: "
                "every running request needs one token a step; raise max_tokens or lower max_requests"
            )
