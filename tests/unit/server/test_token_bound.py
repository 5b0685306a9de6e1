"""The lower bound of the number of tokens holds for every vocabulary, and is tight enough to reject megabytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import size
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from megatron_runtime.tokenization import Tokenizer
from megatron_runtime.tokenization.vocabulary import BYTE_OF_CHARACTER, UNKNOWN_BYTES_PER_TOKEN, TokenBound

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
PIECES = ["a", "b", "aa", "aaaa", "ab", "Ġ", "ĠĠ", "ĠĠĠĠ", "e", "é", "Ċ"]
MERGES = [("a", "a"), ("aa", "aa"), ("a", "b"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
SP_PIECES = [SPACE, SPACE * 2, SPACE * 4, "a", "b", "aa", "aaaa", "é", "e", "\N{COMBINING ACUTE ACCENT}", "ab"]
SP_MERGES = [(SPACE, SPACE), (SPACE * 2, SPACE * 2), ("a", "a"), ("aa", "aa"), ("a", "b")]


def byte_level(pieces: list[str], normalizer: object = None) -> tokenizers.Tokenizer:
    vocabulary = {piece: id_ for id_, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\S+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def sentence_piece(*, byte_fallback: bool) -> tokenizers.Tokenizer:
    pieces = ["<unk>", *SP_PIECES, *([f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else [])]
    vocabulary = {piece: id_ for id_, piece in enumerate(pieces)}
    model = models.BPE(
        vocab=vocabulary, merges=SP_MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return backend


def with_greedy_token() -> tokenizers.Tokenizer:
    """Return a vocabulary with a special token that includes all the white space beside it."""
    backend = byte_level([*PIECES, *BYTE_OF_CHARACTER])
    backend.add_special_tokens([AddedToken("<m>", lstrip=True, rstrip=True)])
    return backend


def of_words() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


VOCABULARIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": lambda: byte_level([*PIECES, *BYTE_OF_CHARACTER]),
    "bytes left out": lambda: byte_level(PIECES),
    "NFC": lambda: byte_level([*PIECES, *BYTE_OF_CHARACTER], normalizers.NFC()),
    "NFKC": lambda: byte_level([*PIECES, *BYTE_OF_CHARACTER], normalizers.NFKC()),
    "white space taken along": with_greedy_token,
    "SentencePiece": lambda: sentence_piece(byte_fallback=True),
    "SentencePiece without bytes": lambda: sentence_piece(byte_fallback=False),
}
TEXTS = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from([" ", "a", "ab", "\n", "e\N{COMBINING ACUTE ACCENT}", "<m>", SPACE, "Ａ", "Ω", "한"]),
            st.characters(codec="utf-8"),
        ),
        st.integers(1, 40),
    ).map(lambda pair: pair[0] * pair[1]),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_no_text_has_fewer_tokens_than_the_bound(name: str) -> None:
    backend = VOCABULARIES[name]()
    bound = TokenBound.of(backend)

    @settings(max_examples=size(25, soak=20_000))
    @given(TEXTS)
    def check(text: str) -> None:
        assert bound.min_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)

    check()


def test_the_bound_of_the_built_in_model_holds_and_is_tight(tokenizer: Tokenizer) -> None:
    @settings(max_examples=size(25, soak=20_000))
    @given(TEXTS)
    def check(text: str) -> None:
        assert tokenizer.bound.min_tokens(text) <= len(tokenizer.encode(text, add_special=False))

    check()
    for text in ("1" * 9000, "The river runs to the sea. " * 10_000, " " * 800_000):
        assert tokenizer.bound.min_tokens(text) > 8192, text[:10]


def test_vocabularies_without_a_provable_bound_have_a_loose_one() -> None:
    unigram = tokenizers.Tokenizer(models.Unigram([("a", -1.0)], unk_id=0))
    assert len(unigram.encode("aba" * 9).ids) == 1
    for backend in (of_words(), unigram):
        assert TokenBound.of(backend).min_tokens("a" * UNKNOWN_BYTES_PER_TOKEN * 10) == 10
    stripped = byte_level([*PIECES, *BYTE_OF_CHARACTER], normalizers.Strip())
    assert TokenBound.of(stripped).min_tokens("ab" * UNKNOWN_BYTES_PER_TOKEN) == 2


def test_text_that_is_not_unicode_is_left_to_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.bound.min_tokens("\ud800" * 100_000) == 0
