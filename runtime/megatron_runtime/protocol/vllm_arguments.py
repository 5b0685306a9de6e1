"""Which engine arguments of vLLM a resource may set. Read by the operator and by the engine. Imports nothing of vLLM.

The names are the fields of vLLM's AsyncEngineArgs. The operator checks names and conflicts before it changes a pod; the
engine checks the values against the installed version when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
    "speculative_config": _OBJECT,
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
    "trust_remote_code": _SWITCH,
    "worker_cls": _TEXT,
    "worker_extension_cls": _TEXT,
}
"""Arguments that can load code from the model, or name classes to import, with the types of their values."""

SPECULATION_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "ngram", "ngram_gpu", "suffix")
"""Values of speculative_config.method that load no code. vLLM takes a method that is not named from the draft model, or
imports a class."""

SPECULATION: Mapping[str, tuple[type, ...]] = {
    "attention_backend": _TEXT,
    "draft_sample_method": _TEXT,
    "draft_tensor_parallel_size": _COUNT,
    "enforce_eager": _SWITCH,
    "kv_cache_dtype": _TEXT,
    "max_model_len": _COUNT,
    "method": _TEXT,
    "model": _TEXT,
    "moe_backend": _TEXT,
    "num_speculative_tokens": _COUNT,
    "prompt_lookup_max": _COUNT,
    "prompt_lookup_min": _COUNT,
    "quantization": _TEXT,
    "rejection_sample_method": _TEXT,
}
"""Members of speculative_config that load no code, with the types of their values. The engine resolves `model` as it
does `spec.model.source`: "hf:ORG/NAME[@REVISION]", the URL of an object store, or a path."""
_DRAFT = re.compile(r"(hf:|s3://|gs://|az://|https://|/)[!-~]+")

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


def loads_code(arguments: Mapping[str, object], name: str) -> bool:
    """Return whether the argument `name` of these can load code with its value."""
    value = arguments[name]
    if name != "speculative_config" or not isinstance(value, Mapping):
        return name in LOADS_CODE
    return value.get("method") not in SPECULATION_METHODS or not value.keys() <= SPECULATION.keys()


def code_arguments(arguments: Mapping[str, object]) -> Sequence[str]:
    """Return the names of the arguments that can load code, sorted."""
    return [name for name in sorted(arguments) if loads_code(arguments, name)]


def problem_of(arguments: Mapping[str, object], *, allow_code: bool) -> str | None:
    """Return why the first argument is rejected, with its name and the remedy; None if all are allowed."""
    for name, value in sorted(arguments.items()):
        if name in FIELDS:
            return f"{name} conflicts with {FIELDS[name]}: set that field instead"
        if loads_code(arguments, name):
            if not allow_code:
                return f"{name} can load code: {_remedy(name)}"
        elif name not in ALLOWED:
            return f"{name} is not supported: use one of {', '.join(sorted(ALLOWED))}"
        problem = _problem(name, value, ALLOWED.get(name) or LOADS_CODE[name])
        if problem is None and name == "speculative_config" and not loads_code(arguments, name):
            assert isinstance(value, Mapping)
            problem = _speculation_problem(value)
        if problem is not None:
            return problem
    return None


def _remedy(name: str) -> str:
    allow = "have the administrator allow it (vllm.allowCode)"
    if name != "speculative_config":
        return f"leave it out, or {allow}"
    return (
        f"set its method to one of {', '.join(SPECULATION_METHODS)} and use only the members "
        f"{', '.join(sorted(SPECULATION))}, or {allow}"
    )


def _problem(name: str, value: object, kinds: tuple[type, ...]) -> str | None:
    if type(value) not in kinds:
        return f"{name} is {json.dumps(value)[:60]}: give {_KINDS[kinds]}"
    if name not in LOADS_CODE and isinstance(value, str) and (not _WORD.fullmatch(value) or ".." in value):
        return f"{name} is {json.dumps(value)[:60]}: give a word of at most 256 visible ASCII characters without .."
    return None


def _speculation_problem(config: Mapping[str, object]) -> str | None:
    for member, value in sorted(config.items()):
        name = f"speculative_config.{member}"
        problem = _problem(name, value, SPECULATION[member])
        if problem is None and member == "model" and not _DRAFT.fullmatch(str(value)):
            problem = (
                f"{name} is {json.dumps(value)[:60]}: give hf:ORG/NAME[@REVISION], the URL of an object store, or an "
                "absolute path"
            )
        if problem is not None:
            return problem
    return None
