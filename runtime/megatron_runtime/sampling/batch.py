"""Sampling parameters: those of one step's rows, and those of all running requests, in columns by slot. No torch.

A step's parameters are plain arrays, so that a plan can be sent to other ranks. n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # llguidance is loaded with the first grammar
    from megatron_runtime.sampling.structured_output import GrammarState

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

NO_LOG_PROBS = -1
_FIRST_CAPACITY = 256
_MOST = int(np.iinfo(np.int32).max)
_HOTTEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Penalties:
    """The distinct tokens of prompt and answer.

    ids:    int32 [m].
    counts: int32 [m]; occurrences of each in the answer.
    """

    ids: Int32
    counts: Int32
    repetition: float
    presence: float
    frequency: float


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes to the logits of a row before temperature and filters; None where there are none.

    bias_ids, bias: int32 [m], float32 [m]; added to the logits of these tokens.
    banned:         int32 [m]; tokens that are removed, unless no other token is allowed.
    allowed:        uint32 [ceil(V / 32)]; bit t % 32 of word t // 32 is set for every allowed token t.
    """

    penalties: Penalties | None = None
    bias_ids: Int32 | None = None
    bias: Float32 | None = None
    banned: Int32 | None = None
    allowed: npt.NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Columns by row of the plan.

    temperature, top_k, top_p, min_p: [n]; 0 means greedy, off, off, off.
    seeds:          uint64 [n]; with `positions` they fix the random number.
    positions:      int64 [n]; number of the generated token in its answer.
    num_log_probs:  int32 [n]; likeliest tokens to report beside the sampled one; NO_LOG_PROBS for no report.
    edits:          by row, for rows with edits.
    prompt_targets: by row, for rows that want log-probabilities of their prompt: int32 [m], the tokens after the first
                    m tokens that the row computes in this step.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    num_log_probs: Int32
    edits: Mapping[int, LogitEdits] = field(default_factory=dict)
    prompt_targets: Mapping[int, Int32] = field(default_factory=dict)


class _TokenCounts:
    """The distinct tokens of a request, and their occurrences in its answer. append() takes constant time."""

    def __init__(self, prompt: npt.NDArray[np.int32]) -> None:
        distinct = np.unique(prompt)
        self._size = len(distinct)
        capacity = max(_FIRST_CAPACITY, 2 * self._size)
        self._ids = np.empty(capacity, dtype=np.int32)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(capacity, dtype=np.int32)
        self._index = {int(token): index for index, token in enumerate(distinct)}

    def append(self, token: int) -> None:
        index = self._index.get(token)
        if index is None:
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            index = self._index[token] = self._size
            self._ids[index] = token
            self._size += 1
        self._counts[index] += 1

    @property
    def ids(self) -> Int32:
        return self._ids[: self._size]

    @property
    def counts(self) -> Int32:
        return self._counts[: self._size]


@dataclass(slots=True)
class _Edits:
    """The inputs of a slot's LogitEdits."""

    params: SamplingParams
    counts: _TokenCounts | None
    bias_ids: Int32 | None
    bias: Float32 | None
    stop_ids: Int32
    grammar: GrammarState | None

    def of_step(self, generated: int) -> LogitEdits | None:
        """The edits of the next token. generated: length of the answer so far."""
        params, counts, grammar = self.params, self.counts, self.grammar
        is_short = generated < params.min_tokens and len(self.stop_ids) > 0
        if counts is None and self.bias_ids is None and grammar is None and not is_short:
            return None
        return LogitEdits(
            penalties=None
            if counts is None
            else Penalties(
                counts.ids,
                counts.counts,
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            ),
            bias_ids=self.bias_ids,
            bias=self.bias,
            banned=self.stop_ids if is_short else None,
            allowed=None if grammar is None else grammar.allowed(),
        )


class SamplingColumns:
    """Parameters of the requests that hold a slot. A step's rows share memory with them until the next append()."""

    def __init__(self, max_requests: int) -> None:
        self._temperature = np.zeros(max_requests, dtype=np.float32)
        self._top_k = np.zeros(max_requests, dtype=np.int32)
        self._top_p = np.zeros(max_requests, dtype=np.float32)
        self._min_p = np.zeros(max_requests, dtype=np.float32)
        self._seeds = np.zeros(max_requests, dtype=np.uint64)
        self._num_log_probs = np.full(max_requests, NO_LOG_PROBS, dtype=np.int32)
        self._edits: dict[int, _Edits] = {}

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt: npt.NDArray[np.int32],
        generated: npt.NDArray[np.int32],
        stop_ids: Collection[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        """Set the parameters of the request in `slot`.

        generated: the answer so far, which counts for penalties.
        stop_ids:  tokens that end the request; they are banned until `min_tokens`.
        grammar:   state of the grammar after `generated`.
        """
        self._temperature[slot] = 0.0 if params.is_greedy else min(params.temperature, _HOTTEST)
        self._top_k[slot] = min(params.top_k, _MOST)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = np.uint64(seed)
        self._num_log_probs[slot] = params.top_n_logprobs if params.wants_log_probs else NO_LOG_PROBS
        counts = None
        if params.has_penalties:
            counts = _TokenCounts(prompt)
            for token in generated:
                counts.append(int(token))
        if counts is None and not params.logit_bias and params.min_tokens == 0 and grammar is None:
            return
        bias = params.logit_bias or None
        self._edits[slot] = _Edits(
            params,
            counts,
            None if bias is None else np.fromiter(bias.keys(), np.int32, len(bias)),
            None if bias is None else np.fromiter(bias.values(), np.float32, len(bias)),
            np.fromiter(sorted(stop_ids), np.int32, len(stop_ids)),
            grammar,
        )

    def append(self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> None:
        """Record a sampled token for each of `slots`."""
        if not self._edits:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            edits = self._edits.get(slot)
            if edits is None:
                continue
            if edits.counts is not None:
                edits.counts.append(token)
            if edits.grammar is not None:
                edits.grammar.accept(token)

    def release(self, slot: int) -> None:
        self._edits.pop(slot, None)

    def rows(
        self,
        slots: npt.NDArray[np.int64],
        *,
        generated: npt.NDArray[np.integer],
        needs_sample: npt.NDArray[np.bool_],
        prompt_targets: Mapping[int, Int32],
    ) -> SamplingBatch:
        """The batch of a step.

        slots:     int64 [n]; the slot of each row.
        generated: [n]; length of each row's answer.
        """
        edits = {}
        if self._edits:
            for row in np.flatnonzero(needs_sample):
                of_slot = self._edits.get(int(slots[row]))
                of_step = of_slot.of_step(int(generated[row])) if of_slot is not None else None
                if of_step is not None:
                    edits[int(row)] = of_step
        return SamplingBatch(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seeds=self._seeds[slots],
            positions=generated.astype(np.int64),
            num_log_probs=self._num_log_probs[slots],
            edits=edits,
            prompt_targets=prompt_targets,
        )
