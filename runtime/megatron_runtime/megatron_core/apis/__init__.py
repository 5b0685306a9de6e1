"""The Python API for inference. `MegatronLLM` has blocking methods, and `MegatronAsyncLLM` has coroutines."""

from megatron_runtime.coordinator.spawn import CoordinatorFailedError
from megatron_runtime.in_process.calls import CallsClosedError, EngineFailedError
from megatron_runtime.in_process.front_end import ServeConfig
from megatron_runtime.in_process.streams import GenerationChunk
from megatron_runtime.megatron_core.apis.async_llm import MegatronAsyncLLM
from megatron_runtime.megatron_core.apis.llm import MegatronLLM
from megatron_runtime.requests.request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron_runtime.requests.sampling_params import SamplingParams

__all__ = [
    "CallsClosedError",
    "CoordinatorFailedError",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "EngineFailedError",
    "GenerationChunk",
    "MegatronAsyncLLM",
    "MegatronLLM",
    "SamplingParams",
    "ServeConfig",
]
