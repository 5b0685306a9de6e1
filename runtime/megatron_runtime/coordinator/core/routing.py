"""Routing policies: the engine for a request, by load, rotation or cached prefix."""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from megatron_runtime.coordinator.core.records import TOKEN_BYTES, Engine
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.media import MediaItem, media_of_blocks
from megatron_runtime.requests.config import RoutingPolicy

PREFIX_POLICIES = (RoutingPolicy.FIRST_PREFIX_BLOCK, RoutingPolicy.LONGEST_PREFIX, RoutingPolicy.LEAST_COST)
MAX_COMPARED = 8
"""Engines that LeastCost compares whether or not they hold a block of the prompt: the least loaded ones."""
MAX_HOLDERS = 16
"""A block that more engines hold is common: LeastCost then looks for it at the least loaded engines only."""
MAX_SESSIONS = 1 << 16
"""Sessions whose engine is remembered; the least recently used is forgotten first."""
MAX_KNOWN_BLOCKS = 1 << 16
"""Blocks remembered of each engine. The last block of the least recently routed prompt is forgotten first."""
_ROUNDING = 1e-9
MAX_DECISIONS = 1_000_000
"""Scheduling decisions kept for the schedule file; the first are kept."""
PromptHashes = Mapping[int, Sequence[int]]
"""Block size in tokens -> the hashes of the blocks of a prompt; never an empty sequence."""


class KnownBlocks:
    """The prompt blocks that each engine is known to hold, indexed by engine and by block.

    A block is identified by its hash. It is known from its dispatch to an engine until it is evicted or forgotten.

    clock: the number of prompts that engines were given.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._held: dict[int, OrderedDict[int, int]] = {}
        """Index of an engine's registration -> block -> the clock when the engine was last given it."""
        self._holders: dict[int, set[Engine] | tuple[Engine]] = {}
        """Block -> the engines that hold it. If it is one, as for most blocks: the engine's tuple in _alone."""
        self._alone: dict[int, tuple[Engine]] = {}
        """Index of an engine's registration -> a tuple of the engine, shared by its blocks."""

    def __contains__(self, block: int) -> bool:
        return block in self._holders

    def holds(self, engine: Engine, block: int) -> bool:
        return block in self._held.get(engine.index, ())

    def holders(self, block: int) -> Collection[Engine]:
        """Return the engines that hold a block, and therefore all blocks before it."""
        return self._holders.get(block, ())

    def match(self, engine: Engine, hashes: Sequence[int]) -> tuple[int, int]:
        """Return how many leading blocks of a prompt an engine holds, and when it last received the last of them."""
        held = self._held.get(engine.index)
        # Blocks are chained: without the first, a deeper one is of no use.
        if held is None or hashes[0] not in held:
            return 0, 0
        depth = len(hashes)
        while (given := held.get(hashes[depth - 1])) is None:
            depth -= 1
        return depth, given

    def give(self, engine: Engine, hashes: Sequence[int]) -> int:
        """Record that the engine receives these blocks now. Return how many of them it held already."""
        self.clock += 1
        if not hashes:
            return 0
        held = self._held.get(engine.index)
        if held is None:
            held = self._held[engine.index] = OrderedDict()
            self._alone[engine.index] = (engine,)
        before = len(held)
        # The deepest first: where the table is full, a prompt is forgotten from its end.
        for block in reversed(hashes):
            if block in held:
                held.move_to_end(block)
            else:
                self._add_holder(block, engine)
            held[block] = self.clock
        known = before + len(hashes) - len(held)
        while len(held) > MAX_KNOWN_BLOCKS:
            self._remove_holder(held.popitem(last=False)[0], engine)
        return known

    def evict(self, engine: Engine, hashes: Iterable[int]) -> None:
        """Record that the engine holds these blocks no longer."""
        held = self._held.get(engine.index)
        if held is not None:
            for block in hashes:
                if held.pop(block, None) is not None:
                    self._remove_holder(block, engine)

    def forget(self, engine: Engine) -> None:
        """Forget all blocks of an engine that has left or has emptied its cache."""
        for block in self._held.pop(engine.index, ()):
            self._remove_holder(block, engine)
        self._alone.pop(engine.index, None)

    def forget_all(self) -> None:
        """Forget all blocks, because they were computed with weights that have been replaced."""
        self._held.clear()
        self._holders.clear()
        self._alone.clear()

    def _add_holder(self, block: int, engine: Engine) -> None:
        engines = self._holders.setdefault(block, self._alone[engine.index])
        if isinstance(engines, set):
            engines.add(engine)
        elif engines[0] is not engine:
            self._holders[block] = {*engines, engine}

    def _remove_holder(self, block: int, engine: Engine) -> None:
        engines = self._holders[block]
        if isinstance(engines, set):
            engines.discard(engine)
            if len(engines) == 1:
                self._holders[block] = self._alone[engines.pop().index]
        else:
            del self._holders[block]


