"""The text of an answer is what follows the text of its prompt, whatever the decoder does at the first token.

A decoder of SentencePiece removes the first space of a sequence. An answer is decoded after its prompt, so its first
word keeps the space, in streams, with stop texts, echo and log-probabilities.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import size
from vocabularies import DECODERS, sentencepiece_like

from megatron_runtime.tokenization import Tokenizer
from megatron_runtime.tokenization.tokenizer import WindowDetokenizer

BYTES = [4 + byte for byte in "🦙é".encode()]
PROMPT = "Paris is"


def tokenizer_with(decoder: str) -> Tokenizer:
    return Tokenizer(sentencepiece_like(decoder), bos_id=1, add_bos=True, eos_ids=[2])


@pytest.fixture(params=DECODERS)
def spaced(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_with(request.param)


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    found = [tokenizer.token_id(piece) for piece in pieces]
    assert None not in found
    return found  # type: ignore[return-value]


def test_the_answer_continues_the_text_of_any_prompt(spaced: Tokenizer) -> None:
    """Equal to the library's text of prompt and answer together, less the text of the prompt, in parts of any size."""

    @settings(max_examples=size(50, soak=300))
    @given(
        ids=st.lists(st.integers(0, spaced.vocab_size - 1) | st.sampled_from(BYTES), min_size=2, max_size=24),
        cut=st.integers(0, 24),
        part=st.integers(1, 4),
    )
    def check(ids: list[int], cut: int, part: int) -> None:
        whole = spaced._backend.decode(ids)
        prompt, answer = ids[:cut], ids[cut:]
        before = spaced._backend.decode(prompt)
        if "\N{REPLACEMENT CHARACTER}" in whole + before:
            return  # not UTF-8: an incomplete character is not where the library writes it
        detokenizer = spaced.detokenizer(after=prompt)
        parts = [detokenizer.feed(answer[at : at + part]) for at in range(0, len(answer), part)]
        assert before + "".join(parts) + detokenizer.finish() == whole

    check()


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_character_that_the_prompt_began_belongs_to_the_answer(decoder: str) -> None:
    if decoder == "by window":
        return  # it has no byte tokens
    tokenizer = tokenizer_with(decoder)
    llama, begun = BYTES[:4], ids_of(tokenizer, "▁is")
    assert tokenizer.decode([*llama[2:], *begun], after=[*begun, *llama[:2]]) == "🦙 is"
    assert tokenizer.decode(begun, after=[*begun, *llama]) == " is"
    assert tokenizer.decode(begun, after=[*begun, *llama[:3]]).endswith(" is")


def test_bytes_in_the_middle_of_a_long_run_keep_their_characters() -> None:
    """A decoder that sees a part of the run, which begins within a character, would write none of them."""
    tokenizer = tokenizer_with("strips one space")
    run = BYTES[:4] * 20
    for cut in range(len(run) + 1):
        detokenizer = tokenizer.detokenizer(after=run[:cut])
        assert detokenizer.feed(run[cut:]) + detokenizer.finish() == "🦙" * (20 - cut // 4)


def test_only_a_prompt_with_text_keeps_the_first_space() -> None:
    tokenizer = tokenizer_with("strips one space")
    the = ids_of(tokenizer, "▁the")
    assert tokenizer.decode(the) == tokenizer.decode(the, after=[1]) == "the"
    assert tokenizer.decode(the, after=[1, 3, *the, 3, 3]) == " the"
    window = WindowDetokenizer(lambda ids: tokenizer._backend.decode(list(ids)), after=the)
    assert window.feed(the) == " the"


@pytest.mark.parametrize("decoder", DECODERS)
async def test_completions_keep_the_first_space(start: Any, decoder: str) -> None:
    tokenizer = tokenizer_with(decoder)
    running = await start(tokenizer)
    pieces = ["▁the", "▁capital", "▁of", "▁France"]
    running.backend.answer = ids_of(tokenizer, *pieces)
    text = " the capital of France"
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 99}
    expected = {
        "plain": (body, text),
        "tokens": ({**body, "prompt": tokenizer.encode(PROMPT)}, text),
        "echo": ({**body, "echo": True}, PROMPT + text),
        "echo of tokens": ({**body, "prompt": tokenizer.encode(PROMPT), "echo": True}, PROMPT + text),
        "one token": ({**body, "max_tokens": 1}, " the"),
        "stop": ({**body, "stop": " of"}, " the capital"),
        "stop with a space": ({**body, "stop": " the"}, ""),
        "kept stop": ({**body, "stop": " the", "include_stop_str_in_output": True}, " the"),
        "log-probabilities": ({**body, "logprobs": 1, "echo": True}, PROMPT + text),
    }
    for name, (fields, answer) in expected.items():
        whole = (await running.post("/v1/completions", fields)).json()["choices"][0]
        reply = await running.post("/v1/completions", {**fields, "stream": True})
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        streamed = "".join(event["choices"][0]["text"] for event in events)
        assert (name, whole["text"], streamed) == (name, answer, answer)
    offsets, tokens = whole["logprobs"]["text_offset"], whole["logprobs"]["tokens"]
    assert tokens[-4:] == [piece.replace("▁", " ") for piece in pieces]
    assert all(whole["text"].startswith(token, at) for token, at in zip(tokens[-4:], offsets[-4:], strict=True))


async def test_the_echo_of_tokens_and_the_answer_are_one_text(start: Any) -> None:
    """The prompt ends within a character, which the answer completes."""
    tokenizer = tokenizer_with("strips one space")
    running = await start(tokenizer)
    running.backend.answer = [*BYTES[2:4], *ids_of(tokenizer, "▁is")]
    body = {"prompt": [1, *ids_of(tokenizer, "▁the"), *BYTES[:2]], "temperature": 0, "max_tokens": 99, "echo": True}
    for fields, text in ((body, "the🦙 is"), ({**body, "max_tokens": 0}, "the\N{REPLACEMENT CHARACTER}")):
        choice = (await running.post("/v1/completions", fields)).json()["choices"][0]
        assert choice["text"] == text


def test_the_special_tokens_of_a_text_are_found(tokenizer: Tokenizer) -> None:
    for text, expected in (
        ("<|im_start|>", ["<|im_start|>"]),
        ("end<|im_end|>\n<|im_start|>user", ["<|im_end|>", "<|im_start|>"]),
        ("<|im_end|", []),
        ("text", []),
        ("", []),
        ("<\ud800<|im_end|>", []),
    ):
        found = tokenizer.special_tokens_in([text])
        assert sorted(found.values()) == sorted(expected)
        assert all(tokenizer.token_id(written) == id_ for id_, written in found.items())
