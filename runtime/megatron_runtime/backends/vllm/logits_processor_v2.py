"""The counterpart of logits_processor.py for Model Runner V2, which vLLM has since version 0.31.

V2 passes all rows of a step to a logits processor at once. Without speculation, a request has one row. With
speculation, it has one more row for each draft token: row i predicts the token after draft token i, and assumes that
the draft tokens before it are accepted.

Tensor suffixes: N rows, V vocabulary, T forced tokens, W banned sequences, K tokens of a sequence without its last
                 token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from megatron_runtime.backends.vllm.forced_tokens import BAD_WORDS, FORCED, require_token_ids

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NO_TOKEN = -1
"""A position before the answer, or a draft token that vLLM rejects."""
ANY_TOKEN = -2
"""Padding in front of a sequence that is shorter than the longest sequence."""


class AnswerRows(LogitsProcessor):
    """The logits processor that forces and bans tokens in all rows of a step. It never synchronises with the device.

    The state of a request is stored by the request's slot in vLLM. add_request() can reuse the slot of an earlier
    request.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._requests = req_states
        slots, device = req_states.max_num_reqs, req_states.device
        self._forced_ST = torch.zeros((slots, 0), dtype=torch.int64, device=device)
        self._num_forced_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self._has_forced: npt.NDArray[np.bool_] = np.zeros(slots, dtype=bool)
        self._has_words: npt.NDArray[np.bool_] = np.zeros(slots, dtype=bool)
        self._words: dict[int, Sequence[Sequence[int]]] = {}
        """Banned sequences by slot."""
        self._table: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """The contents of `_words` as tensors: slot [W], tokens before the last [W, K], last token [W]."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        require_token_ids(sampling_params.extra_args)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        extra = sampling_params.extra_args or {}
        forced, words = extra.get(FORCED, ()), extra.get(BAD_WORDS, ())
        if forced or self._has_forced[req_idx]:
            self._force(req_idx, forced)
        if words or self._has_words[req_idx]:
            self._words.pop(req_idx, None)
            if words:
                self._words[req_idx] = words
            self._table = None
        self._has_forced[req_idx], self._has_words[req_idx] = bool(forced), bool(words)
        return bool(forced or words)

    def _force(self, slot: int, tokens: Sequence[int]) -> None:
        missing = len(tokens) - self._forced_ST.shape[1]
        if missing > 0:
            width = max(missing, self._forced_ST.shape[1])  # at least doubled
            self._forced_ST = torch.nn.functional.pad(self._forced_ST, (0, width))
        self._num_forced_S[slot] = len(tokens)
        if tokens:
            self._forced_ST[slot, : len(tokens)] = _copied(tokens, self._forced_ST.device)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots_N = ctx.expanded_idx_mapping.long()
        prompt_N = self._requests.prompt_len.gpu[slots_N]
        if self._has_words[ctx.idx_mapping_np].any():
            self._ban(logits, ctx, slots_N, prompt_N)
        if self._has_forced[ctx.idx_mapping_np].any():
            place_N = ctx.pos + 1 - prompt_N
            is_forced_N1 = ((place_N >= 0) & (place_N < self._num_forced_S[slots_N])).unsqueeze(1)
            place_N = place_N.clamp(0, self._forced_ST.shape[1] - 1)
            token_N1 = self._forced_ST[slots_N, place_N].unsqueeze(1)
            value_N1 = logits.gather(1, token_N1).masked_fill(is_forced_N1, 0.0)
            logits.masked_fill_(is_forced_N1, -math.inf)
            logits.scatter_(1, token_N1, value_N1)
        return logits

    def _ban(self, logits_NV: torch.Tensor, ctx: LogitsContext, slots_N: torch.Tensor, prompt_N: torch.Tensor) -> None:
        if self._table is None:
            self._table = self._build_table(logits_NV.device)
        slots_W, before_WK, last_W = self._table
        answer_NK = self._newest(ctx, slots_N, prompt_N, before_WK.shape[1])
        ends_NW = ((before_WK == answer_NK.unsqueeze(1)) | (before_WK == ANY_TOKEN)).all(-1)
        ends_NW &= slots_W == slots_N.unsqueeze(1)
        last_NW = last_W.expand_as(ends_NW)
        value_NW = logits_NV.gather(1, last_NW)
        nothing = torch.full_like(value_NW, math.inf)
        logits_NV.scatter_reduce_(1, last_NW, nothing.masked_fill(ends_NW, -math.inf), "amin")
        # If a grammar allows only banned tokens, the grammar takes precedence.
        ends_NW &= logits_NV.amax(1, keepdim=True) == -math.inf
        logits_NV.scatter_reduce_(1, last_NW, value_NW.masked_fill(~ends_NW, -math.inf), "amax")

    def _newest(self, ctx: LogitsContext, slots_N: torch.Tensor, prompt_N: torch.Tensor, count: int) -> torch.Tensor:
        """Return the `count` newest answer tokens of each row, [N, count]. The last of them is the row's input token.

        Where an answer has fewer than `count` tokens, the positions before its first token have NO_TOKEN.
        """
        device = slots_N.device
        back_K = torch.arange(count - 1, -1, -1, device=device)
        place_NK = ctx.pos.unsqueeze(1) - back_K
        row_NK = torch.arange(len(slots_N), device=device).unsqueeze(1) - back_K
        in_step_NK = back_K <= ctx.expanded_local_pos.unsqueeze(1)
        drafts_NK = ctx.input_ids[row_NK.clamp(min=0)]
        committed_NK = self._requests.all_token_ids.gpu[slots_N.unsqueeze(1), place_NK.clamp(min=0)]
        token_NK = torch.where(in_step_NK, drafts_NK, committed_NK)
        return token_NK.masked_fill(place_NK < prompt_N.unsqueeze(1), NO_TOKEN)

    def _build_table(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pairs = [(slot, sequence) for slot, sequences in self._words.items() for sequence in sequences]
        length = max(len(sequence) for _, sequence in pairs) - 1
        rows = [[ANY_TOKEN] * (length + 1 - len(sequence)) + list(sequence[:-1]) for _, sequence in pairs]
        slots_W = _copied([slot for slot, _ in pairs], device)
        last_W = _copied([sequence[-1] for _, sequence in pairs], device)
        return slots_W, _copied(rows, device).reshape(len(pairs), length), last_W


def _copied(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return an int64 tensor of `values` on the device, without waiting for the copy."""
    on_host = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)
