"""A `Tokenizer` from the metadata of a GGUF file: byte-level BPE, or SentencePiece.

SentencePiece (Kudo and Richardson 2018, arXiv:1808.06226) joins the neighbours whose union has the highest score first.
That is byte-pair encoding with the merges in the order of the scores. Text that no piece covers becomes byte tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from megatron_runtime.checkpoints.gguf_metadata import read_gguf_header
from megatron_runtime.tokenization.chat_template import chat_template_of_model
from megatron_runtime.tokenization.tokenizer import Tokenizer
from megatron_runtime.tokenization.vocabulary import WORD_START, contained

_PREFIX = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SENTENCEPIECE = "llama"
"""The name of SentencePiece in GGUF files."""

MAX_PIECE_CHARACTERS = 512
"""Finding the merges of a piece takes quadratic time. The longest pieces of known models have some 160 characters."""

END_OF_TURN_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
    }
)
"""Control tokens that end an answer, whatever the metadata calls them: a file can name only one of them."""

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"

PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (_DIGIT, _GPT2_WORDS),
    "starcoder": (_DIGIT, _GPT2_WORDS),
    "refact": (_DIGIT, _GPT2_WORDS),
    "llama-bpe": (_LLAMA3_WORDS,),
    "qwen2": (_LLAMA3_WORDS.replace(r"\p{N}{1,3}", _DIGIT),),
}
"""The patterns by which each `tokenizer.ggml.pre` splits text into words before the merges apply, one after another."""


class UnsupportedTokenizerError(ValueError):
    """The file's tokenizer is of an unsupported kind; the message names it and the remedy."""


def tokenizer_from_gguf(path: Path, *, renders_chat: bool = True) -> Tokenizer:
    """Build the tokenizer in the metadata of `path`, with its chat template or without.

    Raises ModelFileError if the file cannot be read, ValueError for an invalid field, and UnsupportedTokenizerError if
    its vocabulary is neither byte-level BPE nor SentencePiece, or if its pre-tokenizer is unknown.
    """
    metadata = read_gguf_header(path, vocabulary=True)[0]
    _check(metadata, path)
    pieces: list[str] = metadata.get(f"{_PREFIX}tokens", [])
    backend = _backend(metadata, pieces, path)
    special = {
        f"{name}_token": pieces[id_]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (id_ := _token_id(metadata, key, pieces)) is not None
    }
    template = metadata.get("tokenizer.chat_template") if renders_chat else None
    return Tokenizer(
        backend,
        bos_id=_token_id(metadata, "bos", pieces),
        # SentencePiece models add it unless the metadata says otherwise.
        add_bos=bool(metadata.get(f"{_PREFIX}add_bos_token", metadata.get(f"{_PREFIX}model") == _SENTENCEPIECE)),
        eos_ids=_end_ids(metadata, pieces),
        chat_template=chat_template_of_model(template, special=special) if template else None,
        context_length=metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    )


