"""Helpers for the compiled `tokenizers` library: error handling, byte alphabet, and a lower bound of token counts.

Every byte of a text is part of some token, and each byte of a token of n bytes accounts for 1/n of the token. So a byte
value accounts for 1/n of a token or more, where n is the length of the longest token that contains it. The sum over the
bytes of a text is a lower bound of the number of tokens. With this bound, a text that is too long for a model is
rejected before it is tokenized. The bound takes milliseconds for megabytes of text. The tokenizer takes seconds, and up
to 300 bytes of memory for each byte of text.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import tokenizers

from megatron_runtime.protocol import strict_json as json

WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character that stands for a space in SentencePiece vocabularies."""

UNKNOWN_BYTES_PER_TOKEN = 256
"""Assumed number of bytes per token for vocabularies without a provable bound. Real text has 3 to 6 bytes per token.

In such a vocabulary, the normalizer drops text, or the model makes one token of a run of unknown text.
"""

_COMPOSITION_SHRINK = 8
"""Factor by which Unicode normalization can shorten a text in UTF-8.

The maximum is 4, which is doubled here for safety.
"""

_Form: TypeAlias = Literal["NFC", "NFD", "NFKC", "NFKD"]
_FORMS: frozenset[str] = frozenset(get_args(_Form))
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split", "Sequence"})
_SPACES = frozenset(b"\t\n\v\f\r\x1c\x1d\x1e\x1f ")
_CHUNK = 1 << 16


@contextmanager
def contained(action: str) -> Iterator[None]:
    """Return a context manager that converts every error of the tokenizers library to a ValueError.

    It also converts the library's panics, which are not subclasses of Exception.

    action: start of the message, such as "the text cannot be tokenized".
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{action}: {error}") from error


def load_vocabulary(content: bytes) -> tokenizers.Tokenizer:
    """Load a tokenizer.json without its padding and truncation. Raises the errors of the library.

    content: content of a file that has passed the trial; see tokenizer_trial.py.
    """
    backend = tokenizers.Tokenizer.from_buffer(content)
    backend.no_padding()
    backend.no_truncation()
    return backend


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _alphabet()
"""The alphabet of byte-level BPE, which has a printable character for each byte (GPT-2, Radford et al. 2019)."""


def piece_to_bytes(piece: str) -> bytes:
    """Return the bytes of an entry of a byte-level vocabulary.

    An entry with characters outside the byte-level alphabet stands for its own UTF-8 bytes.
    """
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()


@dataclass(frozen=True, slots=True)
class TokenBound:
    """A lower bound of the number of tokens of a text.

    weights: float64 [256], the minimum fraction of a token that one byte of a text needs, by byte value; 0 for bytes
             that the tokenizer can drop.
    forms:   Unicode normal forms to which the tokenizer first converts text.
    longest: upper bound of the length of a token, in bytes.
    """

    weights: np.ndarray[Any, np.dtype[np.float64]]
    forms: tuple[_Form, ...]
    longest: int

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenBound:
        """Compute how many bytes a token of this tokenizer can stand for at most.

        If that cannot be proved from the vocabulary, the bound is UNKNOWN_BYTES_PER_TOKEN.
        """
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
        added = list(backend.get_added_tokens_decoder().values())
        longest = max((len(piece.encode()) for piece in (*vocabulary, *(token.content for token in added))), default=1)
        normalizers = list(_parts(backend.normalizer, "normalizers"))
        pre_tokenizers = list(_parts(backend.pre_tokenizer, "pretokenizers"))
        if not (_keep_all_text(normalizers, pre_tokenizers) and _is_of_pieces(backend.model)):
            return cls(np.full(256, 1 / max(longest, UNKNOWN_BYTES_PER_TOKEN)), (), longest)
        forms: tuple[_Form, ...] = tuple(part["type"] for part in normalizers if part["type"] in _FORMS)
        is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
        sizes = _sizes(map(piece_to_bytes if is_byte_level else _marked, vocabulary))
        for token in added:
            for written in {token.content, *(unicodedata.normalize(form, token.content) for form in forms)}:
                size = len(_marked(written))
                for byte in {*written.encode(), *_marked(written)}:
                    sizes[byte] = max(sizes[byte], size)
        sizes[ord(" ")] = max(sizes[ord(" ")], *(sizes[byte] for byte in WORD_START.encode()))
        kept = _kept_bytes(backend.model, vocabulary, is_byte_level=is_byte_level)
        if any(token.lstrip or token.rstrip for token in added):
            kept -= _SPACES | frozenset(range(128, 256))  # such tokens may strip adjacent white space
        weights = np.array([1 / sizes[byte] if byte in kept else 0.0 for byte in range(256)])
        return cls(weights, forms, longest)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`; 0 for text that is not valid Unicode."""
        try:
            data = np.frombuffer(text.encode(), np.uint8)
        except UnicodeError:
            return 0
        counts = np.zeros(256)
        for start in range(0, len(data), _CHUNK):
            counts += np.bincount(data[start : start + _CHUNK], minlength=256)
        if text.isascii() or all(unicodedata.is_normalized(form, text) for form in self.forms):
            return math.ceil(float(counts @ self.weights) - 1e-6)
        if not self.weights.all():
            return 0
        return math.ceil(len(data) / (_COMPOSITION_SHRINK * self.longest) - 1e-6)


