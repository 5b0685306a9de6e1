"""Megatron-Core name: `GPTInferenceWrapper`."""

from megatron_runtime.backends.native.gpt_inference_wrapper import GPTInferenceWrapper

__all__ = ["GPTInferenceWrapper"]
