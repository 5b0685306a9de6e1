"""The scheduler on the echo executor: an exact answer, whatever happens on the way."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from echo_executor import EchoExecutor, echo_answer
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.megatron_core.contexts.dynamic_context import (
    BlockOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
)
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.config import InferenceConfig, InvalidConfigError
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams

from .echo_core import make_engine, request, run

prompts = st.lists(st.lists(st.integers(1, 999), min_size=1, max_size=60), min_size=1, max_size=20)


@settings(max_examples=60)
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


def test_only_a_request_whose_grammar_is_not_ready_skips_the_step() -> None:
    engine = make_engine()
    for index in range(2):
        engine.add_request(request(index, [1, 2, 3]))
    engine.step()
    scheduler = engine._scheduler
    grammar: Any = SimpleNamespace(is_ready=False)
    scheduler.open[0].grammar = grammar

    def scheduled() -> list[int]:
        rows = scheduler.schedule(now=0.0, epoch=0)
        return [] if rows is None else [row.request_id for row in rows.requests]

    assert scheduled() == [1]
    grammar.is_ready = True
    assert scheduled() == [0, 1]


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
    engine.add_request(request(2, [3, 4], 10, stop_token_ids=[answer[2]], min_tokens=3))
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    reasons = {}
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.new_tokens
            reasons[output.request_id] = output.finish_reason, output.stop_token
    assert answers == {0: answer[:3], 1: answer, 2: answer[:3]}
    assert reasons == {0: ("stop", answer[2]), 1: ("length", None), 2: ("stop", answer[2])}


def test_an_answer_whose_generated_tokens_end_it_names_the_stop_token() -> None:
    answer = echo_answer([3, 4], 3)
    engine = make_engine()
    engine.add_request(request(0, [3, 4], 10, generated=answer, stop_token_ids=[answer[2]]))
    [output] = engine.step()
    assert (output.finish_reason, output.stop_token, output.new_tokens) == ("stop", answer[2], [])


def test_a_request_that_can_never_fit_is_rejected_with_the_remedy() -> None:
    engine = make_engine()
    with pytest.raises(MaxSequenceLengthOverflowError, match=r"maximum context length is .*shorten"):
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


def test_a_token_outside_the_vocabulary_is_rejected() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        make_engine().add_request(request(0, [50_000]))


def test_an_answer_stops_at_the_longest_sequence() -> None:
    engine = make_engine()
    engine.add_request(request(0, [1] * 250, 100))
    nothing = np.empty(0, np.int32)
    for number, total in ((1, 400), (2, 253)):
        params = SamplingParams(temperature=0.0, num_tokens_total=total)
        engine.add_request(EngineRequest(number, np.array([1] * 250, np.int32), nothing, params))
    answers = run(engine)
    assert [len(answers[number]) for number in range(3)] == [6, 6, 3]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def order(engine: EngineCore) -> list[int]:
    """Requests in the order in which they end."""
    return [output.request_id for _ in range(2000) for output in engine.step() if output.finish_reason is not None]


def test_lower_priority_numbers_go_first_and_equal_ones_in_the_order_of_arrival() -> None:
    engine = make_engine(max_requests=1)
    for number, priority in enumerate([1, 0, 1, -5, 0]):
        engine.add_request(request(number, [7, 8], 3, priority=priority))
    assert order(engine) == [3, 1, 4, 0, 2]


def test_a_preempted_request_keeps_its_place_and_the_first_always_makes_progress() -> None:
    engine = make_engine(pages=20)
    for index in range(6):
        engine.add_request(request(index, [index + 1] * 8, 40))
    assert order(engine) == list(range(6))
    assert engine.stats().preemptions > 0


def test_memory_is_taken_from_the_lowest_priority() -> None:
    engine = make_engine(pages=14, max_requests=2)
    engine.add_request(request(0, [1] * 8, 40, priority=1))
    engine.step()
    engine.add_request(request(1, [2] * 8, 40, priority=0))
    assert order(engine) == [1, 0]


@pytest.mark.parametrize("running", [True, False])
def test_a_request_past_its_deadline_ends_and_frees_its_memory(running: bool) -> None:
    clock = Clock()
    engine = make_engine(max_requests=1, clock=clock)
    if not running:
        engine.add_request(request(9, [1], 50))
    engine.add_request(request(0, [1, 2, 3], 50, seconds=5.0))
    clock.now += 4.9
    assert all(output.error is None for output in engine.step())
    clock.now += 0.1
    (ended,) = [output for output in engine.step() if output.request_id == 0]
    assert (ended.finish_reason, ended.error_code) == ("error", ErrorCode.DEADLINE)
    assert "5 s" in (ended.error or "")
    engine.check_integrity()
    assert (engine.context.usage == 0) is running


def test_a_call_that_ended_in_time_is_not_killed() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    for number in range(300):
        engine.add_request(request(number, [1], 1, seconds=5.0))
        engine.step()
    clock.now += 10
    engine.add_request(request(0, [1], 2))
    assert [output.finish_reason for output in engine.step()] == [None]


def test_a_deadline_is_kept_whatever_many_others_ended_in_time() -> None:
    clock = Clock()
    engine = make_engine(pages=20, clock=clock)
    engine.add_request(request(0, [1, 2], 50, seconds=5.0))
    for number in range(1, 200):
        engine.add_request(request(number, [1, 2], 50, seconds=100.0))
        assert engine.abort_request(number)
    clock.now += 6
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [(0, "error")]


def test_an_admitted_prompt_has_pages_for_all_its_chunks() -> None:
    engine = make_engine(max_tokens=8, pages=41)
    engine.add_request(request(0, [1] * 100, 4))
    engine.add_request(request(1, [2] * 100, 4))
    assert order(engine) == [0, 1]
    assert engine.stats().preemptions == 0


def test_several_prompts_share_a_step() -> None:
    engine = make_engine(max_tokens=64)
    for number in range(4):
        engine.add_request(request(number, [number + 1] * 20, 4))
    plan = engine.schedule()
    assert plan is not None
    assert plan.query_lengths.tolist() == [20, 20, 20, 4]


def test_without_chunking_a_preempted_request_comes_back_whatever_its_length() -> None:
    engine = make_engine(enable_chunked_prefill=False, max_tokens=24, pages=15, max_requests=4)
    for number in range(4):
        engine.add_request(request(number, [number + 1] * 20, 30))
    assert run(engine) == {number: echo_answer([number + 1] * 20, 30) for number in range(4)}
    assert engine.stats().preemptions > 0


def test_prompts_get_the_tokens_of_a_step_that_decodes_leave() -> None:
    engine = make_engine(max_tokens=12)
    for number in range(6):
        engine.add_request(request(number, [number + 1] * 2, 30))
    engine.step()
    engine.add_request(request(6, [9] * 40, 4))
    plan = engine.schedule()
    assert plan is not None
    assert plan.query_lengths.tolist() == [1] * 6 + [6]


def test_without_chunking_a_prompt_is_never_split_be_it_ahead_of_decodes_in_line() -> None:
    engine = make_engine(max_tokens=24, enable_chunked_prefill=False)
    for number in range(6):
        engine.add_request(request(number, [number + 1] * 2, 5, priority=1))
    engine.step()
    engine.add_request(request(6, [9] * 20, 4))
    rows = []
    while engine.has_work:
        plan = engine.schedule()
        assert plan is not None
        rows.append(plan.query_lengths.tolist())
        engine.collect(engine.executor.execute(plan))
    assert rows == [[1] * 6] * 4 + [[20]] + [[1]] * 3


def test_an_early_stop_token_does_not_end_a_request_that_was_begun_elsewhere() -> None:
    answer = echo_answer([3, 4], 10)
    engine = make_engine()
    engine.add_request(request(0, [3, 4], 10, generated=answer[:3], stop_token_ids=[answer[2]], min_tokens=5))
    engine.add_request(request(1, [3, 4], 10, generated=answer[:3], stop_token_ids=[answer[2]]))
    engine.add_request(request(2, [3, 4], 10, generated=answer))
    last = {}
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.new_tokens
            last[output.request_id] = output.finish_reason
    assert tokens == {0: answer[3:], 1: [], 2: []}
    assert last == {0: "length", 1: "stop", 2: "length"}


def test_bad_words_without_a_tokenizer_are_rejected_by_name() -> None:
    with pytest.raises(InvalidSamplingParamsError, match="model has a tokenizer") as rejected:
        make_engine().add_request(request(0, [1, 2, 3], bad_words=["a"]))
    assert rejected.value.field == "bad_words"


def test_a_total_that_the_prompt_already_has_is_rejected_by_name() -> None:
    one = request(0, [1, 2, 3])
    params = SamplingParams(num_tokens_total=3)
    with pytest.raises(InvalidSamplingParamsError, match="num_tokens_total=3"):
        make_engine().add_request(EngineRequest(0, one.prompt_tokens, one.generated_tokens, params))


def test_an_unsupported_parameter_is_rejected_by_name() -> None:
    with pytest.raises(InvalidConfigError, match="num_speculative_tokens=2"):
        make_engine(num_speculative_tokens=2)


def test_the_load_is_logged_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(logging_step_interval=3)
    engine.add_request(request(0, [1, 2], 7))
    with caplog.at_level("INFO"):
        run(engine)
    assert [record.message.split(":")[0] for record in caplog.records] == ["step 3", "step 6"]
    assert "num_running=1" in caplog.text


def test_a_request_reports_its_times_and_epochs() -> None:
    clock = Clock()
    executor = EchoExecutor(page_size=4, num_pages=12)
    executor.load()
    config = InferenceConfig(max_requests=1, track_generated_token_events=True)
    engine = EngineCore(executor, config, clock=clock)
    engine.add_request(request(0, [1], 2))
    engine.add_request(request(1, [2], 2))
    outputs = []
    while engine.has_work:
        clock.now += 1
        outputs += engine.step()
    summary = next(output.summary for output in outputs if output.request_id == 1 and output.summary)
    assert (summary.queue_seconds, summary.prefill_seconds, summary.decode_seconds) == (3, 0, 1)
    kinds = [event.type.name for event in summary.events]
    assert kinds == ["ADD_ENGINE", "ADD_CONTEXT", "GENERATED_TOKEN", "GENERATED_TOKEN", "FINISH"]
    assert summary.policy_epoch == summary.kv_cache_epoch == [(0, 0)]


def test_epochs_are_reported_as_spans() -> None:
    engine = make_engine()
    engine.add_request(request(0, [1, 2, 3], 6))
    for epoch in (4, 4, 6):
        engine.step()
        engine.set_epoch(epoch)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    summary = outputs[-1].summary
    assert summary is not None
    assert summary.policy_epoch == summary.kv_cache_epoch == [(0, 0), (3, 4), (5, 6)]


def test_an_epoch_that_came_before_the_first_token_is_the_first_of_the_answer() -> None:
    engine = make_engine(max_tokens=8)
    engine.add_request(request(0, [1] * 12, 3))
    engine.add_request(request(1, [2] * 12, 3))
    engine.step()  # a part of the first prompt; the second has not begun
    engine.set_epoch(4)
    summaries = {}
    while engine.has_work:
        for output in engine.step():
            summaries[output.request_id] = output.summary
    assert all(summary is not None and summary.policy_epoch == [(0, 4)] for summary in summaries.values())
    assert [summaries[number].kv_cache_epoch for number in (0, 1)] == [[(0, 0), (8, 4)], [(0, 4)]]


def test_a_recomputed_cache_has_only_the_newest_epoch() -> None:
    engine = make_engine()
    engine.add_request(request(0, [1, 2, 3], 6))
    engine.step()
    engine.set_epoch(4)
    engine.step()
    engine._scheduler.preempt_all()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    summary = outputs[-1].summary
    assert summary is not None
    assert summary.policy_epoch == [(0, 0), (3, 4)]
    assert summary.kv_cache_epoch == [(0, 4)]
