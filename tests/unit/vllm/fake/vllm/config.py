from __future__ import annotations

import os
from copy import copy
from dataclasses import dataclass


@dataclass
class KVEventsConfig:
    enable_kv_cache_events: bool = False
    endpoint: str = ""


@dataclass
class StructuredOutputsConfig:
    backend: str = "auto"


@dataclass
class ModelConfig:
    max_model_len: int
    enable_sleep_mode: bool
    logits_processors: list[type]
    runner_type: str = "generate"
    dtype: str = "float32"

    def get_vocab_size(self) -> int:
        return 49_152


@dataclass
class _SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass
class CacheConfig:
    block_size: int
    enable_prefix_caching: bool
    kv_cache_memory_bytes: int | None
    cache_dtype: str = "auto"
    num_gpu_blocks: int | None = 64


@dataclass
class ParallelConfig:
    world_size: int


@dataclass
class VllmConfig:
    """The part that `backends/vllm` reads."""

    model_config: ModelConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    scheduler_config: _SchedulerConfig
    lora_config: object | None
    speculative_config: dict[str, object] | None
    use_v2_model_runner: bool
    _args: object


def _config_of(args: object) -> VllmConfig:
    return VllmConfig(
        ModelConfig(
            2048 if args.max_model_len in (None, -1) else args.max_model_len,
            args.enable_sleep_mode,
            args.logits_processors,
        ),
        CacheConfig(args.block_size or 16, args.enable_prefix_caching, args.kv_cache_memory_bytes),
        ParallelConfig(args.tensor_parallel_size * args.pipeline_parallel_size),
        _SchedulerConfig(
            256 if args.max_num_seqs is None else args.max_num_seqs,
            8192 if args.max_num_batched_tokens is None else args.max_num_batched_tokens,
        ),
        object() if args.enable_lora else None,
        args.speculative_config,
        _chosen_runner(args),
        copy(args),  # later changes of the arguments have no effect
    )


def _chosen_runner(args: object) -> bool:
    """Model Runner V2 where Triton works, except for suffix decoding, as vLLM chooses since 0.31."""
    if "VLLM_USE_V2_MODEL_RUNNER" in os.environ:
        return os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    return "FAKE_VLLM_HAS_TRITON" in os.environ and (args.speculative_config or {}).get("method") != "suffix"
