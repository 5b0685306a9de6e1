"""Maps the settings of an engine to vLLM's engine arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import vllm
from vllm.config import KVEventsConfig, StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from megatron_runtime.backends.vllm.logits_processor import AnswerTokens
from megatron_runtime.backends.vllm.models import model_directory
from megatron_runtime.distributed.shard import node_identity
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.protocol.vllm_arguments import loads_code, problem_of
from megatron_runtime.requests.sampling_params import MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)

SUPPORTED = ((0, 26), (0, 34))
"""Versions of vLLM: from the first, below the second. Its interface changes between minor versions."""

V2_INTERFACE = "vllm.v1.worker.gpu.sample.logits_processor"
"""Since vLLM 0.31. Before, V2 has no logits processors of others, and vLLM chooses V1 where there is one."""

NOT_RUN = "not run"
ON_A_GPU: Mapping[str, tuple[str, ...]] = {
    "Model Runner V2 instead of V1, with vLLM 0.31 or newer": (
        "tests/vllm/test_model_runner_v2.py::test_ngram_on_v2_continues_every_answer_of_a_killed_engine",
        "tests/vllm/test_model_runner_v2.py::test_vllm_accepts_the_configuration_of_a_gpu",
        "tests/unit/vllm/test_backend.py"
        "::test_the_logits_processor_is_that_of_the_model_runner_and_what_is_missing_is_announced",
        "tests/unit/vllm/test_parameters.py::test_v2_bans_what_v1_bans",
    ),
    "Triton's kernels are compiled instead of interpreted": (NOT_RUN,),
    "asynchronous scheduling: a step is prepared before the tokens of the last one are known": (NOT_RUN,),
    "CUDA graphs, unless enforce_eager is set": (NOT_RUN,),
    "sleep mode: SUSPEND keeps vLLM's process, and RESUME wakes it": (
        "tests/unit/vllm/test_backend.py::test_on_a_platform_with_sleep_mode_a_suspend_sleeps_and_a_resume_wakes",
        NOT_RUN,
    ),
    "an update writes new weights to the memory of the GPU": (NOT_RUN,),
    "ranks exchange tensors by NCCL": (NOT_RUN,),
}
"""What differs on a GPU from the CPUs of `make test-vllm`: the tests that cover it there, and whether no GPU ran it."""

_DTYPES = ("auto", "bfloat16", "float16", "float32")


def engine_arguments(
    settings: EngineSettings,
    directory: Path,
    *,
    cache_events: str,
    draft_directory: Callable[[str], Path] = model_directory,
) -> AsyncEngineArgs:
    """Return vLLM's engine arguments, without a logits processor.

    directory:       of the model.
    cache_events:    endpoint at which vLLM publishes changes of its prefix cache.
    draft_directory: returns the directory of the draft model of speculation, which is named like a model.

    Raises ValueError: a setting or the version of vLLM is not supported; the message has name, value and remedy.
    """
    check_version(vllm.__version__)
    sizes, node = settings.parallel, node_identity(settings.parallel)
    if settings.dtype not in _DTYPES:
        raise ValueError(
            f"dtype {settings.dtype}: vLLM quantizes by its argument quantization; use one of {', '.join(_DTYPES)}"
        )
    if settings.moe_enable_routing_replay:
        raise ValueError("moe_enable_routing_replay is not supported by the vLLM backend: use the native backend")
    if settings.threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    if current_platform.is_cpu() and node.ranks_per_node > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cpu_shares(node.ranks_per_node))
    # The process has threads and sockets, which a fork would copy.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    problem = problem_of(settings.vllm_arguments, allow_code=settings.vllm_allow_code)
    if problem is not None:
        raise ValueError(f"vLLM argument {problem}")
    fixed = {
        "model": str(directory),
        "dtype": settings.dtype,
        "max_model_len": settings.max_sequence_length,
        "max_num_seqs": settings.max_requests,
        "max_num_batched_tokens": max(settings.max_tokens, settings.max_requests),
        "enable_chunked_prefill": settings.chunked_prefill,
        "enable_prefix_caching": settings.prefix_caching,
        "kv_cache_memory_bytes": settings.kv_cache_memory,
        "tensor_parallel_size": sizes.tensor * sizes.expert,
        "enable_expert_parallel": sizes.expert > 1,
        "pipeline_parallel_size": sizes.pipeline,
        "distributed_executor_backend": "mp" if sizes.world > 1 else None,
        "nnodes": node.nodes,
        "node_rank": node.node_rank,
        "master_addr": node.address,
        "master_port": node.port,
        "scheduling_policy": "priority",
        "generation_config": "vllm",
        "max_logprobs": MAX_TOP_LOGPROBS,
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance"),
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=settings.prefix_caching, endpoint=cache_events),
        "enable_sleep_mode": current_platform.is_sleep_mode_available(),
        "enable_log_requests": False,
    }
    known = {name: value for name, value in fixed.items() if value is not None}
    chosen = dict(settings.vllm_arguments)
    speculation = chosen.get("speculative_config")
    if speculation and "model" in speculation and not loads_code(settings.vllm_arguments, "speculative_config"):
        chosen["speculative_config"] = {**speculation, "model": str(draft_directory(speculation["model"]))}
    try:
        return AsyncEngineArgs(**{**known, **chosen})
    except TypeError as error:
        raise ValueError(f"vLLM {vllm.__version__} rejects its arguments: {error}") from error


def logits_processor_of(config: VllmConfig) -> type | None:
    """Return the class of logits processors for the model runner of `config`, which was built without one.

    A logits processor of the wrong interface is an error at vLLM's start. None: vLLM accepts no logits processor,
    because it speculates with V1, or with a V2 that has no interface for them.
    """
    if config.use_v2_model_runner and find_spec(V2_INTERFACE) is not None:
        # Older versions of vLLM do not have the module that it imports.
        from megatron_runtime.backends.vllm.logits_processor_v2 import AnswerRows

        return AnswerRows
    if config.speculative_config is not None:
        return None
    return AnswerTokens


def _cpu_shares(ranks: int) -> str:
    """Return the CPUs of each rank in vLLM's notation: equal shares of those that this process may use.

    By itself, vLLM divides NUMA nodes only.
    """
    cpus = sorted(os.sched_getaffinity(0))
    shares = [cpus[rank::ranks] or [cpus[rank % len(cpus)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def check_version(version: str) -> None:
    """Log a warning if this version of vLLM is newer than the supported ones.

    Raises ValueError if it is older.
    """
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    lowest, below = (".".join(map(str, part)) for part in SUPPORTED)
    if found < SUPPORTED[0]:
        raise ValueError(
            f"vLLM {version} is not supported: install vLLM >={lowest},<{below}, or use the native backend"
        )
    if found >= SUPPORTED[1]:
        logger.warning("vLLM %s is newer than this release was written for: >=%s,<%s", version, lowest, below)
