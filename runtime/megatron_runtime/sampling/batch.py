"""The sampling parameters of one step, by row of the batch, and of all running requests, by slot.

The parameters of a step are plain arrays, so that a plan can be sent to other ranks. This module does not import torch.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.bad_words import BadWords

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

NO_LOG_PROBS = -1
NO_TOKEN = -1
"""A value in place of the token of a row that needs no token."""
_FIRST_CAPACITY = 256
_MIN_TOP_P = float(np.finfo(np.float32).tiny)
"""Minimum top_p. A smaller value is 0, or can become 0, in float32, and 0 would keep all tokens."""


class RowFailure(IntEnum):
    """The reason why no token can be sampled for a row. The value takes the place of the row's token.

    Only this row fails. The step and its other rows succeed.
    """

    MODEL = -2
    EDITS = -3
    MASK = -4

    @property
    def message(self) -> str:
        """The error message, with the cause and the remedy."""
        return _MESSAGES[self]


_MESSAGES = {
    RowFailure.MODEL: "the model computed numbers that are not finite for this request: its weights or activations "
    "exceed the range of their type; use weights or a dtype of a larger range",
    RowFailure.EDITS: "the logits are not finite after repetition_penalty, presence_penalty, frequency_penalty and "
    "logit_bias: use values closer to those that switch them off",
    RowFailure.MASK: "structured_output and allowed_token_ids allow no token here, or only tokens without any "
    "probability: use a grammar that the model's tokens can continue, or more tokens",
}

_COLUMNS: dict[str, npt.DTypeLike] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seeds": np.uint64,
    "num_log_probs": np.int32,
    "returns_hidden": np.bool_,
}
"""Types of the SamplingBatch fields that do not change during a request, by field name."""


class AnswerState(Protocol):
    """The state that determines which tokens may come next in an answer. GrammarState describes the methods."""

    @property
    def failure(self) -> str | None: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def is_ready(self) -> bool: ...
    def is_fresh(self) -> bool: ...
    def wait(self, seconds: float) -> bool: ...
    def allowed(self) -> npt.NDArray[np.uint32] | None: ...
    def accept(self, token: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of one row, and the distinct tokens of its prompt and answer.

    ids:    int32 [m]; the distinct tokens.
    counts: int32 [m]; number of occurrences of each token in the answer.
    """

    ids: Int32
    counts: Int32
    repetition: float
    presence: float
    frequency: float


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The changes to the logits of a row before temperature and filters. A field is None if the row has no such change.

    bias_ids, bias: int32 [m], float32 [m]; tokens, and the value to add to the logit of each.
    banned:         int32 [m]; tokens that are removed, unless all allowed tokens are banned.
    allowed:        uint32 [at most ceil(V / 32)]; bit t % 32 of word t // 32 is set for every allowed token t.
    """

    penalties: Penalties | None = None
    bias_ids: Int32 | None = None
    bias: Float32 | None = None
    banned: Int32 | None = None
    allowed: npt.NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of one step: one array per parameter, with one element per row of the plan.

    temperature, top_k, top_p, min_p: [n]; a temperature of 0 means greedy sampling. For each of the other three, 0
        means that the filter is off.
    seeds:          uint64 [n]; a row's seed and position determine its random number.
    positions:      int64 [n]; index of the generated token in the answer.
    num_log_probs:  int32 [n]; number of most likely tokens to report in addition to the sampled token; NO_LOG_PROBS
                    reports nothing.
    returns_hidden: bool [n]; whether to report the hidden state from which the row's token is sampled.
    edits:          LogitEdits by row, for the rows that have edits.
    prompt_targets: by row, for the rows that want log-probabilities of their prompt; int32 [m], the tokens that follow
                    the first m tokens that the row computes in this step.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    num_log_probs: Int32
    returns_hidden: npt.NDArray[np.bool_]
    edits: Mapping[int, LogitEdits] = field(default_factory=dict)
    prompt_targets: Mapping[int, Int32] = field(default_factory=dict)


class _TokenCounts:
    """Counts how often each token of a request occurs in the request's answer. append() takes constant time."""

    def __init__(self, prompt: Int32) -> None:
        distinct = np.unique(prompt)
        self._index = {token: index for index, token in enumerate(distinct.tolist())}
        self._columns = np.zeros((2, max(_FIRST_CAPACITY, 2 * len(distinct))), dtype=np.int32)
        self._columns[0, : len(distinct)] = distinct

    def append(self, token: int) -> None:
        index = self._index.get(token)
        if index is None:
            index = self._index[token] = len(self._index)
            if index == self._columns.shape[1]:
                self._columns = np.pad(self._columns, ((0, 0), (0, index)))
            self._columns[0, index] = token
        self._columns[1, index] += 1

    def penalties(self, params: SamplingParams) -> Penalties:
        ids, counts = self._columns[:, : len(self._index)]
        return Penalties(
            ids,
            counts,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )


