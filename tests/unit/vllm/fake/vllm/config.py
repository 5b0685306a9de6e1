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


class VllmConfig:
    """The part that `backends/vllm` reads."""

    def __init__(self, args: object) -> None:
        self.args = copy(args)  # later changes of the arguments have no effect
        self.model_config = _ModelConfig(args)
        self.cache_config = _CacheConfig(args)
        self.parallel_config = _ParallelConfig(args)
        self.lora_config = object() if args.enable_lora else None
        self.speculative_config = args.speculative_config
        self.use_v2_model_runner = self._chosen_runner(args)

    def _chosen_runner(self, args: object) -> bool:
        """Model Runner V2 where Triton works, except for suffix decoding, as vLLM chooses since 0.31."""
        if "VLLM_USE_V2_MODEL_RUNNER" in os.environ:
            return os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
        return "FAKE_VLLM_HAS_TRITON" in os.environ and (args.speculative_config or {}).get("method") != "suffix"


class _ModelConfig:
    def __init__(self, args: object) -> None:
        self.max_model_len = args.max_model_len or 2048
        self.enable_sleep_mode = args.enable_sleep_mode
        self.logits_processors = args.logits_processors

    def get_vocab_size(self) -> int:
        return 49_152


class _CacheConfig:
    def __init__(self, args: object) -> None:
        self.block_size = args.block_size or 16
        self.enable_prefix_caching = args.enable_prefix_caching


class _ParallelConfig:
    def __init__(self, args: object) -> None:
        self.world_size = args.tensor_parallel_size * args.pipeline_parallel_size
