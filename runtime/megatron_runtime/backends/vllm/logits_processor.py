"""Logits processor for vLLM's Model Runner V1 that forces and bans tokens. It runs in vLLM's engine process.

A request that moves to this engine has tokens that its client has already received. If these tokens were part of the
prompt, penalties on generated tokens and the state of a grammar would not include them. Instead, the logits processor
forces vLLM to generate exactly these tokens first. vLLM's state is then the same as on the previous engine.

vLLM's own `bad_words` is not used, because a request fails if `bad_words` bans every token that its grammar allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from megatron_runtime.backends.vllm.forced_tokens import BAD_WORDS, FORCED, require_token_ids
from megatron_runtime.sampling.bad_words import BadWords

if TYPE_CHECKING:
    import torch


class AnswerTokens(AdapterLogitsProcessor):
    """The logits processor that forces and bans tokens. A separate function changes the logits of each request."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        require_token_ids(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        extra = params.extra_args
        if not extra:
            return None
        forced, bad_words = extra.get(FORCED, []), BadWords(extra.get(BAD_WORDS, []))

        def apply(answer: list[int], logits_V: torch.Tensor) -> torch.Tensor:
            if len(answer) < len(forced):
                logits_V.fill_(-math.inf)
                logits_V[forced[len(answer)]] = 0.0
            elif banned := bad_words.after(answer):
                before_M = logits_V[banned]
                logits_V[banned] = -math.inf
                # Does not wait for the GPU. If no other token is allowed, banned tokens stay allowed.
                logits_V[banned] = before_M.where(logits_V.max() == -math.inf, -math.inf)
            return logits_V

        return apply
