"""The rules by which byte-level vocabularies in GGUF files split text into words, by the value of `tokenizer.ggml.pre`.

The names come from llama.cpp (src/llama-vocab.cpp), and the patterns from the tokenizer.json of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_SPACES = r"\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_DIGIT, _DIGITS, _THREE_DIGITS = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_NEWER_LETTERS = (
    "ՠ-ֈჇ-\u10ffᲀ-\u1c88ⴀ-ⴭ\ua790-\ua7faꬰ-\uab68\U00010570-\U000105bc\U00016e40-\U00016e7f"
    "\U0001d400-\U0001d7cb\U0001df00-\U0001df1e"
)
_DEEPSEEK_LETTERS = rf"(?:(?![{_NEWER_LETTERS}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+"
"""Letters with case, except letters that were added to Unicode after the model."""


def _cased_words(number: str, contraction: str = "") -> str:
    """Return the word pattern of vocabularies that split words where lower case changes to upper case."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{_UPPER}*{_LOWER}+{contraction}|{before}{_UPPER}+{_LOWER}*{contraction}|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


def _words(number: str, letters: str = _LETTERS, marks: str = _MARKS) -> str:
    return rf"{_CONTRACTION}|{letters}|{number}|{marks}|\s*[\r\n]+|{_SPACES}"


@dataclass(frozen=True, slots=True)
class WordRule:
    """A rule that divides text into words before byte-pair merges.

    patterns:    regular expressions, applied in order. Text between two matches is also a word.
    keeps_words: whether a word that is in the vocabulary is always one token, even if the merges do not form it.
    adds_bos:    whether texts begin with the BOS token, unless the file states otherwise.
    """

    patterns: tuple[str, ...]
    keeps_words: bool = False
    adds_bos: bool = False


_GPT2_RULE = WordRule((_GPT2,))
_DIGITS_GPT2_RULE = WordRule((_DIGIT, _GPT2))
_LLAMA3_RULE = WordRule((_words(_THREE_DIGITS),))
_QWEN2_RULE = WordRule((_words(_DIGIT),))
_DEEPSEEK3_RULE = WordRule(
    (
        _THREE_DIGITS,
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
        rf"|{_SPACES}",
    )
)
_GPT4O_RULE = WordRule((_cased_words(_THREE_DIGITS, f"{_CONTRACTION}?"),))
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"

DEFAULT_RULE = "default"
"""Rule for files without `tokenizer.ggml.pre`."""

WORD_RULES: Mapping[str, WordRule] = {
    DEFAULT_RULE: WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, _DIGITS, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4"), _GPT2_RULE),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2_RULE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS_GPT2_RULE),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2_RULE),
    "falcon": WordRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        replace(_LLAMA3_RULE, keeps_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3_RULE),
    **dict.fromkeys(("glm4", "glm5"), replace(_LLAMA3_RULE, keeps_words=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), _QWEN2_RULE),
    **dict.fromkeys(("hunyuan", "solar-open", "stablelm2", "grok-2"), _QWEN2_RULE),
    "qwen35": WordRule((_words(_DIGIT, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)),
    "seed-coder": WordRule((_words(_DIGIT, marks=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "minicpm5": WordRule((_THREE_DIGITS, _words(_DIGITS)), keeps_words=True),
    "tekken": WordRule((_cased_words(_DIGIT),), keeps_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _GPT4O_RULE),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3_RULE),
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    "deepseek-llm": WordRule(
        (r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK, _DIGITS)
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), WordRule((_BLOOM,))),
    "viking": WordRule((_BLOOM, _DIGIT)),
}
