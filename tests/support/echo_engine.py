"""An engine without a model, with injected faults: the native engine's thread and core on an EchoExecutor.

As a program it takes the options of `megatron engine`, and these:

    --echo-step-seconds N  duration of a step
    --echo-ranks N         simulated ranks; each acknowledges every verb
    --fault SPEC           see echo_faults.py; repeatable. $ECHO_FAULTS has several, separated by spaces

An adapter changes the answers. Of its source only a path is checked, a repository is not fetched.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import click
from echo_executor import EchoExecutor
from echo_faults import FailVerb, Faults, FaultyLink, Lacks, StallVerb, parse_faults

from megatron_runtime.backends.native.backend import NativeBackend, Ranks
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.adapters import adapter_directory
from megatron_runtime.cli.containers import engine
from megatron_runtime.engine import worker
from megatron_runtime.engine.backend import Capability, RankResults
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.children import end_with_parent
from megatron_runtime.protocol.headers import Header

PROGRAM = __file__
PAGE_SIZE = 16
TOKEN_BYTES = 4
MAX_CACHE_BYTES = 16 << 20
"""Four million tokens. The default size of a cache would hold hundreds of millions, and take seconds to allocate."""


class EchoBackend(NativeBackend):
    """Implements EngineBackend.

    step_seconds: duration of a step.
    ranks:        number of simulated ranks.

    Raises:
        ValueError: a setting is not usable; the message names it and the remedy.
    """

    def __init__(
        self, settings: EngineSettings, *, step_seconds: float = 0.0, ranks: int = 1, faults: Faults | None = None
    ) -> None:
        faults = faults or Faults()
        memory = min(settings.kv_cache_memory, MAX_CACHE_BYTES)
        executor = EchoExecutor(
            max_sequence_length=settings.max_sequence_length or 4096,
            page_size=PAGE_SIZE,
            num_pages=1 + max(1, memory // (PAGE_SIZE * TOKEN_BYTES)),
            step_seconds=step_seconds,
            faults=faults,
        )
        super().__init__(
            EngineCore(executor, settings.inference_config),
            ModelText.of_model(settings.model),
            ranks=SimulatedRanks(ranks, faults),
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


@click.command(params=[*engine.params])
@click.option("--echo-step-seconds", type=float, default=0.0)
@click.option("--echo-ranks", type=int, default=1)
@click.option("--fault", "faults", multiple=True, envvar="ECHO_FAULTS")
def main(*, echo_step_seconds: float, echo_ranks: int, faults: tuple[str, ...], is_check: bool, **options: Any) -> None:
    """Run an echo engine until SIGTERM."""
    for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "device"):
        del options[name]
    settings, injected = EngineSettings(**options), parse_faults(faults)
    make_backend = partial(EchoBackend, step_seconds=echo_step_seconds, ranks=echo_ranks, faults=injected)
    if is_check:
        make_backend(settings)
    else:
        worker.run(settings, make_backend, link=partial(FaultyLink, faults=injected))


if __name__ == "__main__":
    end_with_parent()
    main()
