"""Answers are the same in both modes: order, texts, tokens and log-probabilities, whole and streamed."""

import pytest

PROMPT = "The capital of France is"


@pytest.fixture(params=[False, True], ids=["direct", "coordinator"])
def llm(make, request):
    return make(use_coordinator=request.param)


def test_whole_answers(llm, greedy, tokenizer) -> None:
    prompts = [[number, 1] for number in range(9, 3, -1)]
    answers = llm.generate(prompts, greedy(3))
    alone = [llm.generate(prompt, greedy(3)).generated_tokens for prompt in prompts]
    assert [answer.generated_tokens for answer in answers] == alone
    assert len({tuple(tokens) for tokens in alone}) > 1
    assert [answer.prompt for answer in answers] == [tokenizer.decode(prompt) for prompt in prompts]
    assert {answer.generated_segments for answer in answers} == {None}
    assert len(llm.generate(PROMPT, greedy(2, return_segments=True)).generated_segments) == 2

    assert tokenizer.bos_id is not None
    with_first = [tokenizer.bos_id, *tokenizer.encode(PROMPT)]
    asked = greedy(2, add_BOS=True)
    [answer] = llm.generate([PROMPT], asked)
    assert list(answer.prompt_tokens) == with_first
    assert answer.generated_tokens == llm.generate(with_first, greedy(2)).generated_tokens
    assert list(llm.generate([1, 2], asked).prompt_tokens) == [1, 2]

    tokens = llm.generate(PROMPT, greedy(8)).generated_tokens
    end = tokens.index(tokens[4]) + 1
    ended = llm.generate(PROMPT, greedy(8, stop_token_ids=[tokens[4]]))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", tokens[4])
    assert ended.generated_tokens == tokens[:end]
    assert ended.generated_text == tokenizer.decode(tokens[: end - 1]), "the stop token is not part of the text"


def test_streams(llm, greedy) -> None:
    params = greedy(6, return_log_probs=True)
    whole = llm.generate(PROMPT, params)
    chunks = list(llm.generate_stream(PROMPT, params))
    assert all(len(chunk.log_probs or ()) == len(chunk.token_ids) for chunk in chunks)
    reported = [one for chunk in chunks for one in chunk.log_probs or ()]
    assert reported == pytest.approx(whole.generated_log_probs, abs=1e-4)
    ending = greedy(6, stop_token_ids=whole.generated_tokens[-2:-1])
    text = "".join(chunk.text for chunk in llm.generate_stream(PROMPT, ending))
    assert text == llm.generate(PROMPT, ending).generated_text
    for prompts in (["a"], [[1], [2]], []):
        with pytest.raises(TypeError, match="takes one prompt"):
            next(llm.generate_stream(prompts, params))
