"""The data that the worker and a backend exchange: requests, the outputs of a step, and statistics. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy.typing as npt

from megatron_runtime.engine.kv_transfer import ExportedBlocks
from megatron_runtime.process.metrics import Histogram, counter, gauge, histogram
from megatron_runtime.protocol.adapters import Adapter
from megatron_runtime.protocol.codec import tokens_from_bytes
from megatron_runtime.protocol.epochs import TokenEpochs
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.media import Media
from megatron_runtime.requests.errors import MaxSequenceLengthOverflowError
from megatron_runtime.requests.events import DynamicInferenceEvent
from megatron_runtime.requests.sampling_params import IGNORE_EOS, InvalidSamplingParamsError, SamplingParams

if TYPE_CHECKING:  # pydantic takes long to import, and a load needs no messages
    from megatron_runtime.protocol.messages import Dispatch

TopLogProbs = list[tuple[int, float]]
FinishReason = Literal["stop", "length", "abort", "error"]
EpochSpans = list[tuple[int, int]]
"""Spans (position, epoch). Forward passes from this position of prompt plus answer on used the weights of `epoch`."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request in the form in which the backend receives it.

    prompt_tokens:    int32 [p].
    generated_tokens: int32 [g], generated earlier by this or another engine. The engine continues after these tokens
                      and never samples them again.
    generated_epochs: epochs of the weights that sampled these tokens, by token index; empty if unknown.
    seed:             determines, with the index of a token, the random number with which the token is sampled.
    deadline_seconds: remaining time, including waiting; None means no limit.
    tenant:           the scheduler shares the engine fairly between tenants.
    has_tenant:       whether the client named the tenant. Otherwise the tenant stands for the client's connection, and
                      has no time budget for compiling grammars.
    adapter:          key of the LoRA adapter that answers, as passed to load_adapter(); empty for the base model.
    params_bytes:     size of the sampling parameters on the wire, an upper bound of the cost to inspect them.
    client_request_id: id of the client's request, for log lines.
    bad_words:        token sequences of the sampling parameter `bad_words`; None if it is not set, or not tokenized.
    media:            images, audio and video of the prompt; None if there are none.
    prefill_only:     compute the complete blocks of the prompt, sample nothing, and keep the blocks under `request_id`.
    keeps_blocks:     after the answer, keep the complete blocks of the prompt under `request_id`.
    text:             the prompt as text, which the backend of a pooling model tokenizes; None if prompt_tokens has the
                      tokens.
    """

    request_id: int
    prompt_tokens: npt.NDArray[Any]
    generated_tokens: npt.NDArray[Any]
    sampling_params: SamplingParams
    seed: int = 0
    deadline_seconds: float | None = None
    tenant: str = ""
    has_tenant: bool = False
    adapter: str = ""
    params_bytes: int = 0
    client_request_id: str = ""
    bad_words: Sequence[Sequence[int]] | None = None
    media: Media | None = None
    text: str | None = None
    generated_epochs: TokenEpochs = ()
    prefill_only: bool = False
    keeps_blocks: bool = False

    @classmethod
    def of_dispatch(
        cls,
        dispatch: Dispatch,
        params: SamplingParams,
        *,
        bad_words: Sequence[Sequence[int]] | None = None,
        adapter: Adapter | None = None,
        text: str | None = None,
    ) -> Self:
        """Return the request that a DISPATCH describes.

        params:    sampling parameters that were decoded from the DISPATCH.
        bad_words: token sequences of params.bad_words.
        adapter:   the adapter that the DISPATCH names.
        text:      the prompt of the DISPATCH, if the backend tokenizes it.
        """
        meta = dispatch.meta
        return cls(
            request_id=dispatch.dispatch_id,
            prompt_tokens=tokens_from_bytes(dispatch.prompt),
            generated_tokens=tokens_from_bytes(dispatch.generated),
            sampling_params=params,
            seed=meta.seed,
            deadline_seconds=None if meta.deadline_ms is None else meta.deadline_ms / 1000,
            tenant=meta.tenant or f"client {dispatch.route}",
            has_tenant=bool(meta.tenant),
            adapter=adapter.key if adapter is not None else "",
            params_bytes=len(dispatch.params),
            client_request_id=meta.request_id,
            bad_words=bad_words,
            media=dispatch.media,
            text=text,
            generated_epochs=dispatch.epochs,
        )

    def max_total_tokens(self, longest: int) -> int:
        """Return the number of prompt and answer tokens at which the request ends.

        longest: limit of the engine, in tokens.

        Raises ValueError, InvalidSamplingParamsError or MaxSequenceLengthOverflowError for an invalid request.
        """
        prompt, params = len(self.prompt_tokens), self.sampling_params
        if params.pooling is not None:
            return longest  # the backend tokenizes the prompt and may truncate it
        if prompt == 0:
            raise ValueError("prompt is empty: give at least one token")
        total = params.num_tokens_total
        if total is not None and total <= prompt:
            raise InvalidSamplingParamsError("num_tokens_total", total, f"more than the prompt's {prompt} tokens")
        if prompt >= longest:
            raise MaxSequenceLengthOverflowError(self.request_id, too_long(prompt, longest))
        if total is None and params.num_tokens_to_generate is not None:
            # Even if no token is requested, one token is sampled with the prompt, and OutputStage drops it.
            total = prompt + max(1, params.num_tokens_to_generate)
        return longest if total is None else min(longest, total)

    def stop_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Return the token ids that end the answer. eos_ids: the model's end-of-sequence tokens."""
        params = self.sampling_params
        stop_ids = set(params.stop_token_ids or ())
        if params.termination_id is None:
            stop_ids.update(eos_ids)
        elif params.termination_id != IGNORE_EOS:
            stop_ids.add(params.termination_id)
        return frozenset(stop_ids)


