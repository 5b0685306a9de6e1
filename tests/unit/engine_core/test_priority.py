"""A waiting request takes the place of running ones of lower priority: at once, of as few as need be, once."""

from functools import partial
from random import Random

import numpy as np
import pytest
from echo_executor import echo_answer
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.requests.events import DynamicInferenceEventType as Event
from megatron_runtime.requests.sampling_params import SamplingParams

from . import echo_core
from .echo_core import PAGE, prompt_of, request, run, running, step

make_engine = partial(echo_core.make_engine, max_requests=3, max_tokens=256)


def add(engine: EngineCore, number: int, priority: int, *, length: int = 8, answer: int = 20) -> None:
    engine.add_request(request(number, prompt_of(number, length), answer, priority=priority))


def test_a_higher_priority_preempts_the_last_request_which_continues_later() -> None:
    engine = make_engine()
    answers: dict[int, list[int]] = {}
    for number in range(3):
        add(engine, number, priority=1)
    for _ in range(5):
        step(engine, answers)
    victim = engine._scheduler.open[2]
    add(engine, 3, priority=0)
    add(engine, 4, priority=1)
    step(engine, answers)
    assert running(engine) == [3, 0, 1]
    assert [request.request_id for request in engine._scheduler.waiting] == [2, 4]
    run(engine, answers)
    assert answers == {number: echo_answer(prompt_of(number), 20) for number in range(5)}
    assert engine.stats().preemptions == 1
    kinds = [event.type for event in victim.events]
    assert kinds == [Event.ADD_ENGINE, Event.ADD_CONTEXT, Event.EVICT, Event.ADD_CONTEXT, Event.FINISH]


def test_preemption_takes_as_few_requests_as_needed() -> None:
    engine = make_engine(pages=1 + 30, max_requests=8)
    answers: dict[int, list[int]] = {}
    for number in range(6):
        add(engine, number, priority=1, length=4 * PAGE - 1, answer=30)
    step(engine, answers)
    assert engine.context.prefix_cache.num_free == 6
    add(engine, 6, priority=0, length=10 * PAGE - 1)
    step(engine, answers)
    assert running(engine)[0] == 6
    # 6 pages are free; one victim gives 4 and needs no page kept for its growth: 10 + 5 > 10, two: 10 + 4 <= 14.
    assert running(engine) == [6, 0, 1, 2, 3]
    run(engine, answers)
    assert answers[6] == echo_answer(prompt_of(6, 10 * PAGE - 1), 20)
    assert all(answers[number] == echo_answer(prompt_of(number, 4 * PAGE - 1), 30) for number in range(6))


@pytest.mark.parametrize("priority", [1, 2])
def test_no_request_is_preempted_by_an_equal_or_lower_priority(priority: int) -> None:
    engine = make_engine()
    answers: dict[int, list[int]] = {}
    for number in range(3):
        add(engine, number, priority=1)
    step(engine, answers)
    for number in range(3, 6):
        add(engine, number, priority=priority, answer=5)
    run(engine, answers)
    assert engine.stats().preemptions == 0
    assert answers[5] == echo_answer(prompt_of(5), 5)


def test_no_request_is_preempted_if_that_frees_too_little() -> None:
    engine = make_engine(pages=1 + 30)
    answers: dict[int, list[int]] = {}
    add(engine, 0, priority=0, length=20 * PAGE, answer=8)
    add(engine, 1, priority=2, length=2 * PAGE, answer=60)
    step(engine, answers)
    add(engine, 2, priority=1, length=12 * PAGE)
    for _ in range(6):
        step(engine, answers)
        assert running(engine) == [0, 1]
    run(engine, answers)
    assert engine.stats().preemptions <= 1
    assert answers[1] == echo_answer(prompt_of(1, 2 * PAGE), 60)


def test_a_prompt_of_higher_priority_has_the_tokens_of_a_step_first() -> None:
    engine = make_engine(max_tokens=16)
    answers: dict[int, list[int]] = {}
    add(engine, 0, priority=1, length=100)
    step(engine, answers)
    add(engine, 1, priority=0, length=20)
    plan = engine.schedule()
    assert plan is not None
    engine.collect(engine.executor.execute(plan))
    assert running(engine) == [1, 0]
    assert plan.query_lengths.tolist() == [16]
    assert engine.stats().preemptions == 0
    run(engine, answers)
    assert answers[0] == echo_answer(prompt_of(0, 100), 20)


def test_a_decode_is_deferred_if_decodes_take_every_token_of_a_step() -> None:
    engine = make_engine(max_requests=3, max_tokens=3)
    answers: dict[int, list[int]] = {}
    for number in range(3):
        add(engine, number, priority=1, length=1)
    for _ in range(4):
        step(engine, answers)
    add(engine, 3, priority=0)
    step(engine, answers)
    assert running(engine) == [3, 0, 1]
    assert run(engine, answers)[3] == echo_answer(prompt_of(3), 20)


def test_a_cached_prefix_that_only_victims_held_is_computed_again_where_it_was_forgotten() -> None:
    for policy in ("ref_zero", "lru"):
        engine = make_engine(
            pages=1 + 13,
            max_requests=1,
            enable_prefix_caching=True,
            block_size_tokens=PAGE,
            prefix_caching_eviction_policy=policy,
        )
        answers: dict[int, list[int]] = {}
        add(engine, 0, priority=1, length=6 * PAGE)
        step(engine, answers)
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=4, priority=0)
        tokens = np.array([*prompt_of(0, 5 * PAGE), 9, 9], np.int32)
        engine.add_request(EngineRequest(1, tokens, np.empty(0, np.int32), params))
        step(engine, answers)
        assert running(engine) == [1]
        assert engine._scheduler.open[1].num_cached_tokens == (5 * PAGE if policy == "lru" else 0)
        run(engine, answers)
        assert answers == {0: echo_answer(prompt_of(0, 6 * PAGE), 20), 1: echo_answer(tokens.tolist(), 4)}


@given(st.integers(0, 10**9), st.integers(20, 60), st.sampled_from([5, 17, 64]))
def test_the_first_request_always_runs_and_every_answer_is_exact(seed: int, pages: int, max_tokens: int) -> None:
    random = Random(seed)
    engine = make_engine(pages=pages, max_tokens=max_tokens, max_requests=random.randint(1, 5))
    longest = min(60, engine.context.max_sequence_length - 16)
    answers: dict[int, list[int]] = {}
    wanted = {}
    while len(wanted) < 14 or engine.has_work:
        if len(wanted) < 14 and random.random() < 0.4:
            number, length = len(wanted), random.randint(1, longest)
            add(engine, number, priority=random.randint(-2, 2), length=length, answer=12)
            wanted[number] = echo_answer(prompt_of(number, length), 12)
        line = sorted(engine._scheduler.open.values(), key=lambda request: request.rank)
        preempted = engine.stats().preemptions
        step(engine, answers)
        assert engine.stats().preemptions - preempted <= len(line)
        if line and line[0].request_id in engine._scheduler.open:
            assert line[0].slot >= 0, "the first in line does not run"
    assert answers == wanted
