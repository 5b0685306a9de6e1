from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vllm.config import VllmConfig, _config_of
from vllm.platforms import current_platform


@dataclass(kw_only=True)
class _EPLBConfig:
    window_size: int = 1000


@dataclass(kw_only=True)
class AsyncEngineArgs:
    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    scheduling_policy: str = "fcfs"
    generation_config: str = "auto"
    max_logprobs: int = 20
    logits_processors: list[Any] = field(default_factory=list)
    structured_outputs_config: Any = None
    kv_events_config: Any = None
    enable_sleep_mode: bool = False
    enable_log_requests: bool = False
    block_size: int | None = None
    enforce_eager: bool = False
    quantization: str | None = None
    enable_lora: bool = False
    speculative_config: dict[str, Any] | None = None
    distributed_executor_backend: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 29500
    seed: int = 0
    gpu_memory_utilization: float = 0.92
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    eplb_config: _EPLBConfig = field(default_factory=_EPLBConfig)
    kv_transfer_config: Any = None
    long_prefill_token_threshold: int = 0

    def create_model_config(self) -> object:
        return self._checked().model_config

    def create_engine_config(self, *, headless: bool = False) -> VllmConfig:
        if current_platform.is_unspecified():
            raise RuntimeError("Device string must not be empty")
        return self._checked()

    def _checked(self) -> VllmConfig:
        if self.quantization not in (None, "fp8"):
            raise ValueError(f"quantization {self.quantization!r} is unknown")
        return _config_of(self)