@dataclass(slots=True)
class _Edits:
    """The state from which a slot's LogitEdits are created.

    allowed: bits of the tokens that may be sampled; None allows any token.
    answer:  generated tokens; only filled if the request has bad words.
    """

    params: SamplingParams
    counts: _TokenCounts | None
    bias_ids: Int32 | None
    bias: Float32 | None
    stop_ids: list[int]
    bad_words: BadWords | None
    answer: list[int]
    allowed: npt.NDArray[np.uint32] | None
    grammar: AnswerState | None

    def at(self, generated: int) -> LogitEdits | None:
        """Return the edits for the next token, or None if there are no edits. generated: number of answer tokens so
        far.
        """
        counts, grammar = self.counts, self.grammar
        banned = self.stop_ids if generated < self.params.min_tokens else []
        if self.bad_words is not None:
            banned = banned + self.bad_words.after(self.answer)
        allowed = self.allowed if grammar is None else _both(self.allowed, grammar.allowed())
        if counts is None and self.bias_ids is None and allowed is None and not banned:
            return None
        return LogitEdits(
            penalties=None if counts is None else counts.penalties(self.params),
            bias_ids=self.bias_ids,
            bias=self.bias,
            banned=np.array(banned, np.int32) if banned else None,
            allowed=allowed,
        )


def bits_of(tokens: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Return the bit set LogitEdits.allowed for `tokens`.

    The array ends with the word that contains the highest token.
    """
    ids = np.array(tokens, np.uint32)
    words = np.zeros(int(ids.max()) // 32 + 1, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32))
    return words


def _both(one: npt.NDArray[np.uint32] | None, other: npt.NDArray[np.uint32] | None) -> npt.NDArray[np.uint32] | None:
    """Return the bit set of the tokens that both sets allow. A set that is None allows all tokens."""
    if one is None or other is None:
        return one if other is None else other
    length = min(len(one), len(other))
    return one[:length] & other[:length]


class SamplingColumns:
    """The sampling parameters of all requests that hold a slot.

    The LogitEdits that rows() returns share memory with this object, and are valid until the next append().
    """

    def __init__(self, max_requests: int) -> None:
        self._columns = {name: np.zeros(max_requests, dtype) for name, dtype in _COLUMNS.items()}
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
        bad_words: Sequence[Sequence[int]] = (),
        grammar: AnswerState | None = None,
    ) -> None:
        """Set the parameters of the request in `slot`.

        generated: tokens of the answer so far, for penalties and bad words.
        stop_ids:  tokens that end the request; they are banned until `min_tokens`.
        bad_words: token sequences that the answer must not contain.
        grammar:   state of the grammar after `generated`.
        """
        values: dict[str, float | np.uint64 | bool] = {
            "temperature": 0.0 if params.is_greedy else params.temperature,
            "top_k": params.top_k,
            "top_p": max(params.top_p, _MIN_TOP_P) if params.top_p > 0 else 0.0,
            "min_p": params.min_p,
            "seeds": np.uint64(seed),
            "num_log_probs": params.top_n_logprobs if params.wants_log_probs else NO_LOG_PROBS,
            "returns_hidden": params.return_hidden_state,
        }
        for name, value in values.items():
            self._columns[name][slot] = value
        counts = None
        if params.has_penalties:
            counts = _TokenCounts(prompt)
            for token in generated:
                counts.append(int(token))
        allowed = None if params.allowed_token_ids is None else bits_of(params.allowed_token_ids)
        has_limits = allowed is not None or grammar is not None
        if not (has_limits or counts is not None or params.logit_bias or params.min_tokens > 0 or bad_words):
            return
        bias = params.logit_bias or {}
        self._edits[slot] = _Edits(
            params,
            counts,
            np.array(list(bias), np.int32) if bias else None,
            np.array(list(bias.values()), np.float32) if bias else None,
            sorted(stop_ids),
            BadWords(bad_words) if bad_words else None,
            generated.tolist() if bad_words else [],
            allowed,
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
            if edits.bad_words is not None:
                edits.answer.append(token)
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
        """Return the sampling parameters of one step.

        slots:     int64 [n]; the slot of each row.
        generated: [n]; length of each row's answer.
        """
        edits = {}
        for row in np.flatnonzero(needs_sample).tolist() if self._edits else ():
            of_slot = self._edits.get(int(slots[row]))
            of_step = of_slot.at(int(generated[row])) if of_slot is not None else None
            if of_step is not None:
                edits[row] = of_step
        return SamplingBatch(
            **{name: column[slots] for name, column in self._columns.items()},
            positions=generated.astype(np.int64),
            edits=edits,
            prompt_targets=prompt_targets,
        )
