"""Which engine a request goes to."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_runtime.data_parallel_inference_coordinator.engines import Engine
from megatron_runtime.data_parallel_inference_coordinator.settings import RoutingPolicy
from megatron_runtime.hashing import block_hashes
from megatron_runtime.wire.messages import tokens_from_bytes

MAX_KNOWN_BLOCKS = 1 << 17
"""Blocks whose engines are remembered; the least recently routed are forgotten first."""

_PREFIX_POLICIES = frozenset({RoutingPolicy.FIRST_PREFIX_BLOCK, RoutingPolicy.LONGEST_PREFIX})


class Router:
    """Chooses engines. With a prefix policy the score of an engine is

        alpha * match + (1 - alpha) * free slots / slots

    where match is the share of the prompt's blocks it was given before (FIRST_PREFIX_BLOCK: whether it was given the
    first). Ties go to the engine used last, then to the lowest index. The table says what engines were given, not
    what they still hold.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        alpha: float = 0.5,
        block_size_tokens: int | None = None,
        record: bool = False,
    ) -> None:
        self.policy = policy
        self.decisions: list[dict[str, Any]] | None = [] if record else None
        self._alpha = alpha
        self._block_size = block_size_tokens
        self._holders: OrderedDict[int, dict[int, int]] = OrderedDict()
        """Block hash -> index of the engine's registration -> when it was last given it."""
        self._clock = 0
        self._last_index = -1

    def hashes_of(self, prompt: bytes | Sequence[int], candidates: Sequence[Engine] = ()) -> list[int]:
        """Block hashes of a prompt, or none where the policy has no use for them."""
        if self.policy not in _PREFIX_POLICIES:
            return []
        size = self._block_size or next((engine.block_size_tokens for engine in candidates), 0)
        if size < 1:
            return []
        tokens = tokens_from_bytes(prompt) if isinstance(prompt, bytes) else prompt
        if self.policy is RoutingPolicy.FIRST_PREFIX_BLOCK:
            tokens = tokens[:size]
        return block_hashes(tokens, size)

    def select(self, candidates: Sequence[Engine], hashes: Sequence[int]) -> Engine:
        """The engine for a request, from a non-empty sequence."""
        if self.policy is RoutingPolicy.ROUND_ROBIN:
            return self.next_in_turn(candidates)
        if not hashes:
            return min(candidates, key=lambda engine: (len(engine.in_flight), engine.index))
        depth, last_used = self._matches(hashes)

        def rank(engine: Engine) -> tuple[float, int, int]:
            free = max(0, engine.max_requests - len(engine.in_flight)) / engine.max_requests
            match = depth.get(engine.index, 0) / len(hashes)
            score = self._alpha * match + (1 - self._alpha) * free
            return (score, last_used.get(engine.index, 0), -engine.index)

        return max(candidates, key=rank)

    def next_in_turn(self, candidates: Sequence[Engine]) -> Engine:
        in_order = sorted(candidates, key=lambda engine: engine.index)
        chosen = next((engine for engine in in_order if engine.index > self._last_index), in_order[0])
        self._last_index = chosen.index
        return chosen

    def assigned(self, engine: Engine, hashes: Sequence[int], *, request: str) -> None:
        """Remember that `engine` was given these blocks."""
        self._clock += 1
        for block in hashes:
            self._holders.setdefault(block, {})[engine.index] = self._clock
            self._holders.move_to_end(block)
        while len(self._holders) > MAX_KNOWN_BLOCKS:
            self._holders.popitem(last=False)
        if self.decisions is not None:
            self.decisions.append({"request": request, "engine": engine.name, "order": self._clock})

    def forget(self, engine: Engine) -> None:
        """The engine's cache is gone."""
        for holders in self._holders.values():
            holders.pop(engine.index, None)

    def write_decisions(self, path: Path) -> None:
        path.write_text(json.dumps(self.decisions or [], indent=1) + "\n")

    def _matches(self, hashes: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """By engine index: blocks matched from the first, and when the deepest of them was last given to it."""
        depth: dict[int, int] = {}
        last_used: dict[int, int] = {}
        for position in range(len(hashes) - 1, -1, -1):
            for index, used in self._holders.get(hashes[position], {}).items():
                if index not in depth:
                    depth[index] = position + 1
                    last_used[index] = used
        return depth, last_used
