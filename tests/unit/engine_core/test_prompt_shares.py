"""Prompts share the tokens of a step by age and size: short ones pass long ones, and none starves."""

import random

import pytest
from soak import size

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.requests.config import InferenceConfig, InvalidConfigError

from .echo_core import make_engine, request


def steps_to_first_token(engine: EngineCore, request_id: int) -> int:
    steps = 0
    while True:
        steps += 1
        if any(output.request_id == request_id for output in engine.step()):
            return steps


def test_a_short_prompt_passes_a_long_one() -> None:
    engine = make_engine(max_tokens=16)
    engine.add_request(request(0, [1] * 200, 1))
    engine.step()
    engine.add_request(request(1, [2] * 8, 1))
    assert steps_to_first_token(engine, 1) == 1


def test_a_short_prompt_passes_long_ones_that_are_not_admitted() -> None:
    engine = make_engine(max_tokens=16)
    for number in range(4):
        engine.add_request(request(number, [number + 1] * 100, 1))
    engine.add_request(request(4, [9] * 8, 1))
    assert steps_to_first_token(engine, 4) == 1


def test_the_oldest_prompt_gets_half_of_each_step() -> None:
    engine = make_engine(max_tokens=16)
    engine.add_request(request(0, [1] * 80, 1))
    engine.step()
    ended: list[int] = []
    for number in range(1, 1 + (80 - 16) // 8):
        engine.add_request(request(number, [number + 1] * 16, 1))
        ended += [output.request_id for output in engine.step()]
    assert 0 in ended


def test_what_one_half_leaves_goes_to_the_other() -> None:
    engine = make_engine(max_tokens=16)
    engine.add_request(request(0, [1] * 4, 1))
    engine.add_request(request(1, [2] * 60, 1))
    plan = engine.schedule()
    assert plan is not None
    assert plan.query_lengths.tolist() == [4, 12]


@pytest.mark.parametrize("seed", range(size(2, soak=30)))
def test_adversarial_arrivals_starve_no_request(seed: int) -> None:
    """Each step as many short prompts arrive as the step computes. A request gets its first token after at most the
    steps that half of the tokens takes for it and for the prompts that were there before it.
    """
    rng, budget = random.Random(seed), 32
    engine = make_engine(max_tokens=budget, max_requests=32, pages=2000)
    left: dict[int, int] = {}
    latest: dict[int, int] = {}
    number = 0
    for step in range(400):
        room = 32 - len(left)
        for _ in range(min(room, rng.choice([1, 2, 4]))):
            length = rng.choice([2, 4, 8, budget]) if rng.random() < 0.9 else rng.randint(100, 250)
            engine.add_request(request(number, [1 + number % 999] * length, 1))
            before = sum(left.values())
            latest[number] = step + (before + length) // (budget // 2) + 1
            left[number] = length
            number += 1
        for output in engine.step():
            del left[output.request_id]
            assert step <= latest[output.request_id], "a request waited longer than the bound"
        engine.check_integrity()
        assert all(step <= latest[waiting] for waiting in left), "a request waits longer than the bound"


def test_a_step_that_generates_has_a_bound_of_prompt_tokens() -> None:
    engine = make_engine(max_tokens=32, max_prefill_tokens=6)
    engine.add_request(request(0, [1] * 20, 30))
    plan = engine.schedule()
    assert plan is not None
    assert plan.query_lengths.tolist() == [20], "no request generates"
    engine.collect(engine.executor.execute(plan))
    engine.add_request(request(1, [2] * 40, 1))
    engine.add_request(request(2, [3] * 4, 1))
    plan = engine.schedule()
    assert plan is not None
    assert plan.query_lengths.tolist() == [1, 3, 3]


def test_the_bound_needs_chunked_prefill() -> None:
    with pytest.raises(InvalidConfigError, match="enable chunked prefill"):
        InferenceConfig(max_prefill_tokens=64)


def test_queued_tokens_are_those_that_are_not_computed_or_cached() -> None:
    caching = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru", "block_size_tokens": 8}
    engine = make_engine(max_tokens=16, **caching)
    assert engine.stats().queued_tokens == 0
    engine.add_request(request(3, [1] * 40, 5))
    assert (engine.stats().queued_tokens, engine.stats().last_request) == (40, 3)
    plan = engine.schedule()
    assert engine.stats().queued_tokens == 40, "the step is in progress"
    engine.collect(engine.executor.execute(plan))
    assert engine.stats().queued_tokens == 24
    while engine.has_work:
        engine.step()
    assert engine.stats().queued_tokens == 0
    engine.add_request(request(4, [1] * 40, 5))
    assert engine.stats().queued_tokens == 40 - 32, "four blocks of 8 are in the prefix cache"
    engine.abort_request(4)
    assert engine.stats().queued_tokens == 0
