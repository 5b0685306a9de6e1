"""`Tokenizer`: text to token ids and back, for whole texts and for streams.

Byte-level vocabularies map every token to bytes, so a stream is an incremental UTF-8 decode: linear, and a character is
returned only when its last byte has arrived. Other vocabularies decode a short sliding window of tokens. Concatenated,
the parts of a stream equal `Tokenizer.decode` of all ids.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from megatron_runtime.tokenization.chat_template import ChatTemplate, ChatTemplateError
from megatron_runtime.tokenization.vocabulary import WORD_START, TokenBound, contained, piece_to_bytes

MAX_SHORT_CHARACTERS = 512
"""A text up to this length is encoded by the call with the least overhead, which holds the global interpreter lock."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(ABC):
    """Text of one growing sequence of token ids."""

    @abstractmethod
    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; an incomplete character is held back."""

    @abstractmethod
    def finish(self) -> str:
        """Return the text that was held back; incomplete characters become U+FFFD."""


class ByteLevelDetokenizer(Detokenizer):
    """For vocabularies in which each token is a string of bytes.

    token_bytes: returns the bytes of a token id, empty for one that has no text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """For vocabularies whose decoder looks at neighbouring tokens (leading spaces, byte fallback).

    decode: returns the text of consecutive token ids.

    The window starts at tokens whose text has been returned: a decoder may strip the first space of its input.
    """

    MAX_HELD_TOKENS = 16

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # tokens at the start of the window whose text has been returned

    def feed(self, ids: Iterable[int]) -> str:
        return "".join(self._step(token) for token in ids)

    def _step(self, token: int) -> str:
        self._window.append(token)
        fresh = self._fresh()
        held = len(self._window) - self._shown
        if held < self.MAX_HELD_TOKENS and (not fresh or fresh.endswith(REPLACEMENT)):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return fresh

    def finish(self) -> str:
        fresh = self._fresh()
        self._shown = len(self._window)
        return fresh

    def _fresh(self) -> str:
        out = self._decode(self._window[: self._shown]) if self._shown else ""
        return self._decode(self._window)[len(out) :]


class Tokenizer:
    """Vocabulary, special tokens and chat template of one model. Safe to share between threads.

    backend:        the compiled tokenizer.
    bos_id:         token that begins a sequence, or None.
    add_bos:        prompts that are encoded with special tokens begin with `bos_id`.
    eos_ids:        every token that ends an answer: end of sequence, end of turn. The first is the model's own.
    chat_template:  None for a model that only completes text.
    context_length: longest sequence that the model was made for, in tokens; None if unknown.
    generation_config: how the model is to be sampled, as its generation_config.json says.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        add_bos: bool = False,
        eos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        context_length: int | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._backend = backend
        self.bos_id = bos_id
        self.adds_bos = bos_id is not None and add_bos
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self.context_length = context_length
        self.generation_config: Mapping[str, Any] = generation_config or {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        # A token that is matched in normalised text is written with the vocabulary's mark for a space.
        self._bytes = {
            id_: (token.content.replace(WORD_START, " ") if token.normalized else token.content).encode()
            for id_, token in added.items()
        }

    def to_json(self) -> str:
        """Return the contents of tokenizer.json."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of `text`. The text of a special token becomes that token.

        Bytes without a token in the vocabulary are left out, as the model's own library does.

        add_special: also add the tokens that the model expects around a prompt, such as the begin-of-sequence token.

        Raises ValueError if the text is not valid Unicode (a lone surrogate), or if the library fails on it.
        """
        ids: list[int]
        try:
            text.encode()
        except UnicodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from error
        with contained("the text cannot be tokenized"):
            if len(text) <= MAX_SHORT_CHARACTERS:
                ids = self._backend.encode(text, add_special_tokens=add_special).ids
            else:  # this call releases the global interpreter lock
                ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        if add_special and self.adds_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]  # type: ignore[list-item]  # adds_bos implies an id
        return ids

    @cached_property
    def bound(self) -> TokenBound:
        """The lower bound of the number of tokens of a text."""
        return TokenBound.of(self._backend)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation. Raises ChatTemplateError; see ChatTemplate.render()."""
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        return self.chat_template.render(messages, tools=tools, variables=variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation; the template itself writes every special token."""
        return self.encode(self.render_chat(messages, tools=tools, variables=variables), add_special=False)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary have no text."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.feed(ids) + detokenizer.finish()

    def detokenizer(self, *, skip_special: bool = True, visible: Collection[int] = ()) -> Detokenizer:
        """Return a fresh incremental decoder for one sequence.

        visible: special tokens that are returned as text.
        """
        hidden = self.special_ids.difference(visible) if skip_special else frozenset()
        if self._is_byte_level:
            return ByteLevelDetokenizer(lambda id_: b"" if id_ in hidden else self.token_bytes(id_))
        return WindowDetokenizer(
            lambda ids: self._backend.decode([id_ for id_ in ids if id_ not in hidden], skip_special_tokens=False)
        )

    def token_id(self, text: str) -> int | None:
        """Return the id of the vocabulary entry `text`."""
        id_: int | None = self._backend.token_to_id(text)
        return id_

    def token_bytes(self, id_: int) -> bytes:
        """Return the bytes of a token, special or not; empty for an id outside the vocabulary."""
        known = self._bytes.get(id_)
        if known is None:
            piece = self._backend.id_to_token(id_) if 0 <= id_ < self.vocab_size else None
            known = self._bytes[id_] = b"" if piece is None else self._piece_bytes(piece)
        return known

    def _piece_bytes(self, piece: str) -> bytes:
        if self._is_byte_level:
            return piece_to_bytes(piece)
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(WORD_START, " ").encode()
