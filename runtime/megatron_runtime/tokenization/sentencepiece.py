"""A SentencePiece vocabulary (Kudo and Richardson 2018, arXiv:1808.06226) as the compiled tokenizer runs it.

The pieces and their scores say which neighbours are joined first: those whose union has the highest score. That is
byte-pair encoding with the merges in the order of the scores. What no piece covers is spelled in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""What the vocabulary writes for a space."""
NORMAL = 1


def sentencepiece_backend(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    unknown: str | None,
    adds_space: bool,
) -> tokenizers.Tokenizer:
    """The tokenizer without its special tokens.

    kinds:      of each piece, as GGUF numbers them; only normal ones are joined from others.
    unknown:    the piece for what has no bytes either.
    adds_space: text is encoded as if it began with a space.
    """
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: id_ for id_, piece in enumerate(pieces)},
            merges=_merges(pieces, scores, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", WORD_START)]
    back = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        spaces.insert(0, normalizers.Prepend(WORD_START))
        back.append(decoders.Strip(content=" ", left=1))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(back)
    return backend


def _merges(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best pieces first."""
    normal = [id_ for id_, kind in enumerate(kinds) if kind == NORMAL]
    known = {pieces[id_] for id_ in normal}
    return [
        (left, right)
        for id_ in sorted(normal, key=scores.__getitem__, reverse=True)
        if (piece := pieces[id_])
        for at in range(1, len(piece))
        if (left := piece[:at]) in known and (right := piece[at:]) in known
    ]
