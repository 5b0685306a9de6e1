"""From settings to an engine that is ready to load: the only place that knows which executors there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_runtime.backends.native.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.distributed.identity import RankIdentity, rank_identity
from megatron_runtime.distributed.shard import IndivisibleError
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode, PrefixCachingEvictionPolicy

if TYPE_CHECKING:
    from megatron_runtime.backends.native.executor import Executor
    from megatron_runtime.backends.native.ranked_executor import RankedExecutor
    from megatron_runtime.backends.native.torch_executor import TorchExecutor
    from megatron_runtime.distributed.groups import Groups
    from megatron_runtime.engine.faults import Faults
    from megatron_runtime.engine.lifecycle import Ranks
    from megatron_runtime.engine.output_stage import Detokenizer
    from megatron_runtime.requests.sampling_params import SamplingParams
    from megatron_runtime.sampling.structured_output import GrammarState
    from megatron_runtime.transport.peer_link import PeerLink

ECHO_PAGE_SIZE = 16
ECHO_TOKEN_BYTES = 4
ECHO_MOST_MEMORY = 16 << 20
"""Four million tokens. A cache of the usual size for a model is hundreds of millions, which take seconds to make."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what it is served with.

    controller: its text; None when its tokens mean none.
    ranks: who acknowledges a verb beside the engine's thread; None when nobody does.
    others: the other ranks' processes, of which this one is the first; None when it is alone.
    link:  makes its connection to the coordinator; None for a PeerLink.
    """

    engine: DynamicInferenceEngine
    controller: ModelText | None = None
    ranks: Ranks | None = None
    others: RankedExecutor | None = None
    link: Callable[..., PeerLink] | None = None

    def detokenizer(self) -> Detokenizer | None:
        """A fresh incremental decoder of its tokens."""
        return self.controller.detokenizer() if self.controller is not None else None

    def begin_grammar(self, params: SamplingParams, generated: Sequence[int]) -> GrammarState | None:
        """Where an answer stands in the structure that `params` asks for; None if there is none, or no tokenizer."""
        return self.controller.begin_grammar(params, generated) if self.controller is not None else None

    def is_grammar_known(self, params: SamplingParams) -> bool:
        """Whether begin_grammar() returns without compiling."""
        return self.controller is None or self.controller.is_grammar_known(params)

    def prepare_grammars(self) -> None:
        """Do at the start what would stall an engine that serves; see ModelText."""
        if self.controller is not None:
            self.controller.prepare_grammars()

    def close_grammars(self) -> None:
        """End the process that tries grammars, if there is one."""
        if self.controller is not None:
            self.controller.close_grammars()


def build_engine(settings: EngineSettings) -> LoadedEngine:
    """An engine whose weights are not loaded yet.

    Raises:
        ValueError: a setting or the model is not usable; the message names it and the remedy.
    """
    config = _inference_config(settings)
    if settings.executor == "echo":
        if settings.parallel.world != 1:
            raise ValueError("executor 'echo' runs in one process: use --echo-ranks for ranks that it simulates")
        return _echo_engine(settings, config)
    if settings.echo_faults or settings.echo_ranks != 1 or settings.echo_step_seconds:
        raise ValueError(
            f"executor {settings.executor!r} takes no faults, simulated ranks or step time: "
            "leave --fault, MEGATRON_ENGINE_FAULTS, --echo-ranks and --echo-step-seconds out, or use --executor echo"
        )
    controller = ModelText.of_model(settings.model)
    if settings.parallel.world == 1:
        return LoadedEngine(DynamicInferenceEngine(_torch(settings, controller), config), controller)
    identity = rank_identity(settings.parallel)
    if identity is None or identity.rank != 0:
        raise IndivisibleError(
            f"an engine of {settings.parallel.world} ranks is scheduled by its rank 0: start it by `megatron engine`, "
            "which starts all ranks of one machine, or by torchrun"
        )
    from megatron_runtime.backends.native.rank_start import lead

    executor = lead(settings, identity, lambda groups: _torch(settings, controller, groups=groups, identity=identity))
    return LoadedEngine(DynamicInferenceEngine(executor, config), controller, ranks=executor, others=executor)


def _inference_config(settings: EngineSettings) -> InferenceConfig:
    return InferenceConfig(
        max_requests=settings.max_requests,
        max_tokens=max(settings.max_tokens, settings.max_requests),
        max_sequence_length=settings.max_sequence_length,
        enable_chunked_prefill=settings.chunked_prefill,
        batch_invariant=settings.batch_invariant,
        enable_prefix_caching=settings.prefix_caching,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy(settings.prefix_eviction),
        kv_cache_management_mode=KVCacheManagementMode(settings.kv_cache_mode),
        block_size_tokens=settings.block_size_tokens,
    )


def run_other_rank(settings: EngineSettings, identity: RankIdentity) -> None:
    """Be a rank that is not the first, until the engine ends.

    Raises RankError, and ValueError as build_engine() does.
    """
    from megatron_runtime.backends.native.rank_start import follow

    controller = ModelText.of_model(settings.model)
    follow(settings, identity, lambda groups: _torch(settings, controller, groups=groups, identity=identity))


def _echo_engine(settings: EngineSettings, config: InferenceConfig) -> LoadedEngine:
    from megatron_runtime.engine.faults import FaultyLink, parse_faults
    from megatron_runtime.engine.simulated_ranks import SimulatedRanks

    faults = parse_faults(settings.echo_faults)
    return LoadedEngine(
        DynamicInferenceEngine(_echo(settings, faults), config),
        ModelText.of_model(settings.model),
        ranks=SimulatedRanks(settings.echo_ranks, faults),
        link=partial(FaultyLink, faults=faults) if faults.concern_the_link else None,
    )


def _echo(settings: EngineSettings, faults: Faults) -> Executor:
    from megatron_runtime.backends.echo.echo_executor import EchoExecutor

    memory = min(settings.kv_cache_memory, ECHO_MOST_MEMORY)
    return EchoExecutor(
        max_sequence_length=settings.max_sequence_length or 4096,
        page_size=ECHO_PAGE_SIZE,
        num_pages=1 + max(1, memory // (ECHO_PAGE_SIZE * ECHO_TOKEN_BYTES)),
        step_seconds=settings.echo_step_seconds,
        faults=faults,
    )


def _torch(
    settings: EngineSettings,
    controller: ModelText,
    *,
    groups: Groups | None = None,
    identity: RankIdentity | None = None,
) -> TorchExecutor:
    # Read when torch loads its OpenMP runtime: threads that spin between operators take the processor from the
    # coordinator, the server and other engines of the same machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_runtime.backends.native.select import select_executor
    from megatron_runtime.checkpoints.source import resolve

    source = resolve(settings.model)
    if settings.model_format not in ("Auto", source.format):
        raise ValueError(
            f"model {settings.model!r} is {source.format}, format says {settings.model_format}: "
            f"use Auto or {source.format}"
        )
    threads = settings.threads
    if threads is not None and identity is not None:
        threads = max(1, threads // identity.local_world)
    return select_executor(
        source,
        controller,
        _inference_config(settings),
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_memory=settings.kv_cache_memory,
        max_sequence_length=settings.max_sequence_length,
        threads=threads,
        groups=groups,
        local_rank=identity.local_rank if identity is not None else 0,
    )
