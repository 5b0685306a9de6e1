"""Cores with echo executors, and what tests do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from echo_executor import EchoExecutor

from megatron_runtime.backends.native.backend import Ranks
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.engine.backend import RankResults
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import SamplingParams

PAGE, BLOCK = 4, 8


def make_engine(*, pages: int = 200, clock: Callable[[], float] | None = None, **config: object) -> EngineCore:
    """Return a core with loaded weights. config: fields of InferenceConfig."""
    executor = EchoExecutor(page_size=PAGE, num_pages=pages, max_sequence_length=256)
    executor.load()
    defaults = {"max_requests": 8, "max_tokens": 64, "enable_chunked_prefill": True}
    options = {} if clock is None else {"clock": clock}
    return EngineCore(executor, InferenceConfig(**{**defaults, **config}), **options)


def request(
    number: int,
    prompt: list[int],
    length: int = 10,
    *,
    generated: Sequence[int] = (),
    tenant: str = "",
    seconds: float | None = None,
    **params: Any,
) -> EngineRequest:
    """Return a greedy request. seconds: its deadline. params: fields of SamplingParams."""
    return EngineRequest(
        number,
        np.array(prompt, np.int32),
        np.array(generated, np.int32),
        SamplingParams(temperature=0.0, num_tokens_to_generate=length, **params),
        deadline_seconds=seconds,
        tenant=tenant,
    )


def prompt_of(number: int, length: int = 8) -> list[int]:
    return [number + 1] * length


def running(engine: EngineCore) -> list[int]:
    return [request.request_id for request in engine._scheduler.running]


def step(engine: EngineCore, answers: dict[int, list[int]]) -> None:
    """Run a step and append its tokens to the answers."""
    for output in engine.step():
        assert output.error is None
        answers.setdefault(output.request_id, []).extend(output.new_tokens)
    engine.check_integrity()


def run(engine: EngineCore, answers: dict[int, list[int]] | None = None) -> dict[int, list[int]]:
    """Run until nothing is left to do, and return the answers."""
    answers = {} if answers is None else answers
    while engine.has_work:
        step(engine, answers)
    return answers


class FailingRanks(Ranks):
    """Four ranks, two of which do not confirm some signals."""

    count = 4

    def __init__(self, *failing: Header) -> None:
        self.failing = set(failing)

    async def confirm(self, signal: Header) -> RankResults:
        failed = {3: "it hangs", 1: f"did not confirm {signal.name}"} if signal in self.failing else {}
        return RankResults(4, failed)
