"""`Tokenizer` converts text to token ids and back, for whole texts and for streams.

Byte-level and SentencePiece vocabularies map every token to bytes, so a stream is decoded as incremental UTF-8, in
linear time. A character is returned when its last byte has arrived. For other vocabularies, a short sliding window of
tokens is decoded. The concatenated parts of a stream are equal to the result of `Tokenizer.decode` for all ids.

The first token of a sequence is decoded differently, without its space, and a character can begin in one token and end
in another. So the decoder needs the tokens that precede a text; see the argument `after` of `Tokenizer.detokenizer`.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

import tokenizers

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.tokenization.chat_template import ChatTemplate, ChatTemplateError
from megatron_runtime.tokenization.vocabulary import WORD_START, TokenBound, contained, piece_to_bytes

MAX_SHORT_CHARACTERS = 512
"""Maximum length of a text that is encoded with the fastest call. This call holds the global interpreter lock."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SEARCHED_TOKENS = 256
"""Maximum number of preceding tokens in which visible tokens are searched."""
_CONTEXT_TOKENS = 8
"""Number of visible preceding tokens that a decoder gets as context."""
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""The bytes that continue a character in UTF-8."""

LeadingSpaces: TypeAlias = Literal["kept", "one", "all"]
"""What a decoder does with the leading spaces of the first token: keep them, remove one, or remove all."""


class Detokenizer(ABC):
    """An incremental decoder of one sequence of token ids."""

    @abstractmethod
    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that the next `ids` complete. An incomplete character is kept for the next call."""

    @abstractmethod
    def finish(self) -> str:
        """Return the remaining text at the end of the sequence. Incomplete characters become U+FFFD."""


