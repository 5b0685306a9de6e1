"""Thousands of requests, many of them bad, in a small engine: no block, slot or memory is lost, and it goes on."""

import gc
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from echo_executor import EchoExecutor, echo_answer
from soak import SOAK, size

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import SamplingParams

REQUESTS = size(400, soak=20_000)
VOCABULARY = 1000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(clock: Clock) -> EngineCore:
    executor = EchoExecutor(vocab_size=VOCABULARY, page_size=4, num_pages=80, max_sequence_length=128)
    executor.load()
    config = InferenceConfig(
        max_requests=8,
        max_tokens=48,
        max_waiting=24,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy="lru",
        block_size_tokens=8,
    )
    return EngineCore(executor, config, clock=clock)


def bad_or_good(source: random.Random, number: int) -> tuple[EngineRequest, bool]:
    """A request, and whether it must be rejected."""
    prompt = [1 + index % 7 for index in range(source.randint(1, 60))] + [source.randint(1, 999)]
    params: dict[str, Any] = {
        "temperature": 0,
        "num_tokens_to_generate": source.randint(1, 30),
        "priority": source.randint(-1, 1),
        "cache_salt": source.choice([None, None, "tenant"]),
    }
    flaw = source.choice([None] * 6 + ["long", "empty", "vocabulary", "negative", "total"])
    if flaw == "long":
        prompt = [5] * source.randint(128, 400)
    elif flaw == "empty":
        prompt = []
    elif flaw == "vocabulary":
        prompt[source.randrange(len(prompt))] = source.choice([VOCABULARY, 2**31 - 1])
    elif flaw == "negative":
        prompt[source.randrange(len(prompt))] = -source.randint(1, 2**31)
    elif flaw == "total":
        del params["num_tokens_to_generate"]
        params["num_tokens_total"] = source.randint(1, len(prompt))
    deadline = source.choice([None, None, 0.0, 3.0, 1e9])
    tokens = np.array(prompt, np.int32)
    request = EngineRequest(number, tokens, np.array([], np.int32), SamplingParams(**params), deadline_seconds=deadline)
    return request, flaw is not None


def rejection(engine: EngineCore, request: EngineRequest) -> str | None:
    """Why the engine does not take a request; None if it does."""
    try:
        engine.add_request(request)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.timeout(1800 if SOAK else 300)
def test_random_requests_leak_nothing() -> None:
    source, clock = random.Random(3), Clock()
    engine = make_engine(clock)
    open_requests: dict[int, EngineRequest] = {}
    answers: dict[int, list[int]] = {}
    reasons: dict[str, int] = {}
    sizes = []
    tracemalloc.start()
    try:
        for number in range(REQUESTS):
            request, must_fail = bad_or_good(source, number)
            rejected = rejection(engine, request)
            if rejected is None:
                assert not must_fail
                open_requests[number] = request
                answers[number] = []
            else:
                words = ("prompt", "vocabulary", "num_tokens_total") if must_fail else ("waiting",)
                assert any(word in rejected for word in words)
            for _ in range(source.randint(0, 4)):
                clock.now += source.choice([0.0, 0.5])
                for output in engine.step():
                    answers[output.request_id] += output.new_tokens
                    if output.finish_reason is not None:
                        reasons[output.finish_reason] = reasons.get(output.finish_reason, 0) + 1
                        _check(open_requests.pop(output.request_id), answers.pop(output.request_id))
            if open_requests and source.random() < 0.2:
                victim = source.choice(sorted(open_requests))
                assert engine.abort_request(victim)
                del open_requests[victim], answers[victim]
            if number % 50 == 0:
                engine.check_integrity()
            if number % (REQUESTS // 4) == REQUESTS // 8:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    for number in open_requests:
        assert engine.abort_request(number)
    engine.check_integrity()
    assert engine.context.usage == 0
    assert not engine.has_work
    assert set(reasons) == {"length", "error"}
    assert min(reasons.values()) > REQUESTS // 50
    assert max(sizes[1:]) < sizes[0] + (1 << 20), sizes


def _check(request: EngineRequest, answer: list[int]) -> None:
    """Answers are right as far as they go; a deadline may have ended them early."""
    prompt = request.prompt_tokens.tolist()
    assert answer == echo_answer(prompt, len(answer), vocab_size=VOCABULARY)
