"""Converts the arguments of a user's program to an executor with its limits, and to the settings of a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_runtime.backends.native.build import select_executor
from megatron_runtime.backends.native.cpu.executor import ForwardPass
from megatron_runtime.backends.native.executor import Executor
from megatron_runtime.backends.native.ranked.executor import Follower
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.checkpoints.source import ModelSource, resolve
from megatron_runtime.checkpoints.torch_dist.live_model import is_megatron_model, unwrapped
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.distributed.rendezvous import LOOPBACK
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.in_process.ranks import executor_of_ranks, local_rank, local_world
from megatron_runtime.models.decoder import DecoderModel
from megatron_runtime.process.memory import available_bytes
from megatron_runtime.requests.config import InferenceConfig, RoutingPolicy
from megatron_runtime.tokenization import Tokenizer, load_tokenizer, tokenizer_of

DEFAULT_MEMORY_SHARE = 0.25
"""Fraction of the free memory that the KV cache of an engine without a configuration gets."""

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Parameter types of a GPTModel with which every device can compute."""


def default_config() -> InferenceConfig:
    """Return Megatron-Core's defaults, with a KV cache that leaves memory for the other ranks on this host."""
    gigabytes = InferenceConfig().buffer_size_gb
    if (available := available_bytes()) is not None:
        gigabytes = min(gigabytes, available * DEFAULT_MEMORY_SHARE / local_world() / (1 << 30))
    return InferenceConfig(buffer_size_gb=gigabytes, enable_chunked_prefill=True)


def build_executor(
    model: Any,
    tokenizer: Any,
    config: InferenceConfig,
    sizes: ParallelSizes,
    *,
    dtype: str = "auto",
    threads: int | None = None,
    make_forward: Callable[[DecoderModel], ForwardPass] | None = None,
) -> tuple[Executor, InferenceConfig, Follower | None]:
    """Return this rank's executor, the configuration of all ranks of its engine, and the follower.

    The weights of the executor are not loaded yet. The follower executes the first rank's commands on this rank. It is
    None on the first rank.

    model: a model reference, which can include a tokenizer, or a model in memory, for which `tokenizer` is required.
    sizes: number of ranks of the engine by dimension.
    dtype, threads, make_forward: see select_executor(). dtype "auto" uses the type of a GPTModel's parameters.

    Raises:
        ModelSourceError, UnsupportedModelError: the model cannot be used.
        TypeError: the tokenizer cannot be used.
    """
    source: ModelSource
    text: Tokenizer | Callable[[], Tokenizer]
    if isinstance(model, str):
        source = resolve(model)
        text = (lambda: load_tokenizer(model)) if tokenizer is None else tokenizer_of(tokenizer)
    else:
        text = tokenizer_of(tokenizer)
        source = model_in_memory(model, ends=text.eos_ids)
    if dtype == "auto" and is_megatron_model(model):
        dtype = _DTYPES.get(unwrapped(model).config.params_dtype, dtype)
    options: dict[str, Any] = {"dtype": dtype, "threads": threads, "make_forward": make_forward}
    if sizes.world > 1:
        return executor_of_ranks(source, ModelText(text), config, sizes, **options)
    executor = select_executor(
        source, ModelText(text), config, local_rank=local_rank(), kv_cache_memory=config.buffer_bytes, **options
    )
    return executor, config, None


def coordinator_settings(
    config: InferenceConfig, *, host: str | None, port: int | None, schedule_output_path: str | None
) -> CoordinatorSettings:
    """Return the settings of the coordinator that an engine with `config` launches.

    host, port: address on which the coordinator listens. None means the loopback interface, or a free port.
    """
    by_prefix = config.enable_prefix_caching
    return CoordinatorSettings(
        listen=host or LOOPBACK,
        client_port=port or 0,
        single_port=True,
        routing_policy=config.prefix_caching_coordinator_policy if by_prefix else RoutingPolicy.LOAD_BALANCED,
        alpha=config.prefix_caching_routing_alpha,
        schedule_output_path=Path(schedule_output_path) if schedule_output_path is not None else None,
        timing=Timing(recovery=0.0),  # a new coordinator has no earlier engines to wait for
    )
