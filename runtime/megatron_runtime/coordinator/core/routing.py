"""Routing policies: the engine for a request, by load, rotation or cached prefix."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_runtime.coordinator.core.records import TOKEN_BYTES, Engine
from megatron_runtime.requests.config import RoutingPolicy

MAX_KNOWN_BLOCKS = 1 << 16
"""Blocks remembered of each engine. The last block of the least recently routed prompt is forgotten first."""
MAX_DECISIONS = 1_000_000
"""Scheduling decisions kept for the schedule file; the first are kept."""
PromptHashes = Mapping[int, Sequence[int]]
"""Block size in tokens -> the hashes of the blocks of a prompt; never an empty sequence."""


class Router:
    """Chooses engines. With a prefix policy the score of an engine is

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
        self._by_prefix = policy in (RoutingPolicy.FIRST_PREFIX_BLOCK, RoutingPolicy.LONGEST_PREFIX)
        self._by_first_block = policy is RoutingPolicy.FIRST_PREFIX_BLOCK
        self._by_turn = policy is RoutingPolicy.ROUND_ROBIN
        self._hash: Callable[..., list[int]] | None = None
        self._block_size = block_size_tokens
        self._held: dict[int, OrderedDict[int, int]] = {}
        """Index of an engine's registration -> block hash -> the clock when it was last given it."""
        self._clock = 0
        self._last_index = -1
        self._turn = 0

    def hashes_of(
        self, prompt: bytes, candidates: Sequence[Engine] = (), *, salt: str = "", adapter: str = ""
    ) -> PromptHashes:
        """Block hashes of a prompt (little-endian int32) that the policy uses, for each block size of the engines:
        while a change of the block size is rolled out, there are two."""
        if not self._by_prefix:
            return {}
        sizes = {self._block_size} if self._block_size else {engine.block_size_tokens for engine in candidates}
        if self._hash is None:
            from megatron_runtime.requests.hashing import (
                frame_hashes,  # NumPy: imported when it is needed, not at start
            )

            self._hash = frame_hashes
        hashes = {}
        for size in sizes:
            if size > 0 and len(prompt) >= size * TOKEN_BYTES:
                used = prompt[: size * TOKEN_BYTES] if self._by_first_block else prompt
                hashes[size] = self._hash(used, size, salt=salt, adapter=adapter)
        return hashes

    def select(self, candidates: Sequence[Engine], hashes: PromptHashes) -> Engine:
        """The engine for a request, from a non-empty sequence."""
        if self._by_turn:
            return self.next_in_turn(candidates)
        if not hashes:
            return min(candidates, key=lambda engine: (len(engine.in_flight), engine.index))

        best, best_score, best_given = candidates[0], -1.0, 0
        for_match, for_room = self._alpha, 1 - self._alpha
        for engine, (match, given) in zip(candidates, self._matches(candidates, hashes), strict=True):
            slots, waiting = engine.max_requests, len(engine.in_flight)
            score = for_match * match + (for_room * (slots - waiting) / slots if waiting < slots else 0.0)
            if score > best_score or (score == best_score and (given, -engine.index) > (best_given, -best.index)):
                best, best_score, best_given = engine, score, given
        return best

    def next_in_turn(self, candidates: Sequence[Engine]) -> Engine:
        if self.deterministic:
            chosen = sorted(candidates, key=lambda engine: engine.name)[self._turn % len(candidates)]
            self._turn += 1
            return chosen
        in_order = sorted(candidates, key=lambda engine: engine.index)
        chosen = next((engine for engine in in_order if engine.index > self._last_index), in_order[0])
        self._last_index = chosen.index
        return chosen

    def assigned(self, engine: Engine, hashes: PromptHashes, *, request: bytes) -> None:
        """A request went to `engine`: remember its blocks, and the decision where decisions are recorded."""
        self.learn(engine, self._of_engine(hashes, engine))
        if self.decisions is not None and len(self.decisions) < MAX_DECISIONS:
            self.decisions.append({"request": request.hex(), "engine": engine.name, "order": self._clock})

    def learn(self, engine: Engine, hashes: Sequence[int]) -> None:
        """`engine` was given these blocks now."""
        self._clock += 1
        if not hashes:
            return
        if self._by_first_block:
            hashes = hashes[:1]
        held = self._held.get(engine.index)
        if held is None:
            held = self._held[engine.index] = OrderedDict()
        # The deepest first: where the table is full, a prompt is forgotten from its end.
        for block in reversed(hashes):
            if block in held:
                held.move_to_end(block)
            held[block] = self._clock
        while len(held) > MAX_KNOWN_BLOCKS:
            held.popitem(last=False)

    def stored(self, engine: Engine, hashes: Sequence[int]) -> None:
        """`engine` reports that it holds these blocks, as those of an answer, which no prompt had."""
        if self._by_prefix and not self._by_first_block:
            self.learn(engine, hashes)

    def evicted(self, engine: Engine, hashes: Iterable[int]) -> None:
        """The engine reports that it no longer holds these blocks."""
        held = self._held.get(engine.index)
        if held is not None:
            for block in hashes:
                held.pop(block, None)

    def forget(self, engine: Engine) -> None:
        """The engine's cache is gone."""
        self._held.pop(engine.index, None)

    def forget_all(self) -> None:
        """The weights changed: blocks that were computed with the old ones are of no use."""
        self._held.clear()

    def write_decisions(self, path: Path) -> None:
        path.write_text(json.dumps(self.decisions or [], indent=1) + "\n")

    def _of_engine(self, hashes: PromptHashes, engine: Engine) -> Sequence[int]:
        return hashes.get(self._block_size or engine.block_size_tokens, ())

    def _matches(self, engines: Iterable[Engine], hashes: PromptHashes) -> list[tuple[float, int]]:
        """Of each engine: the share of the prompt's blocks that it holds, and when it was last given the deepest."""
        found = []
        for engine in engines:
            held = self._held.get(engine.index)
            blocks = self._of_engine(hashes, engine)
            if self._by_first_block:
                blocks = blocks[:1]
            # Blocks are chained: without the first, a deeper one is of no use.
            if held is None or not blocks or blocks[0] not in held:
                found.append((0.0, 0))
                continue
            depth = len(blocks)
            while (given := held.get(blocks[depth - 1])) is None:
                depth -= 1
            found.append((depth / len(blocks), given))
        return found
