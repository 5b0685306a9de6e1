"""Builds the native backend from settings: the model source, the device, the executor and the core. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Unpack

import torch

from megatron_runtime.backends.copies import open_weight_port
from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.cpu.executor import CpuExecutor, ForwardPass
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.torch_executor import TorchExecutor, TorchOptions, torch_device
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelSource, require_format, resolve
from megatron_runtime.distributed.shard import IndivisibleError, RankIdentity, Shard, rank_identity
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.models.decoder import DecoderModel
from megatron_runtime.requests.config import InferenceConfig

if TYPE_CHECKING:
    from megatron_runtime.distributed.groups import Groups

logger = logging.getLogger(__name__)


def build_native(settings: EngineSettings) -> NativeBackend:
    """Return the backend that runs the model of `settings`. The backend has not loaded the weights yet.

    Raises:
        ValueError: a setting or the model is not usable. The message names the setting and the remedy.
    """
    controller, config = ModelText.of_model(settings.model), settings.inference_config
    if settings.parallel.world == 1:
        return NativeBackend(
            EngineCore(_executor(settings, controller, None, resolve(settings.model)), config), controller
        )
    identity = rank_identity(settings.parallel)
    if identity is None or identity.rank != 0:
        raise IndivisibleError(
            f"an engine of {settings.parallel.world} ranks needs a process per rank: start it with `megatron engine`, "
            "which starts all ranks of one machine, or with torchrun"
        )
    # Only an engine of several ranks needs sockets and process groups.
    from megatron_runtime.backends.native.ranked.executor import lead

    ranks = lead(
        settings, identity, partial(resolve, settings.model), partial(_executor, settings, controller, identity)
    )
    return NativeBackend(EngineCore(ranks, config), controller, ranks=ranks)


def check_native(settings: EngineSettings) -> None:
    """Validate the settings and the model, as every rank of an engine does at its start.

    This function reads only the headers of the weights. It needs no GPU, even for `device="cuda"`.

    Raises:
        ValueError: a setting or the model is not usable. The message names the setting and the remedy.
        OSError: a file of the model cannot be read.
    """
    controller = ModelText.of_model(settings.model)
    # Rank 0 has the most layers. All ranks have the same number of heads and experts.
    shard = settings.parallel.shard(0)
    executor = _executor(settings, controller, None, resolve(settings.model), shard=shard)
    EngineCore(executor, settings.inference_config)
    controller.tokenizer  # noqa: B018 - loads it; servers need it


def run_other_rank(settings: EngineSettings, identity: RankIdentity) -> None:
    """Run a rank other than rank 0 until the engine ends. Raises RankError and the ValueError of build_native()."""
    from megatron_runtime.backends.native.ranked.executor import follow

    controller = ModelText.of_model(settings.model)
    follow(settings, identity, partial(resolve, settings.model), partial(_executor, settings, controller, identity))


def _executor(
    settings: EngineSettings,
    controller: ModelText,
    identity: RankIdentity | None,
    source: ModelSource,
    groups: Groups | None = None,
    *,
    shard: Shard | None = None,
) -> TorchExecutor:
    """Return the executor of one rank.

    shard: the rank's part of the model, for an executor that only validates and has no `groups`.
    """
    require_format(source, settings.model_format, model=settings.model)
    threads = settings.threads
    if threads is not None and identity is not None:
        threads = max(1, threads // identity.local_world)
    return select_executor(
        source,
        controller,
        settings.inference_config,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_memory=settings.kv_cache_memory,
        max_sequence_length=settings.max_sequence_length,
        threads=threads,
        groups=groups,
        shard=shard,
        is_check=shard is not None,
        keys_dir=settings.keys_dir,
        open_port=partial(open_weight_port, settings, identity.local_rank if identity is not None else 0),
        local_rank=identity.local_rank if identity is not None else 0,
    )


def select_executor(
    source: ModelSource,
    controller: ModelText,
    config: InferenceConfig,
    *,
    device: str = "auto",
    dtype: str = "auto",
    local_rank: int = 0,
    is_check: bool = False,
    make_forward: Callable[[DecoderModel], ForwardPass] | None = None,
    **options: Unpack[TorchOptions],
) -> TorchExecutor:
    """Return the executor of a model, or of this rank's part of it.

    config:             limits of a step, and options for CUDA graphs, log-probabilities and recorded experts.
    device, local_rank: as for torch_device().
    is_check:           whether the executor only validates. If so, the device "cuda" need not exist.
    make_forward:       returns a forward pass on the CPU that replaces the executor's own forward pass.

    Raises ValueError if the device does not exist or does not support `config`, or if an option does not fit the model.
    """
    options["logprobs_mode"] = config.logprobs_mode
    options["records_routing"] = config.moe_enable_routing_replay or getattr(source, "records_routing", False)
    if options["records_routing"] and make_forward is not None:
        raise ValueError("moe_enable_routing_replay=True: a custom inference_wrapper_cls does not record the experts")
    where = torch.device(device) if is_check and device == "cuda" else torch_device(device, local_rank=local_rank)
    if where.type == "cpu" or make_forward is not None:
        return CpuExecutor(source, controller, dtype=dtype, make_forward=make_forward, **options)

    rows = config.request_slots
    graph_rows = 0 if config.num_cuda_graphs == 0 else min(rows, config.cuda_graph_max_tokens)
    if graph_rows and config.use_cuda_graphs_for_non_decode_steps and not is_check:
        logger.info("use_cuda_graphs_for_non_decode_steps has no effect: only steps without prompts are CUDA graphs")
    return CudaExecutor(
        source,
        controller,
        dtype=dtype,
        max_rows=rows,
        max_tokens=config.step_tokens,
        graph_rows=graph_rows,
        device=where,
        **options,
    )
