"""Megatron-Core's names for the state of open requests."""

from megatron_runtime.megatron_core.contexts.dynamic_context import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextOverflowError,
    DynamicInferenceContext,
    RequestOverflowError,
    TokenOverflowError,
)

__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextOverflowError",
    "DynamicInferenceContext",
    "RequestOverflowError",
    "TokenOverflowError",
]