def too_long(prompt: int, longest: int) -> str:
    """Return the error message for a prompt that is too long.

    prompt:  length of the prompt, in tokens.
    longest: limit of prompt plus answer, in tokens.
    """
    return (
        f"This model's maximum context length is {longest} tokens for prompt and answer. However, the prompt alone has "
        f"{prompt} tokens: shorten the prompt"
    )


def with_epoch(spans: EpochSpans, start: int, epoch: int) -> EpochSpans:
    """Return spans (first position, epoch) in which all tokens from position `start` on have the epoch `epoch`.

    The tokens before `start` have the epochs of `spans`.
    """
    return [*(span for span in spans if span[0] < start), (start, epoch)]


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Times and weight epochs of a request on this engine. The time of a stage that was not reached is 0.

    queue_seconds:   from arrival until the request first had a slot.
    prefill_seconds: from the first slot to the first token.
    decode_seconds:  from the first to the last token.
    policy_epoch:    epochs of the weights that sampled the tokens, as spans.
    kv_cache_epoch:  epochs of the weights that computed the KV of the tokens, as spans.
    """

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    policy_epoch: EpochSpans
    kv_cache_epoch: EpochSpans
    events: list[DynamicInferenceEvent]


@dataclass(slots=True)
class RequestOutput:
    """The output of a step for one request. An output with a finish_reason is the last output of its request.

    epoch: epoch of the weights that sampled the new tokens; None if unknown.
    new_log_probs, new_top_n_logprobs: log-probability of each new token, and the most likely (id, log-probability)
        pairs at its position.
    prompt_log_probs, prompt_top_n_logprobs: the same for each prompt token except the first; sent with the first new
        token.
    hidden_state: float32 [D], if the request wants it; in the last output.
    pooled: float32, result of a pooling model: [D], or [tokens, D] for one vector per token; in the last output.
    label: name of the class that a classifier assigns to a text; None without a classifier, or if the class has no
        name.
    stop_token: the last token, if it ended the request.
    error, error_code: the cause, if finish_reason is "error". If the cause is an exception, the answer to the client
                       contains its class and its fields.
    summary: in the last output, and in every output of a request that a stop text may end.
    exported: the blocks that were kept, in the last output of a request with `prefill_only` or `keeps_blocks`.
    routing: in outputs with a summary, if the engine records it: [prompt + generated - 1, G, J], the J experts of each
             token in the G layers with experts. The last token has no row, because no forward pass computes it.
    """

    request_id: int
    new_tokens: list[int]
    prompt_length: int
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    epoch: int | None = None
    new_log_probs: list[float] | None = None
    new_top_n_logprobs: list[TopLogProbs] | None = None
    prompt_log_probs: list[float] | None = None
    prompt_top_n_logprobs: list[TopLogProbs] | None = None
    hidden_state: npt.NDArray[Any] | None = None
    pooled: npt.NDArray[Any] | None = None
    label: str | None = None
    stop_token: int | None = None
    error: Exception | str | None = None
    error_code: ErrorCode = ErrorCode.ENGINE_FAILED
    summary: RequestSummary | None = None
    exported: ExportedBlocks | None = None
    routing: npt.NDArray[Any] | None = None


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the histogram of the number of tokens per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStats:
    """Counters since the start, and the current load. A backend omits values that it does not count.

    steps, last_step: number of finished engine steps, and the end of the last one (time.monotonic()).
    weights_digest:   digest of the weights loaded last; empty before the first load, or if the backend computes none.
    prefix_coordination_waits: total number of steps for which requests waited while another request computed their
        prefix.
    prefill_rate:     prompt tokens that the engine computes per second; None if unknown.
    decode_rate:      tokens in the KV cache, divided by the seconds that they add to a step; None if unknown.
    queued_tokens:    prompt tokens of open requests that are neither computed nor cached; None if unknown.
    last_request:     the highest id of the requests that `queued_tokens` includes.
    free_blocks:      number of blocks that an import can use now: free blocks, and cached blocks that no request holds;
                      None if unknown.
    """

    steps: int = counter("engine_steps", "engine steps; 0 with vLLM")
    last_step: float | None = None
    weights_digest: str = ""
    num_running: int = gauge("num_requests_running", "requests being generated", vllm=True)
    num_waiting: int = gauge(
        "num_requests_waiting", "requests waiting for a slot or for pages", vllm=True, panel="Waiting inside engines"
    )
    kv_usage: float = gauge("kv_cache_usage_perc", "share of the KV cache in use, 0 to 1", vllm=True)
    prompt_tokens: int = counter("prompt_tokens", "prompt tokens computed", vllm=True)
    generation_tokens: int = counter("generation_tokens", "tokens generated", vllm=True)
    step_sizes: Histogram = histogram(
        "iteration_tokens_total", "tokens of a step; empty with vLLM", bounds=STEP_SIZES, vllm=True
    )
    preemptions: int = counter("num_preemptions", "preempted requests, whose KV was computed again", vllm=True)
    failed_rows: int = counter(
        "engine_failed_rows", "requests that failed in a step, without harm to others; 0 with vLLM"
    )
    prefix_cache_queries: int = counter(
        "prefix_cache_queries", "prompt tokens looked up in the prefix cache", vllm=True
    )
    prefix_cache_hits: int = counter("prefix_cache_hits", "prompt tokens found in the prefix cache", vllm=True)
    prefix_coordination_waits: int = 0
    prefill_rate: float | None = None
    decode_rate: float | None = None
    queued_tokens: int | None = None
    last_request: int | None = None
    free_blocks: int | None = None
