"""Conversion of a reply with token ids to the request of the Python interface."""

from collections.abc import Iterable

from megatron_runtime.requests.request import answered_request
from megatron_runtime.sampling_params import SamplingParams

TEXTS = {5: "a", 6: "a", 7: "b"}


class Texts:
    def detokenize(self, tokens: Iterable[int]) -> str:
        return "".join(TEXTS[token] for token in tokens)


def test_of_tokens_with_equal_text_the_likeliest_is_kept() -> None:
    reply = {
        "request_id": 1,
        "status": "COMPLETED",
        "generated_tokens": [5, 7],
        "generated_top_n_logprobs": [[[5, -0.5], [6, -2.0], [7, -3.0]], [[7, -0.25]]],
    }
    request = answered_request(
        reply, prompt=[5, 6], prompt_tokens=[5, 6], sampling_params=SamplingParams(), text=Texts()
    )
    assert request.generated_top_n_logprobs == [{"a": -0.5, "b": -3.0}, {"b": -0.25}]
    assert request.prompt_top_n_logprobs is None
    assert (request.prompt, request.generated_text) == ("aa", "ab")


def test_an_engine_without_text_returns_tokens_only() -> None:
    reply = {"request_id": 1, "status": "COMPLETED", "generated_tokens": [5]}
    request = answered_request(reply, prompt=[6], prompt_tokens=[6], sampling_params=SamplingParams(), text=None)
    assert (request.prompt, request.generated_text, request.generated_tokens) == (None, None, [5])
