"""What depends on where a model runs: its types, the memory of weights and KV cache, and who runs a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatron_runtime.backends.native.executor import NoCudaProfilerError, StepPlan
from megatron_runtime.backends.native.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.backends.native.kv_pool import KVPool
from megatron_runtime.backends.native.memory import require_memory
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderWeights, build_decoder
from megatron_runtime.models.layers.compiled_linear import NativeLinears
from megatron_runtime.models.layers.cpu import Numbers, select_numbers
from megatron_runtime.models.layers.linear import DenseLinears, LinearFactory
from megatron_runtime.requests.config import InferenceConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from megatron_runtime.backends.native.stage_runner import Parts, StageRunner
    from megatron_runtime.backends.native.text_generation_controller import TextGenerationController
    from megatron_runtime.distributed.groups import Groups


class Pool(Protocol):
    """Memory of a KV cache that may be given back; cache_LPXE is None while it is."""

    cache_LPXE: torch.Tensor | None

    def allocate(self) -> None: ...
    def release(self, keep_pages: npt.NDArray[np.int64] | None = None) -> None: ...


class ModelRunner(Protocol):
    """What a TextGenerationController asks for forward passes."""

    def run_one_forward_step(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> Any: ...


class PartRunner(Protocol):
    """What one rank of several asks for its share of a step."""

    def run(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> Parts:
        """Returns what this rank sampled, with the rows of the plan that it is of; most ranks sample nothing."""


class Device(Protocol):
    """One kind of device. Nothing of it is touched before something is asked for."""

    def select_dtype(self, name: str) -> torch.dtype:
        """Raises ValueError naming what is supported."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What keys and values are kept in where activations are of type `dtype`."""

    def linears(self, dtype: torch.dtype) -> LinearFactory: ...

    def kv_pool(self, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype) -> Pool: ...

    def runner(
        self, config: ModelConfig, weights: DecoderWeights, *, page_size: int, dtype: torch.dtype, max_length: int
    ) -> ModelRunner:
        """Raises ValueError if the device cannot run such a model."""

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
    ) -> PartRunner:
        """Of the part of a model that this rank of `groups` holds. Raises ValueError as runner() does."""

    def require_memory(self, needed: int, *, what: str) -> None:
        """Raises MemoryShortError unless so many bytes are free."""

    def return_freed_memory(self) -> None:
        """To whom else may use it."""

    def profile(self, active: bool) -> None:
        """See Executor."""


def select_device(
    name: str,
    config: InferenceConfig,
    *,
    sizes: ParallelSizes | None = None,
    local_rank: int = 0,
    wrapper_class: Callable[..., ModelRunner] | None = None,
) -> Device:
    """The device called `name`: "cpu", "cuda", or "auto" for a GPU where there is one.

    config:   how large a step may be, and up to which size decode steps are captured as CUDA graphs.
    sizes:    over how many ranks the engine is spread; None is one. local_rank: this one's, among those of its machine.
    wrapper_class: runs the model, on a processor, in place of ours.

    Raises ValueError: there is no such device, or it does not do what `config` asks for.
    """
    _require_known(name)
    sizes = sizes or ParallelSizes()
    if config.batch_invariant:
        from megatron_runtime.backends.native.batch_invariant import BatchInvariantProcessor

        if name == "cuda" or sizes.world > 1:
            raise ValueError("batch_invariant=True is for one rank on a processor: use device=cpu and one rank")
        return BatchInvariantProcessor(wrapper_class or GPTInferenceWrapper)
    if wrapper_class is not None:
        return Processor(wrapper_class)
    where = torch_device(name, local_rank=local_rank)
    if where.type == "cpu":
        return Processor()
    from megatron_runtime.backends.native.cuda.device import CudaDevice

    rows = config.request_slots
    graph_rows = 0 if config.num_cuda_graphs == 0 else min(rows, config.cuda_graph_max_tokens)
    return CudaDevice(max_rows=rows, max_tokens=config.step_tokens, graph_rows=graph_rows, device=where)


def torch_device(name: str, *, local_rank: int) -> torch.device:
    """Where a rank's tensors are: the GPU of its number on its machine. Raises ValueError as select_device() does."""
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


class Processor:
    """Implements Device.

    wrapper_class: runs the model; made anew with each set of weights.
    """

    def __init__(self, wrapper_class: Callable[..., ModelRunner] = GPTInferenceWrapper) -> None:
        self._wrapper_class = wrapper_class
        self._numbers = Numbers("float32", torch.float32, torch.float32, is_native=False)

    def select_dtype(self, name: str) -> torch.dtype:
        self._numbers = select_numbers(name)
        return self._numbers.activations

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._numbers.cache if self._numbers.is_native else dtype

    def linears(self, dtype: torch.dtype) -> LinearFactory:
        if not self._numbers.is_native:
            return DenseLinears(dtype)
        return NativeLinears(self._numbers.weights)

    def kv_pool(self, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype) -> Pool:
        return KVPool(layers=layers, pages=pages, page_size=page_size, width=width, dtype=dtype)

    def runner(
        self, config: ModelConfig, weights: DecoderWeights, *, page_size: int, dtype: torch.dtype, max_length: int
    ) -> ModelRunner:
        return self._wrapper_class(build_decoder(config, weights), page_size=page_size, dtype=dtype)

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
    ) -> StageRunner:
        from megatron_runtime.backends.native.stage_runner import StageRunner

        return StageRunner(
            model=build_decoder(config, weights, shard=groups.shard, collectives=groups),
            controller=controller,
            groups=groups,
            hidden_size=config.hidden_size,
            page_size=page_size,
            dummy_page=dummy_page,
            dtype=dtype,
        )

    def require_memory(self, needed: int, *, what: str) -> None:
        require_memory(needed, what=what)

    def return_freed_memory(self) -> None:
        """To the operating system. Only glibc has to be asked: no cycle holds weights or cache, so they are freed with
        the last reference. A garbage collection would stop the heartbeats of an engine in a program with a large heap.
        """
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def profile(self, active: bool) -> None:
        raise NoCudaProfilerError("a processor")
