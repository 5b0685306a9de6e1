"""Megatron-Core name: `InferenceConfig` and its enumerations."""

from megatron_runtime.requests.config import (
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_TOKENS,
    AsyncScheduleMode,
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
    "InferenceConfig",
    "InvalidConfigError",
    "KVCacheManagementMode",
    "LogprobsMode",
    "PrefixCachingCoordinatorPolicy",
    "PrefixCachingEvictionPolicy",
    "RoutingPolicy",
    "SamplingBackend",
]
