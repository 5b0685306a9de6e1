"""`DynamicInferenceContext`, the limits and state of an engine. The package path is the same as in Megatron-Core."""

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
