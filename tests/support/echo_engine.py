"""The echo backend: the native engine's thread and core on an executor without a model, with fault injection.

An adapter changes the answers. Of its source only a path is checked, a repository is not fetched.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TypeVar

from megatron_runtime.backends.echo.echo_executor import EchoExecutor
from megatron_runtime.backends.echo.faults import FailVerb, Faults, Lacks, StallVerb, parse_faults
from megatron_runtime.backends.native.backend import NativeBackend, Ranks
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.adapters import adapter_directory
from megatron_runtime.engine.backend import Capability, RankResults
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.protocol.headers import Header

PAGE_SIZE = 16
TOKEN_BYTES = 4
MAX_CACHE_BYTES = 16 << 20
"""Four million tokens. The default size of a cache would hold hundreds of millions, and take seconds to allocate."""


class EchoBackend(NativeBackend):
    """Implements EngineBackend.

    Raises:
        ValueError: a setting is not usable; the message names it and the remedy.
    """

    def __init__(self, settings: EngineSettings) -> None:
        if settings.parallel.world != 1:
            raise ValueError("backend 'echo' runs in one process: use --echo-ranks for simulated ranks")
        faults = parse_faults(settings.echo_faults)
        memory = min(settings.kv_cache_memory, MAX_CACHE_BYTES)
        executor = EchoExecutor(
            max_sequence_length=settings.max_sequence_length or 4096,
            page_size=PAGE_SIZE,
            num_pages=1 + max(1, memory // (PAGE_SIZE * TOKEN_BYTES)),
            step_seconds=settings.echo_step_seconds,
            faults=faults,
        )
        super().__init__(
            EngineCore(executor, settings.inference_config),
            ModelText.of_model(settings.model),
            ranks=SimulatedRanks(settings.echo_ranks, faults),
            name="echo",
        )
        lacking = {Capability.HIDDEN_STATES, *(Capability[fault.capability] for fault in faults.of(Lacks))}
        self.info = replace(self.info, capabilities=(self.info.capabilities | {Capability.ADAPTERS}) - lacking)
        self.adapters: dict[str, str] = {}
        """Sources of the loaded adapters by name."""

    async def load_adapter(self, name: str, source: str) -> RankResults:
        if source.startswith("/"):
            await asyncio.to_thread(adapter_directory, source)
        self.adapters[name] = source
        return RankResults(self.ranks.count)

    async def unload_adapter(self, name: str) -> RankResults:
        del self.adapters[name]
        return RankResults(self.ranks.count)


_V = TypeVar("_V", FailVerb, StallVerb)


class SimulatedRanks(Ranks):
    """Ranks without processes: each acknowledges every verb, unless a fault makes it fail or stall.

    acted: by rank, how often it acknowledged each verb.
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
        """Acknowledge `signal` on one rank. Return the cause if a fault makes it fail."""
        stall = self._due(self._faults.of(StallVerb), signal, rank)
        if stall is not None:
            await asyncio.sleep(stall.seconds)
        if self._due(self._faults.of(FailVerb), signal, rank) is not None:
            return f"{signal.name} fails: injected fault"
        self.acted[rank][signal] += 1
        return None

    def _due(self, faults: list[_V], signal: Header, rank: int) -> _V | None:
        for fault in faults:
            if (fault.verb, fault.rank) == (signal.name, rank) and self._used[id(fault)] < fault.times:
                self._used[id(fault)] += 1
                return fault
        return None
