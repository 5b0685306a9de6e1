"""Which executor runs a model: the choice of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch

from megatron_runtime.backends.native.cpu.executor import CpuExecutor, ForwardPass
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.backends.native.torch_executor import TorchExecutor, TorchOptions
from megatron_runtime.checkpoints.source import ModelSource
from megatron_runtime.models.decoder import DecoderModel
from megatron_runtime.requests.config import InferenceConfig


def select_executor(
    source: ModelSource,
    controller: ModelText,
    config: InferenceConfig,
    *,
    kv_cache_memory: int,
    device: str = "auto",
    dtype: str = "auto",
    local_rank: int = 0,
    make_forward: Callable[[DecoderModel, torch.dtype], ForwardPass] | None = None,
    **options: Unpack[TorchOptions],
) -> TorchExecutor:
    """The executor of a model, or of this rank's part of it, on the device called `device`.

    config:       size of a step, CUDA graphs, batch invariance, log-probabilities.
    device:       "cpu", "cuda", or "auto" for a GPU where there is one.
    local_rank:   number of this rank among those of its machine.
    make_forward: returns the forward pass of a model on the CPU, in place of the executor's own.

    Raises ValueError: there is no such device, it does not support what `config` asks for, or the model does not fit.
    """
    _require_known(device)
    options["logprobs_mode"] = config.logprobs_mode
    groups = options.get("groups")
    if config.batch_invariant and (device == "cuda" or (groups is not None and groups.shard.sizes.world > 1)):
        raise ValueError("batch_invariant=True is for one rank on the CPU: use device=cpu and one rank")
    runs_on_cpu = config.batch_invariant or make_forward is not None
    where = torch.device("cpu") if runs_on_cpu else torch_device(device, local_rank=local_rank)
    if where.type == "cpu":
        return CpuExecutor(
            source,
            controller,
            kv_cache_memory=kv_cache_memory,
            dtype=dtype,
            batch_invariant=config.batch_invariant,
            make_forward=make_forward,
            **options,
        )

    rows = config.request_slots
    return CudaExecutor(
        source,
        controller,
        kv_cache_memory=kv_cache_memory,
        dtype=dtype,
        max_rows=rows,
        max_tokens=config.step_tokens,
        graph_rows=0 if config.num_cuda_graphs == 0 else min(rows, config.cuda_graph_max_tokens),
        device=where,
        **options,
    )


def torch_device(name: str, *, local_rank: int) -> torch.device:
    """The device of a rank's tensors: the GPU of its number on its machine. Raises ValueError as select_executor()."""
    _require_known(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device='cuda': torch finds no CUDA device: use auto or cpu, or give the container a GPU")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"device={name!r}: rank {local_rank} of this machine has no GPU, there are {torch.cuda.device_count()}: "
            "start as many ranks on it as it has GPUs (gpusPerPod)"
        )
    return torch.device("cuda", local_rank)


def _require_known(name: str) -> None:
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={name!r}: choose among auto, cpu, cuda")
