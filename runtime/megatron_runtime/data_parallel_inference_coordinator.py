"""The coordinator: routes requests to engines, keeps what is open, and carries out control messages. No torch."""

from megatron_runtime.coordinator.core.settings import (
    CoordinatorSettings,
    PrefixCachingCoordinatorPolicy,
    RoutingPolicy,
)
from megatron_runtime.coordinator.library import DataParallelInferenceCoordinator
from megatron_runtime.coordinator.main import run

__all__ = [
    "CoordinatorSettings",
    "DataParallelInferenceCoordinator",
    "PrefixCachingCoordinatorPolicy",
    "RoutingPolicy",
    "run",
]
