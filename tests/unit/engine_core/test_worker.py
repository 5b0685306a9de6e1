"""The engine process's event-loop half, registered with a real coordinator."""

import asyncio

from megatron_runtime.config import InferenceConfig
from megatron_runtime.data_parallel_inference_coordinator.coordinator import Coordinator
from megatron_runtime.data_parallel_inference_coordinator.settings import CoordinatorSettings
from megatron_runtime.engines.build import LoadedEngine
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engines.echo_executor import EchoExecutor
from megatron_runtime.engines.settings import EngineSettings
from megatron_runtime.engines.worker import EngineWorker
from megatron_runtime.wire.headers import Role


class BrokenExecutor(EchoExecutor):
    def load(self) -> None:
        raise OSError("weights are truncated")


async def test_an_engine_whose_weights_cannot_be_loaded_ends_with_the_cause() -> None:
    coordinator = Coordinator(CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True))
    coordinator.start()
    settings = EngineSettings(coordinator=coordinator.transport.addresses[Role.ENGINE], name="broken")
    loaded = LoadedEngine(DynamicInferenceEngine(BrokenExecutor(), InferenceConfig()), lambda: None)
    worker = EngineWorker(settings, loaded)
    try:
        await asyncio.wait_for(worker.run(), 20)
    finally:
        coordinator.stop()
    assert str(worker.failure) == "weights are truncated"
