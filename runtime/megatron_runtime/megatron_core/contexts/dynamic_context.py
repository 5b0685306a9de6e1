"""Megatron-Core name: `DynamicInferenceContext`, with the overflow errors of requests."""

from megatron_runtime.backends.native.kv.dynamic_context import DynamicInferenceContext
from megatron_runtime.requests.errors import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)

__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextOverflowError",
    "DynamicInferenceContext",
    "MaxSequenceLengthOverflowError",
    "RequestOverflowError",
    "TensorStateDeallocatedError",
    "TokenOverflowError",
]
