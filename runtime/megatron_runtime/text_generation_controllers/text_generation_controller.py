"""Megatron-Core name: `TextGenerationController`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.model_inference_wrappers.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.tokenization import Tokenizer


class TextGenerationController:
    """A model and its tokenizer, for code written for Megatron-Core. The engine does not use it.

    inference_wrapped_model: None while the weights are released.
    tokenizer: the tokenizer, a function that loads it at first use, or a ModelText to share.
    """

    def __init__(
        self,
        inference_wrapped_model: GPTInferenceWrapper | None,
        tokenizer: Tokenizer | Callable[[], Tokenizer] | ModelText,
    ) -> None:
        self.inference_wrapped_model = inference_wrapped_model
        self._text = tokenizer if isinstance(tokenizer, ModelText) else ModelText(tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the token ids of `prompt`. add_BOS: prepend the begin-of-sequence token if it is missing."""
        return self._text.tokenize_prompt(prompt, add_BOS)

    def detokenize(self, tokens: Iterable[int]) -> str:
        return self._text.detokenize(tokens)
