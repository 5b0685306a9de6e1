"""Small vocabularies of each kind, in the format of tokenizer.json: words, and byte tokens for other characters."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]
_WORDS = ["Paris", "is", "the", "capital", "of", "France", "a", "cat", ".", ",", "!", "\n", "naïve", "東京"]
_TO_SPACES = decoders.Replace("▁", " ")
_METASPACE = decoders.Metaspace(prepend_scheme="first")

DECODERS: dict[str, decoders.Decoder] = {
    "strips one space": decoders.Sequence(
        [_TO_SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    ),
    "keeps spaces": decoders.Sequence([_TO_SPACES, decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), _METASPACE, decoders.Fuse()]),
    "by window": decoders.Sequence(
        [_TO_SPACES, decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0), decoders.Strip("\N{SNOWMAN}", 1, 0)]
    ),
}
"""Decoders of SentencePiece vocabularies. The last one is none that this project knows."""


def sentencepiece_like(decoder: str) -> tokenizers.Tokenizer:
    """Return a vocabulary as Llama 2 and Mistral have it, with one of DECODERS."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if decoder != "by window" else []
    letters = sorted({character for word in _WORDS for character in word} | set("▁bcdefghijklmnopqrstuvwxyz"))
    pieces = [*SPECIAL, *bytes_, *dict.fromkeys([*letters, *_WORDS, *(f"▁{word}" for word in _WORDS), "▁▁", "▁▁▁"])]
    vocabulary = {piece: id_ for id_, piece in enumerate(pieces)}
    merges = [
        (piece[:at], piece[at:])
        for piece in sorted(pieces[len(SPECIAL) + len(bytes_) :], key=len)
        for at in range(1, len(piece))
        if piece[:at] in vocabulary and piece[at:] in vocabulary
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=bool(bytes_))
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if decoder == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        if decoder != "keeps spaces":
            spaces.insert(0, normalizers.Prepend("▁"))
        backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = DECODERS[decoder]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return backend
