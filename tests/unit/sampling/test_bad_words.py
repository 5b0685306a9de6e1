"""Bad words: their token sequences, and the tokens that may not follow an answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.backends.text import ModelText
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams
from megatron_runtime.sampling.bad_words import BadWords, token_sequences
from megatron_runtime.sampling.batch import LogitEdits, SamplingColumns
from megatron_runtime.sampling.sampler import apply_edits

TOKENS = st.integers(0, 3)  # few, so that prefixes match often
SEQUENCES = st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=6)
ANSWERS = st.lists(TOKENS, max_size=12)


def expected(sequences: list[list[int]], answer: list[int]) -> set[int]:
    """Return the tokens with which one of the sequences would be complete."""
    return {token for token in range(4) for word in sequences if [*answer, token][-len(word) :] == word}


@given(SEQUENCES, ANSWERS)
def test_a_token_is_banned_where_it_would_complete_a_sequence(sequences: list[list[int]], answer: list[int]) -> None:
    assert set(BadWords(sequences).after(answer)) == expected(sequences, answer)


@given(sequences=SEQUENCES, prompt=ANSWERS, earlier=ANSWERS, later=ANSWERS, min_tokens=st.integers(0, 12))
def test_a_slot_counts_delivered_tokens_as_the_answer_and_the_prompt_not(
    sequences: list[list[int]], prompt: list[int], earlier: list[int], later: list[int], min_tokens: int
) -> None:
    columns = SamplingColumns(2)
    columns.admit(
        1,
        SamplingParams(min_tokens=min_tokens),
        seed=0,
        prompt=np.array(prompt, np.int32),
        generated=np.array(earlier, np.int32),
        stop_ids={9},
        bad_words=sequences,
    )
    for token in later:
        columns.append(np.array([1]), np.array([token], np.int32))
    answer = [*earlier, *later]
    batch = columns.rows(
        np.array([1]), generated=np.array([len(answer)]), needs_sample=np.ones(1, bool), prompt_targets={}
    )
    banned = batch.edits[0].banned if batch.edits else None
    wanted = expected(sequences, answer) | ({9} if len(answer) < min_tokens else set())
    assert set([] if banned is None else banned.tolist()) == wanted


def test_a_grammar_that_allows_only_banned_tokens_overrules_them() -> None:
    allowed = np.array([0b110], np.uint32)
    for banned, left in (([1], [2]), ([1, 2], [1, 2]), ([0, 3], [1, 2])):
        logits = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
        apply_edits(logits, LogitEdits(banned=np.array(banned, np.int32), allowed=allowed))
        assert np.flatnonzero(np.isfinite(logits)).tolist() == left


class OnlyTokens:
    """The state of a grammar that allows the same tokens everywhere."""

    def __init__(self, tokens: set[int], vocab_size: int) -> None:
        self._words = np.zeros(-(-vocab_size // 32), np.uint32)
        for token in tokens:
            self._words[token // 32] |= np.uint32(1 << (token % 32))

    def allowed(self) -> np.ndarray:
        return self._words

    def accept(self, token: int) -> None:
        pass


@given(
    allowed=st.sets(st.integers(0, 99), min_size=1),
    by_grammar=st.none() | st.sets(st.integers(0, 99), min_size=1),
    generated=st.integers(0, 3),
)
def test_only_allowed_tokens_can_be_sampled(allowed: set[int], by_grammar: set[int] | None, generated: int) -> None:
    columns = SamplingColumns(1)
    columns.admit(
        0,
        SamplingParams(allowed_token_ids=sorted(allowed)),
        seed=0,
        prompt=np.array([5], np.int32),
        generated=np.zeros(generated, np.int32),
        grammar=None if by_grammar is None else OnlyTokens(by_grammar, 100),  # type: ignore[arg-type]
    )
    batch = columns.rows(
        np.array([0]), generated=np.array([generated]), needs_sample=np.ones(1, bool), prompt_targets={}
    )
    logits = np.zeros(100, np.float32)
    apply_edits(logits, batch.edits[0])
    left = allowed if by_grammar is None else allowed & by_grammar
    assert set(np.flatnonzero(np.isfinite(logits)).tolist()) == left


@pytest.mark.parametrize(
    ("texts", "sequences"),
    [
        (["a"], [(1,), (11,)]),  # " a" is another token
        (["  a", "a", "a"], [(1,), (11,)]),
        (["ab"], [(1, 2), (11, 2)]),
        (["b"], [(2,)]),  # " b" has more tokens
        (["c"], [(3,)]),  # " c" begins with the same token
        (["d"], []),  # the model has no such token
    ],
)
def test_a_text_counts_with_and_without_a_space(texts: list[str], sequences: list[tuple[int, ...]]) -> None:
    tokens = {"a": [1], " a": [11], "ab": [1, 2], " ab": [11, 2], "b": [2], " b": [20, 2]}
    tokens |= {"c": [3], " c": [3], "d": [99], " d": [98]}
    assert token_sequences(texts, tokens.__getitem__, vocab_size=50) == tuple(sequences)


def test_a_text_without_tokens_is_rejected_by_name() -> None:
    def fails(text: str) -> list[int]:
        raise ValueError("the text cannot be tokenized")

    for encode, message in ((lambda text: [], "has tokens"), (fails, "cannot be tokenized")):
        with pytest.raises(InvalidSamplingParamsError, match=message) as rejected:
            token_sequences(["☃"], encode, vocab_size=50)
        assert rejected.value.field == "bad_words"


def test_sequences_of_a_real_tokenizer_have_no_special_tokens_of_prompts() -> None:
    text = ModelText.of_model("builtin:smollm2-135m")
    decode = text.tokenizer.decode
    found = text.bad_words(["Paris", "New York"], vocab_size=49152)
    assert [decode(sequence) for sequence in found] == ["Paris", " Paris", "New York", " New York"]
