"""Megatron-Core's names for the state of open requests."""

from megatron_runtime.megatron_core.contexts.dynamic_context import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    DynamicInferenceContext,
    RequestOverflowError,
    TokenOverflowError,
)

__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "DynamicInferenceContext",
    "RequestOverflowError",
    "TokenOverflowError",
]
