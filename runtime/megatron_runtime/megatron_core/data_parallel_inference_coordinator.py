"""Megatron-Core name: `DataParallelInferenceCoordinator`, with the coordinator's settings and entry point. No torch."""

from megatron_runtime.coordinator.core.settings import (
    CoordinatorSettings,
    PrefixCachingCoordinatorPolicy,
    RoutingPolicy,
)
from megatron_runtime.coordinator.embedded import DataParallelInferenceCoordinator
from megatron_runtime.coordinator.service import run

CoordinatorState = DataParallelInferenceCoordinator.CoordinatorState

__all__ = [
    "CoordinatorSettings",
    "CoordinatorState",
    "DataParallelInferenceCoordinator",
    "PrefixCachingCoordinatorPolicy",
    "RoutingPolicy",
    "run",
]
