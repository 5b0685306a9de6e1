"""What an InferenceClient and a MegatronLLM get back: text, times and staleness of a real answer."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zmq

from megatron_runtime.megatron_core.apis import DynamicInferenceRequestRecord, MegatronLLM, SamplingParams
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import pack, unpack
from megatron_runtime.requests.request import DynamicInferenceRequest

PROMPT = "The capital of France is"

Make = Callable[..., MegatronLLM]


class ParametersOfMegatron:
    """All that InferenceClient of Megatron-Core asks of sampling parameters."""

    def serialize(self) -> dict[str, Any]:
        return {
            "temperature": 0.0,
            "num_tokens_to_generate": 6,
            "num_tokens_total": None,
            "termination_id": None,
            "return_prompt_top_n_logprobs": False,
        }


async def ask(llm: MegatronLLM, prompt: str | list[int], params: Any, *, deserialize: bool | None = None) -> Any:
    client = InferenceClient(llm._coord_runtime.coord_addr, deserialize=deserialize)
    await client.start()
    try:
        return await client.add_request(prompt, params)
    finally:
        client.stop()


def test_a_client_sends_text_and_gets_text(make: Make, greedy: Any) -> None:
    llm = make(use_coordinator=True)
    record = asyncio.run(ask(llm, PROMPT, greedy(6)))
    assert isinstance(record, DynamicInferenceRequestRecord)
    expected = llm.generate(PROMPT, greedy(6))
    answer = record.merge()
    assert answer.generated_tokens == expected.generated_tokens
    assert answer.generated_text == expected.generated_text
    assert answer.prompt_length == len(llm.controller.tokenize_prompt(PROMPT))
    of_tokens = asyncio.run(ask(llm, llm.controller.tokenize_prompt(PROMPT), greedy(6), deserialize=True))
    assert of_tokens.generated_text == expected.generated_text
    assert "generated_text" not in {
        name for name, value in asyncio.run(ask(llm, PROMPT, greedy(2), deserialize=False)).items() if value
    }, "a caller that takes the map detokenizes itself"


def test_a_record_has_prompt_parameters_and_likeliest_tokens(make: Make, greedy: Any) -> None:
    """As the answer of generate(); a stream of the client has the same."""
    llm = make(use_coordinator=True)
    params = greedy(6, return_log_probs=True, top_n_logprobs=2)
    expected = llm.generate(PROMPT, params)
    answer = asyncio.run(ask(llm, PROMPT, params, deserialize=True))
    assert answer.prompt == PROMPT
    assert answer.sampling_params.top_n_logprobs == 2
    assert answer.generated_top_n_logprobs == expected.generated_top_n_logprobs
    assert answer.prompt_top_n_logprobs == expected.prompt_top_n_logprobs
    assert all(isinstance(likeliest, dict) for likeliest in answer.generated_top_n_logprobs)

    async def stream() -> list[Any]:
        client = InferenceClient(llm._coord_runtime.coord_addr)
        await client.start()
        try:
            return [item async for item in client.add_request_streaming(PROMPT, params)]
        finally:
            client.stop()

    *partials, final = asyncio.run(stream())
    streamed = [one for item in partials for one in item["partial"]["new_top_n_logprobs"]]
    assert streamed == expected.generated_top_n_logprobs[: len(streamed)]
    assert len(streamed) >= 5
    assert final["final"]["generated_top_n_logprobs"] == expected.generated_top_n_logprobs


def test_a_client_of_megatron_gets_text_from_a_coordinator_without_a_tokenizer(make: Make, greedy: Any) -> None:
    llm = make(use_coordinator=True)
    params = greedy(6, return_log_probs=True, top_n_logprobs=2)
    expected = llm.generate(PROMPT, params)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(llm._coord_runtime.coord_addr)
        dealer.send(pack([int(Header.CONNECT)]))
        assert unpack(dealer.recv()) == [Header.CONNECT_ACK]
        for number, prompt in enumerate((PROMPT, llm.controller.tokenize_prompt(PROMPT))):
            dealer.send(pack([int(Header.SUBMIT_REQUEST), number, prompt, params.serialize()]))
            header, answered, reply = unpack(dealer.recv())
            assert (header, answered) == (Header.ENGINE_REPLY, number)
            assert reply.get("prompt") == (PROMPT if isinstance(prompt, str) else None)
            for name in ("generated_tokens", "generated_text", "generated_log_probs", "generated_top_n_logprobs"):
                assert reply[name] == getattr(expected, name)
            assert reply["prompt_top_n_logprobs"] == expected.prompt_top_n_logprobs
            assert len(reply["tpot"]) == 5


@pytest.mark.parametrize("use_coordinator", [False, True], ids=["direct", "coordinator"])
def test_parameters_need_only_serialize(make: Make, use_coordinator: bool) -> None:
    llm = make(use_coordinator=use_coordinator)
    answers = [llm.generate(PROMPT, ParametersOfMegatron())]
    *_, last = llm.generate_stream(PROMPT, ParametersOfMegatron())
    answers.append(last.request)
    if use_coordinator:
        answers.append(asyncio.run(ask(llm, PROMPT, ParametersOfMegatron(), deserialize=True)))
    else:
        answers += llm.engine.generate([PROMPT], ParametersOfMegatron())
    assert [len(answer.generated_tokens) for answer in answers] == [6, 6, 6]


@pytest.mark.parametrize("use_coordinator", [False, True], ids=["direct", "coordinator"])
def test_an_answer_has_the_times_of_its_tokens(make: Make, greedy: Any, use_coordinator: bool) -> None:
    answer = make(use_coordinator=use_coordinator).generate(PROMPT, greedy(6))
    assert answer.ttft >= 0
    assert len(answer.tpot) == 5
    assert all(seconds >= 0 for seconds in answer.tpot)
    assert answer.ttft + sum(answer.tpot) <= answer.latency + 1e-4


@pytest.mark.parametrize("use_coordinator", [False, True], ids=["direct", "coordinator"])
def test_no_token_is_generated_for_a_limit_of_zero(make: Make, greedy: Any, use_coordinator: bool) -> None:
    llm = make(use_coordinator=use_coordinator)
    none, one = (llm.generate(PROMPT, greedy(count, return_log_probs=True)) for count in (0, 1))
    assert none.succeeded()
    assert (none.generated_tokens, none.generated_text, none.generated_length) == ([], "", 0)
    assert not none.generated_log_probs
    assert none.prompt_log_probs == pytest.approx(one.prompt_log_probs)
    assert none.finish_reason == "length"


def test_tokens_age_with_each_epoch_that_passes_while_the_request_runs(make: Make, greedy: Any) -> None:
    llm = make(use_coordinator=True)
    for epoch in range(2, 22, 2):
        chunks = llm.generate_stream(PROMPT, greedy(200))
        next(chunks)
        llm.pause()
        llm.set_generation_epoch(epoch)
        llm.unpause()
        *_, last = chunks
        answer = last.request
        assert answer is not None
        if len(answer.policy_epoch) > 1:  # otherwise the answer was complete before the pause
            break
    length = answer.prompt_length
    for staleness, spans in (
        (answer.policy_staleness, answer.policy_epoch),
        (answer.kv_cache_staleness, answer.kv_cache_epoch),
    ):
        changed = spans[-1][0]
        assert isinstance(staleness, torch.Tensor)
        assert staleness.dtype is torch.int32
        assert length <= changed < length + 200
        assert staleness.tolist() == [2] * changed + [0] * (length + 200 - changed)
    assert llm.generate(PROMPT, greedy(3)).policy_staleness.tolist() == [0] * (length + 3)


def test_staleness_of_an_answer_can_be_incremented_and_serialized() -> None:
    reply = {
        "request_id": 1,
        "status": "COMPLETED",
        "prompt_length": 2,
        "generated_tokens": [5, 6],
        "policy_epoch": [[0, 3], [3, 5]],
    }
    record = DynamicInferenceRequestRecord.from_reply(reply)
    assert record[0].policy_staleness.tolist() == [2, 2, 2, 0]
    assert record[0].kv_cache_staleness is None
    again = DynamicInferenceRequest.deserialize(record[0].serialize())
    assert again.policy_staleness.tolist() == [2, 2, 2, 0]
    record.increment_staleness()
    assert record[0].policy_staleness.tolist() == [3, 3, 3, 1]
    assert record[0].kv_cache_staleness.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_n_logprobs": 2}, True),
        ({"top_n_logprobs": 2, "skip_prompt_log_probs": True}, False),
        ({}, False),
    ],
)
def test_the_deprecated_field_of_prompt_log_probs(fields: dict[str, Any], expected: bool) -> None:
    params = SamplingParams(**fields)
    assert (params.return_prompt_top_n_logprobs, SamplingParams().skip_prompt_log_probs) == (expected, False)
    assert SamplingParams.deserialize(params.serialize()) == params


def test_the_deprecated_field_may_be_set() -> None:
    with pytest.warns(DeprecationWarning, match="return_prompt_top_n_logprobs"):
        assert SamplingParams(return_prompt_top_n_logprobs=True, top_n_logprobs=1).wants_prompt_log_probs
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="skip_prompt_log_probs=False"),
    ):
        SamplingParams(return_prompt_top_n_logprobs=True, skip_prompt_log_probs=True)


def test_one_answer_is_used_as_an_object_or_as_a_list_of_one(make: Make, greedy: Any) -> None:
    llm = make()
    answer = llm.generate(PROMPT, greedy(3))
    assert isinstance(answer, DynamicInferenceRequest)
    assert [one.generated_tokens for one in answer] == [answer.generated_tokens]
    assert (len(answer), answer[0], answer[-1]) == (1, answer, answer)
    with pytest.raises(IndexError):
        answer[1]
