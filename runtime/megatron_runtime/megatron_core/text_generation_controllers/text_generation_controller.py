"""Defines `TextGenerationController`, under the module path that the class has in Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_runtime.backends.text import ModelText
from megatron_runtime.megatron_core.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.tokenization import tokenizer_of
from megatron_runtime.tokenization.of_program import MegatronTokenizer


class TextGenerationController:
    """A model and its tokenizer, from which an engine is constructed.

    inference_wrapped_model: the wrapped model; None while the weights are released.
    tokenizer: an object with tokenize() and detokenize(), or another tokenizer or a model reference that tokenizer_of()
               accepts.
    """

    def __init__(self, inference_wrapped_model: GPTInferenceWrapper | None, tokenizer: Any) -> None:
        self.inference_wrapped_model = inference_wrapped_model
        self._text = tokenizer if isinstance(tokenizer, ModelText) else ModelText(lambda: tokenizer_of(tokenizer))

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the program passed if it has Megatron-Core's interface, otherwise a Tokenizer.

        A Tokenizer also has Megatron-Core's interface.
        """
        made = self._text.tokenizer
        return made.of_program if isinstance(made, MegatronTokenizer) else made

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the token ids of `prompt`. add_BOS: prepend the BOS token if the tokenizer does not add it."""
        return self._text.tokenize_prompt(prompt, add_BOS)

    def detokenize(self, tokens: Iterable[int]) -> str:
        return self._text.detokenize(tokens)
