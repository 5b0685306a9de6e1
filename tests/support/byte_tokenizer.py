"""A replacement of a model's `Tokenizer` whose tokens 0 to 255 are the bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megatron_runtime.tokenization.tokenizer import BytesDetokenizer, LeadingSpaces


class ByteTokenizer:
    """special:  texts of the special tokens, which are numbered from 256.
    stripped: what its decoder removes at the beginning of a sequence.
    """

    def __init__(self, *special: str, stripped: LeadingSpaces = "kept") -> None:
        self.special = dict(enumerate(special, start=256))
        self._stripped: LeadingSpaces = stripped

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text without special tokens."""
        return list(text.encode())

    def token_bytes(self, id_: int) -> bytes:
        return bytes([id_]) if id_ < 256 else self.special[id_].encode()

    def special_tokens_in(self, texts: Iterable[str]) -> dict[int, str]:
        listed = list(texts)
        return {id_: text for id_, text in self.special.items() if any(text in each for each in listed)}

    def detokenizer(self, *, after: Sequence[int] = (), visible: Collection[int] = ()) -> BytesDetokenizer:
        hidden = self.special.keys() - set(visible)
        return BytesDetokenizer(
            lambda id_: b"" if id_ in hidden else self.token_bytes(id_), after=after, stripped=self._stripped
        )

    def answer_text(
        self, ids: Sequence[int], *, after: Sequence[int] = (), stop_token: int | None = None, keeps_end: bool = False
    ) -> str:
        return self.decode(ids if stop_token is None or keeps_end else ids[:-1], after=after)

    def decode(self, ids: Iterable[int], *, after: Sequence[int] = ()) -> str:
        detokenizer = self.detokenizer(after=after)
        return detokenizer.feed(ids) + detokenizer.finish()
