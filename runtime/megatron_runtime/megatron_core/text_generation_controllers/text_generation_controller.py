"""Megatron-Core name: `TextGenerationController`."""

from __future__ import annotations

from collections.abc import Callable

from megatron_runtime.backends.text import ModelText
from megatron_runtime.megatron_core.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.tokenization import Tokenizer


class TextGenerationController(ModelText):
    """A model and its tokenizer, for code written for Megatron-Core. The engine does not use it.

    inference_wrapped_model: None while the weights are released.
    tokenizer: the tokenizer, or a function that loads it at first use.
    """

    def __init__(
        self, inference_wrapped_model: GPTInferenceWrapper | None, tokenizer: Tokenizer | Callable[[], Tokenizer]
    ) -> None:
        super().__init__(tokenizer)
        self.inference_wrapped_model = inference_wrapped_model
