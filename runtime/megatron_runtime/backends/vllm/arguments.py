"""Maps the settings of an engine to vLLM's engine arguments."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import vllm
from vllm.config import KVEventsConfig, StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from megatron_runtime.backends.vllm.kv_connector import LEASE_SECONDS
from megatron_runtime.backends.vllm.logits_processor import AnswerTokens
from megatron_runtime.backends.vllm.models import model_directory
from megatron_runtime.distributed.shard import node_identity
from megatron_runtime.engine.settings import (
    DECODE_PREFILL_TOKENS,
    DEFAULT_CPU_CACHE_BYTES,
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_TOKENS,
    EngineSettings,
)
from megatron_runtime.protocol.vllm_arguments import WITHOUT_DRAFT_WEIGHTS, names_draft_model, problem_of
from megatron_runtime.requests.sampling_params import MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)

SUPPORTED = ((0, 26), (0, 34))
"""The first supported version of vLLM, and the first that is too new. Minor versions change its interface."""

V2_INTERFACE = "vllm.v1.worker.gpu.sample.logits_processor"
"""A module that vLLM has since 0.31.

Without this module, Model Runner V2 accepts no external logits processor, and vLLM selects Model Runner V1 if the
arguments have one.
"""

LONGEST_THAT_FITS = -1
"""Value of max_model_len in each supported version: the model's limit, or less if the KV cache is too small for it."""

SHARED_GPU = 0.01
"""Value of gpu_memory_utilization for a KV cache of a fixed size. vLLM requires this share of the GPU to be free at
start.

With the default of 0.92, a second engine on the GPU would not start.
"""

NOT_RUN = "not run"
RUN = "docs/measurements/2026-11-27-gpu-h200.md"
"""Record of the run on a GPU, which used Model Runner V1 of vLLM 0.26 with enforce_eager."""
ON_A_GPU: Mapping[str, tuple[str, ...]] = {
    "Model Runner V2 instead of V1, with vLLM 0.31 or newer": (
        "tests/vllm/test_model_runner_v2.py::test_ngram_on_v2_continues_every_answer_of_a_killed_engine",
        "tests/vllm/test_model_runner_v2.py::test_vllm_accepts_the_configuration_of_a_gpu",
        "tests/unit/vllm/test_backend.py"
        "::test_the_logits_processor_is_that_of_the_model_runner_and_what_is_missing_is_announced",
        "tests/unit/vllm/test_parameters.py::test_v2_bans_what_v1_bans",
    ),
    "Triton's kernels are compiled instead of interpreted": (RUN,),
    "asynchronous scheduling: a step is prepared before the tokens of the last one are known": (RUN,),
    "CUDA graphs, unless enforce_eager is set": (NOT_RUN,),
    "sleep level 2: SUSPEND keeps vLLM's process, and RESUME wakes it and loads the weights": (
        "tests/unit/vllm/test_backend.py::test_after_sleep_level_2_weights_and_adapters_are_loaded_again",
        RUN,
    ),
    "sleep level 1: SUSPEND moves the weights to host memory": (
        "tests/unit/vllm/test_backend.py::test_on_a_platform_with_sleep_mode_a_suspend_sleeps_and_a_resume_wakes",
        NOT_RUN,
    ),
    "KV blocks that are evicted move to host memory (kv_offloading_size)": (
        "tests/unit/vllm/test_interfaces.py::test_arguments_of_features_of_gpus_are_in_each_version",
        NOT_RUN,
    ),
    "NIXL reads KV from the memory of another GPU": (
        "tests/vllm/test_split.py::test_split_answers_are_the_same",
        "tests/vllm/test_split.py::test_engines_of_two_ranks_exchange_kv",
        NOT_RUN,
    ),
    "expert parallelism, and data parallelism of a mixture of experts": (
        "tests/unit/vllm/test_backend.py::test_expert_ranks_share_those_of_tensor_and_data",
        "tests/unit/vllm/test_interfaces.py::test_arguments_of_features_of_gpus_are_in_each_version",
        NOT_RUN,
    ),
    "drafts by MTP layers, EAGLE heads or a draft model": (
        "tests/unit/vllm/test_backend.py::test_a_draft_model_is_resolved_like_the_model",
        "tests/vllm/test_drafts.py::test_vllm_accepts_the_configuration_of_drafts",
        NOT_RUN,
    ),
    "an update writes new weights to the memory of the GPU": (RUN,),
    "vLLM measures the memory for the KV cache, fits the sequence length to it, and chooses its batch limits": (
        "tests/unit/vllm/test_backend.py::test_on_a_gpu_vllm_chooses_what_the_settings_leave_open",
        NOT_RUN,
    ),
    "ranks exchange tensors by NCCL": (NOT_RUN,),
}
"""Differences between a GPU and the CPUs of `make test-vllm`.

Each value lists the tests that cover the difference on a GPU. Its last item states whether these tests have run on a
GPU.
"""

