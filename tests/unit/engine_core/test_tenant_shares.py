"""Tenants share an engine's slots, pages and prompt tokens; a tenant alone has all of them, in the order of arrival."""

from functools import partial
from random import Random

import pytest
from echo_executor import echo_answer
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.backends.native.engine import EngineCore

from . import echo_core
from .echo_core import PAGE, prompt_of, request, run, running, step

make_engine = partial(echo_core.make_engine, max_requests=4, max_tokens=256)


def add(engine: EngineCore, number: int, tenant: str, *, length: int = 8, answer: int = 20, priority: int = 0) -> None:
    engine.add_request(request(number, prompt_of(number, length), answer, tenant=tenant, priority=priority))


def test_a_tenant_that_has_every_slot_gives_half_of_them_to_another() -> None:
    engine = make_engine()
    answers: dict[int, list[int]] = {}
    for number in range(12):
        add(engine, number, "greedy")
    for _ in range(5):
        step(engine, answers)
    for number in range(12, 16):
        add(engine, number, "other")
    step(engine, answers)
    assert running(engine) == [0, 12, 1, 13]
    assert engine.stats().preemptions == 2
    run(engine, answers)
    assert answers == {number: echo_answer(prompt_of(number), 20) for number in range(16)}


def test_a_tenant_that_fills_the_memory_is_preempted_for_another() -> None:
    engine = make_engine(pages=1 + 40, max_requests=16)
    answers: dict[int, list[int]] = {}
    for number in range(16):
        add(engine, number, "greedy", length=6 * PAGE - 1, answer=60)
    for _ in range(20):
        step(engine, answers)
    assert len(running(engine)) < 16, "memory is full before the slots are"
    add(engine, 16, "other", length=6 * PAGE - 1, answer=10)
    step(engine, answers)
    assert len(answers[16]) == 1, "the first step brought its first token"
    run(engine, answers)
    assert answers[16] == echo_answer(prompt_of(16, 6 * PAGE - 1), 10)
    assert all(answers[number] == echo_answer(prompt_of(number, 6 * PAGE - 1), 60) for number in range(16))


def test_long_prompts_of_a_tenant_do_not_hold_up_the_prompt_of_another() -> None:
    engine = make_engine(max_tokens=16)
    answers: dict[int, list[int]] = {}
    for number in range(4):
        add(engine, number, "greedy", length=100)
    step(engine, answers)
    add(engine, 4, "other", length=12)
    steps = 0
    while 4 not in answers:
        step(engine, answers)
        steps += 1
    assert steps <= 8, "only the first prompt of the other tenant goes before it: 100 tokens in steps of 16"
    assert run(engine, answers)[4] == echo_answer(prompt_of(4, 12), 20)


@pytest.mark.parametrize("waiting", ["a", "b"])
def test_tenants_with_equal_shares_are_not_preempted(waiting: str) -> None:
    engine = make_engine()
    answers: dict[int, list[int]] = {}
    for number, tenant in enumerate("aabb"):
        add(engine, number, tenant)
    step(engine, answers)
    for number in range(4, 8):
        add(engine, number, waiting)
    run(engine, answers)
    assert engine.stats().preemptions == 0


def test_a_tenant_alone_is_served_in_the_order_of_arrival_again() -> None:
    engine = make_engine(max_requests=1)
    answers: dict[int, list[int]] = {}
    for number in range(3):
        add(engine, number, "a", answer=4)
    add(engine, 3, "b", answer=4)
    step(engine, answers)
    assert [request.request_id for request in engine._scheduler.waiting] == [3, 1, 2]
    engine.abort_request(3)
    add(engine, 4, "a", answer=4)
    step(engine, answers)
    assert [request.rank for request in engine._scheduler.open.values()] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 4)]
    assert list(run(engine, answers)) == [0, 1, 2, 4]


def test_priority_precedes_the_share_of_a_tenant() -> None:
    engine = make_engine(max_requests=2)
    answers: dict[int, list[int]] = {}
    for number in range(2):
        add(engine, number, "a", priority=0)
    step(engine, answers)
    add(engine, 2, "b", priority=1)
    for _ in range(5):
        step(engine, answers)
    assert running(engine) == [0, 1]
    run(engine, answers)


@pytest.mark.slow
@given(st.integers(0, 10**9), st.integers(20, 60), st.sampled_from([5, 17, 64]))
def test_no_request_overtakes_the_first_and_every_answer_is_exact(seed: int, pages: int, max_tokens: int) -> None:
    random = Random(seed)
    engine = make_engine(pages=pages, max_tokens=max_tokens, max_requests=random.randint(1, 5))
    longest = min(60, engine.context.max_sequence_length - 16)
    answers: dict[int, list[int]] = {}
    wanted = {}
    first_waiting, beside = None, set()
    while len(wanted) < 14 or engine.has_work:
        if len(wanted) < 14 and random.random() < 0.4:
            number, length = len(wanted), random.randint(1, longest)
            add(engine, number, random.choice("abc"), length=length, answer=12, priority=random.randint(0, 1))
            wanted[number] = echo_answer(prompt_of(number, length), 12)
        step(engine, answers)
        line = sorted(engine._scheduler.open.values(), key=lambda request: request.rank)
        waits = line[0].request_id if line and line[0].slot < 0 else None
        if waits is not None and waits == first_waiting:
            assert beside.issuperset(running(engine)), "another was admitted before the first in line"
        first_waiting, beside = waits, set(running(engine))
    assert answers == wanted
    assert engine.stats().preemptions <= 14 * 14, "requests take each other's place without end"
