"""Token ids to text, one step at a time, for streams.

Byte-level vocabularies map every token to bytes, so a stream is an incremental UTF-8 decode: linear, and a character is
given out only when its last byte is there. Other vocabularies decode a short sliding window of tokens.
Concatenated, the pieces equal `Tokenizer.decode` of all ids.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(ABC):
    """Text of one growing sequence of token ids."""

    @abstractmethod
    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; an unfinished character is kept back."""

    @abstractmethod
    def finish(self) -> str:
        """Return what was kept back; bytes that never became a character read as U+FFFD."""


class ByteLevelDetokenizer(Detokenizer):
    """For vocabularies in which each token is a string of bytes.

    token_bytes: bytes of a token id, empty for one that has no text.
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

    decode: text of a run of token ids.
    The window starts at tokens whose text is already out, because a decoder may strip the first space of what it sees.
    """

    MAX_HELD_TOKENS = 16

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # tokens at the start of the window whose text is out

    def feed(self, ids: Iterable[int]) -> str:
        return "".join(self._step(token) for token in ids)

    def _step(self, token: int) -> str:
        self._window.append(token)
        fresh = self._fresh()
        held = len(self._window) - self._shown
        if fresh.endswith(REPLACEMENT) and held < self.MAX_HELD_TOKENS:
            return ""
        if not fresh and held < self.MAX_HELD_TOKENS:
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
