"""Who runs in the next step, with how many tokens. Owns the queues; slots and pages belong to the context. No torch.

A request's place in every queue is (priority, order of arrival). It keeps it when it is preempted, and the last in line
is preempted first: the first in line always gets on, so nobody starves but behind lower priority numbers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron_runtime.config import InferenceConfig
from megatron_runtime.contexts.dynamic_context import DynamicInferenceContext
from megatron_runtime.engines.engine_request import OpenRequest
from megatron_runtime.requests.events import DynamicInferenceEventType as Event


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step: counts int32 [n] tokens of each of slots int64 [n]; who needs a sample after them."""

    requests: list[OpenRequest]
    slots: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]
    needs_sample: npt.NDArray[np.bool_]


def _rank(request: OpenRequest) -> tuple[int, int]:
    return request.rank


class Scheduler:
    """open:               every request, by id; each is in `waiting` or `running`, which are in the order of rank.
    preemptions:        requests whose pages were taken for others.
    coordination_waits: steps that a request sat out because another was computing its prefix.
    cache_queries, cache_hits: prompt tokens looked for in the prefix cache, and found.
    """

    def __init__(self, context: DynamicInferenceContext, config: InferenceConfig) -> None:
        self.open: dict[int, OpenRequest] = {}
        self.waiting: list[OpenRequest] = []
        self.running: list[OpenRequest] = []
        self.preemptions = 0
        self.coordination_waits = 0
        self.cache_queries = 0
        self.cache_hits = 0
        self._context = context
        self._config = config
        self._deadlines: list[tuple[float, int]] = []
        """(deadline, request id); entries of requests that have ended are skipped."""

    # --- queues -------------------------------------------------------------------------------------------------

    def add(self, request: OpenRequest) -> None:
        self.open[request.request_id] = request
        insort(self.waiting, request, key=_rank)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))
            if len(self._deadlines) > 64 + 2 * len(self.open):
                self._deadlines = sorted(entry for entry in self._deadlines if self._is_deadline(*entry))

    def remove(self, request: OpenRequest) -> None:
        """Forget it and free what it holds, now."""
        del self.open[request.request_id]
        if request.slot >= 0:
            self._release(request)
        else:
            _discard(self.waiting, request)

    def overdue(self, now: float) -> list[OpenRequest]:
        """Requests whose deadline has come; each is named once."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            if self._is_deadline(*entry):
                overdue.append(self.open[entry[1]])
        return overdue

    def _is_deadline(self, deadline: float, request_id: int) -> bool:
        request = self.open.get(request_id)
        return request is not None and request.deadline == deadline

    def preempt_all(self) -> None:
        """Every running request waits, with the tokens it has; its KV is computed again."""
        while self.running:
            self._requeue(self.running[-1])

    def _requeue(self, request: OpenRequest) -> None:
        """Preempt: the request waits in its place, with the tokens it has."""
        request.tokens = self._context.tokens_of(request.slot).copy()
        request.note(Event.EVICT)
        self._release(request)
        insort(self.waiting, request, key=_rank)

    def _release(self, request: OpenRequest) -> None:
        self._context.release(request.slot)
        request.slot = -1
        _discard(self.running, request)

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self, *, now: float, epoch: int) -> StepRows | None:
        """Choose the rows of the next step: one token of each decode, then prompts under way, then waiting requests,
        while tokens and pages last. max_tokens >= max_requests, so every decode has its token.
        """
        preempted = self._grow()
        requests = list(self.running)
        slots = _slots(requests)
        left = self._context.tokens_left(slots)
        if requests and not self.waiting and left.max() == 1:
            return StepRows(requests, slots, left, np.ones(len(left), dtype=bool))
        counts = self._shares(left, self._config.step_tokens)
        if self._config.track_paused_request_events:
            for index in np.flatnonzero(counts == 0):
                requests[index].note(Event.PAUSE)
        if not preempted:
            admitted = self._admit(self._config.step_tokens - int(counts.sum()), now=now, epoch=epoch)
            requests += admitted
            left = np.concatenate([counts, self._left(admitted)])
            counts = self._shares(left, self._config.step_tokens)
        if not requests:
            return None
        chosen = np.flatnonzero(counts)
        requests = [requests[index] for index in chosen]
        counts = counts[chosen]
        return StepRows(requests, _slots(requests), counts, counts == self._left(requests))

    def _left(self, requests: list[OpenRequest]) -> npt.NDArray[np.int32]:
        return self._context.tokens_left(_slots(requests))

    @staticmethod
    def _shares(left: npt.NDArray[np.int32], budget: int) -> npt.NDArray[np.int32]:
        """How many of the tokens that are left each request computes: decodes their one, then prompts in order."""
        shares = np.minimum(left, 1)
        prompts = left > 1
        wanted = left[prompts]
        before = np.cumsum(wanted) - wanted
        shares[prompts] = np.clip(budget - int(shares[~prompts].sum()) - before, 0, wanted)
        return shares

    def _grow(self) -> bool:
        """Give each request the page that its newest token needs, preempting the last in line: whether any was."""
        before = self.preemptions
        for index in self._context.short_of_pages(_slots(self.running)):
            request = self.running[index] if index < len(self.running) else None
            while request is not None and request.slot >= 0 and not self._context.grow(request.slot):
                self._requeue(self.running[-1])
                self.preemptions += 1
        return self.preemptions > before

    def _admit(self, budget: int, *, now: float, epoch: int) -> list[OpenRequest]:
        """Take waiting requests into slots, in order. Only who waits for a prefix under computation is overtaken.

        A request gets the pages of all its tokens at once, and only where a page is left for each running request:
        what was admitted is not preempted by the next few steps.
        """
        admitted: list[OpenRequest] = []
        context = self._context
        if budget <= 0 or not self.waiting or not context.has_free_slot:
            return admitted
        for request in list(self.waiting):
            total = len(request.tokens)
            matched = context.match(request.digests, total) if request.reads_cache else []
            if request.reads_cache and context.is_being_computed(request.digests, total, num_matched=len(matched)):
                self.coordination_waits += 1
                continue
            count = total - context.tokens_of_blocks(matched)
            if not self._config.enable_chunked_prefill and budget < count <= self._config.step_tokens:
                break
            slot = context.admit(request, matched, spare_pages=len(self.running))
            if slot is None:
                break
            self._admitted(request, slot, num_cached=total - count, now=now, epoch=epoch)
            admitted.append(request)
            budget -= count
            if budget <= 0 or not context.has_free_slot:
                break
        return admitted

    def _admitted(self, request: OpenRequest, slot: int, *, num_cached: int, now: float, epoch: int) -> None:
        request.slot = slot
        request.tokens = _NO_TOKENS
        request.kv_cache_epoch = [(0, epoch)]
        request.note(Event.ADD_CONTEXT)
        if request.admitted is None:
            request.admitted = now
            request.num_cached_tokens = num_cached
            if request.reads_cache:
                self.cache_queries += request.prompt_length
                self.cache_hits += num_cached
        _discard(self.waiting, request)
        insort(self.running, request, key=_rank)

    def check_integrity(self) -> None:
        """Queues are in order, and hold slots or do not. Raises AssertionError."""
        queued = {request.request_id: request for request in [*self.waiting, *self.running]}
        if queued != self.open or len(queued) != len(self.waiting) + len(self.running):
            raise AssertionError("a request is open but in no queue, or in a queue but not open, or in two")
        for queue in (self.waiting, self.running):
            if any(first.rank >= second.rank for first, second in pairwise(queue)):
                raise AssertionError("a queue is out of order")
        if any(request.slot >= 0 for request in self.waiting):
            raise AssertionError("a waiting request holds a slot")
        if sorted(request.slot for request in self.running) != self._context.taken_slots():
            raise AssertionError("running requests and taken slots differ")


_NO_TOKENS = np.empty(0, np.int32)


def _slots(requests: list[OpenRequest]) -> npt.NDArray[np.int64]:
    return np.fromiter((request.slot for request in requests), np.int64, len(requests))


def _discard(queue: list[OpenRequest], request: OpenRequest) -> None:
    del queue[bisect_left(queue, request.rank, key=_rank)]
