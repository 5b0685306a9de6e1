"""Conversion of a reply with token ids to the request of the Python interface."""

from collections.abc import Collection, Iterable, Sequence

from megatron_runtime.in_process.answers import PromptBatch
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.tokenization.tokenizer import BytesDetokenizer, Tokenizer

TEXTS = {5: "a", 6: " b"}


class Texts:
    eos_ids = ()
    answer_text = Tokenizer.answer_text

    @property
    def tokenizer(self) -> "Texts":
        return self

    def detokenize(self, tokens: Iterable[int]) -> str:
        return "".join(TEXTS[token] for token in tokens)

    def detokenizer(self, *, after: Sequence[int] = (), visible: Collection[int] = ()) -> BytesDetokenizer:
        return BytesDetokenizer(lambda token: TEXTS[token].encode(), after=after, stripped="one")


def test_prompt_answer_and_segments_get_their_text() -> None:
    prompts = PromptBatch([[5, 5]], SamplingParams(return_segments=True), Texts())
    prompts.replies[0] = {"request_id": 1, "status": "COMPLETED", "generated_tokens": [6, 5]}
    (request,) = prompts.answers()
    assert (request.prompt, request.generated_text) == ("aa", " ba")
    assert request.generated_segments == [" b", "a"]


def test_an_engine_without_text_returns_tokens_only() -> None:
    prompts = PromptBatch([[6]], None, None)
    prompts.replies[0] = {"request_id": 1, "status": "COMPLETED", "generated_tokens": [5]}
    (request,) = prompts.answers()
    assert (request.prompt, request.generated_text, request.generated_tokens) == (None, None, [5])
