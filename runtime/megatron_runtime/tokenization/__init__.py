"""Conversion of text to token ids and back, with a model's vocabulary, chat template and streaming detokenizer.

tokenizer = load_tokenizer("builtin:smollm2-135m")
ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
text = tokenizer.decode(ids)
"""

from megatron_runtime.tokenization.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateRejectedError,
    ChatTemplateUnusableError,
)
from megatron_runtime.tokenization.loader import TokenizerLoadError, load_tokenizer, tokenizer_location
from megatron_runtime.tokenization.of_program import tokenizer_of
from megatron_runtime.tokenization.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "ChatTemplateRejectedError",
    "ChatTemplateUnusableError",
    "Detokenizer",
    "Tokenizer",
    "TokenizerLoadError",
    "load_tokenizer",
    "tokenizer_location",
    "tokenizer_of",
]
