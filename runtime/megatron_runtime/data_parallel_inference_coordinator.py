"""The coordinator: routes requests to engines, keeps open requests, and carries out control messages. No torch."""

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
