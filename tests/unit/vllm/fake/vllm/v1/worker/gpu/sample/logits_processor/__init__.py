from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LogitsProcRequestState:
    device: Any
    max_num_reqs: int
    vocab_size: int
    all_token_ids: Any
    prompt_len: Any
    prefill_len: Any
    total_len: Any


@dataclass(frozen=True)
class LogitsContext:
    expanded_idx_mapping: Any
    idx_mapping: Any
    idx_mapping_np: np.ndarray
    expanded_local_pos: Any
    input_ids: Any
    pos: Any
    seq_lens_upper_bound_np: np.ndarray


class LogitsProcessor:
    """The interface of Model Runner V2."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        raise NotImplementedError

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        raise NotImplementedError

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        raise NotImplementedError

    def apply(self, logits: Any, ctx: LogitsContext) -> Any:
        raise NotImplementedError
