"""A logits processor for vLLM that forces the first tokens of an answer. It runs in vLLM's engine process.

A request that moves to this engine has tokens that its client already received. As part of the prompt they would not
count for penalties on generated tokens, and the state of a grammar would not include them. Here vLLM generates exactly
these tokens first, so that its own state becomes that of the interrupted request.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

if TYPE_CHECKING:
    import torch

FORCED = "megatron_forced_tokens"
"""Key of `SamplingParams.extra_args` with the tokens to force."""


class ForcedTokens(LogitsProcessor):
    """Implements vLLM's LogitsProcessor."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}
        """Forced tokens and generated tokens of each row. vLLM appends to the second list."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        forced = (sampling_params.extra_args or {}).get(FORCED, [])
        if not isinstance(forced, list) or not all(isinstance(token, int) and token >= 0 for token in forced):
            raise ValueError(f"{FORCED} must be a list of token ids")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch: removed, then added, then moved."""
        if batch_update is not None:
            for row in batch_update.removed:
                self._rows.pop(row, None)
            for row, params, _, generated in batch_update.added:
                self._rows.pop(row, None)
                if forced := (params.extra_args or {}).get(FORCED):
                    self._rows[row] = (forced, generated)
            for source, target, direction in batch_update.moved:
                moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
                if moved is not None:
                    self._rows[target] = moved
                if direction is MoveDirectionality.SWAP and replaced is not None:
                    self._rows[source] = replaced
        finished = [row for row, (forced, generated) in self._rows.items() if len(generated) >= len(forced)]
        for row in finished:
            del self._rows[row]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [rows, vocabulary]. Allow only the next forced token of each row that has one."""
        for row, (forced, generated) in self._rows.items():
            if len(generated) < len(forced):
                logits[row].fill_(-math.inf)
                logits[row, forced[len(generated)]] = 0.0
        return logits
