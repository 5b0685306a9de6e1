"""Settings of one engine process. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode, PrefixCachingEvictionPolicy

DEFAULT_MAX_REQUESTS = 64
DEFAULT_MAX_TOKENS = 2048
DECODE_PREFILL_TOKENS = 256
"""Limit of prompt tokens of a step that also decodes, on an engine that is preferred for decoding."""
DEFAULT_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of `megatron engine`.

    coordinator:       address of the coordinator's engine port, "tcp://host:port".
    name:              stable identity of this engine, which stays the same after a restart.
    model:             model reference: "builtin:NAME", "hf:ORG/NAME[@REVISION]", a GGUF file, or a directory.
    model_format:      "Auto", or the only accepted format: "GGUF", "SafeTensors", "TorchDist" or "Packed".
    backend:           "native" is this project's engine; "vllm" runs vLLM, which must be installed.
    device:            "auto" (a GPU if there is one), "cpu" or "cuda".
    dtype:             "auto", "float32", "bfloat16"; on a GPU also "float16", on a CPU also "int8" and "int4".
    max_sequence_length: limit of prompt + generated tokens of one request. None means the model's limit; with vLLM on a
                       GPU, the longest sequence that fits.
    max_requests:      limit of concurrent requests. None means 64; with vLLM on a GPU, vLLM's own limit.
    max_tokens:        limit of tokens per step. None means 2048; with vLLM on a GPU, vLLM's own limit.
    chunked_prefill:   split prompts longer than max_tokens over several steps.
    max_prefill_tokens: limit of prompt tokens of a step that also decodes, with chunked_prefill; only for native
                       engines. None means that only max_tokens limits them.
    kv_cache_memory:   size of the KV cache in bytes. None means 1 GiB on a CPU; on a GPU, the memory that the weights
                       leave free.
    moe_enable_routing_replay: record the experts of each token; see InferenceConfig.
    prefix_caching:    requests share the KV of equal prefixes.
    prefix_eviction:   "lru" keeps blocks without requests until their memory is needed; "ref_zero" frees them
                       immediately.
    kv_cache_mode:     effect of SUSPEND on the KV cache: "persist" keeps it, "offload" moves used blocks to host
                       memory, "recompute" drops it.
    block_size_tokens: granularity of block hashes and of the prefix cache, in tokens.
    role:              the stage of requests for which the engine is preferred. "prefill" means computing prompts for
                       other engines. "decode" means generating answers to such prompts. A decode engine computes its
                       own prompts in chunks of at most 256 tokens unless max_prefill_tokens is set. None means both
                       stages.
    kv_port:           port on which engines with a role exchange KV; 0 picks a free port.
    weights_port:      port on which rank 0 offers the weights of a trainer to other engines. Each further rank of this
                       host or pod uses the next port. 0 picks free ports.
    model_hash:        hash of the model, up to 128 characters. The coordinator dispatches only requests for this model
                       to the engine. Empty means requests for any model.
    revision:          hash of the manifests of this engine, which the status shows. Empty means that the engine belongs
                       to no custom resource, and its process exits after STOP.
    health_port:       port of HTTP probes and metrics. None serves neither; 0 picks a free port.
    keys_dir:          directory of engine.key, engine.pub and server.pub, and of trainer.pub for weights of a trainer;
                       None means no encryption.
    threads:           number of torch threads of all ranks of this host or pod together; None means torch's default.
    parallel:          number of ranks by dimension.
    rendezvous_seconds: timeout of the ranks' rendezvous at the start.
    step_timeout_seconds: watchdog timeout of an engine with several ranks. The engine fails if no rank makes progress
                       for this time.
    vllm_arguments:    engine arguments of vLLM by name; see protocol/vllm_arguments.py.
    vllm_allow_code:   accept arguments with which vLLM loads code.
    vllm_allow_nixl:   with a role, exchange KV by NIXL, which authenticates no peer.
    vllm_sleep_level:  effect of SUSPEND with vLLM on a GPU: 1 moves the weights to host memory, 2 drops them and reads
                       their files again at RESUME. None means 2, or 1 if a draft model would be lost.
    registration_seconds: time after the start within which a coordinator must answer; otherwise the engine exits. None
                       means that it retries forever.
    drain_seconds:     time after SIGTERM to finish the requests in flight; the remaining requests are handed over.
    """

    coordinator: str
    name: str
    model: str = "builtin:smollm2-135m"
    model_format: Literal["Auto", "GGUF", "SafeTensors", "TorchDist", "Packed"] = "Auto"
    backend: Literal["native", "vllm"] = "native"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str = "auto"
    max_sequence_length: int | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    chunked_prefill: bool = True
    max_prefill_tokens: int | None = None
    kv_cache_memory: int | None = None
    moe_enable_routing_replay: bool = False
    prefix_caching: bool = True
    prefix_eviction: Literal["lru", "ref_zero"] = "lru"
    kv_cache_mode: Literal["persist", "offload", "recompute"] = "recompute"
    block_size_tokens: int = 256
    role: Literal["prefill", "decode"] | None = None
    kv_port: int = 0
    weights_port: int = 0
    model_hash: str = ""
    revision: str = ""
    health_port: int | None = None
    keys_dir: Path | None = None
    threads: int | None = None
    parallel: ParallelSizes = field(default_factory=ParallelSizes)
    rendezvous_seconds: float = 300.0
    step_timeout_seconds: float = 60.0
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    vllm_allow_code: bool = False
    vllm_allow_nixl: bool = False
    vllm_sleep_level: Literal[1, 2] | None = None
    registration_seconds: float | None = None
    drain_seconds: float = 60.0

    @property
    def inference_config(self) -> InferenceConfig:
        """The configuration of the native engine's core."""
        requests = self.max_requests or DEFAULT_MAX_REQUESTS
        prefill_tokens = self.max_prefill_tokens
        if prefill_tokens is None and self.role == "decode" and self.chunked_prefill:
            prefill_tokens = DECODE_PREFILL_TOKENS
        return InferenceConfig(
            max_requests=requests,
            max_tokens=max(self.max_tokens or DEFAULT_MAX_TOKENS, requests),
            max_sequence_length=self.max_sequence_length,
            enable_chunked_prefill=self.chunked_prefill,
            max_prefill_tokens=prefill_tokens,
            moe_enable_routing_replay=self.moe_enable_routing_replay,
            enable_prefix_caching=self.prefix_caching,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy(self.prefix_eviction),
            kv_cache_management_mode=KVCacheManagementMode(self.kv_cache_mode),
            block_size_tokens=self.block_size_tokens,
        )
