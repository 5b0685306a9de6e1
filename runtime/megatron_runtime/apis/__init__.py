"""The Python interface: `MegatronLLM` has blocking calls, `MegatronAsyncLLM` has coroutines."""

from megatron_runtime.apis._llm_base import GenerationChunk
from megatron_runtime.apis.async_llm import MegatronAsyncLLM
from megatron_runtime.apis.llm import MegatronLLM
from megatron_runtime.apis.serve import ServeConfig

__all__ = ["GenerationChunk", "MegatronAsyncLLM", "MegatronLLM", "ServeConfig"]
