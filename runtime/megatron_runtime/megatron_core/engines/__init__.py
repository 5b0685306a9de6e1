"""`DynamicInferenceEngine`, under Megatron-Core's package path."""

from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine

__all__ = ["DynamicInferenceEngine"]
