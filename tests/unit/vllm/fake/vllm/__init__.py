"""Stands for vLLM in tests; see README.md in the folder above."""

import os
from typing import NotRequired, TypedDict

from vllm.sampling_params import SamplingParams

__version__ = os.environ.get("FAKE_VLLM_VERSION", "0.32.0")
__all__ = ["SamplingParams", "TokensPrompt"]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]
