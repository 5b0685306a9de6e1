"""What the rows of one step ask of their next token. Plain arrays, so that a plan can travel to other ranks. No torch.

n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

NO_LOG_PROBS = -1


@dataclass(frozen=True, slots=True)
class Penalties:
    """Tokens of prompt and answer, each once.

    ids:    int32 [m].
    counts: int32 [m]; how often each is in the answer.
    """

    ids: Int32
    counts: Int32
    repetition: float
    presence: float
    frequency: float


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What changes the logits of a row before temperature and filters; None where nothing does.

    bias_ids, bias: int32 [m], float32 [m]; added to the logits of these tokens.
    banned:         int32 [m]; tokens that must not come, unless nothing else may.
    allowed:        uint32 [ceil(V / 32)]; bit t % 32 of word t // 32 is set for every token t that may come.
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
    positions:      int64 [n]; which generated token of the request is drawn.
    num_log_probs:  int32 [n]; the likeliest tokens to report beside the sampled one; NO_LOG_PROBS for none at all.
    edits:          by row, for rows that have any.
    prompt_targets: by row, for rows that want log-probabilities of their prompt: int32 [m], the tokens that follow the
                    first m tokens that the row computes in this step.
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
