"""The ranks of an echo engine: each acknowledges every verb, and one may fail or stall as a fault says."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TypeVar

from megatron_runtime.backends.echo.faults import FailVerb, Faults, StallVerb
from megatron_runtime.backends.native.backend import SingleRank
from megatron_runtime.engine.backend import RankResults
from megatron_runtime.protocol.headers import Header

_V = TypeVar("_V", FailVerb, StallVerb)


class SimulatedRanks(SingleRank):
    """Implements Ranks, without processes.

    acted: by rank, how often each verb was done.
    """

    def __init__(self, count: int = 1, faults: Faults | None = None) -> None:
        if count < 1:
            raise ValueError(f"echo_ranks {count}: want at least 1")
        faults = faults or Faults()
        for fault in (*faults.of(FailVerb), *faults.of(StallVerb)):
            if fault.rank >= count:
                raise ValueError(f"fault {fault.name}: rank {fault.rank} of {count}; ranks count from 0")
        self.count = count
        self.acted: list[Counter[Header]] = [Counter() for _ in range(count)]
        self._faults = faults
        self._used: Counter[int] = Counter()

    async def confirm(self, signal: Header) -> RankResults:
        causes = await asyncio.gather(*(self._act(rank, signal) for rank in range(self.count)))
        return RankResults(self.count, {rank: cause for rank, cause in enumerate(causes) if cause is not None})

    async def _act(self, rank: int, signal: Header) -> str | None:
        """Acknowledge `signal` on one rank; return why it fails, if it does."""
        stall = self._due(self._faults.of(StallVerb), signal, rank)
        if stall is not None:
            await asyncio.sleep(stall.seconds)
        if self._due(self._faults.of(FailVerb), signal, rank) is not None:
            return f"{signal.name} fails as told"
        self.acted[rank][signal] += 1
        return None

    def _due(self, faults: list[_V], signal: Header, rank: int) -> _V | None:
        for fault in faults:
            if (fault.verb, fault.rank) == (signal.name, rank) and self._used[id(fault)] < fault.times:
                self._used[id(fault)] += 1
                return fault
        return None
