"""The coordinator: routes requests to engines, keeps what is open, and carries out control messages. No torch."""

from megatron_runtime.data_parallel_inference_coordinator.library import DataParallelInferenceCoordinator
from megatron_runtime.data_parallel_inference_coordinator.main import run
from megatron_runtime.data_parallel_inference_coordinator.settings import (
    CoordinatorSettings,
    PrefixCachingCoordinatorPolicy,
    RoutingPolicy,
)

__all__ = [
    "CoordinatorSettings",
    "DataParallelInferenceCoordinator",
    "PrefixCachingCoordinatorPolicy",
    "RoutingPolicy",
    "run",
]
