"""Megatron-Core name: `DataParallelInferenceCoordinator`, with the coordinator's settings and entry point. No torch."""

from megatron_runtime.coordinator.core.settings import (
    CoordinatorSettings,
    PrefixCachingCoordinatorPolicy,
    RoutingPolicy,
)
from megatron_runtime.coordinator.embedded import DataParallelInferenceCoordinator
from megatron_runtime.coordinator.service import run

__all__ = [
    "CoordinatorSettings",
    "DataParallelInferenceCoordinator",
    "PrefixCachingCoordinatorPolicy",
    "RoutingPolicy",
    "run",
]
