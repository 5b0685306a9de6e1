"""The scheduler on the echo executor: an exact answer, whatever happens on the way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_runtime.config import InferenceConfig
from megatron_runtime.contexts.dynamic_context import (
    BlockOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
)
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engines.echo_executor import EchoExecutor, echo_answer
from megatron_runtime.engines.engine_request import EngineRequest
from megatron_runtime.sampling_params import SamplingParams

DEFAULTS = {"max_requests": 8, "max_tokens": 64, "enable_chunked_prefill": True}


def make_engine(*, pages: int = 200, **config: int) -> DynamicInferenceEngine:
    executor = EchoExecutor(page_size=4, num_pages=pages, max_sequence_length=256)
    executor.load()
    return DynamicInferenceEngine(executor, InferenceConfig(**{**DEFAULTS, **config}))


def request(
    request_id: int, prompt: list[int], length: int = 10, *, generated: list[int] | None = None, **params: object
) -> EngineRequest:
    return EngineRequest(
        request_id,
        np.array(prompt, np.int32),
        np.array(generated or [], np.int32),
        SamplingParams(temperature=0.0, num_tokens_to_generate=length, **params),
    )


def run(engine: DynamicInferenceEngine, steps: int = 10_000) -> dict[int, list[int]]:
    answers: dict[int, list[int]] = {}
    for _ in range(steps):
        if not engine.has_work:
            break
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.new_tokens)
        engine.check_integrity()
    return answers


prompts = st.lists(st.lists(st.integers(1, 999), min_size=1, max_size=60), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(8, 80), st.integers(26, 60))
def test_every_answer_is_exact_under_chunking_and_preemption(
    prompts: list[list[int]], max_tokens: int, pages: int
) -> None:
    engine = make_engine(max_tokens=max_tokens, pages=pages)
    for index, prompt in enumerate(prompts):
        engine.add_request(request(index, prompt, 12))
    answers = run(engine)
    assert answers == {index: echo_answer(prompt, 12) for index, prompt in enumerate(prompts)}
    assert engine.context.usage == 0


def test_memory_pressure_preempts_and_nothing_is_sampled_twice() -> None:
    engine = make_engine(pages=20)
    for index in range(6):
        engine.add_request(request(index, [index + 1] * 8, 40))
    answers = run(engine)
    assert engine.stats().preemptions > 0
    assert answers == {index: echo_answer([index + 1] * 8, 40) for index in range(6)}


def test_a_long_prompt_does_not_hold_up_decodes() -> None:
    engine = make_engine(max_tokens=8, max_requests=2)
    engine.add_request(request(0, [1, 2, 3], 30))
    engine.step()
    engine.add_request(request(1, list(range(1, 101)), 5))
    for _ in range(10):
        assert [output.request_id for output in engine.step()] == [0]


def test_an_abort_frees_its_pages_at_once() -> None:
    engine = make_engine()
    engine.add_request(request(0, [1] * 40, 100))
    engine.step()
    assert engine.context.usage > 0
    assert engine.abort_request(0)
    assert engine.context.usage == 0
    assert not engine.has_work


@given(st.integers(0, 20))
@settings(deadline=None)
def test_a_continuation_equals_the_undisturbed_answer(already: int) -> None:
    whole = echo_answer([5, 6, 7], 20)
    engine = make_engine()
    engine.add_request(request(0, [5, 6, 7], 20, generated=whole[:already]))
    answers = run(engine)
    assert answers.get(0, []) == whole[already:]


def test_a_stop_token_ends_a_request_and_counts_from_min_tokens_on() -> None:
    answer = echo_answer([3, 4], 10)
    engine = make_engine()
    engine.add_request(request(0, [3, 4], 10, stop_token_ids=[answer[2]]))
    engine.add_request(request(1, [3, 4], 10, stop_token_ids=[answer[2]], min_tokens=5))
    answers: dict[int, list[int]] = {0: [], 1: []}
    reasons = {}
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.new_tokens
            reasons[output.request_id] = output.finish_reason
    assert answers == {0: answer[:3], 1: answer}
    assert reasons == {0: "stop", 1: "length"}


def test_what_can_never_fit_is_refused_with_the_remedy() -> None:
    engine = make_engine()
    with pytest.raises(MaxSequenceLengthOverflowError, match=r"maximum context length was exceeded.*shorten"):
        engine.add_request(request(0, [1] * 256))
    small = make_engine(pages=5)
    with pytest.raises(BlockOverflowError, match="kv_cache_memory"):
        small.add_request(request(0, [1] * 16))
    assert not engine.has_work


def test_the_waiting_queue_is_bounded() -> None:
    engine = make_engine(max_waiting=2)
    engine.add_request(request(0, [1]))
    engine.add_request(request(1, [1]))
    with pytest.raises(RequestOverflowError):
        engine.add_request(request(2, [1]))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        make_engine().add_request(request(0, [50_000]))


def test_an_answer_stops_at_the_longest_sequence() -> None:
    engine = make_engine()
    engine.add_request(request(0, [1] * 250, 100))
    assert len(run(engine)[0]) == 6
