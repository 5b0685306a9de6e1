"""From settings to an engine that is ready to load: the only place that knows which executors there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode, PrefixCachingEvictionPolicy
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engines.echo_executor import EchoExecutor
from megatron_runtime.engines.executor import Executor
from megatron_runtime.engines.faults import Faults, FaultyLink, parse_faults
from megatron_runtime.engines.lifecycle import Ranks
from megatron_runtime.engines.output_stage import Detokenizer
from megatron_runtime.engines.settings import EngineSettings
from megatron_runtime.engines.simulated_ranks import SimulatedRanks
from megatron_runtime.peer_link import PeerLink
from megatron_runtime.text_generation_controllers.text_generation_controller import TextGenerationController

if TYPE_CHECKING:
    from megatron_runtime.sampling.structured_output import GrammarState
    from megatron_runtime.sampling_params import SamplingParams
    from megatron_runtime.tokenization import Tokenizer

ECHO_PAGE_SIZE = 16
ECHO_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what it is served with.

    controller: its text; None when its tokens mean none.
    ranks: who acknowledges a verb beside the engine's thread; None when nobody does.
    link:  makes its connection to the coordinator.
    """

    engine: DynamicInferenceEngine
    controller: TextGenerationController | None = None
    ranks: Ranks | None = None
    link: Callable[..., PeerLink] = PeerLink

    def detokenizer(self) -> Detokenizer | None:
        """A fresh incremental decoder of its tokens."""
        return self.controller.detokenizer() if self.controller is not None else None

    def begin_grammar(self, params: SamplingParams, generated: Sequence[int]) -> GrammarState | None:
        """Where an answer stands in the structure that `params` asks for; None if there is none, or no tokenizer."""
        return self.controller.begin_grammar(params, generated) if self.controller is not None else None


def build_engine(settings: EngineSettings) -> LoadedEngine:
    """An engine whose weights are not loaded yet.

    Raises:
        ValueError: a setting or the model is not usable; the message names it and the remedy.
    """
    config = InferenceConfig(
        max_requests=settings.max_requests,
        max_tokens=max(settings.max_tokens, settings.max_requests),
        max_sequence_length=settings.max_sequence_length,
        enable_chunked_prefill=settings.chunked_prefill,
        enable_prefix_caching=settings.prefix_caching,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy(settings.prefix_eviction),
        kv_cache_management_mode=KVCacheManagementMode(settings.kv_cache_mode),
        block_size_tokens=settings.block_size_tokens,
    )
    if settings.executor == "echo":
        return _echo_engine(settings, config)
    if settings.echo_faults or settings.echo_ranks != 1 or settings.echo_step_seconds:
        raise ValueError(
            f"executor {settings.executor!r} takes no faults, simulated ranks or step time: "
            "leave --fault, MEGATRON_ENGINE_FAULTS, --echo-ranks and --echo-step-seconds out, or use --executor echo"
        )
    controller = TextGenerationController(None, partial(_load_tokenizer, settings.model))
    return LoadedEngine(DynamicInferenceEngine(_torch(settings, controller), config), controller)


def _echo_engine(settings: EngineSettings, config: InferenceConfig) -> LoadedEngine:
    faults = parse_faults(settings.echo_faults)
    return LoadedEngine(
        DynamicInferenceEngine(_echo(settings, faults), config),
        TextGenerationController(None, partial(_load_tokenizer, settings.model)),
        ranks=SimulatedRanks(settings.echo_ranks, faults),
        link=partial(FaultyLink, faults=faults) if faults.concern_the_link else PeerLink,
    )


def _echo(settings: EngineSettings, faults: Faults) -> Executor:
    return EchoExecutor(
        max_sequence_length=settings.max_sequence_length or 4096,
        page_size=ECHO_PAGE_SIZE,
        num_pages=1 + max(1, settings.kv_cache_memory // (ECHO_PAGE_SIZE * ECHO_TOKEN_BYTES)),
        step_seconds=settings.echo_step_seconds,
        faults=faults,
    )


def _torch(settings: EngineSettings, controller: TextGenerationController) -> Executor:
    # Read when torch loads its OpenMP runtime: threads that spin between operators take the processor from the
    # coordinator, the server and other engines of the same machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_runtime.engines.torch_executor import TorchExecutor
    from megatron_runtime.loading.source import GGUFSource, resolve

    source = resolve(settings.model)
    found = "GGUF" if isinstance(source, GGUFSource) else "SafeTensors"
    if settings.model_format not in ("Auto", found):
        raise ValueError(
            f"model {settings.model!r} is {found}, format says {settings.model_format}: use Auto or {found}"
        )
    return TorchExecutor(
        source,
        controller,
        dtype=settings.dtype,
        kv_cache_memory=settings.kv_cache_memory,
        max_sequence_length=settings.max_sequence_length,
        threads=settings.threads,
    )


def _load_tokenizer(model: str) -> Tokenizer:
    from megatron_runtime.tokenization import load_tokenizer

    return load_tokenizer(model)
