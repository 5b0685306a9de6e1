"""Chooses the requests of the next step, and how many tokens each computes.

This module owns the queues; request_slots.py owns slots and pages.

The waiting queue and the running queue are sorted by rank, which is (priority, place among the tenant's requests,
arrival). A preempted request keeps its rank. The running request with the last rank is preempted first. So the first
request always makes progress, and a request starves only behind requests with lower priority numbers.

A waiting request preempts running requests only if their priority number is higher and preemption frees enough memory.
So requests of one priority never alternate, and a preempted request waits until there is memory for it.

Half of the prompt tokens of a step go to prompts by rank. The other half goes to the prompts with the fewest tokens
left. So a short prompt does not wait for a long one. The first prompt by rank gets at least half of each step, whatever
arrives after it.

Requests of several tenants are interleaved. Within a priority, the queue has the first request of each tenant, then the
second request of each tenant, and so on. The n-th request of a tenant may also preempt a request of another tenant that
comes after the n-th request of that other tenant. So each tenant that has enough requests gets an equal share of slots,
pages and prompt tokens.

This module does not import torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.admission import CoreRequest
from megatron_runtime.backends.native.kv.prefix_cache import CachedBlock
from megatron_runtime.backends.native.kv.request_slots import RequestSlots
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.events import DynamicInferenceEventType as Event

if TYPE_CHECKING:
    from megatron_runtime.sampling.batch import AnswerState


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step.

    slots:        int64 [n]; the slot of each of `requests`.
    counts:       int32 [n]; number of tokens that each row computes.
    needs_sample: bool [n]; whether to sample a token after the row's last token.
    """

    requests: list[CoreRequest]
    slots: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]
    needs_sample: npt.NDArray[np.bool_]


def _rank(request: CoreRequest) -> tuple[int, int, int]:
    return request.rank


