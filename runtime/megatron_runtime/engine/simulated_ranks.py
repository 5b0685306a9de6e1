"""The ranks of an echo engine: each acknowledges every verb, and one may fail or stall as told."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TypeVar

from megatron_runtime.engine.faults import FailVerb, Faults, InjectedFaultError, StallVerb
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import Control

_V = TypeVar("_V", FailVerb, StallVerb)


class SimulatedRanks:
    """Implements lifecycle.Ranks.

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

    async def confirm(self, control: Control) -> None:
        """Return when every rank has done the work of `control`. Raises InjectedFaultError naming who did not."""
        outcomes = await asyncio.gather(
            *(self._act(rank, control.kind) for rank in range(self.count)), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise InjectedFaultError("; ".join(map(str, failures)))

    async def _act(self, rank: int, kind: Header) -> None:
        stall = self._due(self._faults.of(StallVerb), kind, rank)
        if stall is not None:
            await asyncio.sleep(stall.seconds)
        if self._due(self._faults.of(FailVerb), kind, rank) is not None:
            raise InjectedFaultError(f"rank {rank}: {kind.name} fails as told")
        self.acted[rank][kind] += 1

    def _due(self, faults: list[_V], kind: Header, rank: int) -> _V | None:
        for fault in faults:
            if fault.concerns(kind, rank) and self._used[id(fault)] < fault.times:
                self._used[id(fault)] += 1
                return fault
        return None
