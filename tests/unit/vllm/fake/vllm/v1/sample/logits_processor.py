from __future__ import annotations

from typing import Any


class AdapterLogitsProcessor:
    """vLLM's applies new_req_logits_processor() to the rows of a batch. The engine of this package has no logits."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        raise NotImplementedError

    def is_argmax_invariant(self) -> bool:
        raise NotImplementedError

    def new_req_logits_processor(self, params: Any) -> Any:
        raise NotImplementedError
