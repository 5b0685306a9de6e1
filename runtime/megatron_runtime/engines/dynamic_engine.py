"""Megatron-Core name: `DynamicInferenceEngine`."""

from megatron_runtime.backends.native.dynamic_engine import (
    MASK_GRACE_SECONDS,
    SUSPEND_TAGS,
    DynamicInferenceEngine,
)

__all__ = [
    "MASK_GRACE_SECONDS",
    "SUSPEND_TAGS",
    "DynamicInferenceEngine",
]
