"""Megatron-Core name: `DynamicInferenceContext`, with the overflow errors that a request may meet."""

from megatron_runtime.backends.native.kv.dynamic_context import DynamicInferenceContext
from megatron_runtime.requests.errors import (
    BlockOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TokenOverflowError,
)

__all__ = [
    "BlockOverflowError",
    "DynamicInferenceContext",
    "MaxSequenceLengthOverflowError",
    "RequestOverflowError",
    "TokenOverflowError",
]
