"""Which engine was given which prompt block, by engine and by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from megatron_runtime.coordinator.core.records import Engine

MAX_KNOWN_BLOCKS = 1 << 16
"""Blocks remembered of each engine. The last block of the least recently routed prompt is forgotten first."""


class KnownBlocks:
    """Blocks are hashes. A block is known from when an engine was given it until it is evicted or forgotten.

    clock: the number of prompts that engines were given.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._held: dict[int, OrderedDict[int, int]] = {}
        """Index of an engine's registration -> block -> the clock when the engine was last given it."""
        self._holders: dict[int, Engine | set[Engine]] = {}
        """Block -> the engines that hold it: without a set if it is one, as for most blocks."""

    def __contains__(self, block: int) -> bool:
        return block in self._holders

    def count(self, engine: Engine) -> int:
        return len(self._held.get(engine.index, ()))

    def holders(self, block: int) -> Iterator[Engine]:
        found = self._holders.get(block)
        return iter(found) if isinstance(found, set) else iter(() if found is None else (found,))

    def match(self, engine: Engine, hashes: Sequence[int]) -> tuple[int, int]:
        """Return how many blocks of a prompt an engine holds, and when it was last given the deepest of them."""
        held = self._held.get(engine.index)
        # Blocks are chained: without the first, a deeper one is of no use.
        if held is None or hashes[0] not in held:
            return 0, 0
        depth = len(hashes)
        while (given := held.get(hashes[depth - 1])) is None:
            depth -= 1
        return depth, given

    def give(self, engine: Engine, hashes: Sequence[int]) -> None:
        """The engine was given these blocks now."""
        self.clock += 1
        if not hashes:
            return
        held = self._held.get(engine.index)
        if held is None:
            held = self._held[engine.index] = OrderedDict()
        # The deepest first: where the table is full, a prompt is forgotten from its end.
        for block in reversed(hashes):
            if block in held:
                held.move_to_end(block)
            else:
                self._add_holder(block, engine)
            held[block] = self.clock
        while len(held) > MAX_KNOWN_BLOCKS:
            self._remove_holder(held.popitem(last=False)[0], engine)

    def evict(self, engine: Engine, hashes: Iterable[int]) -> None:
        held = self._held.get(engine.index)
        if held is not None:
            for block in hashes:
                if held.pop(block, None) is not None:
                    self._remove_holder(block, engine)

    def forget(self, engine: Engine) -> None:
        for block in self._held.pop(engine.index, ()):
            self._remove_holder(block, engine)

    def forget_all(self) -> None:
        self._held.clear()
        self._holders.clear()

    def _add_holder(self, block: int, engine: Engine) -> None:
        found = self._holders.setdefault(block, engine)
        if isinstance(found, set):
            found.add(engine)
        elif found is not engine:
            self._holders[block] = {found, engine}

    def _remove_holder(self, block: int, engine: Engine) -> None:
        found = self._holders.get(block)
        if isinstance(found, set):
            found.discard(engine)
            if len(found) == 1:
                self._holders[block] = found.pop()
        elif found is engine:
            del self._holders[block]