def load_by(policy: RoutingPolicy, *, alpha: float) -> Callable[[Engine], float]:
    """Return the load by which a policy orders engines without a matching block."""
    if policy is RoutingPolicy.LEAST_COST:
        return Engine.cost
    if policy not in PREFIX_POLICIES:
        return lambda engine: len(engine.in_flight)
    # With alpha 1 the free share has no weight, so the lowest index is first.
    return (lambda engine: len(engine.in_flight) / engine.max_requests) if alpha < 1 else (lambda engine: 0.0)


class EnginesByLoad:
    """Engines sorted by load, so that the dispatch of a request need not examine every engine.

    load: returns the sort key of an engine that is not full. Engines with equal keys are sorted by their index.
    """

    def __init__(self, load: Callable[[Engine], float]) -> None:
        self._load = load
        self.changed: dict[int, Engine] = {}
        """Engines, by index, whose load may have changed. They are moved when the order is needed."""
        self._loads: dict[int, float] = {}
        self._order: list[tuple[float, int, Engine]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Engine]:
        """Yield all engines that are not full, by load. Loads must not change during the iteration."""
        changed = self.changed
        while changed:
            self.put(changed.popitem()[1])
        for load, _, engine in self._order:
            if load == math.inf:
                return
            yield engine

    def put(self, engine: Engine) -> None:
        """Add an engine, or move it to the position that its current load gives it."""
        load = self._load(engine) if len(engine.in_flight) < engine.max_requests else math.inf
        if self._loads.get(engine.index) != load:
            self.remove(engine)
            self._loads[engine.index] = load
            bisect.insort(self._order, (load, engine.index, engine))

    def remove(self, engine: Engine) -> None:
        load = self._loads.pop(engine.index, None)
        if load is not None:
            del self._order[bisect.bisect_left(self._order, (load, engine.index))]


