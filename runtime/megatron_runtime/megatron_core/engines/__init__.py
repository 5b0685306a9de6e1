"""Re-exports `DynamicInferenceEngine`. The package path is the same as in Megatron-Core."""

from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine

__all__ = ["DynamicInferenceEngine"]
