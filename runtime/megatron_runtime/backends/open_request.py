"""The record that every backend keeps of an open request: limits, deadline, times, weight epochs and events.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from megatron_runtime.engine.engine_request import (
    EngineRequest,
    EpochSpans,
    FinishReason,
    RequestOutput,
    RequestSummary,
    with_epoch,
)
from megatron_runtime.protocol.epochs import continued_epochs
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.events import DynamicInferenceEvent, DynamicInferenceEventType
from megatron_runtime.requests.sampling_params import SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class BackendRequest:
    """A request that a backend processes. All times are on the same clock of the backend.

    max_total_tokens: number of tokens, prompt plus answer, at which the request ends.
    stop_ids:    ids of the tokens that end the answer.
    deadline:    time of the deadline; infinite if the request has no deadline.
    admitted:    time at which the request first had a slot.
    first_token: time of the request's first token on this engine.
    policy_epoch, kv_cache_epoch: see RequestSummary.
    """

    request: EngineRequest
    max_total_tokens: int
    stop_ids: frozenset[int]
    arrived: float
    deadline: float = math.inf
    admitted: float | None = None
    first_token: float | None = None
    num_cached_tokens: int = 0
    policy_epoch: EpochSpans = field(default_factory=list)
    kv_cache_epoch: EpochSpans = field(default_factory=list)
    events: list[DynamicInferenceEvent] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        request: EngineRequest,
        *,
        longest: int,
        eos_ids: Iterable[int],
        vocab_size: int,
        now: float,
        epoch: int,
        **fields: Any,
    ) -> Self:
        """Create the record of a new request.

        longest: maximum number of tokens, prompt plus answer.
        now:     time on the backend's clock.
        epoch:   epoch of the weights in use.
        fields:  values for the fields of the subclass.

        Raises the errors of EngineRequest.max_total_tokens().
        """
        return cls(
            request=request,
            max_total_tokens=request.max_total_tokens(longest),
            stop_ids=frozenset(token for token in request.stop_ids(eos_ids) if 0 <= token < vocab_size),
            arrived=now,
            deadline=math.inf if request.deadline_seconds is None else now + request.deadline_seconds,
            policy_epoch=continued_epochs(
                request.generated_epochs,
                [(0, epoch)],
                prompt_length=len(request.prompt_tokens),
                num_generated=len(request.generated_tokens),
            ),
            kv_cache_epoch=[(0, epoch)],
            **fields,
        )

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling_params

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)

    def note(self, kind: DynamicInferenceEventType, payload: Any = None) -> None:
        self.events.append(DynamicInferenceEvent(kind, payload=payload))

    def stamp_epoch(self, epoch: int, *, total_tokens: int, num_computed: int) -> None:
        """Record that tokens from now on are computed with the weights of `epoch`.

        total_tokens: number of tokens, prompt plus answer, until now. `num_computed` of them are in the KV cache.
        """
        start = total_tokens - 1 if total_tokens > self.prompt_length else 0
        self.policy_epoch = with_epoch(self.policy_epoch, start, epoch)
        self.kv_cache_epoch = with_epoch(self.kv_cache_epoch, num_computed, epoch)

    def finish_reason(self, token: int, total_tokens: int) -> Literal["stop", "length"] | None:
        """Return why the request ends after its newest token `token`, or None if the request continues."""
        if token in self.stop_ids and total_tokens - self.prompt_length >= self.params.min_tokens:
            return "stop"
        return "length" if total_tokens >= self.max_total_tokens else None

    def output(self, tokens: list[int]) -> RequestOutput:
        """Return an output with the new tokens `tokens`."""
        return RequestOutput(
            self.request_id,
            tokens,
            self.prompt_length,
            num_cached_tokens=self.num_cached_tokens,
            epoch=self.policy_epoch[-1][1],
        )

    def end(self, output: RequestOutput, reason: FinishReason, *, now: float) -> RequestOutput:
        """Add the finish reason and the summary to `output`, the last output of the request. Return `output`."""
        self.note(DynamicInferenceEventType.FAIL if reason == "error" else DynamicInferenceEventType.FINISH)
        output.finish_reason = reason
        output.summary = self.summary(now)
        return output

    def fail(self, error: Exception | str, code: ErrorCode, *, now: float) -> RequestOutput:
        """Return the last output of a request that ends with an error."""
        output = self.output([])
        output.error, output.error_code = error, code
        return self.end(output, "error", now=now)

    def expire(self, *, now: float) -> RequestOutput:
        """Return the last output of a request whose deadline has passed."""
        seconds = self.request.deadline_seconds
        return self.fail(f"the deadline of {seconds:g} s passed", ErrorCode.DEADLINE, now=now)

    def summary(self, now: float) -> RequestSummary:
        admitted = self.admitted if self.admitted is not None else now
        first_token = self.first_token if self.first_token is not None else now
        return RequestSummary(
            queue_seconds=admitted - self.arrived,
            prefill_seconds=first_token - admitted,
            decode_seconds=now - first_token,
            policy_epoch=self.policy_epoch,
            kv_cache_epoch=self.kv_cache_epoch,
            events=list(self.events),
        )