_DTYPES = ("auto", "bfloat16", "float16", "float32")


def engine_arguments(
    settings: EngineSettings,
    directory: Path,
    *,
    cache_events: str,
    draft_directory: Callable[[str], Path] = model_directory,
) -> AsyncEngineArgs:
    """Return vLLM's engine arguments, without a logits processor.

    directory:       directory of the model.
    cache_events:    endpoint at which vLLM publishes changes of its prefix cache.
    draft_directory: returns the directory of a draft model for speculation, given its model reference.

    Raises ValueError if a setting or the version of vLLM is not supported. The message has name, value and remedy.
    """
    check_version(vllm.__version__)
    sizes, node = settings.parallel, node_identity(settings.parallel)
    if settings.dtype not in _DTYPES:
        raise ValueError(
            f"dtype {settings.dtype}: vLLM quantizes by its argument quantization; use one of {', '.join(_DTYPES)}"
        )
    if settings.moe_enable_routing_replay:
        raise ValueError("moe_enable_routing_replay is not supported by the vLLM backend: use the native backend")
    if sizes.data > 1 and node.nodes > 1:
        raise ValueError(
            f"data_parallel_size={sizes.data} over {node.nodes} pods: give an engine with data parallelism one pod"
        )
    if settings.threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    if current_platform.is_cpu() and node.ranks_per_node > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cpu_shares(node.ranks_per_node))
    # The process has threads and sockets, which a fork would copy.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    problem = problem_of(settings.vllm_arguments, allow_code=settings.vllm_allow_code)
    problem = problem or next(type_problems(settings.vllm_arguments, AsyncEngineArgs), None)
    if problem is None and transfers_kv(settings) and "kv_transfer_config" in settings.vllm_arguments:
        problem = "kv_transfer_config is set by --role: remove one"
    if problem is not None:
        raise ValueError(f"vLLM argument {problem}")
    sleep_level(settings)
    # On a GPU, vLLM measures the free memory after loading, and derives the limits from the model and the device.
    is_cpu = current_platform.is_cpu()
    requests = settings.max_requests or (DEFAULT_MAX_REQUESTS if is_cpu else None)
    tokens = settings.max_tokens or (DEFAULT_MAX_TOKENS if is_cpu else None)
    fixed = {
        "model": str(directory),
        "dtype": settings.dtype,
        "max_model_len": settings.max_sequence_length or (None if is_cpu else LONGEST_THAT_FITS),
        "max_num_seqs": requests,
        "max_num_batched_tokens": None if tokens is None else max(tokens, requests or 0),
        "enable_chunked_prefill": settings.chunked_prefill,
        "enable_prefix_caching": settings.prefix_caching,
        "kv_cache_memory_bytes": settings.kv_cache_memory or (DEFAULT_CPU_CACHE_BYTES if is_cpu else None),
        "gpu_memory_utilization": SHARED_GPU if settings.kv_cache_memory and not is_cpu else None,
        "tensor_parallel_size": sizes.tensor if sizes.data > 1 else sizes.tensor * sizes.expert,
        "data_parallel_size": sizes.data if sizes.data > 1 else None,
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
    chosen = {**_role_arguments(settings, is_cpu=is_cpu), **settings.vllm_arguments}
    if names_draft_model(chosen):
        speculation = chosen["speculative_config"]
        chosen["speculative_config"] = {**speculation, "model": str(draft_directory(speculation["model"]))}
    declared = _declared_types(AsyncEngineArgs)
    for name, value in chosen.items():
        nested = _dataclass_in(declared.get(name, ()))
        if isinstance(value, Mapping) and nested is not None:
            chosen[name] = nested(**value)  # vLLM itself does this only for some of them
    try:
        return AsyncEngineArgs(**{**known, **chosen})
    except TypeError as error:
        raise ValueError(f"vLLM {vllm.__version__} rejects its arguments: {error}") from error


def transfers_kv(settings: EngineSettings) -> bool:
    """Return whether vLLM exchanges KV with other engines by NIXL.

    Ranks that share layers may exchange KV, each with the rank of the same number, if they are in one pod.
    """
    sizes = settings.parallel
    fits = sizes.pipeline == sizes.data == 1 and node_identity(sizes).nodes == 1
    return settings.role is not None and settings.vllm_allow_nixl and fits


def _role_arguments(settings: EngineSettings, *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments of an engine with a role.

    vLLM's default kv_load_failure_policy ends a request whose blocks cannot be imported. vLLM limits the prompt tokens
    of a step per request, and not of all requests as a native engine does.

    Raises ValueError if NIXL is not installed.
    """
    if not transfers_kv(settings):
        return {}
    if find_spec("nixl") is None:
        raise ValueError(f"--role {settings.role}: NIXL is not installed: run uv pip install --no-deps nixl nixl-cu13")
    transfer: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
    }
    if is_cpu:
        transfer["kv_buffer_device"] = "cpu"
    chunk = settings.max_prefill_tokens or (DECODE_PREFILL_TOKENS if settings.role == "decode" else None)
    limit = {"long_prefill_token_threshold": chunk} if chunk and settings.chunked_prefill else {}
    return {"kv_transfer_config": transfer, **limit}


def type_problems(arguments: Mapping[str, Any], declared: type, parent: str = "") -> Iterator[str]:
    """Yield an error for each argument that the installed version of vLLM lacks or declares with a different type.

    declared: vLLM's dataclass that has the arguments as fields.
    parent:   name of the argument whose fields are checked, followed by a dot; empty for top-level arguments.
    """
    declared_types = _declared_types(declared)
    for key, value in sorted(arguments.items()):
        name = f"{parent}{key}"
        if key not in declared_types:
            yield f"{name} is not known to vLLM {vllm.__version__}: remove it, or use a version of vLLM that has it"
            continue
        alternatives = declared_types[key]
        nested = _dataclass_in(alternatives)
        if isinstance(value, Mapping) and nested is not None:
            yield from type_problems(value, nested, f"{name}.")
        elif not any(_accepts(each, value) for each in alternatives):
            yield f"{name} is {value!r}: give {' or '.join(dict.fromkeys(map(_described, alternatives)))}"


def _declared_types(declared: type) -> dict[str, tuple[Any, ...]]:
    """Return the types that each field of a dataclass accepts.

    If the type of a field exists only for type checkers, the field accepts `Any`. Each annotation is evaluated
    separately, so that such a type does not affect the other fields.
    """
    names = vars(sys.modules[declared.__module__])
    found: dict[str, tuple[Any, ...]] = {}
    for field in fields(declared):
        annotated = types.SimpleNamespace(__annotations__={field.name: field.type})
        try:
            hint = get_type_hints(annotated, names)[field.name]
        except NameError:
            hint = Any
        found[field.name] = (*_alternatives(hint),)
    return found


def _dataclass_in(alternatives: Iterable[Any]) -> type | None:
    return next((each for each in alternatives if isinstance(each, type) and is_dataclass(each)), None)


def _alternatives(hint: Any) -> Iterator[Any]:
    """Yield the alternatives of a union type. Each value of a Literal counts as an alternative."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _alternatives(each)
    elif origin is Literal:
        yield from (Literal[each] for each in get_args(hint))
    elif origin is Annotated:
        yield from _alternatives(get_args(hint)[0])
    else:
        yield hint


_JSON_TYPES: Mapping[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    dict: ((dict,), "an object"),
    float: ((int, float), "a number"),
    int: ((int,), "an integer"),
    list: ((list,), "a list"),
    set: ((list,), "a list"),
    str: ((str,), "a string"),
    tuple: ((list,), "a list"),
    type(None): ((type(None),), "null"),
}
"""Map from a Python type to the types of JSON values that it accepts, and their name in messages."""


def _accepts(declared: Any, value: object) -> bool:
    """Return whether a JSON value can be converted to the declared type. vLLM performs the remaining checks."""
    origin = get_origin(declared) or declared
    if origin is Literal:
        return bool(get_args(declared)[0] == value and type(get_args(declared)[0]) is type(value))
    if origin in _JSON_TYPES:
        return type(value) in _JSON_TYPES[origin][0]
    if isinstance(origin, type) and issubclass(origin, Enum):
        return isinstance(value, str | int)
    return not is_dataclass(origin)


def _described(declared: Any) -> str:
    origin = get_origin(declared) or declared
    if origin is Literal:
        return repr(get_args(declared)[0])
    if origin in _JSON_TYPES:
        return _JSON_TYPES[origin][1]
    return "an object" if is_dataclass(origin) else "a string"


def logits_processor_of(config: VllmConfig) -> type | None:
    """Return our logits processor class for the model runner that vLLM has selected in `config`.

    Returns None if the engine speculates and vLLM has selected Model Runner V1 or lacks V2_INTERFACE. In this case,
    vLLM accepts no logits processor. vLLM also fails to start if the class is made for the other model runner.

    config: configuration that was built without a logits processor.
    """
    if config.use_v2_model_runner and find_spec(V2_INTERFACE) is not None:
        # Older versions of vLLM lack a module that logits_processor_v2 imports.
        from megatron_runtime.backends.vllm.logits_processor_v2 import AnswerRows

        return AnswerRows
    if config.speculative_config is not None:
        return None
    return AnswerTokens


def _cpu_shares(ranks: int) -> str:
    """Return the CPUs of each rank in vLLM's notation. Each rank gets an equal part of the CPUs of this process.

    Without this setting, vLLM divides the CPUs only by NUMA node.
    """
    cpus = sorted(os.sched_getaffinity(0))
    shares = [cpus[rank::ranks] or [cpus[rank % len(cpus)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def sleep_level(settings: EngineSettings) -> int:
    """Return vLLM's sleep level for SUSPEND, which is 1 or 2.

    Level 2 is not possible with a draft model, because vLLM does not reload the weights of draft models.

    Raises ValueError if the settings request level 2 together with a draft model.
    """
    speculation = settings.vllm_arguments.get("speculative_config") or {}
    keeps_drafts = bool(speculation) and speculation.get("method") not in WITHOUT_DRAFT_WEIGHTS
    if keeps_drafts and settings.vllm_sleep_level == 2:
        raise ValueError(
            "vllm_sleep_level=2: vLLM cannot reload the weights of speculative_config: use 1, or another method"
        )
    return settings.vllm_sleep_level or (1 if keeps_drafts else 2)


def check_version(version: str) -> None:
    """Log a warning if this version of vLLM is newer than the supported versions.

    Raises ValueError if this version is older than the supported versions.
    """
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    lowest, below = (".".join(map(str, part)) for part in SUPPORTED)
    if found < SUPPORTED[0]:
        raise ValueError(
            f"vLLM {version} is not supported: install vLLM >={lowest},<{below}, or use the native backend"
        )
    if found >= SUPPORTED[1]:
        logger.warning("vLLM %s is newer than this release was written for: >=%s,<%s", version, lowest, below)