def _check(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError for metadata of the wrong type, or pieces that are too long."""
    architecture = metadata.get("general.architecture")
    for key, kind in (
        *((f"{_PREFIX}{name}", str) for name in ("model", "pre")),
        *((f"{_PREFIX}{name}_token_id", int) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")),
        ("tokenizer.chat_template", str),
        (f"{architecture}.context_length", int),
    ):
        if (value := metadata.get(key)) is not None and type(value) is not kind:
            raise ValueError(f"{path}: {key} is {value!r:.80}: want a value of type {kind.__name__}")
    for name, item_kind in (("tokens", str), ("merges", str), ("token_type", int), ("scores", float)):
        items = metadata.get(f"{_PREFIX}{name}", [])
        wrong = items if not isinstance(items, list) else [item for item in items if type(item) is not item_kind]
        if wrong or not isinstance(items, list):
            raise ValueError(f"{path}: {_PREFIX}{name} has {wrong!r:.80}: want a list of {item_kind.__name__}")
    pieces, scores = metadata.get(f"{_PREFIX}tokens", []), metadata.get(f"{_PREFIX}scores")
    longest = max(map(len, pieces), default=0)
    if longest > MAX_PIECE_CHARACTERS:
        raise ValueError(f"{path}: {_PREFIX}tokens has one of {longest} characters: at most {MAX_PIECE_CHARACTERS}")
    if metadata.get(f"{_PREFIX}model") == _SENTENCEPIECE and len(scores or ()) < len(pieces):
        raise ValueError(f"{path}: {_PREFIX}scores has {len(scores or ())} numbers for {len(pieces)} tokens")


def _backend(metadata: Mapping[str, Any], pieces: list[str], path: Path) -> tokenizers.Tokenizer:
    model, pre = metadata.get(f"{_PREFIX}model"), metadata.get(f"{_PREFIX}pre", "gpt-2")
    if model != _SENTENCEPIECE and (model != "gpt2" or pre not in PRE_TOKENIZERS):
        raise UnsupportedTokenizerError(
            f"{path} has tokenizer model {model!r} with pre-tokenizer {pre!r}: supported are {_SENTENCEPIECE!r}, and "
            f"'gpt2' with {', '.join(sorted(PRE_TOKENIZERS))}; use the model's Hugging Face directory, which has a "
            "tokenizer.json"
        )
    kinds = metadata.get(f"{_PREFIX}token_type", [])
    with contained(f"{path} has no readable tokenizer"):
        build = _sentencepiece_backend if model == _SENTENCEPIECE else _byte_level_backend
        backend = build(metadata, pieces)
        backend.add_special_tokens(_added(pieces, kinds, kind=_CONTROL))
        # Runs of spaces are among them, and SentencePiece looks for them after spaces have become WORD_START.
        backend.add_tokens(_added(pieces, kinds, kind=_USER_DEFINED, normalized=model == _SENTENCEPIECE))
    return backend


def _byte_level_backend(metadata: Mapping[str, Any], pieces: list[str]) -> tokenizers.Tokenizer:
    vocabulary = {piece: id_ for id_, piece in enumerate(pieces)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(f"{_PREFIX}merges", [])]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in PRE_TOKENIZERS[metadata.get(f"{_PREFIX}pre", "gpt-2")]
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(metadata: Mapping[str, Any], pieces: list[str]) -> tokenizers.Tokenizer:
    unknown = _token_id(metadata, "unknown", pieces)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: id_ for id_, piece in enumerate(pieces)},
            merges=_sentencepiece_merges(metadata, pieces),
            unk_token=None if unknown is None else pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", WORD_START)]
    back = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(f"{_PREFIX}add_space_prefix", True):  # text is encoded as if it began with a space
        spaces.insert(0, normalizers.Prepend(WORD_START))
        back.append(decoders.Strip(content=" ", left=1))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(back)
    return backend


def _sentencepiece_merges(metadata: Mapping[str, Any], pieces: list[str]) -> list[tuple[str, str]]:
    """Return every way to join a normal piece from two others, pieces of the highest score first."""
    scores: list[float] = metadata.get(f"{_PREFIX}scores", [])
    normal = [id_ for id_, kind in enumerate(metadata.get(f"{_PREFIX}token_type", [])) if kind == _NORMAL]
    known = {pieces[id_] for id_ in normal}
    return [
        (left, right)
        for id_ in sorted(normal, key=scores.__getitem__, reverse=True)
        if (piece := pieces[id_])
        for at in range(1, len(piece))
        if (left := piece[:at]) in known and (right := piece[at:]) in known
    ]


def _added(pieces: list[str], kinds: list[int], *, kind: int, normalized: bool = False) -> list[AddedToken]:
    return [
        AddedToken(piece, normalized=normalized, special=kind == _CONTROL)
        for piece, own in zip(pieces, kinds, strict=False)
        if own == kind and piece
    ]


def _end_ids(metadata: Mapping[str, Any], pieces: list[str]) -> list[int]:
    named = [_token_id(metadata, key, pieces) for key in ("eos", "eot", "eom")]
    kinds = metadata.get(f"{_PREFIX}token_type", [])
    by_text = [
        id_
        for id_, (piece, kind) in enumerate(zip(pieces, kinds, strict=False))
        if kind == _CONTROL and piece in END_OF_TURN_TEXTS
    ]
    return list(dict.fromkeys(id_ for id_ in [*named, *by_text] if id_ is not None))


def _token_id(metadata: Mapping[str, Any], name: str, pieces: list[str]) -> int | None:
    id_ = metadata.get(f"{_PREFIX}{name}_token_id")
    return id_ if id_ is not None and 0 <= id_ < len(pieces) else None
