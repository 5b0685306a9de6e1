"""The words into which byte-level vocabularies of GGUF files split text, as transformers and llama.cpp split them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import size
from tokenizers import Regex, pre_tokenizers

from megatron_runtime.tokenization.word_rules import WORD_RULES

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(list(" \n\r\t'/aBcDéßÀǅʰ12٣9.,!?$+<=~`|-_中文ひカ한ा́ⅷ😀\u3000\xa0")),
        st.sampled_from(["'s", "'LL", "'Re", "don't", "1234567", "HelloWorld", "  "]),
        st.characters(codec="utf-8"),
    ),
    max_size=40,
).map("".join)


def words(patterns: tuple[str, ...], text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


def test_words_are_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    @settings(max_examples=size(10, soak=40))
    @given(text=TEXTS)
    def check(text: str) -> None:
        for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items():
            assert words(WORD_RULES[name].patterns, text) == words((pattern,), text), name

    check()


@pytest.mark.parametrize("name", WORD_RULES)
@settings(max_examples=size(10, soak=20))
@given(text=TEXTS)
def test_no_rule_loses_text(name: str, text: str) -> None:
    assert "".join(words(WORD_RULES[name].patterns, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("gpt-2", "don't 123  x", ["don", "'t", " 123", " ", " x"]),
        ("smollm", "in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("falcon", "x<=y 1234", ["x", "<=", "y", " ", "123", "4"]),
        ("seed-coder", "a,\nb", ["a", ",", "\n", "b"]),
        ("qwen2", "a,\nb", ["a", ",\n", "b"]),
        ("deepseek-v3", "12345 中文abc", ["123", "45", " ", "中文", "abc"]),
        ("deepseek-coder", "if x:\n y", ["if", " x", ":", "\n", " y"]),
        ("deepseek-llm", "Hi中文 3.14", ["Hi", "中文", " ", "3", ".", "14"]),
        ("bloom", "Hi, there", ["Hi", ",", " there"]),
        ("viking", "in 20", ["in", " ", "2", "0"]),
    ],
)
def test_words_of_rules_that_transformers_lacks(name: str, text: str, expected: list[str]) -> None:
    assert words(WORD_RULES[name].patterns, text) == expected
