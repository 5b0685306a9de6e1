"""Who runs in the next step, with how many tokens. Owns the queues; slots and pages belong to the context. No torch.

A request's place in every queue is (priority, order of arrival). It keeps it when it is preempted, and the last in line
is preempted first: the first in line always gets on, so nobody starves but behind lower priority numbers.

Who waits takes the place of who runs only where its priority number is lower, and only where that makes room for it.
So requests of one priority never take turns, and who was preempted waits for room of its own.

Requests of several tenants are interleaved: of one priority, the first request of each tenant goes first, then the
second of each, and so on. The n-th request of a tenant may also take the place of a later one than the n-th of another
tenant. So each tenant gets an equal share of slots, pages and prompt tokens, as far as it has requests for it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.admission import OpenRequest
from megatron_runtime.backends.native.kv.dynamic_context import DynamicInferenceContext
from megatron_runtime.backends.native.kv.prefix_cache import CachedBlock
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.events import DynamicInferenceEventType as Event

if TYPE_CHECKING:
    from megatron_runtime.sampling.structured_output import GrammarState


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step: counts int32 [n] tokens of each of slots int64 [n]; who needs a sample after them."""

    requests: list[OpenRequest]
    slots: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]
    needs_sample: npt.NDArray[np.bool_]


def _rank(request: OpenRequest) -> tuple[int, int, int]:
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
        self._tenants: Counter[str] = Counter()
        """Open requests of each tenant."""
        self._is_interleaved = False
        self._has_changed = False
        """Requests were added or removed since tenants were interleaved."""
        self._deadlines: list[tuple[float, int]] = []
        """(deadline, request id); entries of requests that have ended are skipped."""

    # --- queues -------------------------------------------------------------------------------------------------

    def add(self, request: OpenRequest) -> None:
        self.open[request.request_id] = request
        self._tenants[request.tenant] += 1
        self._has_changed = True
        insort(self.waiting, request, key=_rank)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))
            if len(self._deadlines) > 64 + 2 * len(self.open):
                self._deadlines = sorted(entry for entry in self._deadlines if self._is_deadline(*entry))

    def remove(self, request: OpenRequest) -> None:
        """Forget it and free what it holds, now."""
        del self.open[request.request_id]
        self._tenants[request.tenant] -= 1
        if not self._tenants[request.tenant]:
            del self._tenants[request.tenant]
        self._has_changed = True
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

    def _interleave(self) -> None:
        """Give each request its place among those of its tenant, and put the queues into the order of rank."""
        has_several = len(self._tenants) > 1
        if has_several or self._is_interleaved:
            for request, place in zip(self.open.values(), self._places(), strict=True):
                request.rank = request.priority, place, request.arrival
            self.waiting.sort(key=_rank)
            self.running.sort(key=_rank)
        self._is_interleaved, self._has_changed = has_several, False

    def _places(self) -> list[int]:
        """The place of each open request among those of its tenant; 0 while there is one tenant."""
        places: Counter[tuple[int, str]] = Counter()
        found = []
        for request in self.open.values():  # in the order of arrival
            own = request.priority, request.tenant
            found.append(places[own] if len(self._tenants) > 1 else 0)
            places[own] += 1
        return found

    # --- a step -------------------------------------------------------------------------------------------------

    def schedule(self, *, now: float, epoch: int) -> StepRows | None:
        """Choose the rows of the next step: one token of each decode, then prompts in the order of rank, under way or
        just admitted, while tokens and pages last. max_tokens >= max_requests, so every decode has its token.
        """
        if self._has_changed:
            self._interleave()
        victim = self._grow()
        left = self._left(self.running)
        if self.running and not self.waiting and left.max() == 1 and not self._without_mask():
            return StepRows(list(self.running), _slots(self.running), left, np.ones(len(left), dtype=bool))
        self._admit(victim, now=now, epoch=epoch)
        if not self.running:
            return None
        left = self._left(self.running)
        counts = self._shares(left, self._config.step_tokens)
        counts[self._without_mask()] = 0
        if self._config.track_paused_request_events:
            for index in np.flatnonzero(counts == 0):
                self.running[index].note(Event.PAUSE)
        chosen = np.flatnonzero(counts)
        if not len(chosen):
            return None
        requests = [self.running[index] for index in chosen]
        return StepRows(requests, _slots(requests), counts[chosen], counts[chosen] == left[chosen])

    def _without_mask(self) -> list[int]:
        """Running requests, by place, whose grammar still computes what may come next."""
        return [
            place
            for place, request in enumerate(self.running)
            if request.grammar is not None and not request.grammar.is_ready
        ]

    def fresh_masks(self) -> list[GrammarState]:
        """Grammars of running requests that compute a mask which no step has waited for yet."""
        states = [self.running[place].grammar for place in self._without_mask()]
        return [state for state in states if state is not None and state.is_fresh()]

    def wait_for_mask(self, seconds: float) -> None:
        """Wait for the mask of the first request that lacks one, at most so long; return at once where none does."""
        for place in self._without_mask()[:1]:
            state = self.running[place].grammar
            assert state is not None
            state.wait(seconds)

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

    def _grow(self) -> OpenRequest | None:
        """Give each request the page that its newest token needs, preempting the last in line. Returns the first in
        line of those that were preempted.
        """
        victim = None
        for index in self._context.short_of_pages(_slots(self.running)):
            request = self.running[index] if index < len(self.running) else None
            while request is not None and request.slot >= 0 and not self._context.grow(request.slot):
                victim = self.running[-1]
                self._preempt([victim])
        return victim

    def _preempt(self, victims: list[OpenRequest]) -> None:
        for victim in reversed(victims):
            self._requeue(victim)
        self.preemptions += len(victims)

    def _admit(self, victim: OpenRequest | None, *, now: float, epoch: int) -> None:
        """Take waiting requests into slots, in order, up to `victim`, whom this step preempted. Only who waits for a
        prefix under computation is overtaken.

        A request gets the pages of all its tokens at once, and only where a page is left for each running request:
        what was admitted is not preempted by the next few steps.
        """
        context = self._context
        for request in list(self.waiting):
            if victim is not None and victim.rank <= request.rank:
                break
            if not context.has_free_slot and request.rank[:2] >= self.running[-1].rank[:2]:
                break
            total = len(request.tokens)
            matched = context.match(request.digests, total) if request.reads_cache else []
            if request.reads_cache and context.is_being_computed(request.digests, total, num_matched=len(matched)):
                self.coordination_waits += 1
                continue
            victims = self._victims(request, matched)
            if victims is None:
                break
            count, room = total - context.tokens_of_blocks(matched), self._tokens_for(request, without=victims)
            if room <= 0 or (not self._config.enable_chunked_prefill and room < count <= self._config.step_tokens):
                break
            if victims:
                self._preempt(victims)
                victim = victims[0]
                # What only they held may be forgotten now.
                matched = context.match(request.digests, total) if request.reads_cache else []
            slot = context.admit(request, matched, spare_pages=len(self.running))
            assert slot is not None, "room was made before"
            self._admitted(request, slot, num_cached=context.tokens_of_blocks(matched), now=now, epoch=epoch)

    def _victims(self, request: OpenRequest, matched: Sequence[CachedBlock]) -> list[OpenRequest] | None:
        """Whom `request` takes the place of: of those that give way to it the last in line, as few as make room for
        it. None where even all of them would not.
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

    def _tokens_for(self, request: OpenRequest, *, without: Sequence[OpenRequest]) -> int:
        """Tokens of a step that are left to `request` when those of `without` have gone: each decode has its one, and
        prompts before it in line all they want.
        """
        staying = [other for other in self.running if other not in without] if without else self.running
        left = self._left(staying)
        ahead = bisect_left(staying, request.rank, key=_rank)
        return self._config.step_tokens - int(left[:ahead].sum()) - int((left[ahead:] == 1).sum())

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
        if self._tenants != Counter(request.tenant for request in self.open.values()):
            raise AssertionError("the requests of a tenant are miscounted")
        if not self._has_changed and [request.place for request in self.open.values()] != self._places():
            raise AssertionError("a request is in the wrong place among those of its tenant")
        if any(request.slot >= 0 for request in self.waiting):
            raise AssertionError("a waiting request holds a slot")
        if sorted(request.slot for request in self.running) != self._context.taken_slots():
            raise AssertionError("running requests and taken slots differ")


def _gives_way(running: OpenRequest, waiting: OpenRequest) -> bool:
    """Whether `running` is of lower priority, or beyond the share of its tenant where `waiting` is within its own."""
    if running.priority != waiting.priority:
        return running.priority > waiting.priority
    return running.place > waiting.place and running.tenant != waiting.tenant


_NO_TOKENS = np.empty(0, np.int32)


def _slots(requests: list[OpenRequest]) -> npt.NDArray[np.int64]:
    return np.fromiter((request.slot for request in requests), np.int64, len(requests))


def _discard(queue: list[OpenRequest], request: OpenRequest) -> None:
    del queue[bisect_left(queue, request.rank, key=_rank)]
