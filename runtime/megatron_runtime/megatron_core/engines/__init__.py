"""Megatron-Core's engine, which runs prompts in the calling thread or serves a coordinator."""

from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine

__all__ = ["DynamicInferenceEngine"]
