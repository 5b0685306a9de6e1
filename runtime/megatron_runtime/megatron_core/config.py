"""`InferenceConfig`, its enumerations and its nested configurations. The module path is as in Megatron-Core."""

from __future__ import annotations

from typing import Any

from megatron_runtime.requests.config import (
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_TOKENS,
    AsyncScheduleMode,
    CudaGraphSizingDistribution,
    InferenceConfig,
    InvalidConfigError,
    KVCacheManagementMode,
    LogprobsMode,
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
    RoutingPolicy,
    SamplingBackend,
)

__all__ = [
    "DEFAULT_MAX_REQUESTS",
    "DEFAULT_MAX_TOKENS",
    "AsyncScheduleMode",
    "CudaGraphSizingDistribution",
    "ImageProcessingConfig",
    "InferenceConfig",
    "InvalidConfigError",
    "KVCacheManagementMode",
    "LogprobsMode",
    "MambaInferenceStateConfig",
    "PrefixCachingCoordinatorPolicy",
    "PrefixCachingEvictionPolicy",
    "RoutingPolicy",
    "SamplingBackend",
]


class ImageProcessingConfig:
    """A configuration of image preprocessing, which this runtime does not support.

    The constructor raises InvalidConfigError.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise InvalidConfigError("image_preprocessing_config", type(self).__name__, "models accept text only: use None")


class MambaInferenceStateConfig:
    """A configuration of the state of Mamba layers, which this runtime does not support.

    The constructor raises InvalidConfigError.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        raise InvalidConfigError("mamba_inference_state_config", name, "no Mamba layer runs here: use None")

    @classmethod
    def from_model(cls, model: Any, conv_states_dtype: Any = None, ssm_states_dtype: Any = None) -> None:
        """Return None for a model without Mamba layers. Raises InvalidConfigError for a model with Mamba layers."""
        decoder = getattr(getattr(model, "module", model), "decoder", None)
        if "M" in (getattr(decoder, "layer_type_list", None) or ()):
            cls()
