"""An executor without a model: the next token is a hash of all tokens so far, read back from its paged cache.

It costs microseconds and is exact, so that everything around the arithmetic can be tested and measured: a page mapped
wrongly, a token lost or doubled, a request continued in the wrong place all change the answer.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

import numpy as np

from megatron_runtime.engines.executor import StepPlan, StepResult
from megatron_runtime.engines.faults import FailStep, Faults, InjectedFaultError, SlowStep


def echo_token(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> int:
    """The token that follows `tokens`: never 0, which ends a sequence."""
    digest = zlib.crc32(np.asarray(tokens, dtype="<i4").tobytes())
    return 1 + digest % (vocab_size - 1)


def echo_answer(prompt: Sequence[int], length: int, *, vocab_size: int = 50_000) -> list[int]:
    """What an echo engine answers to `prompt`."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(echo_token(tokens, vocab_size))
    return tokens[len(prompt) :]


class EchoExecutor:
    """Implements Executor.

    step_seconds: how long a step takes, to stand in for arithmetic.
    faults:       steps that fail or are slow.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 50_000,
        max_sequence_length: int = 4096,
        page_size: int = 16,
        num_pages: int = 4097,
        step_seconds: float = 0.0,
        faults: Faults | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_ids: tuple[int, ...] = (0,)
        self.max_sequence_length = max_sequence_length
        self.page_size = page_size
        self.num_pages = num_pages
        self._step_seconds = step_seconds
        self._faults = faults or Faults()
        self._steps = 0
        self._cache: np.ndarray | None = None

    def load(self) -> None:
        self._cache = np.full(self.num_pages * self.page_size, -1, dtype=np.int32)

    def release(self) -> None:
        self._cache = None

    def execute(self, plan: StepPlan) -> StepResult:
        if self._cache is None:
            raise RuntimeError("execute() before load()")
        self._take_time()
        self._cache[plan.slot_mapping] = plan.token_ids
        tokens = np.full(len(plan.query_lengths), -1, dtype=np.int32)
        offsets = np.arange(self.page_size)
        for row in np.flatnonzero(plan.needs_sample):
            length = plan.context_lengths[row]
            pages = plan.block_tables[row, : -(-length // self.page_size)]
            slots = (pages[:, None] * self.page_size + offsets).ravel()[:length]
            tokens[row] = echo_token(self._cache[slots], self.vocab_size)
        return StepResult(tokens, np.zeros(len(tokens), np.float32) if plan.wants_log_probs.any() else None)

    def _take_time(self) -> None:
        """Stand in for arithmetic, with the faults of this step."""
        self._steps += 1
        seconds = self._step_seconds
        seconds += sum(fault.seconds for fault in self._faults.of(SlowStep) if self._steps % fault.every == 0)
        if seconds:
            time.sleep(seconds)
        if any(fault.at == self._steps for fault in self._faults.of(FailStep)):
            raise InjectedFaultError(f"step {self._steps} fails as told")