class EngineRouter:
    """Chooses engines. With LEAST_COST an engine's cost for a request, in seconds, is

        (ahead + uncached * (1 + requests / slots)) / prefill rate + held / decode rate
        ahead = min(queued, waiting * uncached + step)

    where `queued` is the prompt tokens that the engine still has to compute, for `waiting` requests, `uncached` the
    request's tokens that it does not hold, `step` the tokens of a step, and `held` the tokens of its requests. Prompts
    share steps, so each delays another one by at most the other's length, and by the step in progress. A prompt delays
    the other requests of the engine, so it counts double at a full one. If rates are unknown, the cost is the number of
    requests. Ties go to the fewest uncached tokens. A session stays at its engine, see _session_engine().

    With another prefix policy the score of an engine is

        alpha * match + (1 - alpha) * free slots / slots

    where match is (the deepest block it holds + 1) / blocks of the prompt (FIRST_PREFIX_BLOCK: whether it holds the
    first). Ties go to the engine that was given the matching block last, then to the lowest index. An engine is
    assumed to hold what it was given, and what it reports as stored, until it reports the eviction.

    deterministic: engines alternate in the order of their names, whichever registered or became free first.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        alpha: float = 0.5,
        block_size_tokens: int | None = None,
        deterministic: bool = False,
        record: bool = False,
    ) -> None:
        if deterministic:
            policy = RoutingPolicy.ROUND_ROBIN
        self.deterministic = deterministic
        self.decisions: list[dict[str, Any]] | None = [] if record else None
        self._alpha = alpha
        self.by_prefix = policy in PREFIX_POLICIES
        self.by_cost = policy is RoutingPolicy.LEAST_COST
        self._by_first_block = policy is RoutingPolicy.FIRST_PREFIX_BLOCK
        self.in_turn = policy is RoutingPolicy.ROUND_ROBIN
        self._hash: Callable[..., list[int]] | None = None
        self._block_size = block_size_tokens
        self.blocks = KnownBlocks()
        self._sessions: OrderedDict[str, tuple[Engine, int]] = OrderedDict()
        """Session -> its last engine, and the last block of the prompt that the engine was given."""
        self._last_index = -1
        self._turn = 0

    def hashes_of(
        self,
        prompt: bytes,
        block_sizes: Iterable[int] = (),
        *,
        salt: str = "",
        adapter: str = "",
        media: Sequence[MediaItem] = (),
    ) -> PromptHashes:
        """Block hashes of a prompt (little-endian int32) that the policy uses, for each block size of the engines."""
        if not self.by_prefix:
            return {}
        sizes = (self._block_size,) if self._block_size else block_sizes
        if self._hash is None:
            from megatron_runtime.requests.hashing import (
                frame_hashes,  # NumPy: imported when it is needed, not at start
            )

            self._hash = frame_hashes
        hashes = {}
        for size in sizes:
            if size > 0 and len(prompt) >= size * TOKEN_BYTES:
                used = prompt[: size * TOKEN_BYTES] if self._by_first_block else prompt
                of_blocks = media_of_blocks(media, size) if media else None
                hashes[size] = self._hash(used, size, salt=salt, adapter=adapter, media=of_blocks)
        return hashes

    def select(self, candidates: Sequence[Engine], hashes: PromptHashes) -> Engine:
        """Return the engine for a request, from a non-empty sequence of engines."""
        if self.in_turn:
            return self.next_in_turn(candidates)
        if not hashes:
            return min(candidates, key=lambda engine: (len(engine.in_flight), engine.index))
        best, rank = candidates[0], (-1.0, 0, 0)
        for engine in candidates:
            found = self._rank(engine, hashes)
            if found > rank:
                best, rank = engine, found
        return best

    def with_prefix(self, hashes: PromptHashes, *, min_loaded: Engine, fits: Callable[[Engine], bool]) -> Engine:
        """Return the engine that select() would return for all suitable engines, but score only a part of them.

        Engines that hold no block of the prompt cannot win against `min_loaded`, and are not scored.

        min_loaded: the suitable engine with the lowest load (load_by()); the lowest index wins a tie.
        """
        # An engine without the first block scores its free share alone: none more than this one.
        best, rank = min_loaded, self._rank(min_loaded, hashes)
        for_room = 1 - self._alpha
        for blocks in hashes.values():
            deepest = next((depth for depth in range(len(blocks), 0, -1) if blocks[depth - 1] in self.blocks), 0)
            for_match = self._alpha * deepest / len(blocks)
            for engine in self.blocks.holders(blocks[0]):
                # A common prefix has many holders, of which most are busier than the best one: skip those.
                if for_match + for_room * (1 - len(engine.in_flight) / engine.max_requests) < rank[0] - _ROUNDING:
                    continue
                if engine is not min_loaded and fits(engine) and (found := self._rank(engine, hashes)) > rank:
                    best, rank = engine, found
        return best

    def cheapest(
        self,
        by_load: EnginesByLoad,
        hashes: PromptHashes,
        *,
        tokens: int,
        min_prefill_cost: float,
        fits: Callable[[Engine], bool],
        session: str = "",
    ) -> Engine | None:
        """Return the engine with the lowest cost for a prompt; None if no engine is suitable.

        The candidates are the first MAX_COMPARED suitable engines of `by_load`, and the engines that hold a block of
        the prompt that at most MAX_HOLDERS engines hold.

        by_load:  all engines in the order of load_by(). Engines at capacity may be left out of the iteration.
        tokens:   number of tokens of the prompt, and of the part of the answer that another engine has generated.
        min_prefill_cost: prefill cost of the fastest engine, in seconds per token.
        session:  the session of the request; empty if it has none.
        """
        best, cost, fewest = None, math.inf, 0
        compared: Collection[Engine] = ()  # with a longer prefix
        common, min_uncached = [], tokens  # common: uncached tokens of many engines, and the engines
        for size, blocks in hashes.items():
            count = 0
            for depth in range(len(blocks), 0, -1):
                engines = self.blocks.holders(blocks[depth - 1])
                if len(engines) == count:
                    continue  # the engines of the longer prefix
                count, uncached = len(engines), tokens - depth * size
                if cost <= uncached * min_prefill_cost:
                    break
                if len(engines) > MAX_HOLDERS:
                    common.append((uncached, engines))
                    min_uncached = min(min_uncached, uncached)
                    continue
                for engine in engines:
                    if engine not in compared and (found := engine.cost_of(uncached)) < cost and fits(engine):
                        best, cost, fewest = engine, found, uncached
                compared = engines
        if len(compared) < len(by_load) and (best is None or cost > min_uncached * min_prefill_cost):
            for engine in islice(filter(fits, by_load), MAX_COMPARED):
                if engine in compared:
                    continue
                uncached = tokens
                for fewer, engines in common:
                    if engine in engines:
                        uncached = fewer
                        break
                found = engine.cost_of(uncached)
                if found < cost or (found == cost and uncached < fewest):
                    best, cost, fewest = engine, found, uncached
                    if uncached == min_uncached and cost <= uncached * min_prefill_cost:
                        break
        if best is None or not session:
            return best
        return self._session_engine(session, best, cost, hashes, tokens, fits)

    def uncached(self, engine: Engine, hashes: PromptHashes, tokens: int) -> int:
        """Return how many of the tokens of a request an engine would have to compute."""
        size = self._block_size or engine.block_size_tokens
        blocks = hashes.get(size)
        return max(0, tokens - self.blocks.match(engine, blocks)[0] * size) if blocks else tokens

    def _session_engine(
        self,
        session: str,
        best: Engine,
        cost: float,
        hashes: PromptHashes,
        tokens: int,
        fits: Callable[[Engine], bool],
    ) -> Engine:
        """Return the engine of a session while it holds the last prompt of the session, otherwise `best`.

        A move computes the cached tokens again and stores them twice. So the session stays while its engine costs at
        most the computation of these tokens more than `best`; if requests are counted, while it has at most twice the
        requests and one.
        """
        engine, block = self._sessions.get(session, (best, 0))
        if engine is best or not self.blocks.holds(engine, block) or not fits(engine):
            return best
        uncached = self.uncached(engine, hashes, tokens)
        maximum = cost + (tokens - uncached) * engine.prefill_cost if engine.prefill_cost else 2 * cost + 1
        return engine if engine.cost_of(uncached) <= maximum else best

    def _of_engine(self, hashes: PromptHashes, engine: Engine) -> Sequence[int]:
        return hashes.get(self._block_size or engine.block_size_tokens, ())

    def _rank(self, engine: Engine, hashes: PromptHashes) -> tuple[float, int, int]:
        """Return the sort key of an engine: its score, when it last received the matching block, its index."""
        blocks = self._of_engine(hashes, engine)
        depth, given = self.blocks.match(engine, blocks) if blocks else (0, 0)
        slots, waiting = engine.max_requests, len(engine.in_flight)
        # 1 - load, as the order by load: equal loads have equal scores.
        room = 1 - waiting / slots if waiting < slots else 0.0
        return self._alpha * depth / max(1, len(blocks)) + (1 - self._alpha) * room, given, -engine.index

    def next_in_turn(self, candidates: Sequence[Engine]) -> Engine:
        if self.deterministic:
            chosen = sorted(candidates, key=lambda engine: engine.name)[self._turn % len(candidates)]
            self._turn += 1
            return chosen
        in_order = sorted(candidates, key=lambda engine: engine.index)
        chosen = next((engine for engine in in_order if engine.index > self._last_index), in_order[0])
        self._last_index = chosen.index
        return chosen

    def assigned(self, engine: Engine, hashes: PromptHashes, *, request: bytes, session: str = "") -> int:
        """Record that a request was sent to `engine`: its blocks and, if decisions are recorded, the decision. Return
        how many of its tokens the engine held before.
        """
        cached = 0
        if self.by_prefix or self.decisions is not None:
            blocks = self._of_engine(hashes, engine)
            cached = self.blocks.give(engine, blocks) * (self._block_size or engine.block_size_tokens)
            if session and blocks and self.by_cost:
                self._sessions[session] = engine, blocks[-1]
                self._sessions.move_to_end(session)
                if len(self._sessions) > MAX_SESSIONS:
                    self._sessions.popitem(last=False)
        if self.decisions is not None and len(self.decisions) < MAX_DECISIONS:
            self.decisions.append({"request": request.hex(), "engine": engine.name, "order": self.blocks.clock})
        return cached

    def stored(self, engine: Engine, hashes: Sequence[int]) -> None:
        """Record that `engine` reports these blocks as stored, such as blocks of an answer."""
        if self.by_prefix and not self._by_first_block:
            self.blocks.give(engine, hashes)

    def decisions_text(self) -> str:
        """Return the recorded scheduling decisions as JSON, the content of `schedule_output_path`."""
        return json.dumps(self.decisions or [], indent=1) + "\n"
