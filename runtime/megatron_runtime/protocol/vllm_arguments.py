"""Which engine arguments of vLLM a resource may set. Read by the operator and by the engine. Imports nothing of vLLM.

The names are the fields of vLLM's AsyncEngineArgs. The operator checks names and conflicts before it changes a pod; the
engine checks the values against the installed version when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_runtime.protocol import strict_json as json

_WORD = re.compile(r"[!-~]{1,256}")
_TEXT, _COUNT, _NUMBER, _SWITCH, _OBJECT = (str,), (int,), (int, float), (bool,), (dict,)
_KINDS = {_TEXT: "a string", _COUNT: "an integer", _NUMBER: "a number", _SWITCH: "true or false", _OBJECT: "an object"}

ALLOWED: Mapping[str, tuple[type, ...]] = {
    "attention_backend": _TEXT,
    "block_size": _COUNT,
    "cpu_offload_gb": _NUMBER,
    "disable_cascade_attn": _SWITCH,
    "disable_custom_all_reduce": _SWITCH,
    "enable_lora": _SWITCH,
    "enforce_eager": _SWITCH,
    "fully_sharded_loras": _SWITCH,
    "gpu_memory_utilization": _NUMBER,
    "kv_cache_dtype": _TEXT,
    "long_prefill_token_threshold": _COUNT,
    "max_cpu_loras": _COUNT,
    "max_lora_rank": _COUNT,
    "max_loras": _COUNT,
    "moe_backend": _TEXT,
    "num_gpu_blocks_override": _COUNT,
    "prefix_caching_hash_algo": _TEXT,
    "quantization": _TEXT,
    "scheduler_reserve_full_isl": _SWITCH,
    "seed": _COUNT,
    "stream_interval": _COUNT,
}
"""Arguments that load no code and that no field of the resource stands for, with the types of their values."""

LOADS_CODE: Mapping[str, tuple[type, ...]] = {
    "code_revision": _TEXT,
    "compilation_config": _OBJECT,
    "hf_overrides": _OBJECT,
    "load_format": _TEXT,
    "model_impl": _TEXT,
    "model_loader_extra_config": _OBJECT,
    "scheduler_cls": _TEXT,
    "speculative_config": _OBJECT,
    "trust_remote_code": _SWITCH,
    "worker_cls": _TEXT,
    "worker_extension_cls": _TEXT,
}
"""Arguments that can load code from the model, or name classes to import, with the types of their values."""

FIELDS = {
    "dtype": "spec.model.dtype",
    "enable_chunked_prefill": "spec.engine.batching.chunkedPrefill",
    "enable_prefix_caching": "spec.engine.batching.prefixCaching",
    "kv_cache_memory_bytes": "spec.engine.batching.kvCacheMemory",
    "max_model_len": "spec.model.maxSequenceLength",
    "max_num_batched_tokens": "spec.engine.batching.maxTokens",
    "max_num_seqs": "spec.engine.batching.maxRequests",
    "model": "spec.model.source",
    "pipeline_parallel_size": "spec.parallelism.pipeline",
    "enable_expert_parallel": "spec.parallelism.expert",
    "tensor_parallel_size": "spec.parallelism.tensor",
}
"""Fields of the resource that set an argument."""


def problem_of(arguments: Mapping[str, object], *, allow_code: bool) -> str | None:
    """Return why the first argument is rejected, with its name and the remedy; None if all are allowed."""
    for name, value in sorted(arguments.items()):
        if name in FIELDS:
            return f"{name} conflicts with {FIELDS[name]}: set that field instead"
        if name in LOADS_CODE and not allow_code:
            return f"{name} can load code: leave it out, or have the administrator allow it (vllm.allowCode)"
        kinds = ALLOWED.get(name) or LOADS_CODE.get(name)
        if kinds is None:
            return f"{name} is not supported: use one of {', '.join(sorted(ALLOWED))}"
        if type(value) not in kinds:
            return f"{name} is {json.dumps(value)[:60]}: give {_KINDS[kinds]}"
        if name in ALLOWED and isinstance(value, str) and (not _WORD.fullmatch(value) or ".." in value):
            return f"{name} is {json.dumps(value)[:60]}: give a word of at most 256 visible ASCII characters without .."
    return None