class Scheduler:
    """The queues of one engine.

    open:               all requests by id. Each is in `waiting` or `running`, which are sorted by CoreRequest.rank.
    last_request:       the highest request id added so far; 0 if there is none.
    preemptions: number of times that a request lost its pages to other requests.
    coordination_waits: number of steps that waiting requests skipped because another request was computing their
        prefix.
    cache_queries, cache_hits: numbers of prompt tokens that were looked up in the prefix cache, and of these tokens
        that were in the cache.
    """

    def __init__(self, context: RequestSlots, config: InferenceConfig) -> None:
        self.open: dict[int, CoreRequest] = {}
        self.waiting: list[CoreRequest] = []
        self.running: list[CoreRequest] = []
        self.last_request = 0
        self.preemptions = 0
        self.coordination_waits = 0
        self.cache_queries = 0
        self.cache_hits = 0
        self._context = context
        self._config = config
        self._tenants: Counter[str] = Counter()
        """Number of open requests by tenant."""
        self._is_interleaved = False
        self._has_changed = False
        """Whether requests were added or removed since the last interleaving."""
        self._waiting_tokens = self._running_tokens = 0
        """Prompt tokens that waiting requests must compute, and prompt tokens left for running requests after the
        last step.
        """
        self._next_deadline = math.inf
        """Lower bound of the deadlines of all open requests."""

    # --- queues -------------------------------------------------------------------------------------------------

    def add(self, request: CoreRequest) -> None:
        self.open[request.request_id] = request
        self._tenants[request.tenant] += 1
        self._has_changed = True
        self._enqueue(request)
        self.last_request = max(self.last_request, request.request_id)
        self._next_deadline = min(self._next_deadline, request.deadline)

    def remove(self, request: CoreRequest) -> None:
        """Remove the request, and free its slot and pages."""
        del self.open[request.request_id]
        self._tenants[request.tenant] -= 1
        if not self._tenants[request.tenant]:
            del self._tenants[request.tenant]
        self._has_changed = True
        if request.slot >= 0:
            self._release(request)
        else:
            self._dequeue(request)

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens of open requests that are not computed yet. Any thread may read it."""
        return self._waiting_tokens + self._running_tokens if self.open else 0

    def overdue(self, now: float) -> list[CoreRequest]:
        """Return the requests whose deadline has passed. The caller must remove them."""
        if now < self._next_deadline:
            return []
        requests = self.open.values()
        self._next_deadline = min((one.deadline for one in requests if one.deadline > now), default=math.inf)
        return [one for one in requests if one.deadline <= now]

    def preempt_all(self) -> None:
        """Move every running request, with its tokens, to the waiting queue.

        The KV of these requests is computed again.
        """
        while self.running:
            self._requeue(self.running[-1])

    def _requeue(self, request: CoreRequest) -> None:
        """Move a running request, with its tokens, to the waiting queue, at the position of CoreRequest.rank."""
        request.tokens = self._context.tokens_of(request.slot).copy()
        request.note(Event.EVICT)
        self._release(request)
        self._enqueue(request)

    def _enqueue(self, request: CoreRequest) -> None:
        matched, _ = self._context.match(request)
        request.uncached = len(request.tokens) - len(matched) * self._context.block_size
        self._waiting_tokens += request.uncached
        insort(self.waiting, request, key=_rank)

    def _dequeue(self, request: CoreRequest) -> None:
        self._waiting_tokens -= request.uncached
        _discard(self.waiting, request)

    def _release(self, request: CoreRequest) -> None:
        self._context.release(request.slot)
        request.slot = -1
        _discard(self.running, request)

    def _interleave(self) -> None:
        """Update the place of each request among its tenant's requests, and sort the queues by CoreRequest.rank."""
        has_several = len(self._tenants) > 1
        if has_several or self._is_interleaved:
            for request, place in zip(self.open.values(), self._places(), strict=True):
                request.rank = request.priority, place, request.rank[2]
            self.waiting.sort(key=_rank)
            self.running.sort(key=_rank)
        self._is_interleaved, self._has_changed = has_several, False

    def _places(self) -> list[int]:
        """Return the place of each open request among its tenant's requests; all 0 if there is only one tenant."""
        places: Counter[tuple[int, str]] = Counter()
        found = []
        for request in self.open.values():  # in the order of arrival
            group = request.priority, request.tenant
            found.append(places[group] if len(self._tenants) > 1 else 0)
            places[group] += 1
        return found

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self, *, now: float, epoch: int) -> StepRows | None:
        """Choose the rows of the next step; return None if no row can run.

        Every decode gets a row with one token. There are enough tokens, because max_tokens >= max_requests. The other
        tokens of the step go to prompts of running requests and of newly admitted requests.
        """
        if self._has_changed:
            self._interleave()
        victim = self._grow()
        left = self._left(self.running)
        if self.running and not self.waiting and left.max() == 1 and not self.without_mask():
            self._running_tokens = 0
            slots = _slots(self.running)
            return StepRows(list(self.running), slots, left, self._context.samples[slots])
        self._admit(victim, now=now, epoch=epoch)
        if not self.running:
            return None
        left = self._left(self.running)
        counts = self._shares(self.running, left)
        counts[list(self.without_mask())] = 0
        if self._config.track_paused_request_events:
            for index in np.flatnonzero(counts == 0):
                self.running[index].note(Event.PAUSE)
        self._running_tokens = int((left - counts)[left > 1].sum())
        chosen = np.flatnonzero(counts)
        if not len(chosen):
            return None
        requests = [self.running[index] for index in chosen]
        slots = _slots(requests)
        needs_sample = (counts[chosen] == left[chosen]) & self._context.samples[slots]
        return StepRows(requests, slots, counts[chosen], needs_sample)

    def without_mask(self) -> dict[int, AnswerState]:
        """Return the grammars whose mask for the next token is still being computed, by index of the running
        request.
        """
        return {
            index: request.grammar
            for index, request in enumerate(self.running)
            if request.grammar is not None and not request.grammar.is_ready
        }

    def _left(self, requests: list[CoreRequest]) -> npt.NDArray[np.int32]:
        return self._context.tokens_left(_slots(requests))

    def _budgets(self, num_decodes: int) -> tuple[int, int]:
        """Return the number of prompt tokens of a step that are assigned by CoreRequest.rank, and the number of others.

        The others are assigned to the prompts with the fewest remaining tokens.
        """
        budget = self._config.step_tokens - num_decodes
        if not self._config.enable_chunked_prefill:
            return budget, 0  # each prompt is computed in one step, so no prompt is split to make room for another
        if num_decodes and self._config.max_prefill_tokens is not None:
            budget = min(budget, self._config.max_prefill_tokens)
        return budget - budget // 2, budget // 2

    def _shares(self, requests: list[CoreRequest], left: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the number of tokens that each of `requests` computes in a step.

        A decode computes one token. Prompts share the other tokens of the step.

        requests: requests in the order of CoreRequest.rank.
        left:     number of remaining tokens of each request.
        """
        shares = np.minimum(left, 1)
        prompts = np.flatnonzero(left > 1)
        by_rank, by_size = self._budgets(len(left) - len(prompts))
        wanted = left[prompts]
        first = _filled(wanted, by_rank)
        unmet = wanted - first
        order = sorted(range(len(prompts)), key=lambda row: (*requests[prompts[row]].rank[:2], unmet[row]))
        second = np.zeros_like(unmet)
        second[order] = _filled(unmet[order], by_rank + by_size - int(first.sum()))
        shares[prompts] = first + second
        return shares

    def _grow(self) -> CoreRequest | None:
        """Add the pages that the newest tokens need. If pages run out, preempt requests from the end of `running`.

        Return the preempted request that came first in `running`, or None if no request was preempted.
        """
        victim = None
        for index in self._context.short_of_pages(_slots(self.running)):
            request = self.running[index] if index < len(self.running) else None
            while request is not None and request.slot >= 0 and not self._context.grow(request.slot):
                victim = self.running[-1]
                self._preempt([victim])
        return victim

    def _preempt(self, victims: list[CoreRequest]) -> None:
        for victim in reversed(victims):
            self._requeue(victim)
        self.preemptions += len(victims)

    def _admit(self, victim: CoreRequest | None, *, now: float, epoch: int) -> None:
        """Admit waiting requests in order. Admit only requests before `victim` if this step has preempted `victim`.

        A request that waits for a prefix that is being computed is skipped. If there is memory for a request but this
        step has no tokens left for it, shorter requests are admitted before it.

        A request gets the pages of all its tokens at once. It is admitted only if a page is left for each running
        request, so the next few steps do not preempt it.
        """
        context = self._context
        for request in self.waiting[: context.max_requests]:
            if victim is not None and victim.rank <= request.rank:
                break
            if not context.has_free_slot and request.rank[:2] >= self.running[-1].rank[:2]:
                break
            matched, should_wait = context.match(request)
            if should_wait:
                self.coordination_waits += 1
                continue
            victims = self._victims(request, matched)
            if victims is None:
                break
            count = len(request.tokens) - len(matched) * context.block_size
            budget = self._tokens_for(request, count, without=victims)
            if self._config.enable_chunked_prefill:
                if budget <= 0:
                    continue
            elif budget <= 0 or budget < count <= self._config.step_tokens:
                break
            if victims:
                self._preempt(victims)
                victim = victims[0]
                matched, _ = context.match(request)  # the cache may have evicted blocks that only the victims held
            slot = context.admit(request, matched)
            self._admitted(request, slot, num_cached=len(matched) * context.block_size, now=now, epoch=epoch)

    def _victims(self, request: CoreRequest, matched: Sequence[CachedBlock]) -> list[CoreRequest] | None:
        """Return the running requests to preempt so that `request` can be admitted.

        Return an empty list if `request` can be admitted without preemption, and None if it cannot be admitted.

        Only requests that give way to `request` (see _gives_way()) are preempted. Of these, the result has the last
        requests of the running queue, and only as many as are needed.
        """
        others = len(self.running)
        lower = [other for other in self.running if _gives_way(other, request)]

        def is_room(count: int) -> bool:
            leaving = _slots(lower[len(lower) - count :])
            return self._context.has_room(request, matched, without=leaving, spare_pages=others - count)

        if is_room(0):
            return []
        if not lower or not is_room(len(lower)):
            return None
        count = next(count for count in range(1, len(lower) + 1) if is_room(count))
        return lower[len(lower) - count :]

    def _tokens_for(self, request: CoreRequest, count: int, *, without: Sequence[CoreRequest]) -> int:
        """Return the number of tokens that `request`, which has `count` remaining tokens, would compute in the step.

        The result assumes that `request` is admitted and that the requests in `without` are preempted.
        """
        staying = [other for other in self.running if other not in without] if without else self.running
        place = bisect_left(staying, request.rank, key=_rank)
        left = np.insert(self._left(staying), place, count)
        return int(self._shares([*staying[:place], request, *staying[place:]], left)[place])

    def _admitted(self, request: CoreRequest, slot: int, *, num_cached: int, now: float, epoch: int) -> None:
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
        self._dequeue(request)
        insort(self.running, request, key=_rank)

    def check_integrity(self) -> None:
        """Check that the queues agree with each other and with the slots. Raises AssertionError."""
        queued = {request.request_id: request for request in [*self.waiting, *self.running]}
        if queued != self.open or len(queued) != len(self.waiting) + len(self.running):
            raise AssertionError("a request is open but in no queue, or in a queue but not open, or in two")
        for queue in (self.waiting, self.running):
            if any(first.rank >= second.rank for first, second in pairwise(queue)):
                raise AssertionError("a queue is out of order")
        if self._waiting_tokens != sum(request.uncached for request in self.waiting):
            raise AssertionError("the tokens of waiting requests are miscounted")
        if self._tenants != Counter(request.tenant for request in self.open.values()):
            raise AssertionError("the requests of a tenant are miscounted")
        if not self._has_changed and [request.rank[1] for request in self.open.values()] != self._places():
            raise AssertionError("a request is out of order among the requests of its tenant")
        if any(request.slot >= 0 for request in self.waiting):
            raise AssertionError("a waiting request holds a slot")
        if sorted(request.slot for request in self.running) != self._context.taken_slots():
            raise AssertionError("running requests and taken slots differ")


def _gives_way(running: CoreRequest, waiting: CoreRequest) -> bool:
    """Return whether `waiting` may preempt `running`. The result is True in two cases:

    - The priority number of `running` is higher.
    - The priorities are equal, the tenants differ, and `running` has a later place among its tenant's requests than
      `waiting` has among its tenant's requests.
    """
    if running.priority != waiting.priority:
        return running.priority > waiting.priority
    return running.rank[1] > waiting.rank[1] and running.tenant != waiting.tenant


def _filled(wanted: npt.NDArray[np.int32], budget: int) -> npt.NDArray[np.int32]:
    """Distribute a budget of tokens over prompts in order, and return the number of tokens for each prompt.

    Each prompt gets all tokens that it wants, until the budget is used up.
    """
    return np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted).astype(np.int32)


_NO_TOKENS = np.empty(0, np.int32)


def _slots(requests: list[CoreRequest]) -> npt.NDArray[np.int64]:
    return np.fromiter((request.slot for request in requests), np.int64, len(requests))


def _discard(queue: list[CoreRequest], request: CoreRequest) -> None:
    del queue[bisect_left(queue, request.rank, key=_rank)]
