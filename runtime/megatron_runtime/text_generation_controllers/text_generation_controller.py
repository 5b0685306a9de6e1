"""Megatron-Core name: `TextGenerationController`."""

from megatron_runtime.backends.native.text_generation_controller import TextGenerationController

__all__ = ["TextGenerationController"]
