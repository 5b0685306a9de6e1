from __future__ import annotations


class AdapterLogitsProcessor:
    """vLLM's applies new_req_logits_processor() to the rows of a batch. The engine of this package has no logits."""
