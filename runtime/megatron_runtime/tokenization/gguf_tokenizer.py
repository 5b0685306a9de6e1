"""A `Tokenizer` from the metadata of a GGUF file, with byte-level BPE or SentencePiece.

SentencePiece (Kudo and Richardson 2018, arXiv:1808.06226) repeatedly joins the two adjacent pieces whose concatenation
has the highest score. The result equals byte-pair encoding with the merges in the order of the scores. Text without a
piece in the vocabulary becomes byte tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from megatron_runtime.checkpoints.gguf_metadata import read_gguf_header
from megatron_runtime.models.config_fields import Fields, longest_sequence, rope_of_gguf
from megatron_runtime.tokenization.chat_template import DEFAULT_TEMPLATE, TOOL_TEMPLATE, ChatTemplate
from megatron_runtime.tokenization.tokenizer import Tokenizer
from megatron_runtime.tokenization.vocabulary import WORD_START, contained
from megatron_runtime.tokenization.word_rules import DEFAULT_RULE, WORD_RULES

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SAMPLING_PREFIX = "general.sampling."
_SAMPLING = {
    **{name: name for name in ("top_k", "top_p", "min_p")},
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of default sampling parameters in the metadata, by their names in generation_config.json."""
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SENTENCEPIECE = "llama"
"""The value of `tokenizer.ggml.model` for SentencePiece."""
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Token ids that llama.cpp assumes if a file does not set them."""

MAX_PIECE_CHARACTERS = 512
"""Maximum length of a piece, because its merges take quadratic time.

The longest pieces of known models have 160 characters.
"""

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
"""Control tokens that end an answer in any model. They are listed because a file's metadata can name only one token."""


