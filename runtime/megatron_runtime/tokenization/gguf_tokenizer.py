"""A `Tokenizer` from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from megatron_runtime.checkpoints.gguf_metadata import read_gguf_metadata
from megatron_runtime.tokenization.backend import contained
from megatron_runtime.tokenization.chat_template import chat_template_of_model
from megatron_runtime.tokenization.sentencepiece import sentencepiece_backend
from megatron_runtime.tokenization.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_SENTENCEPIECE = "llama"
"""What GGUF files call it."""

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
"""Control tokens that end an answer, whatever the metadata calls them: one file can name only one of them."""

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


class UnsupportedTokenizerError(ValueError):
    """The file's tokenizer is of a kind that is not built here; the message says which and what to do."""


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _words(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2_words,
    "smollm": _single_digits_then_gpt2_words,
    "starcoder": _single_digits_then_gpt2_words,
    "refact": _single_digits_then_gpt2_words,
    "llama-bpe": _words(_LLAMA3_WORDS),
    "qwen2": _words(_QWEN2_WORDS),
}
"""How each `tokenizer.ggml.pre` cuts text into words before the merges apply."""


def tokenizer_from_gguf(path: Path, *, renders_chat: bool = True) -> Tokenizer:
    """Build the tokenizer described by the metadata of `path`, with its chat template or without.

    Raises GGUFFormatError when the file cannot be read and UnsupportedTokenizerError when its vocabulary is neither
    byte-level BPE nor SentencePiece, or is cut into words in an unknown way.
    """
    metadata = read_gguf_metadata(path)
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
        # A SentencePiece model adds it unless told otherwise.
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
        if model == _SENTENCEPIECE:
            unknown = _token_id(metadata, "unknown", pieces)
            backend = sentencepiece_backend(
                pieces,
                metadata.get(f"{_PREFIX}scores", []),
                kinds,
                unknown=pieces[unknown] if unknown is not None else None,
                adds_space=metadata.get(f"{_PREFIX}add_space_prefix", True),
            )
        else:
            backend = _byte_level_backend(metadata, pieces, pre)
        backend.add_special_tokens(_added(pieces, kinds, kind=_CONTROL))
        # Runs of spaces are among them, and SentencePiece looks for them when spaces are written its own way already.
        backend.add_tokens(_added(pieces, kinds, kind=_USER_DEFINED, normalized=model == _SENTENCEPIECE))
    return backend


def _byte_level_backend(metadata: Mapping[str, Any], pieces: list[str], pre: str) -> tokenizers.Tokenizer:
    vocabulary = {piece: id_ for id_, piece in enumerate(pieces)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(f"{_PREFIX}merges", [])]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


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
