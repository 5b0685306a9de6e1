"""The rates that an engine reports, fitted to the durations of its steps."""

import random
from dataclasses import dataclass

import pytest

from megatron_runtime.backends.step_rates import MAX_SUMMED, MIN_RECORDS, OutputRates, StepRates

from .echo_core import make_engine, request


def observed(rates: StepRates, steps: int, *, seed: int = 1, prompt: float = 2e-4, held: float = 1e-6) -> StepRates:
    rng = random.Random(seed)
    for _ in range(steps):
        prompt_tokens, held_tokens = rng.choice([0, 0, 100, 2000]), rng.randint(0, 50_000)
        seconds = 5e-3 + prompt_tokens * prompt + held_tokens * held
        noise = rng.uniform(0.95, 1.05)
        rates.observe(prompt_tokens=prompt_tokens, held_tokens=held_tokens, seconds=seconds * noise)
    return rates


def test_the_costs_of_steps_are_found_in_noise() -> None:
    costs = observed(StepRates(), 400).costs()
    assert costs is not None
    assert costs.prompt == pytest.approx(2e-4, rel=0.1)
    assert costs.held == pytest.approx(1e-6, rel=0.2)


def test_rates_need_steps_that_differ() -> None:
    rates = StepRates()
    assert rates.rates() == (None, None)
    for _ in range(2 * MIN_RECORDS):
        rates.observe(prompt_tokens=0, held_tokens=100, seconds=0.01)
    assert rates.rates() == (None, None)


def test_rates_are_tokens_per_second() -> None:
    prefill, decode = observed(StepRates(), 400).rates()
    assert prefill == pytest.approx(5000, rel=0.1)
    assert decode == pytest.approx(1e6, rel=0.2)


def test_rates_follow_a_change_and_keep_their_value_without_new_steps_of_a_kind() -> None:
    rates = observed(StepRates(), 400)
    observed(rates, 3000, seed=2, prompt=4e-4)
    assert rates.rates()[0] == pytest.approx(2500, rel=0.1)
    rng = random.Random(3)
    for _ in range(20_000):
        held = rng.randint(0, 50_000)
        rates.observe(prompt_tokens=0, held_tokens=held, seconds=5e-3 + held * 1e-6)
    assert rates.rates()[0] == pytest.approx(2500, rel=0.1)


def test_an_engine_measures_its_steps() -> None:
    now = [0.0]
    engine = make_engine(max_tokens=32, clock=lambda: now[0])
    execute = engine.executor.execute

    def timed(plan):
        prompt_tokens = int(plan.query_lengths[plan.query_lengths > 1].sum())
        now[0] += 0.01 + prompt_tokens * 1e-3 + int(plan.context_lengths.sum()) * 1e-4
        return execute(plan)

    engine.executor.execute = timed
    for number in range(30):
        engine.add_request(request(number, [number + 1] * (number % 7 + 3), 10 + number))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.prefill_rate == pytest.approx(1000, rel=0.05)
    assert stats.decode_rate is not None


STEP, PROMPT, HELD = 6e-3, 2e-4, 1e-6
"""Costs of the simulated engine below, in seconds."""


@dataclass
class Request:
    uncomputed: int
    tokens_left: int
    held: int = 0


def served(rates: OutputRates, *, prompts: int, budget: int, interrupted: bool = False) -> OutputRates:
    """Simulate an engine that computes at most `budget` prompt tokens in a step, and report its outputs only."""
    rng, now = random.Random(4), 0.0
    requests: list[Request] = []
    for _ in range(prompts):
        requests.append(Request(uncomputed=rng.choice([20, 300, 3000]), tokens_left=rng.randint(1, 60)))
        rates.begin(now)
        for _ in range(rng.randint(0, 20)):
            room, now, has_outputs = budget, now + STEP, False
            for running in requests:
                computed = min(running.uncomputed, room)
                room -= computed
                if running.uncomputed and not computed:
                    continue
                running.held += computed or 1
                now += computed * PROMPT + running.held * HELD
                running.uncomputed -= computed
                if not running.uncomputed:
                    has_outputs = True
                    running.tokens_left -= 1
                    prompt_tokens = running.held if computed else 0
                    rates.output(prompt_tokens=prompt_tokens, held_tokens=running.held)
            requests = [running for running in requests if running.tokens_left]
            if has_outputs:
                has_prompts = any(running.uncomputed for running in requests)
                rates.arrived(now, has_prompts=has_prompts, has_work=bool(requests))
            if interrupted and rng.random() < 0.005:
                rates.stop()
                now += 10.0
            if not requests:
                now += rng.choice([0, 5])
                break
    return rates


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("budget", [500, 8000])
def test_outputs_of_steps_show_the_rates(budget: int, interrupted: bool) -> None:
    """With the small budget, most prompts are computed in steps that report nothing of them."""
    prefill, decode = served(OutputRates(), prompts=400, budget=budget, interrupted=interrupted).rates()
    assert prefill == pytest.approx(1 / PROMPT, rel=0.05)
    assert decode == pytest.approx(1 / HELD, rel=0.05)


def test_outputs_are_recorded_while_prompts_are_always_in_progress() -> None:
    rates = OutputRates()
    rates.begin(0.0)
    for step in range(1, MIN_RECORDS * MAX_SUMMED):
        rates.output(prompt_tokens=0, held_tokens=step)
        rates.arrived(step * 0.01, has_prompts=True, has_work=True)
    assert rates._steps._num_records == MIN_RECORDS - 1
