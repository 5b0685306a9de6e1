"""Re-exports `SamplingParams` under the module path that the class has in Megatron-Core."""

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
