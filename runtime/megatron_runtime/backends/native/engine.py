"""The engine's core. schedule() makes a step plan, the executor runs it, and collect() appends the sampled tokens.

This module does not import torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.admission import Admission, CoreRequest, transferable_blocks
from megatron_runtime.backends.native.executor import Executor, StepPlan, StepResult
from megatron_runtime.backends.native.kv.request_slots import RequestSlots
from megatron_runtime.backends.native.scheduler import Scheduler, StepRows
from megatron_runtime.backends.step_rates import StepRates
from megatron_runtime.engine.backend import CacheEvents
from megatron_runtime.engine.engine_request import STEP_SIZES, BackendStats, EngineRequest, FinishReason, RequestOutput
from megatron_runtime.engine.kv_transfer import ExportedBlocks
from megatron_runtime.process.metrics import Histogram
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.requests.errors import NotFiniteError, RequestOverflowError
from megatron_runtime.requests.events import DynamicInferenceEventType as Event
from megatron_runtime.sampling.batch import NO_TOKEN, RowFailure

if TYPE_CHECKING:
    from megatron_runtime.sampling.batch import AnswerState

logger = logging.getLogger(__name__)

SUSPEND_TAGS = frozenset({"weights", "kv_cache"})
"""Kinds of memory that a suspend can release."""

MASK_GRACE_SECONDS = 0.02
"""Maximum seconds that a step waits for the masks of grammars. A slower mask delays only its own request."""

_MASK_POLL_SECONDS = 0.02
"""Maximum seconds that a step waits if every request waits for its mask. Commands can run only between steps."""

_UNSUPPORTED = {
    "num_speculative_tokens": "this engine generates one token a step",
    "unified_memory_level": "this engine keeps its KV cache in one kind of memory",
    "paused_buffer_size_gb": "this engine preempts requests instead of pausing them",
    "static_kv_memory_pointers": "this engine releases the addresses of the KV cache",
    "sampling_backend": "this engine samples with its own code",
    "async_sched_mode": "this engine plans a step only after the previous step has ended",
}
"""Reasons why fields of InferenceConfig must have their defaults, by field."""


class EngineCore:
    """The loop of an engine, with continuous batching over a paged KV cache. Not thread-safe; one thread owns a core.

    Every step computes the next token of each running request, and as many prompt tokens as fit into `max_tokens`. When
    pages run out, the core preempts the last running request. The request keeps its tokens, and its KV is computed
    again later. A generated token is never sampled again.

    clock: returns monotonic seconds; all deadlines and times of the core are on this clock.

    Raises InvalidConfigError for the first field of `config` that this engine does not support.
    """

    def __init__(
        self,
        executor: Executor,
        config: InferenceConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        scheduler: type[Scheduler] = Scheduler,
    ) -> None:
        for name, because in _UNSUPPORTED.items():
            config.require_default(name, because=because)
        self.executor = executor
        self.config = config = config.for_engine()
        self.epoch = 0
        limit = min(config.max_sequence_length or executor.max_sequence_length, executor.max_sequence_length)
        self.context = RequestSlots(
            config,
            max_sequence_length=limit,
            page_size=executor.page_size,
            num_pages=executor.num_pages,
            expert_size=executor.expert_size,
        )
        self._clock = clock
        self._arrivals = count()
        self._admission = Admission(
            config=config, executor=executor, longest=self.context.max_sequence_length, limit=limit
        )
        self._scheduler = scheduler(self.context, config)
        self._steps = self._prompt_tokens = self._generation_tokens = self._failed_rows = 0
        self._last_step: float | None = None
        self._rates = StepRates()
        self._step_sizes = Histogram(STEP_SIZES)
        self._continued: list[CoreRequest] = []
        """Requests that were added with generated tokens since the last step."""
        self._uses_adapters = False
        """Whether a request has named an adapter since the start."""
        self._rows: StepRows | None = None
        """The rows of the step in progress."""
        self._cache_slots: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """The cache slots of the tokens in the step in progress."""

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.open)

    def add_request(self, request: EngineRequest, *, grammar: AnswerState | None = None) -> None:
        """Queue a request.

        grammar: state of the answer's grammar after the request's generated tokens; None without a grammar.

        Raises:
            MaxSequenceLengthOverflowError, BlockOverflowError, TokenOverflowError, RequestOverflowError,
            InvalidSamplingParamsError, ValueError: the request is rejected. The message names field, value and remedy.
        """
        if request.request_id in self._scheduler.open:
            raise ValueError(f"request_id {request.request_id} is already open")
        opened = self._admission.open(
            request, grammar=grammar, arrival=next(self._arrivals), now=self._clock(), epoch=self.epoch
        )
        waiting = len(self._scheduler.waiting)
        if waiting >= self.config.max_waiting:
            raise RequestOverflowError(
                request.request_id, f"{waiting} requests are waiting, the most allowed: try again later"
            )
        self._uses_adapters = self._uses_adapters or bool(request.adapter)
        opened.note(Event.ADD_ENGINE)
        self._scheduler.add(opened)
        if len(request.generated_tokens) and not request.prefill_only:
            self._continued.append(opened)

    def abort_request(self, request_id: int) -> bool:
        """Remove a request that was aborted or that a stop text has ended, and free its memory.

        An export or import with this id ends too. Return False if no request with this id is open.
        """
        self.context.transfers.release(request_id)
        request = self._scheduler.open.get(request_id)
        if request is not None:
            self._scheduler.remove(request)
        return request is not None

    def reset(self, *, preserve_prefix_cache: bool = False) -> None:
        """Discard all requests, without outputs. Unless `preserve_prefix_cache` is set, clear the prefix cache too."""
        for request_id in list(self._scheduler.open):
            self.abort_request(request_id)
        if not preserve_prefix_cache:
            self.context.clear_prefix_cache()

    # --- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Return its outputs and the outputs of requests that ended without running."""
        outputs = self._end_overdue() + self._end_exhausted()
        self._wait_for_masks()
        begun, computed = self._clock(), self._prompt_tokens
        plan = self.schedule()
        if plan is not None:
            outputs += self.collect(self.executor.execute(plan))
            self._rates.observe(
                prompt_tokens=self._prompt_tokens - computed,
                held_tokens=int(plan.context_lengths.sum()),
                seconds=self._clock() - begun,
            )
        elif grammars := self._scheduler.without_mask():
            next(iter(grammars.values())).wait(_MASK_POLL_SECONDS)
        self._steps += 1
        self._last_step = self._clock()
        interval = self.config.logging_step_interval
        if interval and self._steps % interval == 0:
            logger.info("step %d: %s", self._steps, self.stats())
        return outputs

    def _end_overdue(self) -> list[RequestOutput]:
        now = self._clock()
        overdue = self._scheduler.overdue(now)
        for request in overdue:
            self._scheduler.remove(request)
        return [request.expire(now=now) for request in overdue]

    def _end_exhausted(self) -> list[RequestOutput]:
        """End new requests that continue an answer which is already complete, and return their outputs."""
        outputs = []
        for request in self._continued:
            if self._scheduler.open.get(request.request_id) is request:
                newest = int(request.tokens[-1])
                reason = self._finish_reason(request, newest, len(request.tokens))
                if reason is not None:
                    outputs.append(self._end(request, reason, [], newest=newest))
        self._continued.clear()
        return outputs

    def _wait_for_masks(self) -> None:
        """Wait up to MASK_GRACE_SECONDS for grammar masks that other threads have begun to compute since the last step.

        The following steps run without the requests whose masks are not ready after this time.
        """
        until = time.monotonic() + MASK_GRACE_SECONDS
        for grammar in self._scheduler.without_mask().values():
            if grammar.is_fresh():
                grammar.wait(max(0.0, until - time.monotonic()))

    def schedule(self) -> StepPlan | None:
        """Choose the rows of the next step and return its plan. Return None if no request can run."""
        self._rows = self._scheduler.schedule(now=self._clock(), epoch=self.epoch)
        return self._plan(self._rows) if self._rows is not None else None

    def _plan(self, rows: StepRows) -> StepPlan:
        context, slots, counts = self.context, rows.slots, rows.counts
        starts = context.num_computed[slots]
        token_slots, positions = slots, starts
        if counts.max() > 1:
            # Position of each token: its row's start plus its index within the row.
            row_of_token = np.repeat(np.arange(len(slots)), counts)
            index_in_row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            positions = (starts[row_of_token] + index_in_row).astype(np.int32)
            token_slots = slots[row_of_token]
        pages = context.block_tables[token_slots, positions // context.page_size].astype(np.int64)
        width = int(context.num_pages[slots].max())
        self._cache_slots = pages * context.page_size + positions % context.page_size
        rotary = positions if self.executor.short_length is None else 2 * positions + context.is_long[token_slots]
        return StepPlan(
            token_ids=context.tokens[token_slots, positions],
            positions=rotary,
            query_lengths=counts,
            context_lengths=starts + counts,
            block_tables=context.block_tables[slots, :width],
            slot_mapping=self._cache_slots,
            needs_sample=rows.needs_sample,
            sampling=context.sampling.rows(
                slots,
                generated=context.num_tokens[slots] - context.prompt_length[slots],
                needs_sample=rows.needs_sample,
                prompt_targets=self._prompt_targets(rows, starts),
            ),
            adapters=[request.request.adapter for request in rows.requests] if self._uses_adapters else [],
        )

    def _prompt_targets(self, rows: StepRows, starts: npt.NDArray[np.int32]) -> dict[int, npt.NDArray[np.int32]]:
        """Return the prompt tokens whose log-probabilities this step computes, by row."""
        targets = {}
        for row in np.flatnonzero(starts + 1 < self.context.prompt_length[rows.slots]).tolist():
            found = rows.requests[row].prompt_targets(int(starts[row]), int(rows.counts[row]))
            if found is not None:
                targets[row] = self.context.tokens[rows.slots[row], found[0] : found[1]]
        return targets

    def collect(self, result: StepResult) -> list[RequestOutput]:
        """Append the sampled tokens, end the requests that are complete or have failed, and return the outputs."""
        rows, context = self._rows, self.context
        assert rows is not None, "schedule() first"
        self._rows = None
        if result.routing is not None:
            context.routing.record(self._cache_slots, result.routing)
        in_prompt = context.num_computed[rows.slots] < context.prompt_length[rows.slots]
        context.num_computed[rows.slots] += rows.counts
        has_failed = result.tokens < NO_TOKEN
        sampled = np.flatnonzero(rows.needs_sample & ~has_failed)
        context.append(rows.slots[sampled], result.tokens[sampled])
        if self.config.enable_prefix_caching:
            context.register_computed(rows.slots[in_prompt & ~has_failed])
        self._count(rows, num_sampled=len(sampled), in_prompt=in_prompt)
        for row, found in result.prompt_log_probs.items():
            rows.requests[row].add_prompt_log_probs(found)
        now = self._clock()
        totals = context.num_tokens[rows.slots].tolist()
        computed = ~context.samples[rows.slots] & ~has_failed & (context.tokens_left(rows.slots) == 0)
        outputs = [
            self._fail(rows.requests[row], RowFailure(int(result.tokens[row])))
            for row in np.flatnonzero(has_failed).tolist()
        ]
        outputs += [self._export(rows.requests[row]) for row in np.flatnonzero(computed).tolist()]
        for index in sampled.tolist():
            request, token = rows.requests[index], int(result.tokens[index])
            if request.first_token is None:
                request.first_token = now
            if self.config.track_generated_token_events:
                request.note(Event.GENERATED_TOKEN, {"token_id": token})
            reason = self._finish_reason(request, token, totals[index])
            if reason is None:
                output = request.output([token])
                if request.params.stop_words:  # the output stage may find a stop text and end the request here
                    output.summary = request.summary(now)
                    output.routing = self._routing_of(request)
            else:
                output = self._end(request, reason, [token], newest=token)
            if reason == "error" and request.grammar is not None:
                output.error = f"structured output is too complex or does not match: {request.grammar.failure}"
                output.error_code = ErrorCode.INVALID_REQUEST
            if request.params.wants_log_probs:
                request.report_log_probs(result.log_probs[index], output)
            if request.params.return_hidden_state:
                output.hidden_state = result.hidden_states[index]
            outputs.append(output)
        return outputs

    def _count(self, rows: StepRows, *, num_sampled: int, in_prompt: npt.NDArray[np.bool_]) -> None:
        self._step_sizes.observe(int(rows.counts.sum()))
        self._prompt_tokens += int(rows.counts[in_prompt].sum())
        self._generation_tokens += num_sampled

    def _export(self, request: CoreRequest) -> RequestOutput:
        """End a prefill-only request, keep its blocks for export, and return its last output."""
        digests = self.context.transfers.export(request.request_id, request.digests)
        output = self._end(request, "length", [])
        output.exported = ExportedBlocks(digests, self.weights)
        return output

    def _fail(self, request: CoreRequest, failure: RowFailure) -> RequestOutput:
        """Close a request whose row of the step has failed, and return the request's last output."""
        self._failed_rows += 1
        output = self._end(request, "error", [])
        if failure is RowFailure.MODEL:
            output.error = NotFiniteError(request.request_id, failure.message)
        else:
            output.error, output.error_code = failure.message, ErrorCode.INVALID_REQUEST
        return output

    @staticmethod
    def _finish_reason(request: CoreRequest, token: int, total_tokens: int) -> FinishReason | None:
        """Return why a request ends after its newest token `token`; None if the request continues."""
        if request.grammar is not None and request.grammar.failure is not None:
            return "error"
        reason = request.finish_reason(token, total_tokens)
        return "stop" if request.grammar is not None and request.grammar.is_complete else reason

    def _end(
        self, request: CoreRequest, reason: FinishReason, tokens: list[int], *, newest: int | None = None
    ) -> RequestOutput:
        """Close `request` and return its last output. newest: last sampled token; needed for "stop"."""
        routing, exported = self._routing_of(request), None
        if request.request.keeps_blocks and reason != "error":
            count = transferable_blocks(request.prompt_length, self.config.block_size_tokens)
            digests = self.context.transfers.export(request.request_id, request.digests[:count])
            exported = ExportedBlocks(digests, self.weights)
        self._scheduler.remove(request)
        output = request.end(request.output(tokens), reason, now=self._clock())
        output.exported = exported
        output.stop_token = newest if reason == "stop" and newest in request.stop_ids else None
        output.routing = routing
        return output

    def _routing_of(self, request: CoreRequest) -> npt.NDArray[Any] | None:
        """Return the experts that ran a request's tokens; None if they are not recorded or the request has no slot."""
        return self.context.routing_of(request.slot) if request.slot >= 0 else None

    @property
    def weights(self) -> str:
        """Text that identifies the epoch and the weights. Engines exchange KV blocks only if their texts are equal."""
        return f"{self.epoch} {self.executor.digest}"

    # --- weights and memory -------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Label the weights with `epoch` from now on. Later requests do not reuse KV from another epoch."""
        if epoch == self.epoch:
            return
        self.epoch, context = epoch, self.context
        context.clear_prefix_cache()
        for request in self._scheduler.open.values():
            total, computed = len(request.tokens), 0
            if request.slot >= 0:
                total, computed = (int(column[request.slot]) for column in (context.num_tokens, context.num_computed))
            request.stamp_epoch(epoch, total_tokens=total, num_computed=computed)

    def suspend(self, tags: Collection[str] = SUSPEND_TAGS) -> None:
        """Release memory. Requests keep their tokens.

        Depending on kv_cache_management_mode, KV stays, moves to host memory, or is computed again after resume(). If
        memory cannot be released, suspend() restores what it has released, and raises the error.

        tags: kinds of memory to release, from SUSPEND_TAGS. Raises ValueError for an unknown tag.
        """
        unknown = set(tags) - SUSPEND_TAGS
        if unknown:
            raise ValueError(f"suspend tags {sorted(unknown)}: choose among {sorted(SUSPEND_TAGS)}")
        mode = self.config.kv_cache_management_mode
        if "kv_cache" in tags and mode is KVCacheManagementMode.RECOMPUTE:
            self._scheduler.preempt_all()
            self.context.clear_prefix_cache()
            self.executor.release_kv(None)
        elif "kv_cache" in tags and mode is KVCacheManagementMode.OFFLOAD:
            self.executor.release_kv(self.context.held_pages())
        if "weights" in tags:
            try:
                self.executor.release_weights()
            except Exception:
                self.executor.load()  # a paused engine keeps its KV cache
                raise

    def resume(self) -> None:
        """Reallocate the released memory. Raises if there is too little memory or the weights are not usable."""
        self.executor.load()

    def swap_weights(self, epoch: int) -> None:
        """Use the staged weights, labelled as `epoch`. Requests keep their tokens, and their KV is computed again."""
        self.executor.swap_weights()
        self._scheduler.preempt_all()
        self.context.clear_prefix_cache()
        self.set_epoch(epoch)

    # --- introspection ------------------------------------------------------------------------------------------

    def take_block_events(self) -> CacheEvents:
        """Return the blocks that the prefix cache stored and evicted since the last call."""
        return self.context.prefix_cache.take_events()

    def stats(self) -> BackendStats:
        """Return the counters since the start, and the current load. Any thread may call this."""
        scheduler = self._scheduler
        prefill_rate, decode_rate = self._rates.rates()
        last_request = scheduler.last_request  # read before the tokens, which may include later requests
        queued, rows = scheduler.queued_tokens, self._rows
        if rows is not None:  # a step is in progress
            queued += int(rows.counts[rows.counts > 1].sum())
        return BackendStats(
            steps=self._steps,
            last_step=self._last_step,
            weights_digest=self.executor.digest,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=self.context.usage,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            step_sizes=self._step_sizes,
            preemptions=scheduler.preemptions,
            failed_rows=self._failed_rows,
            prefix_cache_queries=scheduler.cache_queries,
            prefix_cache_hits=scheduler.cache_hits,
            prefix_coordination_waits=scheduler.coordination_waits,
            prefill_rate=prefill_rate,
            decode_rate=decode_rate,
            queued_tokens=queued,
            last_request=last_request,
            free_blocks=self.context.prefix_cache.num_available() // self.context.prefix_cache.pages_per_block,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if pages, prefix cache, slots and queues do not agree."""
        self.context.check_integrity()
        self._scheduler.check_integrity()
