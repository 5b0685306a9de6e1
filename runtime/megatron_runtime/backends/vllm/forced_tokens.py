"""Keys of `SamplingParams.extra_args` that make our logits processors force and ban tokens of an answer.

vLLM has two model runners with different interfaces. logits_processor.py is for Model Runner V1, logits_processor_v2.py
for V2. arguments.py selects one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORCED = "megatron_forced_tokens"
BAD_WORDS = "megatron_bad_words"
"""Keys for the tokens to force, and for the sequences that the answer must not contain."""


def require_token_ids(extra_args: Mapping[str, Any] | None) -> None:
    """Raise ValueError unless the tokens to force in `extra_args` are token ids."""
    forced = (extra_args or {}).get(FORCED, [])
    if not isinstance(forced, list) or not all(isinstance(token, int) and token >= 0 for token in forced):
        raise ValueError(f"{FORCED} must be a list of token ids")