class _TokenizerFields:
    """The tokenizer fields in the metadata of a GGUF file.

    Raises ModelFileError if the file cannot be read, and ValueError for a field of the wrong type or length.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = read_gguf_header(path, vocabulary=True)[0]
        self.model = self._value(f"{_PREFIX}model", str)
        self.pre = self._value(f"{_PREFIX}pre", str, default=DEFAULT_RULE)
        self.is_sentencepiece = self.model == _SENTENCEPIECE
        self.pieces = [piece or f"[EMPTY_{id_}]" for id_, piece in enumerate(self._list("tokens", str))]
        self.kinds = self._list("token_type", int) or [_NORMAL] * len(self.pieces)
        self.merges = self._list("merges", str)
        # Without scores, the pieces are in the order of descending scores.
        self.scores = self._list("scores", float, int) or [-id_ for id_ in range(len(self.pieces))]
        self.add_space_prefix = bool(self._metadata.get(f"{_PREFIX}add_space_prefix", True))
        rule = WORD_RULES.get(self.pre)
        adds_bos = self.is_sentencepiece or (rule is not None and rule.adds_bos)
        self.add_bos = bool(self._metadata.get(f"{_PREFIX}add_bos_token", adds_bos))
        self.templates = {
            DEFAULT_TEMPLATE: self._value(_TEMPLATE, str),
            TOOL_TEMPLATE: self._value(f"{_TEMPLATE}.{TOOL_TEMPLATE}", str),
        }
        self.context_length = self._context_length()
        self.generation_config = {
            name: self._metadata.get(f"{_SAMPLING_PREFIX}{key}") for name, key in _SAMPLING.items()
        }
        defaults = _SENTENCEPIECE_IDS if self.is_sentencepiece else {}
        self.ids = {
            name: id_
            for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
            if (id_ := self._value(f"{_PREFIX}{name}_token_id", int, default=defaults.get(name))) is not None
            and 0 <= id_ < len(self.pieces)
        }
        """Token ids by their purpose."""
        longest = max(map(len, self.pieces), default=0)
        if longest > MAX_PIECE_CHARACTERS:
            raise ValueError(
                f"{path}: {_PREFIX}tokens has a piece of {longest} characters: at most {MAX_PIECE_CHARACTERS}"
            )
        if self.is_sentencepiece and len(self.scores) < len(self.pieces):
            raise ValueError(f"{path}: {_PREFIX}scores has {len(self.scores)} numbers for {len(self.pieces)} tokens")

    def _context_length(self) -> int | None:
        """Return the maximum sequence length, as the engine does; None if the file has no length."""
        prefix = f"{self._metadata.get('general.architecture')}."
        length: int | None = self._value(f"{prefix}context_length", int)
        if length is None:
            return None
        values = {key.removeprefix(prefix): value for key, value in self._metadata.items() if key.startswith(prefix)}
        return longest_sequence(length, rope_of_gguf(Fields(values, where=str(self._path)), theta=1.0)["rope_scaling"])

    def _value(self, key: str, kind: type, *, default: Any = None) -> Any:
        value = self._metadata.get(key)
        if value is not None and type(value) is not kind:
            raise ValueError(f"{self._path}: {key} is {value!r:.80}: want a value of type {kind.__name__}")
        return default if value is None else value

    def _list(self, name: str, *kinds: type) -> list[Any]:
        items = self._metadata.get(f"{_PREFIX}{name}", [])
        wrong = items if not isinstance(items, list) else [item for item in items if type(item) not in kinds]
        if wrong or not isinstance(items, list):
            raise ValueError(f"{self._path}: {_PREFIX}{name} has {wrong!r:.80}: want a list of {kinds[0].__name__}")
        return items

    def of_kind(self, kind: int) -> dict[int, str]:
        """Return the pieces of one kind by token id. kind: a value in `tokenizer.ggml.token_type`."""
        kinds = zip(self.pieces, self.kinds, strict=False)
        return {id_: piece for id_, (piece, own) in enumerate(kinds) if own == kind and piece}


def tokenizer_from_gguf(path: Path, *, renders_chat: bool = True) -> Tokenizer:
    """Build the tokenizer from the metadata of `path`. renders_chat: whether to load the chat template.

    Raises ModelFileError if the file cannot be read. Raises ValueError for an invalid field, a vocabulary that is
    neither byte-level BPE nor SentencePiece, or an unknown pre-tokenizer.
    """
    fields = _TokenizerFields(path)
    if not fields.is_sentencepiece and (fields.model != "gpt2" or fields.pre not in WORD_RULES):
        raise ValueError(
            f"{path} has tokenizer model {fields.model!r} with pre-tokenizer {fields.pre!r}: supported are "
            f"{_SENTENCEPIECE!r}, and 'gpt2' with {', '.join(sorted(WORD_RULES))}; use the model's Hugging Face "
            "directory, which has a tokenizer.json"
        )
    control, user_defined = fields.of_kind(_CONTROL), fields.of_kind(_USER_DEFINED)
    with contained(f"{path} has no readable tokenizer"):
        backend = _sentencepiece_backend(fields) if fields.is_sentencepiece else _byte_level_backend(fields)
        backend.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control.values()])
        # Some of these tokens are runs of spaces, which SentencePiece matches after spaces have become WORD_START.
        backend.add_tokens(
            [AddedToken(piece, normalized=fields.is_sentencepiece, special=False) for piece in user_defined.values()]
        )
    ids, templates = fields.ids, fields.templates if renders_chat else {}
    special = {
        f"{name}_token": fields.pieces[ids[key]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if key in ids
    }
    end_ids = [
        *(ids[name] for name in ("eos", "eot", "eom") if name in ids),
        *(id_ for id_, piece in control.items() if piece in END_OF_TURN_TEXTS),
    ]
    return Tokenizer(
        backend,
        bos_id=ids.get("bos"),
        add_bos=fields.add_bos,
        eos_ids=list(dict.fromkeys(end_ids)),
        chat_template=ChatTemplate.of(templates, DEFAULT_TEMPLATE, special=special),
        tool_template=ChatTemplate.of(templates, TOOL_TEMPLATE, special=special),
        context_length=fields.context_length,
        logits=len(fields.pieces),
        generation_config=fields.generation_config,
    )


def _byte_level_backend(fields: _TokenizerFields) -> tokenizers.Tokenizer:
    vocabulary = {piece: id_ for id_, piece in enumerate(fields.pieces)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields.merges]
    rule = WORD_RULES[fields.pre]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=rule.keeps_words)
    )
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(fields: _TokenizerFields) -> tokenizers.Tokenizer:
    unknown = fields.ids.get("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: id_ for id_, piece in enumerate(fields.pieces)},
            merges=_sentencepiece_merges(fields),
            unk_token=None if unknown is None else fields.pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", WORD_START)]
    back = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.add_space_prefix:  # text is encoded as if it began with a space
        spaces.insert(0, normalizers.Prepend(WORD_START))
        back.append(decoders.Strip(content=" ", left=1))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(back)
    return backend


def _sentencepiece_merges(fields: _TokenizerFields) -> list[tuple[str, str]]:
    """Return every pair of pieces whose concatenation is a normal piece, in descending order of that piece's score."""
    normal = fields.of_kind(_NORMAL)
    known = set(normal.values())
    return [
        (left, right)
        for id_ in sorted(normal, key=fields.scores.__getitem__, reverse=True)
        if (piece := normal[id_])
        for at in range(1, len(piece))
        if (left := piece[:at]) in known and (right := piece[at:]) in known
    ]
