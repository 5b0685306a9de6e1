"""The engine: one readable loop. schedule() makes a step plan, the executor runs it, collect() appends and finishes.

No torch here. Not thread-safe: one thread owns an engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_runtime.config import InferenceConfig
from megatron_runtime.contexts.dynamic_context import (
    BlockOverflowError,
    DynamicInferenceContext,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TokenOverflowError,
)
from megatron_runtime.engines.executor import Executor, StepPlan, StepResult
from megatron_runtime.sampling_params import IGNORE_EOS, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as an engine gets it.

    prompt_tokens:    int32 [p].
    generated_tokens: int32 [g]; generated elsewhere before: they count, and are never sampled again.
    seed:             with the index of a token it fixes the random number that the token is drawn with.
    """

    request_id: int
    prompt_tokens: npt.NDArray[Any]
    generated_tokens: npt.NDArray[Any]
    sampling_params: SamplingParams
    seed: int = 0


@dataclass(slots=True)
class RequestOutput:
    """What a step brought for one request. With a finish_reason it is the last output of that request."""

    request_id: int
    new_tokens: list[int]
    prompt_length: int
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    new_log_probs: list[float] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the load of this moment."""

    num_running: int
    num_waiting: int
    kv_usage: float
    prompt_tokens: int
    generation_tokens: int
    preemptions: int


@dataclass(slots=True)
class _Request:
    """An open request. `tokens` is kept here only while it holds no slot."""

    request: EngineRequest
    tokens: npt.NDArray[np.int32]
    max_total_tokens: int
    stop_ids: frozenset[int]
    slot: int = -1

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)


@dataclass(slots=True)
class _Row:
    """A row of the plan being made: `count` tokens of a slot."""

    request: _Request
    count: int
    needs_sample: bool


@dataclass(slots=True)
class _Totals:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Queues:
    """Open requests: `waiting` in order of arrival, preempted ones first; `running` in order of admission."""

    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    by_id: dict[int, _Request] = field(default_factory=dict)


class DynamicInferenceEngine:
    """Continuous batching over a paged KV cache.

    Every step computes the next token of each running request and as much of the prompts as fits `max_tokens`.
    When pages run out the newest request is preempted: it keeps its tokens and is computed again later. Nothing that
    was generated is ever sampled again.
    """

    def __init__(self, executor: Executor, config: InferenceConfig) -> None:
        self.executor = executor
        self.config = config
        self.context = DynamicInferenceContext(
            max_requests=config.request_slots,
            max_sequence_length=min(
                config.max_sequence_length or executor.max_sequence_length, executor.max_sequence_length
            ),
            page_size=executor.page_size,
            num_pages=executor.num_pages,
        )
        self._queues = _Queues()
        self._totals = _Totals()
        self._plan_rows: list[_Row] = []

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._queues.by_id)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            MaxSequenceLengthOverflowError, BlockOverflowError, TokenOverflowError, RequestOverflowError: it cannot
                be taken; the message names field, value and remedy.
        """
        queues, params = self._queues, request.sampling_params
        request_id, prompt = request.request_id, len(request.prompt_tokens)
        if request_id in queues.by_id:
            raise ValueError(f"request_id {request_id} is already open")
        if prompt == 0:
            raise ValueError("prompt is empty: give at least one token")
        if len(queues.waiting) >= self.config.max_waiting:
            raise RequestOverflowError(request_id, f"{len(queues.waiting)} requests are waiting, the most allowed")
        longest = self.context.max_sequence_length
        if prompt >= longest:
            made_for = self.executor.max_sequence_length
            limit = min(self.config.max_sequence_length or made_for, made_for)
            message = (
                f"This model's maximum context length was exceeded. The prompt has {prompt} tokens; prompt and answer "
                f"together may have {longest}: shorten the prompt"
            )
            if longest < limit:
                raise BlockOverflowError(request_id, message + " or give the engine more kv_cache_memory")
            raise MaxSequenceLengthOverflowError(request_id, message)
        if not self.config.enable_chunked_prefill and prompt > self.config.step_tokens:
            raise TokenOverflowError(
                request_id, f"the prompt has {prompt} tokens, a step takes {self.config.step_tokens}: raise max_tokens"
            )
        tokens = np.concatenate([request.prompt_tokens, request.generated_tokens]).astype(np.int32)
        if tokens.min() < 0 or tokens.max() >= self.executor.vocab_size:
            raise ValueError(f"prompt has a token outside the vocabulary of {self.executor.vocab_size}")
        queued = _Request(request, tokens, self._max_total_tokens(params, prompt), self._stop_ids(params))
        queues.by_id[request_id] = queued
        queues.waiting.append(queued)

    def abort_request(self, request_id: int) -> bool:
        """Forget a request and free what it holds, now: it was aborted, or ended by a stop text. False if not open."""
        return self._remove(request_id) is not None

    def _max_total_tokens(self, params: SamplingParams, prompt: int) -> int:
        longest = self.context.max_sequence_length
        if params.num_tokens_total is not None:
            return min(longest, max(params.num_tokens_total, prompt + 1))
        if params.num_tokens_to_generate is not None:
            return min(longest, prompt + params.num_tokens_to_generate)
        return longest

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_ids = set(params.stop_token_ids or ())
        if params.termination_id is None:
            stop_ids.update(self.executor.eos_ids)
        elif params.termination_id != IGNORE_EOS:
            stop_ids.add(params.termination_id)
        return frozenset(stop_ids)

    def _remove(self, request_id: int) -> _Request | None:
        queues = self._queues
        request = queues.by_id.pop(request_id, None)
        if request is None:
            return None
        if request.slot >= 0:
            self.context.release(request.slot)
            queues.running.remove(request)
        else:
            queues.waiting.remove(request)
        return request

    # --- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns what it brought, and the requests that ended without running."""
        outputs = self._finish_exhausted()
        plan = self.schedule()
        if plan is None:
            return outputs
        return outputs + self.collect(self.executor.execute(plan))

    def _finish_exhausted(self) -> list[RequestOutput]:
        """End requests that came with all the tokens they may have, or with a token that ends them."""
        outputs = []
        for request in list(self._queues.waiting):
            generated = request.request.generated_tokens
            reason: FinishReason | None = None
            if len(generated) and int(generated[-1]) in request.stop_ids:
                reason = "stop"
            elif len(request.tokens) >= request.max_total_tokens:
                reason = "length"
            if reason is not None:
                self._remove(request.request.request_id)
                outputs.append(RequestOutput(request.request.request_id, [], request.prompt_length, reason))
        return outputs

    def schedule(self) -> StepPlan | None:
        """Choose the rows of the next step: decodes, then prompts under way, then waiting requests, while tokens and
        pages last. max_tokens >= max_requests, so that every decode has its token.
        """
        rows: list[_Row] = []
        budget = self.config.step_tokens
        preempted = False
        for request in sorted(self._queues.running, key=lambda running: self._tokens_to_compute(running) > 1):
            if request.slot < 0 or budget == 0:
                continue
            count = min(self._tokens_to_compute(request), budget)
            fits, lost = self._make_room(request, count)
            preempted |= lost
            if fits:
                budget -= count
                rows.append(self._row(request, count))
        rows = [row for row in rows if row.request.slot >= 0]
        while self._queues.waiting and budget and not preempted and self.context.has_free_slot:
            admitted = self._admit(self._queues.waiting[0], budget)
            if admitted is None:
                break
            budget -= admitted.count
            rows.append(admitted)
        self._plan_rows = rows
        return self._plan(rows) if rows else None

    def _tokens_to_compute(self, request: _Request) -> int:
        return int(self.context.num_tokens[request.slot] - self.context.num_computed[request.slot])

    def _row(self, request: _Request, count: int) -> _Row:
        return _Row(request, count, count == self._tokens_to_compute(request))

    def _make_room(self, request: _Request, count: int) -> tuple[bool, bool]:
        """Pages for `count` more tokens, preempting newer requests where needed: (it fits, somebody was preempted)."""
        length = int(self.context.num_computed[request.slot]) + count
        lost = False
        while not self.context.reserve(request.slot, length):
            newest = self._queues.running[-1]
            self._preempt(newest)
            lost = True
            if newest is request:
                return False, lost
        return True, lost

    def _preempt(self, request: _Request) -> None:
        """Take slot and pages; the request waits, first in line, with the tokens it has."""
        context = self.context
        request.tokens = context.tokens[request.slot, : context.num_tokens[request.slot]].copy()
        context.release(request.slot)
        request.slot = -1
        self._queues.running.remove(request)
        self._queues.waiting.appendleft(request)
        self._totals.preemptions += 1

    def _admit(self, request: _Request, budget: int) -> _Row | None:
        if not self.config.enable_chunked_prefill and len(request.tokens) > budget:
            return None
        count = min(len(request.tokens), budget)
        pages = -(-count // self.context.page_size)
        if pages > self.context.allocator.num_free:
            return None
        self._queues.waiting.popleft()
        request.slot = self.context.admit(
            request.tokens,
            prompt_length=request.prompt_length,
            params=request.request.sampling_params,
            seed=request.request.seed,
        )
        self.context.reserve(request.slot, count)
        self._queues.running.append(request)
        return self._row(request, count)

    def _plan(self, rows: list[_Row]) -> StepPlan:
        context = self.context
        slots = np.array([row.request.slot for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int32)
        starts = context.num_computed[slots]
        # Position of each token: its row's start plus its index within the row.
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        index_in_row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = (starts[row_of_token] + index_in_row).astype(np.int32)
        token_slots = slots[row_of_token]
        pages = context.block_tables[token_slots, positions // context.page_size].astype(np.int64)
        width = int(context.num_pages[slots].max())
        return StepPlan(
            token_ids=context.tokens[token_slots, positions],
            positions=positions,
            query_lengths=counts,
            context_lengths=starts + counts,
            block_tables=context.block_tables[slots, :width],
            slot_mapping=pages * context.page_size + positions % context.page_size,
            needs_sample=np.array([row.needs_sample for row in rows]),
            temperature=context.temperature[slots],
            top_k=context.top_k[slots],
            top_p=context.top_p[slots],
            seeds=context.seeds[slots],
            sample_positions=(context.num_tokens[slots] - context.prompt_length[slots]).astype(np.int64),
            wants_log_probs=context.wants_log_probs[slots],
        )

    def collect(self, result: StepResult) -> list[RequestOutput]:
        """Append the sampled tokens, and end what is done."""
        outputs = []
        for index, row in enumerate(self._plan_rows):
            request = row.request
            self.context.num_computed[request.slot] += row.count
            if not row.needs_sample:
                self._totals.prompt_tokens += row.count
                continue
            self._totals.prompt_tokens += row.count - 1
            self._totals.generation_tokens += 1
            token = int(result.tokens[index])
            self.context.append(request.slot, token)
            output = RequestOutput(request.request.request_id, [token], request.prompt_length)
            if result.log_probs is not None and request.request.sampling_params.return_log_probs:
                output.new_log_probs = [float(result.log_probs[index])]
            output.finish_reason = self._finish_reason(request, token)
            if output.finish_reason is not None:
                self._remove(request.request.request_id)
            outputs.append(output)
        self._plan_rows = []
        return outputs

    def _finish_reason(self, request: _Request, token: int) -> FinishReason | None:
        total = int(self.context.num_tokens[request.slot])
        generated = total - request.prompt_length
        if token in request.stop_ids and generated >= request.request.sampling_params.min_tokens:
            return "stop"
        return "length" if total >= request.max_total_tokens else None

    # --- suspend and resume -------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Give weights and KV cache back. Requests keep their tokens; their KV is computed again after resume()."""
        for request in reversed(list(self._queues.running)):
            self._preempt(request)
            self._totals.preemptions -= 1
        self.executor.release()

    def resume(self) -> None:
        self.executor.load()

    # --- introspection ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._queues.running),
            num_waiting=len(self._queues.waiting),
            kv_usage=self.context.usage,
            prompt_tokens=self._totals.prompt_tokens,
            generation_tokens=self._totals.generation_tokens,
            preemptions=self._totals.preemptions,
        )

    def check_integrity(self) -> None:
        """Pages, slots and queues agree. Raises AssertionError."""
        self.context.check_integrity()
        queues = self._queues
        open_requests = {id(request) for request in [*queues.waiting, *queues.running]}
        if open_requests != {id(request) for request in queues.by_id.values()}:
            raise AssertionError("a request is open but in no queue, or in a queue but not open")
        if any(request.slot >= 0 for request in queues.waiting) or any(request.slot < 0 for request in queues.running):
            raise AssertionError("a waiting request holds a slot, or a running one holds none")