def _parts(part: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, in the order of tokenizer.json.

    A Sequence lists its steps in the field `key`.
    """
    if part is None:
        return
    pending = [json.loads(part.__getstate__())]
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step[key]
        else:
            yield step


def _keep_all_text(normalizers: Sequence[dict[str, Any]], pre_tokenizers: Sequence[dict[str, Any]]) -> bool:
    """Return whether each character of a text reaches the model unchanged, normalised, or as the mark for a space."""
    marks_spaces = False
    for part in normalizers:
        match part:
            case {"type": "Replace", "pattern": {"String": " "}, "content": str(mark)} if mark == WORD_START:
                marks_spaces = True
            case {"type": "Prepend", "prepend": str(mark)} if mark == WORD_START:
                marks_spaces = True
            case {"type": str(form)} if form in _FORMS:
                pass
            case _:
                return False
    return all(
        part["type"] in _KEEPING_PRE_TOKENIZERS
        and part.get("behavior") != "Removed"
        and part.get("replacement", WORD_START) == WORD_START
        and not (marks_spaces and part["type"] == "ByteLevel")
        for part in pre_tokenizers
    )


def _is_of_pieces(model: Any) -> bool:
    """Return whether the entries of the vocabulary are plain text.

    Plain text has no marks for the end or the inside of a word.
    """
    marks = (getattr(model, name, None) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    return type(model).__name__ == "BPE" and not any(marks)


def _marked(piece: str) -> bytes:
    return piece.replace(" ", WORD_START).encode()


def _sizes(pieces: Iterable[bytes]) -> list[int]:
    """Return, for each byte value, the length of the longest piece that contains it, or 1 if no piece contains it."""
    sizes = [1] * 256
    known: set[int] = set()
    for piece in sorted(pieces, key=len, reverse=True):
        if not known.issuperset(piece):
            for byte in set(piece) - known:
                sizes[byte] = len(piece)
            known.update(piece)
    return sizes


def _kept_bytes(model: Any, vocabulary: Mapping[str, int], *, is_byte_level: bool) -> set[int]:
    """Return the byte values that the tokenizer never drops.

    The tokenizer can drop other bytes of a text, or replace several consecutive bytes by one token.
    """
    if is_byte_level:
        return {byte for character, byte in BYTE_OF_CHARACTER.items() if character in vocabulary}
    if getattr(model, "byte_fallback", False) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return set(range(256))
    kept = {byte for byte in range(128) if chr(byte) in vocabulary} - {ord(" ")}
    return kept | {ord(" ")} if WORD_START in vocabulary else kept
