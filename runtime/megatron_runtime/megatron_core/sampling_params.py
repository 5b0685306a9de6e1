"""`SamplingParams`, under its Megatron-Core module path."""

from megatron_runtime.requests.sampling_params import (
    IGNORE_EOS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_QUOTED_CHARACTERS,
    MAX_TOP_LOGPROBS,
    STRUCTURED_OUTPUT_TYPES,
    InvalidSamplingParamsError,
    SamplingParams,
)

__all__ = [
    "IGNORE_EOS",
    "MAX_LOGIT_BIAS_TOKENS",
    "MAX_QUOTED_CHARACTERS",
    "MAX_TOP_LOGPROBS",
    "STRUCTURED_OUTPUT_TYPES",
    "InvalidSamplingParamsError",
    "SamplingParams",
]
