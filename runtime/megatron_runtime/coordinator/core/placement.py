"""Chooses the engine for a request by the routing policy, among the suitable engines that have capacity."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TypeAlias

from megatron_runtime.coordinator.core.context import Context
from megatron_runtime.coordinator.core.records import Engine, Entry, RequestStage
from megatron_runtime.coordinator.core.routing import EngineRouter, PromptHashes
from megatron_runtime.coordinator.core.transfers import Transfers
from megatron_runtime.coordinator.core.verbs import Verbs

Condition: TypeAlias = Callable[[Engine], bool]


class Placement:
    """The component that chooses engines for requests. It has no state of its own."""

    def __init__(self, context: Context, router: EngineRouter, verbs: Verbs, transfers: Transfers) -> None:
        self._engines = context.engines
        self._router = router
        self._verbs = verbs
        self._transfers = transfers

    def has_room(self) -> bool:
        """Return whether any engine accepts one more request."""
        if self._router.deterministic:
            return bool(self._engines.available())
        return next(self._engines.with_room(), None) is not None

    def choose(self, entry: Entry) -> tuple[Engine, RequestStage] | None:
        """Return the engine for a request and the stage in which the request starts at this engine.

        Returns None if all engines that can answer the request are at capacity.
        """
        if self._engines.has_roles:
            if entry.hashes is None:
                entry.hashes = self.hashes_of(entry)
            return self._transfers.choose(entry, self._cheapest)
        engine = self._cheapest(entry)
        return None if engine is None else (engine, RequestStage.DECODING)

    def _cheapest(self, entry: Entry, accepts: Condition | None = None) -> Engine | None:
        """Return the engine that the routing policy prefers for a request, or None if no engine can accept it now.

        accepts: returns whether an engine may be chosen; None means that every engine may be chosen.
        """
        router, may_answer = self._router, self._condition(entry, accepts)
        if router.by_cost:
            if entry.hashes is None:
                entry.hashes = self.hashes_of(entry)
            return router.cheapest(
                self._engines.by_load,
                entry.hashes,
                tokens=entry.num_tokens,
                min_prefill_cost=self._engines.min_prefill_cost,
                fits=_with_room(may_answer),
                session=entry.meta.session,
            )
        engines = self._engines.available() if router.deterministic else self._engines.with_room()
        by_load = iter(engines) if may_answer is None else filter(may_answer, engines)
        if router.in_turn:
            fitting = list(by_load)
            return router.next_in_turn(fitting) if fitting else None
        if not router.by_prefix:
            return next(by_load, None)
        least_loaded = list(islice(by_load, 2))
        if len(least_loaded) < 2:
            return least_loaded[0] if least_loaded else None
        if entry.hashes is None:
            entry.hashes = self.hashes_of(entry)
        if not entry.hashes:
            # A prompt without a complete block goes to the engine with the fewest requests, whatever the order of the
            # policy.
            return router.select([*least_loaded, *by_load], {})
        return router.with_prefix(entry.hashes, min_loaded=least_loaded[0], fits=_with_room(may_answer))

    def _condition(self, entry: Entry, accepts: Condition | None) -> Condition | None:
        """Return the condition that an engine must fulfil to answer a request, combined with `accepts`.

        None means that every engine fulfils it.
        """
        meta = entry.meta
        if not (entry.model or meta.adapter or meta.needs or self._engines.has_pooling):
            return accepts
        return lambda engine: engine.runs(entry) and (accepts is None or accepts(engine))

    def hashes_of(self, entry: Entry) -> PromptHashes:
        """Return the hashes of the complete KV blocks of a request's prompt.

        The result is empty if the engine tokenizes the prompt.
        """
        if entry.meta.text:
            return {}
        adapter = self._verbs.adapters.find(entry.meta.adapter) if entry.meta.adapter else None
        key = adapter.key if adapter is not None else ""
        items = () if entry.media is None else entry.media.items
        return self._router.hashes_of(
            entry.prompt, self._engines.block_sizes, salt=entry.meta.cache_salt, adapter=key, media=items
        )


def _with_room(may_answer: Condition | None) -> Condition:
    """Return the condition that an engine fulfils `may_answer` and accepts one more request now.

    may_answer: None means that every engine may answer.
    """
    if may_answer is None:
        return Engine.has_room
    return lambda engine: engine.has_room() and may_answer(engine)
