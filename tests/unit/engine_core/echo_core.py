"""Cores with echo executors, and what tests do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from echo_executor import EchoExecutor

from megatron_runtime.backends.native.backend import Ranks
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.executor import StepPlan, StepResult
from megatron_runtime.backends.native.micro_batches import expert_of_pages, merge, take
from megatron_runtime.engine.backend import RankResults
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import SamplingParams

PAGE, BLOCK = 4, 8


class ExpertEcho(EchoExecutor):
    """Several expert ranks, each of which has a cache of its own and runs its own requests."""

    def __init__(self, expert_size: int, **options: Any) -> None:
        super().__init__(**options)
        self.expert_size = expert_size
        self._ranks = [EchoExecutor(**options) for _ in range(expert_size)]

    def load(self) -> None:
        super().load()
        for rank in self._ranks:
            rank.load()

    def execute(self, plan: StepPlan) -> StepResult:
        owners = expert_of_pages(plan.block_tables[:, 0], self.expert_size)
        rows_of = [np.flatnonzero(owners == number) for number in range(self.expert_size)]
        parts = zip(self._ranks, rows_of, strict=True)
        return merge([(rows, rank.execute(take(plan, rows))) for rank, rows in parts if len(rows)], plan)

    def read_blocks(self, table: np.ndarray, blocks: range) -> bytes:
        return self._owner(table).read_blocks(table, blocks)

    def write_blocks(self, table: np.ndarray, blocks: range, data: bytes) -> None:
        self._owner(table).write_blocks(table, blocks, data)

    def _owner(self, table: np.ndarray) -> EchoExecutor:
        return self._ranks[expert_of_pages(table[:1, 0], self.expert_size)[0]]


def make_engine(
    *, pages: int = 200, expert_size: int = 1, clock: Callable[[], float] | None = None, **config: object
) -> EngineCore:
    """Return a core with loaded weights. config: fields of InferenceConfig."""
    sizes = {"page_size": PAGE, "num_pages": pages, "max_sequence_length": 256}
    executor = ExpertEcho(expert_size, **sizes) if expert_size > 1 else EchoExecutor(**sizes)
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
