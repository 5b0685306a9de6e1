"""What goes into an engine and what comes out: a request, the outputs of a step, how a request went."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.events import DynamicInferenceEvent, DynamicInferenceEventType
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.log_probs import LogProbs

if TYPE_CHECKING:
    from megatron_runtime.sampling.structured_output import GrammarState

TopLogProbs = list[tuple[int, float]]
FinishReason = Literal["stop", "length", "abort", "error"]
EpochSpans = list[tuple[int, int]]
"""(position, epoch): from this position on, among prompt and answer, forward passes ran on the weights of `epoch`."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as an engine gets it.

    prompt_tokens:    int32 [p].
    generated_tokens: int32 [g]; generated elsewhere before: they count, and are never sampled again.
    seed:             with the index of a token it fixes the random number that the token is drawn with.
    deadline_seconds: time left for it, running or waiting; None means no limit.
    grammar:          what the answer must match, as it stands after `generated_tokens`; None where anything may come.
    tenant:           requests of different tenants share the engine: see Scheduler.
    """

    request_id: int
    prompt_tokens: npt.NDArray[Any]
    generated_tokens: npt.NDArray[Any]
    sampling_params: SamplingParams
    seed: int = 0
    deadline_seconds: float | None = None
    grammar: GrammarState | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """How a request went, from when this engine got it. Times are 0 for a stage that was not reached.

    queue_seconds:   until it first had a slot; prefill_seconds: from then to its first token; decode_seconds: the rest.
    policy_epoch:    weights that tokens were sampled with; kv_cache_epoch: weights that their KV was computed with.
    """

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    policy_epoch: EpochSpans
    kv_cache_epoch: EpochSpans
    events: list[DynamicInferenceEvent]


@dataclass(slots=True)
class RequestOutput:
    """What a step brought for one request. With a finish_reason it is the last output of that request.

    new_log_probs, new_top_n_logprobs: of each new token, and the likeliest (id, log-probability) there.
    prompt_log_probs, prompt_top_n_logprobs: of each prompt token but the first; with the first new token.
    stop_token: the token that ended it, the last of all, where one did.
    error, error_code: why, where the reason is "error".
    summary: on the last output, and on every one of a request that a stop text may end.
    """

    request_id: int
    new_tokens: list[int]
    prompt_length: int
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    new_log_probs: list[float] | None = None
    new_top_n_logprobs: list[TopLogProbs] | None = None
    prompt_log_probs: list[float] | None = None
    prompt_top_n_logprobs: list[TopLogProbs] | None = None
    stop_token: int | None = None
    error: str | None = None
    error_code: ErrorCode = ErrorCode.ENGINE_FAILED
    summary: RequestSummary | None = None


@dataclass(slots=True)
class StepSizes:
    """How many steps computed how many tokens.

    counts: of steps up to each of BOUNDS, and of those beyond all.
    """

    BOUNDS: ClassVar = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    counts: list[int] = field(default_factory=lambda: [0] * (len(StepSizes.BOUNDS) + 1))
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.counts[bisect_left(self.BOUNDS, tokens)] += 1
        self.tokens += tokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the load of this moment.

    prefix_cache_queries, prefix_cache_hits: prompt tokens looked for in the prefix cache, and found.
    prefix_coordination_waits: steps that a request sat out because another was computing its prefix.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    prompt_tokens: int
    generation_tokens: int
    step_sizes: StepSizes
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_coordination_waits: int


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that an engine works on.

    tokens:    prompt and answer; kept here only while it holds no slot.
    rank:      its place in every queue: (priority, place, arrival), the lowest first. `place` counts the requests of
               its tenant and priority that came before it; it is 0 while all requests are of one tenant.
    digests:   of the complete blocks of its prompt.
    reads_cache: it may take these blocks from the prefix cache.
    deadline, arrived, admitted, first_token: on the engine's clock.
    """

    request: EngineRequest
    tokens: npt.NDArray[np.int32]
    max_total_tokens: int
    stop_ids: frozenset[int]
    rank: tuple[int, int, int]
    digests: list[bytes]
    reads_cache: bool
    deadline: float | None
    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    slot: int = -1
    num_cached_tokens: int = 0
    policy_epoch: EpochSpans = field(default_factory=list)
    kv_cache_epoch: EpochSpans = field(default_factory=list)
    events: list[DynamicInferenceEvent] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top_n_logprobs: list[TopLogProbs] = field(default_factory=list)
    has_reported_prompt: bool = False

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def priority(self) -> int:
        return self.rank[0]

    @property
    def place(self) -> int:
        return self.rank[1]

    @property
    def arrival(self) -> int:
        return self.rank[2]

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling_params

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def grammar(self) -> GrammarState | None:
        return self.request.grammar

    def prompt_targets(self, start: int, count: int) -> tuple[int, int] | None:
        """Positions (first, end) of the prompt tokens whose log-probabilities come of computing `count` tokens from
        `start` on; None where none are wanted. An answer that was begun elsewhere had them there.
        """
        if not self.params.wants_prompt_log_probs or len(self.request.generated_tokens):
            return None
        if start == 0 and len(self.prompt_log_probs) < self.prompt_length - 1:
            # Computed anew after a preemption.
            self.prompt_log_probs.clear()
            self.prompt_top_n_logprobs.clear()
        first, end = start + 1, min(start + count + 1, self.prompt_length)
        return (first, end) if len(self.prompt_log_probs) == start and first < end else None

    def add_prompt_log_probs(self, found: LogProbs) -> None:
        count = self.params.top_n_logprobs
        self.prompt_log_probs += found.chosen_N.tolist()
        self.prompt_top_n_logprobs += [found.row(line, count) for line in range(len(found.chosen_N))] if count else []

    def report_log_probs(self, found: LogProbs, output: RequestOutput) -> None:
        """Put a sampled token's log-probabilities into its output; with the first one, those of the prompt."""
        output.new_log_probs = found.chosen_N.tolist()
        if self.params.top_n_logprobs:
            output.new_top_n_logprobs = [found.row(0, self.params.top_n_logprobs)]
        if self.prompt_log_probs and not self.has_reported_prompt:
            self.has_reported_prompt = True
            output.prompt_log_probs = self.prompt_log_probs
            output.prompt_top_n_logprobs = self.prompt_top_n_logprobs or None

    def note(self, kind: DynamicInferenceEventType, payload: Any = None) -> None:
        self.events.append(DynamicInferenceEvent(kind, payload=payload))

    def stamp_epoch(self, epoch: int, *, total_tokens: int, num_computed: int) -> None:
        """The weights are of `epoch` from here on. `num_computed` tokens are in the KV cache."""
        self.policy_epoch = _stamped(
            self.policy_epoch, total_tokens - 1 if total_tokens > self.prompt_length else 0, epoch
        )
        self.kv_cache_epoch = _stamped(self.kv_cache_epoch, num_computed, epoch)

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


def _stamped(spans: EpochSpans, start: int, epoch: int) -> EpochSpans:
    return [*(span for span in spans if span[0] < start), (start, epoch)]
