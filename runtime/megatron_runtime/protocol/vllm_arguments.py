"""Which engine arguments of vLLM a resource may set. Read by the operator and by the engine. Imports nothing of vLLM.

The names are the fields of vLLM's AsyncEngineArgs. The operator checks names and conflicts before it changes a pod; the
engine checks the values against the installed version when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping

ALLOWED = frozenset(
    {
        "attention_backend",
        "block_size",
        "cpu_offload_gb",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "enable_lora",
        "enforce_eager",
        "fully_sharded_loras",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "long_prefill_token_threshold",
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "max_logprobs",
        "moe_backend",
        "num_gpu_blocks_override",
        "prefix_caching_hash_algo",
        "quantization",
        "scheduler_reserve_full_isl",
        "seed",
        "stream_interval",
    }
)
"""Arguments that load no code and that no field of the resource stands for."""

LOADS_CODE = frozenset(
    {
        "code_revision",
        "compilation_config",
        "hf_overrides",
        "load_format",
        "model_impl",
        "model_loader_extra_config",
        "scheduler_cls",
        "speculative_config",
        "trust_remote_code",
        "worker_cls",
        "worker_extension_cls",
    }
)
"""Arguments that can load code from the model, or name classes to import."""

FIELDS = {
    "dtype": "spec.model.dtype",
    "enable_chunked_prefill": "spec.engine.chunkedPrefill",
    "enable_prefix_caching": "spec.engine.prefixCaching",
    "kv_cache_memory_bytes": "spec.engine.kvCacheMemory",
    "max_model_len": "spec.engine.maxSequenceLength",
    "max_num_batched_tokens": "spec.engine.maxTokens",
    "max_num_seqs": "spec.engine.maxRequests",
    "model": "spec.model.source",
    "pipeline_parallel_size": "spec.parallelism.pipeline",
    "tensor_parallel_size": "spec.parallelism.tensor",
}
"""Fields of the resource that set an argument."""


def problem_of(arguments: Mapping[str, object], *, allow_code: bool) -> str | None:
    """Return why the first argument is rejected, with its name and the remedy; None if all are allowed."""
    for name in arguments:
        if name in FIELDS:
            return f"{name} conflicts with {FIELDS[name]}: set that field instead"
        if name in LOADS_CODE and not allow_code:
            return f"{name} can load code: leave it out, or have the administrator allow it (vllm.allowCode)"
        if name not in ALLOWED | LOADS_CODE:
            return f"{name} is not supported: use one of {', '.join(sorted(ALLOWED))}"
    return None
