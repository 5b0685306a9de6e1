"""How vLLM forces and bans tokens of an answer: keys of `SamplingParams.extra_args`, and the processor that reads them.

vLLM has two model runners. V1 has the interface `AdapterLogitsProcessor`; V2, which vLLM uses on GPUs since 0.31, has
another one (logits_processor_v2.py). A processor of the wrong interface is an error at the start. V1 rejects every
processor beside speculation.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORCED = "megatron_forced_tokens"
BAD_WORDS = "megatron_bad_words"
"""The tokens to force, and the sequences that may not be in the answer."""

V2_INTERFACE = "vllm.v1.worker.gpu.sample.logits_processor"
"""Since vLLM 0.31. Before, V2 runs without custom processors only, and vLLM chooses V1 where there is one."""


def processor_of(config: VllmConfig) -> type | None:
    """Return the class of logits processors for the model runner of `config`, which was built without one.

    None: vLLM accepts none, because it speculates with a runner that has no interface for both.
    """
    if config.use_v2_model_runner and find_spec(V2_INTERFACE) is not None:
        from megatron_runtime.backends.vllm.logits_processor_v2 import AnswerRows

        return AnswerRows
    if config.speculative_config is not None:
        return None
    from megatron_runtime.backends.vllm.logits_processor import AnswerTokens

    return AnswerTokens


def require_token_ids(extra_args: Mapping[str, Any] | None) -> None:
    """Raise ValueError if the tokens to force are not token ids."""
    forced = (extra_args or {}).get(FORCED, [])
    if not isinstance(forced, list) or not all(isinstance(token, int) and token >= 0 for token in forced):
        raise ValueError(f"{FORCED} must be a list of token ids")
