"""Routing policies, which choose the engine for a request by load, rotation or cached prefix."""

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
"""Number of engines with the lowest load that LEAST_COST always compares, whether or not they hold a block of the
prompt.
"""
MAX_HOLDERS = 16
"""If more engines than this hold a block, the block is common, and LEAST_COST looks for it only at the engines with the
lowest load.
"""
MAX_SESSIONS = 1 << 16
"""Maximum number of sessions whose engine is remembered. The least recently used session is forgotten first."""
MAX_KNOWN_BLOCKS = 1 << 16
"""Maximum number of blocks remembered for each engine. The last block of the least recently routed prompt is forgotten
first.
"""
_ROUNDING = 1e-9
MAX_DECISIONS = 1_000_000
"""Maximum number of scheduling decisions kept for the schedule file. The first decisions are kept."""
PromptHashes = Mapping[int, Sequence[int]]
"""Maps a block size in tokens to the hashes of a prompt's blocks. The sequence is never empty."""


class KnownBlocks:
    """The prompt blocks that each engine is known to hold, indexed by engine and by block.

    A block is identified by its hash. An engine counts as a holder of a block as soon as a prompt with this block is
    dispatched to it. This ends when the engine reports the eviction of the block, or when the block is forgotten.

    clock: the number of prompts that engines have received.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._held: dict[int, OrderedDict[int, int]] = {}
        """Maps the index of an engine's registration to its blocks. Each block has the clock value at which the engine
        last received it.
        """
        self._holders: dict[int, set[Engine] | tuple[Engine]] = {}
        """Maps each block to the engines that hold it. If only one engine holds the block, as for most blocks, the
        value is the tuple of this engine in `_alone`.
        """
        self._alone: dict[int, tuple[Engine]] = {}
        """Maps the index of an engine's registration to a tuple of the engine, which all its blocks share."""

    def __contains__(self, block: int) -> bool:
        return block in self._holders

    def holds(self, engine: Engine, block: int) -> bool:
        return block in self._held.get(engine.index, ())

    def holders(self, block: int) -> Collection[Engine]:
        """Return the engines that hold a block, and therefore all blocks before it."""
        return self._holders.get(block, ())

    def match(self, engine: Engine, hashes: Sequence[int]) -> tuple[int, int]:
        """Return how many leading blocks of a prompt an engine holds, and when it received the last of these blocks.

        The time is a value of `self.clock`. Returns (0, 0) if the engine holds no such block.
        """
        held = self._held.get(engine.index)
        # Blocks are chained, so without the first block a deeper block is useless.
        if held is None or hashes[0] not in held:
            return 0, 0
        depth = len(hashes)
        while (given := held.get(hashes[depth - 1])) is None:
            depth -= 1
        return depth, given

    def give(self, engine: Engine, hashes: Sequence[int]) -> int:
        """Record that the engine receives these blocks now. Return how many of these blocks the engine already held."""
        self.clock += 1
        if not hashes:
            return 0
        held = self._held.get(engine.index)
        if held is None:
            held = self._held[engine.index] = OrderedDict()
            self._alone[engine.index] = (engine,)
        before = len(held)
        # Start with the deepest block, so that a full table forgets a prompt from its end.
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
    """Return the function that computes an engine's load.

    `policy` uses the load to order the engines that hold no block of the prompt.
    """
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
        """Engines, by index, whose load may have changed. They move to their new positions at the next iteration."""
        self._loads: dict[int, float] = {}
        self._order: list[tuple[float, int, Engine]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Engine]:
        """Yield all engines that are not full, lowest load first. Loads must not change during the iteration."""
        changed = self.changed
        while changed:
            self.put(changed.popitem()[1])
        for load, _, engine in self._order:
            if load == math.inf:
                return
            yield engine

    def put(self, engine: Engine) -> None:
        """Add an engine, or move it to the position of its current load. Full engines come last."""
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
    """The component that chooses an engine by the routing policy.

    With LEAST_COST, the cost of an engine for a request, in seconds, is

        (ahead + uncached * (1 + requests / slots)) / prefill rate + held / decode rate
        ahead = min(queued, waiting * uncached + step)

    where `queued` is the number of prompt tokens that the engine must still compute, for `waiting` requests. `uncached`
    is the number of the request's tokens that the engine does not hold. `step` is the number of tokens of a step, and
    `held` is the number of tokens of the engine's requests. Prompts share steps, so each waiting prompt delays this
    request by at most `uncached` tokens, and the step in progress by at most `step` tokens. A prompt also delays the
    other requests of the engine, so it counts double at a full engine. If rates are unknown, the cost is the number of
    requests. Ties go to the engine with the fewest uncached tokens. A session stays at its engine (see
    _session_engine()).

    With another prefix policy, the score of an engine is

        alpha * match + (1 - alpha) * free slots / slots

    where match is (the index of the deepest block that the engine holds + 1) / blocks of the prompt. For
    FIRST_PREFIX_BLOCK, match is whether the engine holds the first block. Ties go to the engine that last received the
    matching block, then to the lowest index. An engine is assumed to hold the blocks that it received or reported as
    stored, until it reports their eviction.

    deterministic: whether engines alternate in the order of their names, regardless of when they registered or became
                   free.
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
        """Maps each session to its last engine, and to the last block of the prompt that this engine received."""
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
        """Return the hashes of the prompt's blocks that the policy needs, for each block size of the engines.

        The prompt is little-endian int32.
        """
        if not self.by_prefix:
            return {}
        sizes = (self._block_size,) if self._block_size else block_sizes
        if self._hash is None:
            from megatron_runtime.requests.hashing import (
                frame_hashes,  # imports NumPy only when it is needed
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
        """Return the engine that select() would return for all suitable engines, but score only the engines that can
        win.

        An engine that holds no block of the prompt cannot have a better score than `min_loaded`.

        min_loaded: the suitable engine with the lowest load (load_by()); the lowest index wins a tie.
        """
        # The score of an engine without the first block is its free share, and no such engine exceeds this one.
        best, rank = min_loaded, self._rank(min_loaded, hashes)
        for_room = 1 - self._alpha
        for blocks in hashes.values():
            deepest = next((depth for depth in range(len(blocks), 0, -1) if blocks[depth - 1] in self.blocks), 0)
            for_match = self._alpha * deepest / len(blocks)
            for engine in self.blocks.holders(blocks[0]):
                # A common prefix has many holders, most of which are busier than the best one and are skipped.
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
        """Return the engine with the lowest cost for a prompt, or None if no engine is suitable.

        The candidates are the first MAX_COMPARED suitable engines in the order `by_load`, and the engines that hold
        blocks of the prompt. A block that more than MAX_HOLDERS engines hold adds no candidates.

        tokens:   number of tokens of the prompt, and of the part of the answer that another engine has generated.
        min_prefill_cost: prefill cost of the fastest engine, in seconds per token.
        session:  the session of the request; empty if it has none.
        """
        best, cost, fewest = None, math.inf, 0
        compared: Collection[Engine] = ()  # with a longer prefix
        common, min_uncached = [], tokens  # common: (uncached tokens, engines) of blocks with many holders
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
                uncached = next((left for left, engines in common if engine in engines), tokens) if common else tokens
                found = engine.cost_of(uncached)
                if found < cost or (found == cost and uncached < fewest):
                    best, cost, fewest = engine, found, uncached
                    if uncached == min_uncached and cost <= uncached * min_prefill_cost:
                        break
        return best and self._session_engine(session, best, cost, hashes, tokens, fits) if session else best

    def uncached(self, engine: Engine, hashes: PromptHashes, tokens: int) -> int:
        """Return how many tokens of a request an engine would have to compute."""
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

        Moving the session would compute the cached tokens again and store them twice. The session therefore stays if
        the extra cost of its engine, compared with `best`, is at most the cost of computing these tokens. If rates are
        unknown, the session stays if its engine has at most twice as many requests as `best`, plus one.
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
        """Return the sort key of an engine: score, time at which it last received the matching block, and index."""
        blocks = self._of_engine(hashes, engine)
        depth, given = self.blocks.match(engine, blocks) if blocks else (0, 0)
        slots, waiting = engine.max_requests, len(engine.in_flight)
        # Use 1 - load, as in the order by load, so that equal loads have equal scores.
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
        """Record that a request was sent to `engine`.

        Return how many of the request's tokens the engine already held.

        The record includes the request's blocks and, if decisions are recorded, the decision.
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
        """Record blocks that `engine` reports to be in its cache, for example the blocks of an answer."""
        if self.by_prefix and not self._by_first_block:
            self.blocks.give(engine, hashes)

    def decisions_text(self) -> str:
        """Return the recorded scheduling decisions as JSON, which is the content of `schedule_output_path`."""
        return json.dumps(self.decisions or [], indent=1) + "\n"
