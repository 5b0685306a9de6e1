"""One CUDA device, as an executor uses it."""

from __future__ import annotations

import gc

import torch

from megatron_kernels.registry import KernelConfig, Kernels, select_kernels
from megatron_runtime.backends.native.cuda.decoder import KernelDecoder
from megatron_runtime.backends.native.cuda.inference_wrapper import DeviceInferenceWrapper
from megatron_runtime.backends.native.cuda.kv_pool import DeviceKVPool
from megatron_runtime.backends.native.cuda.linears import DeviceLinears
from megatron_runtime.backends.native.cuda.stage_runner import DeviceStageRunner
from megatron_runtime.backends.native.cuda.step_buffers import StepBuffers
from megatron_runtime.backends.native.executor import NoCudaProfilerError
from megatron_runtime.backends.native.memory import require_memory
from megatron_runtime.backends.native.text_generation_controller import TextGenerationController
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderWeights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class CudaDevice:
    """Implements Device with the operations of megatron_kernels.

    max_rows, max_tokens: of a step.
    graph_rows: decode steps of up to so many rows are replayed from CUDA graphs; 0 uses none.
    kernels:    None chooses by the environment (MEGATRON_KERNELS, MEGATRON_KERNEL_<OPERATION>).
    device:     None is the current CUDA device. Tests run the same steps on a processor, without graphs.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        graph_rows: int,
        kernels: KernelConfig | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._max_rows, self._max_tokens, self._graph_rows = max_rows, max_tokens, graph_rows
        self._config = kernels or KernelConfig.from_environment()
        self._device = device or torch.device("cuda")

    def select_dtype(self, name: str) -> torch.dtype:
        if name == "auto":
            return torch.bfloat16
        if name not in DTYPES:
            raise ValueError(f"dtype={name!r} is not supported on a GPU: use auto, {', '.join(DTYPES)}")
        return DTYPES[name]

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def linears(self, dtype: torch.dtype) -> DeviceLinears:
        return DeviceLinears(dtype, self._device)

    def kv_pool(self, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype) -> DeviceKVPool:
        return DeviceKVPool(
            layers=layers, pages=pages, page_size=page_size, width=width, dtype=dtype, device=self._device
        )

    def runner(
        self, config: ModelConfig, weights: DecoderWeights, *, page_size: int, dtype: torch.dtype, max_length: int
    ) -> DeviceInferenceWrapper:
        return self._wrapper(config, weights, page_size=page_size, max_length=max_length, groups=None)

    def stage_runner(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        groups: Groups,
        controller: TextGenerationController,
        page_size: int,
        dummy_page: int,
        dtype: torch.dtype,
        max_length: int,
    ) -> DeviceStageRunner:
        return DeviceStageRunner(
            wrapper=self._wrapper(config, weights, page_size=page_size, max_length=max_length, groups=groups),
            controller=controller,
            groups=groups,
            device=self._device,
            hidden_size=config.hidden_size,
            page_size=page_size,
            dummy_page=dummy_page,
        )

    def _wrapper(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        page_size: int,
        max_length: int,
        groups: Groups | None,
    ) -> DeviceInferenceWrapper:
        model = KernelDecoder(
            config,
            weights,
            self._kernels(),
            device=self._device,
            max_length=max_length,
            shard=groups.shard if groups is not None else None,
            collectives=groups,
        )
        buffers = StepBuffers(
            max_tokens=self._max_tokens,
            max_rows=self._max_rows,
            max_pages=-(-max_length // page_size),
            device=self._device,
        )
        return DeviceInferenceWrapper(model, buffers, graph_rows=self._graph_rows)

    def require_memory(self, needed: int, *, what: str) -> None:
        available = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else None
        require_memory(needed, what=what, available=available)

    def return_freed_memory(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def profile(self, active: bool) -> None:
        if self._device.type != "cuda":
            raise NoCudaProfilerError("a processor")
        torch.cuda.synchronize(self._device)  # what runs already is on its side of the border
        if active:
            torch.cuda.profiler.start()
        else:
            torch.cuda.profiler.stop()

    def _kernels(self) -> Kernels:
        return select_kernels(self._config, self._device)
