"""An executor without a model: the next token is a hash of all tokens so far, which it reads from its paged cache.

A step takes microseconds, and its result is exact, so tests and benchmarks can cover everything except the model: a
wrong page table, a lost or duplicated token, and a request continued at the wrong position all change the answer.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.executor import Int64, NoCudaProfilerError, StepPlan, StepResult
from megatron_runtime.protocol.adapters import Adapter
from megatron_runtime.sampling.batch import NO_LOG_PROBS, NO_TOKEN, RowFailure
from megatron_runtime.sampling.sampler import LogProbs


def echo_token(tokens: Sequence[int] | np.ndarray, vocab_size: int, weights: int = 0) -> int:
    """Return the token that follows `tokens` with these weights: never 0, the end-of-sequence token."""
    digest = zlib.crc32(np.asarray(tokens, dtype="<i4").tobytes(), weights)
    return 1 + digest % (vocab_size - 1)


def echo_weights(source: str) -> int:
    """Return the number that represents the weights at `source`: a hash of the name, or 0 for "echo"."""
    return 0 if source == "echo" else zlib.crc32(source.encode())


def echo_adapter(key: str, weights: int = 0) -> int:
    """Return the number that represents the weights with the adapter of this key on them; empty: none."""
    return zlib.crc32(key.encode(), weights) if key else weights


def echo_answer(
    prompt: Sequence[int],
    length: int,
    *,
    vocab_size: int = 50_000,
    weights: int = 0,
    adapter: Adapter | None = None,
) -> list[int]:
    """Return the tokens that an echo engine generates for `prompt`."""
    tokens = list(prompt)
    weights = echo_adapter(adapter.key if adapter is not None else "", weights)
    for _ in range(length):
        tokens.append(echo_token(tokens, vocab_size, weights))
    return tokens[len(prompt) :]


def _certain(tokens: npt.NDArray[np.int32]) -> LogProbs:
    """Return log-probabilities in which every token has the probability 1."""
    zeros = np.zeros(len(tokens), np.float32)
    return LogProbs(zeros, tokens[:, None], zeros[:, None])


def _nearest_allowed(token: int, allowed: npt.NDArray[np.uint32]) -> int:
    """Return the first allowed token at or after `token`, cyclically; a RowFailure if none is allowed."""
    ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
    if not len(ids):
        return RowFailure.MASK
    return int(ids[np.searchsorted(ids, token) % len(ids)])


class EchoExecutor:
    """Implements Executor.

    step_seconds: how long a step takes, to simulate the time of a model.
    token_seconds: how much longer it takes for each token that it computes.
    fails_at:     number of the step that raises.
    crash_token:  a request whose prompt begins with this token ends the process by SIGSEGV, because process 1 of a
                  container ignores signals that it sends itself.
    crash_length: number of tokens of its prompt and answer when it does so.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 50_000,
        max_sequence_length: int = 4096,
        page_size: int = 16,
        num_pages: int = 4097,
        step_seconds: float = 0.0,
        token_seconds: float = 0.0,
        crash_token: int | None = None,
        crash_length: int = 1,
    ) -> None:
        self.vocab_size = vocab_size
        self.short_length = None
        self.eos_ids: tuple[int, ...] = (0,)
        self.max_sequence_length = max_sequence_length
        self.page_size = page_size
        self.num_pages = num_pages
        self.page_bytes = page_size * 4
        self.kv_cache_bytes = num_pages * self.page_bytes
        self.expert_size = 1
        self.records_routing = False
        self.kv_layout = f"echo {page_size}"
        self.step_seconds = step_seconds
        self._token_seconds = token_seconds
        self.fails_at: int | None = None
        self._crash_token = crash_token
        self._crash_length = crash_length
        self._steps = 0
        self.has_weights = False
        self.copies = ()
        self._weights = 0
        self._staged: int | None = None
        self._cache: np.ndarray | None = None
        self._kept: tuple[Int64, np.ndarray] | None = None

    @property
    def digest(self) -> str:
        return f"{self._weights:08x}" if self.has_weights else ""

    def load(self) -> None:
        self.has_weights = True
        if self._cache is None:
            self._cache = np.full((self.num_pages, self.page_size), -1, dtype=np.int32)
            if self._kept is not None:
                pages, values = self._kept
                self._cache[pages] = values
                self._kept = None

    def release_weights(self) -> None:
        self.has_weights = False
        self._staged = None

    def release_kv(self, keep_pages: Int64 | None) -> None:
        if self._cache is not None and keep_pages is not None:
            self._kept = keep_pages, self._cache[keep_pages]
        self._cache = None

    def read_blocks(self, table: np.ndarray, blocks: range) -> bytes:
        assert self._cache is not None
        return self._cache[table[blocks]].tobytes()

    def write_blocks(self, table: np.ndarray, blocks: range, data: bytes) -> None:
        assert self._cache is not None
        self._cache[table[blocks]] = np.frombuffer(data, np.int32).reshape(len(blocks), -1, self.page_size)

    def holds(self, source: str) -> bool:
        return False  # no trainer publishes its weights

    def use_source(self, source: str) -> None:
        self._weights = echo_weights(source)

    def stage_weights(self, source: str) -> None:
        self._staged = echo_weights(source)

    def swap_weights(self) -> None:
        if self._staged is None:
            raise RuntimeError("swap_weights() without staged weights: stage_weights() first")
        self._weights, self._staged = self._staged, None

    def drop_staged(self) -> None:
        self._staged = None

    def profile(self, active: bool) -> None:
        raise NoCudaProfilerError("the echo executor")

    def execute(self, plan: StepPlan) -> StepResult:
        if self._cache is None or not self.has_weights:
            raise RuntimeError("execute() before load()")
        self._take_time(len(plan.token_ids))
        self._cache.reshape(-1)[plan.slot_mapping] = plan.token_ids
        self._crash_if_poisoned(plan)
        tokens = np.full(len(plan.query_lengths), NO_TOKEN, dtype=np.int32)
        for row in np.flatnonzero(plan.needs_sample):
            length = plan.context_lengths[row]
            pages = plan.block_tables[row, : -(-length // self.page_size)]
            weights = echo_adapter(plan.adapters[row] if plan.adapters else "", self._weights)
            edits = plan.sampling.edits.get(int(row))
            allowed = None if edits is None else edits.allowed
            tokens[row] = self.next_token(self._cache[pages].reshape(-1)[:length], weights, allowed)
        sampling = plan.sampling
        reported = np.flatnonzero(plan.needs_sample & (sampling.num_log_probs != NO_LOG_PROBS))
        return StepResult(
            tokens,
            {row: _certain(tokens[row : row + 1]) for row in reported.tolist()},
            {row: _certain(targets) for row, targets in sampling.prompt_targets.items()},
        )

    def next_token(self, context: npt.NDArray[np.int32], weights: int, allowed: npt.NDArray[np.uint32] | None) -> int:
        """Return the token that follows the tokens of prompt and answer so far, or a RowFailure.

        allowed: bits of the tokens that the request's grammar allows; None: all.
        """
        token = echo_token(context, self.vocab_size, weights)
        return token if allowed is None else _nearest_allowed(token, allowed)

    def _crash_if_poisoned(self, plan: StepPlan) -> None:
        assert self._cache is not None
        if self._crash_token is not None:
            first = self._cache[plan.block_tables[:, 0], 0]
            if np.any((first == self._crash_token) & (plan.context_lengths >= self._crash_length)):
                ctypes.string_at(0)

    def _take_time(self, tokens: int) -> None:
        self._steps += 1
        seconds = self.step_seconds + tokens * self._token_seconds
        if seconds:
            time.sleep(seconds)
        if self._steps == self.fails_at:
            raise RuntimeError(f"step {self._steps} fails: injected fault")
