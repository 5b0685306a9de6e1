"""Adapters for tokenizer objects of other libraries: transformers, tokenizers, and Megatron-Core."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_runtime.tokenization.chat_template import DEFAULT_TEMPLATE, TOOL_TEMPLATE, ChatTemplate
from megatron_runtime.tokenization.loader import load_tokenizer
from megatron_runtime.tokenization.tokenizer import Detokenizer, Tokenizer, WindowDetokenizer, context_of
from megatron_runtime.tokenization.vocabulary import TokenBound

_LONGEST_TOKEN_BYTES = 256
"""Assumed maximum length of a token in bytes if the vocabulary is unknown, for the lower bound of token counts."""


def tokenizer_of(tokenizer: Any) -> Tokenizer:
    """Return `tokenizer` as a Tokenizer.

    tokenizer: a Tokenizer, a model reference, a fast tokenizer of transformers, a `tokenizers.Tokenizer`, or an object
               with `tokenize(text)` and `detokenize(ids)`, like the tokenizers of Megatron-Core.

    Raises TypeError for any other object, and TokenizerLoadError if a model reference has no usable tokenizer.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        return load_tokenizer(str(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if type(backend).__module__.partition(".")[0] == "tokenizers":
        eos = getattr(tokenizer, "eos_token_id", None)
        templates = getattr(tokenizer, "chat_template", None)
        sources = templates if isinstance(templates, dict) else {DEFAULT_TEMPLATE: templates}
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {name: text for name in names if (text := getattr(tokenizer, name, None)) is not None}
        return Tokenizer(
            backend,
            bos_id=getattr(tokenizer, "bos_token_id", None),
            eos_ids=() if eos is None else (eos,),
            chat_template=ChatTemplate.of(sources, DEFAULT_TEMPLATE, special=special),
            tool_template=ChatTemplate.of(sources, TOOL_TEMPLATE, special=special),
        )
    if callable(getattr(tokenizer, "tokenize", None)) and callable(getattr(tokenizer, "detokenize", None)):
        return MegatronTokenizer(tokenizer)
    raise TypeError(
        f"tokenizer is {type(tokenizer).__module__}.{type(tokenizer).__name__}: want a Tokenizer of megatron_runtime, "
        "a fast tokenizer of transformers, an object with tokenize() and detokenize(), or a model reference"
    )


class MegatronTokenizer(Tokenizer):
    """A tokenizer with Megatron-Core's interface: tokenize(text), detokenize(ids), vocab_size, eod and bos.

    As in Megatron-Core, special tokens are decoded as text, unless detokenize() has the parameter
    `skip_special_tokens`. The vocabulary is not known, so structured output is not available.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._skips_special = "skip_special_tokens" in inspect.signature(tokenizer.detokenize).parameters
        self.bos_id = _id(tokenizer, "bos", "bos_id")
        self.adds_bos = False
        end = _id(tokenizer, "eod", "eos_id", "eos")
        self.eos_ids = () if end is None else (end,)
        self.chat_template = self.tool_template = None
        self.context_length = None
        self.generation_config = {}
        self.vocab_size = self.id_limit = int(tokenizer.vocab_size)
        self.special_ids = frozenset(id_ for id_ in (self.bos_id, end) if id_ is not None)

    @property
    def of_program(self) -> Any:
        """The tokenizer object that the program passed to tokenizer_of()."""
        return self._tokenizer

    def to_json(self) -> str:
        raise ValueError(
            f"{type(self._tokenizer).__name__} has no tokenizer.json: pass a fast tokenizer of transformers"
        )

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [int(id_) for id_ in self._tokenizer.tokenize(text)]

    @cached_property
    def bound(self) -> TokenBound:
        return TokenBound(np.full(256, 1 / _LONGEST_TOKEN_BYTES), (), _LONGEST_TOKEN_BYTES)

    def detokenizer(
        self, *, after: Sequence[int] = (), skip_special: bool = True, visible: Collection[int] = ()
    ) -> Detokenizer:
        text = partial(self._text, skip_special=skip_special and not visible)
        return WindowDetokenizer(text, after=context_of(after, frozenset()))

    def decode(self, ids: Iterable[int], *, after: Sequence[int] = (), skip_special: bool = True) -> str:
        if after:
            return super().decode(ids, after=after, skip_special=skip_special)
        return self._text(list(ids), skip_special=skip_special)

    def special_tokens_in(self, texts: Iterable[str]) -> dict[int, str]:
        written = {id_: self._text([id_]) for id_ in self.special_ids}
        listed = list(texts)
        return {id_: text for id_, text in written.items() if text and any(text in each for each in listed)}

    def token_id(self, text: str) -> int | None:
        return None

    def token_bytes(self, id_: int) -> bytes:
        return self._text([id_]).encode() if 0 <= id_ < self.vocab_size else b""

    def _text(self, ids: list[int], *, skip_special: bool = False) -> str:
        options = {"skip_special_tokens": skip_special} if self._skips_special else {}
        return str(self._tokenizer.detokenize(ids, **options)) if ids else ""


def _id(tokenizer: Any, *names: str) -> int | None:
    """Return the value of the first attribute in `names` that the tokenizer has and that is a token id.

    Return None if there is no such attribute. Some tokenizers raise an error for a missing attribute.
    """
    for name in names:
        try:
            value = getattr(tokenizer, name)
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(value, int):
            return value
    return None
