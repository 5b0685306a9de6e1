"""How each running request is sampled: columns by slot, from which a step takes its rows. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.batch import (
    NO_LOG_PROBS,
    Float32,
    Int32,
    LogitEdits,
    Penalties,
    SamplingBatch,
)

if TYPE_CHECKING:
    from megatron_runtime.sampling.structured_output import GrammarState

_FIRST_CAPACITY = 256
_MOST = int(np.iinfo(np.int32).max)
_HOTTEST = float(np.finfo(np.float32).max)


class _TokenCounts:
    """The distinct tokens of a request, and how often each is in its answer. Appending costs the same at any length."""

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
    """What a slot needs to make its LogitEdits."""

    params: SamplingParams
    counts: _TokenCounts | None
    bias_ids: Int32 | None
    bias: Float32 | None
    stop_ids: Int32
    grammar: GrammarState | None

    def of_step(self, generated: int) -> LogitEdits | None:
        """generated: how many tokens the answer has so far."""
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
    """Parameters of the requests that hold a slot. Rows of a step share memory with them until the next append()."""

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
        """Take in the request of `slot`.

        generated: the answer so far, which counts for penalties.
        stop_ids:  tokens that end the request; they are held off until `min_tokens`.
        grammar:   what the answer must match, as it stands after `generated`.
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
        """A token was sampled for each of `slots`."""
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

        slots:     int64 [n]; one a row.
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