class BytesDetokenizer(Detokenizer):
    """A Detokenizer for vocabularies in which each token is a string of bytes.

    token_bytes: returns the bytes of a token id; b"" for a token without text.
    after:       tokens that precede the sequence.
    stripped:    leading spaces that are removed if no text precedes the sequence.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, after: Sequence[int] = (), stripped: LeadingSpaces = "kept"
    ) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        before = b""
        for id_ in reversed(after):
            before = token_bytes(id_) + before
            if last := before.lstrip(_CONTINUATION_BYTES):
                self._utf8.decode(last)
                break
        self._stripped: LeadingSpaces = "kept" if before else stripped

    def feed(self, ids: Iterable[int]) -> str:
        if self._stripped == "kept":
            return self._utf8.decode(b"".join(map(self._token_bytes, ids)))
        return self._utf8.decode(b"".join(map(self._after_start, ids)))

    def _after_start(self, id_: int) -> bytes:
        """Return the bytes of a token at the start of a text, without the spaces that the decoder removes there."""
        data = self._token_bytes(id_)
        if data and self._stripped != "kept":
            data = data.removeprefix(b" ") if self._stripped == "one" else data.replace(b" ", b"")
            self._stripped = "kept"
        return data

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """A Detokenizer for vocabularies whose decoder needs adjacent tokens (leading spaces, byte fallback).

    decode: returns the text of consecutive token ids.
    after:  tokens that precede the sequence.

    The window starts with tokens whose text has already been returned, because a decoder can strip the first space of
    its input.
    """

    MAX_HELD_TOKENS = 16

    def __init__(self, decode: Callable[[Sequence[int]], str], *, after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # tokens at the start of the window whose text has been returned
        self.feed(after)

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
    """The vocabulary, special tokens and chat template of one model. Thread-safe.

    backend:        the compiled tokenizer.
    bos_id:         token that begins a sequence; None if the model has no such token.
    add_bos:        whether prompts that are encoded with special tokens begin with `bos_id`.
    eos_ids:        all tokens that end an answer, such as end of sequence and end of turn. The first is the model's
                    end-of-sequence token.
    chat_template:  None for a model that only completes text.
    tool_template:  chat template for requests with tools; None if the model has one template for all requests.
    context_length: maximum number of tokens of a sequence that the model supports; None if unknown.
    logits:         number of the model's logits per token, which can be greater than the vocabulary; 0 if unknown.
    generation_config: default sampling parameters, from the model's generation_config.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        add_bos: bool = False,
        eos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        context_length: int | None = None,
        logits: int = 0,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._backend = backend
        self.bos_id = bos_id
        self.adds_bos = bos_id is not None and add_bos
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.context_length = context_length
        self.generation_config: Mapping[str, Any] = generation_config or {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.id_limit = max(self.vocab_size, logits, max(added, default=-1) + 1)
        """Upper bound of the token ids that the model can generate. Ids that are not in the vocabulary have no text."""
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._special_starts = frozenset(added[id_].content[:1] for id_ in self.special_ids)
        self._is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._stripped = _leading_spaces(backend)
        # Tokens that are matched in normalised text contain the vocabulary's mark for a space.
        self._bytes = {
            id_: (token.content.replace(WORD_START, " ") if token.normalized else token.content).encode()
            for id_, token in added.items()
        }

    def to_json(self) -> str:
        """Return the contents of tokenizer.json."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of `text`. A special token's name in the text, such as `<s>`, becomes this token.

        As in the tokenizers library, bytes for which the vocabulary has no token are left out.

        add_special: whether to add the tokens that the model expects around a prompt, such as the begin-of-sequence
                     token.

        Raises ValueError if the text is not valid Unicode (a lone surrogate), or if the library cannot encode it.
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
        """An object that returns a lower bound of the number of tokens of a text."""
        return TokenBound.of(self._backend)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation. Raises ChatTemplateError; see ChatTemplate.render()."""
        template = self.template_for(tools)
        if template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        return template.render(messages, tools=tools, variables=variables)

    def template_for(self, tools: Sequence[Any] | None) -> ChatTemplate | None:
        """Return the chat template for a request with these tools; None if the model only completes text."""
        return self.tool_template if tools and self.tool_template is not None else self.chat_template

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation.

        No special tokens are added, because the template writes all of them.
        """
        return self.encode(self.render_chat(messages, tools=tools, variables=variables), add_special=False)

    def decode(self, ids: Iterable[int], *, after: Sequence[int] = (), skip_special: bool = True) -> str:
        """Return the text of `ids`.

        Bytes that are not UTF-8 become U+FFFD, and ids outside the vocabulary have no text.

        after: tokens that precede `ids`; see detokenizer().
        """
        detokenizer = self.detokenizer(after=after, skip_special=skip_special)
        return detokenizer.feed(ids) + detokenizer.finish()

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of `text`. This is encode() under the name that Megatron-Core uses."""
        return self.encode(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. This is decode() under the name that Megatron-Core uses."""
        return self.decode(ids)

    @property
    def eod(self) -> int | None:
        """The end-of-sequence token of the model, under the name that Megatron-Core uses."""
        return next(iter(self.eos_ids), None)

    @property
    def bos(self) -> int | None:
        """The begin-of-sequence token, under the name that Megatron-Core uses."""
        return self.bos_id

    def answer_text(
        self, ids: Sequence[int], *, after: Sequence[int] = (), stop_token: int | None = None, keeps_end: bool = False
    ) -> str:
        """Return the text of an answer. The tokens that end the answer are left out unless `keeps_end` is True.

        after:      tokens of the prompt; see detokenizer().
        stop_token: last token of the answer, if this token ended the answer.
        """
        end = len(ids) if keeps_end or stop_token is None else len(ids) - 1
        while not keeps_end and end and ids[end - 1] in self.eos_ids:
            end -= 1
        visible = () if stop_token is None or not keeps_end else (stop_token,)
        detokenizer = self.detokenizer(after=after, visible=visible)
        return detokenizer.feed(ids[:end]) + detokenizer.finish()

    def detokenizer(
        self, *, after: Sequence[int] = (), skip_special: bool = True, visible: Collection[int] = ()
    ) -> Detokenizer:
        """Return a new incremental decoder for one sequence.

        after:   tokens that precede the sequence, such as the prompt of an answer. The text of `after`, followed by the
                 decoder's output, is the text of all tokens together. A character that begins in `after` is returned
                 whole.
        visible: special tokens that are returned as text.
        """
        hidden = self._hidden(skip_special=skip_special, visible=visible)
        if self._stripped is not None:
            token_bytes, last = self.token_bytes, after[-_SEARCHED_TOKENS:]
            if hidden:
                return BytesDetokenizer(
                    lambda id_: b"" if id_ in hidden else token_bytes(id_), after=last, stripped=self._stripped
                )
            return BytesDetokenizer(token_bytes, after=last, stripped=self._stripped)
        return WindowDetokenizer(
            lambda ids: self._backend.decode([id_ for id_ in ids if id_ not in hidden], skip_special_tokens=False),
            after=context_of(after, hidden),
        )

    def _hidden(self, *, skip_special: bool, visible: Collection[int]) -> frozenset[int]:
        if not skip_special:
            return frozenset()
        return self.special_ids.difference(visible) if visible else self.special_ids

    def special_tokens_in(self, texts: Iterable[str]) -> dict[int, str]:
        """Return the special tokens that occur in one or more of `texts`, as a map from token id to text."""
        special_tokens: dict[int, str] = {}
        for text in texts:
            if not self._special_starts.isdisjoint(text):
                with contextlib.suppress(ValueError):  # text that is not valid Unicode has no tokens
                    ids = self.special_ids.intersection(self.encode(text, add_special=False))
                    special_tokens.update((id_, self.token_bytes(id_).decode()) for id_ in ids)
        return special_tokens

    def token_id(self, text: str) -> int | None:
        """Return the id of the token whose vocabulary entry is `text`. Return None if there is no such token."""
        id_: int | None = self._backend.token_to_id(text)
        return id_

    def token_bytes(self, id_: int) -> bytes:
        """Return the bytes of a token, which can be a special token. Returns b"" for an id outside the vocabulary."""
        known = self._bytes.get(id_)
        if known is None:
            piece = self._backend.id_to_token(id_) if 0 <= id_ < self.id_limit else None
            known = self._bytes[id_] = b"" if piece is None else self._piece_bytes(piece)
        return known

    def _piece_bytes(self, piece: str) -> bytes:
        """Return the bytes of a vocabulary entry."""
        if self._is_byte_level:
            return piece_to_bytes(piece)
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(WORD_START, " ").encode()


def context_of(after: Sequence[int], hidden: Collection[int]) -> list[int]:
    """Return the last visible tokens of `after`, the tokens before an answer: at most _CONTEXT_TOKENS tokens.

    hidden: tokens that are not visible.
    """
    visible = (id_ for id_ in reversed(after[-_SEARCHED_TOKENS:]) if id_ not in hidden)
    return list(itertools.islice(visible, _CONTEXT_TOKENS))[::-1]


def _leading_spaces(backend: tokenizers.Tokenizer) -> LeadingSpaces | None:
    """Return how the decoder treats leading spaces; None if the tokens of the vocabulary are not strings of bytes."""
    if backend.decoder is None:
        return None
    if isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
        return "kept"
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    stripped: LeadingSpaces = "kept"
    kinds: list[str] = []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "} if mark == WORD_START:
                pass
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Metaspace", "replacement": str(mark)} if mark == WORD_START and "Fuse" not in kinds:
                stripped = "kept" if step.get("prepend_scheme") == "never" else "all"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if kinds[-1:] == ["Fuse"]:
                stripped = "one"
            case _:
                return None
        kinds.append(step["type"])
    marks_spaces = "Replace" in kinds or "Metaspace" in kinds
    has_byte_pieces = backend.token_to_id("<0x0A>") is not None
    return stripped if marks_spaces and has_byte_pieces == ("ByteFallback" in kinds) else None
