"""An engine of this process in the service of a coordinator, which it may have started itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from megatron_runtime.backends.native.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.spawn import CoordinatorProcess, spawn_coordinator
from megatron_runtime.engine.build import LoadedEngine
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.state_events import StateEvents
from megatron_runtime.engine.worker import EngineWorker
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.config import RoutingPolicy

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class EngineFailedError(RuntimeError):
    """The engine ended before, or while, it served. The cause is its __cause__."""


class Listening:
    """Runs an engine's worker on the event loop of start(), until stop() or the end of the engine.

    name: of the engine, unique at the coordinator.
    """

    def __init__(self, engine: DynamicInferenceEngine, *, name: str) -> None:
        self.coordinator: CoordinatorProcess | None = None
        self.task: asyncio.Task[None] | None = None
        self._engine = engine
        self._name = name
        self._worker: EngineWorker | None = None

    async def start(
        self, *, host: str | None, port: int | None, launch: bool, schedule_output_path: str | None = None
    ) -> str:
        """Serve the coordinator at host and port, started here if `launch`. Returns its address when registered.

        Raises CoordinatorStartError, or EngineFailedError when the engine cannot load. Nothing is left running then.
        """
        try:
            if launch:
                settings = self._coordinator_settings(host, port, schedule_output_path)
                self.coordinator = await asyncio.to_thread(spawn_coordinator, settings)
                address = self.coordinator.address
            else:
                address = f"tcp://{host or LOOPBACK}:{port}"
            await self._join(address)
        except BaseException:
            await self.stop()
            raise
        return address

    @property
    def events(self) -> StateEvents:
        assert self._worker is not None, "start() first"
        return self._worker.lifecycle.events

    async def wait_until(self, state: EngineState, *, times: int | None = None) -> None:
        """See StateEvents.has_reached(). Raises EngineFailedError if the engine ends first."""
        if self.events.has_reached(state, times=times):
            return
        await self._unless_ended(self.events.wait(state, times=times))

    async def stop(self) -> None:
        """End the worker, then the coordinator if it was started here. Idempotent; raises nothing of theirs."""
        if self._worker is not None:
            self._worker.ended.set()
        if self.task is not None:
            with contextlib.suppress(EngineFailedError):  # who waits for the task has been told
                await self.task
        if self.coordinator is not None:
            await asyncio.to_thread(self.coordinator.stop)

    async def _join(self, address: str) -> None:
        config = self._engine.config
        settings = EngineSettings(
            coordinator=address,
            name=self._name,
            max_requests=config.request_slots,
            block_size_tokens=config.block_size_tokens,
            prefix_caching=config.enable_prefix_caching,
        )
        worker = self._worker = EngineWorker(settings, LoadedEngine(self._engine, self._engine._controller))
        self.task = asyncio.create_task(self._serve(worker))
        await self._unless_ended(worker.joined.wait())

    async def _serve(self, worker: EngineWorker) -> None:
        """Until the engine is stopped by a verb, told to end, or fails."""
        running = asyncio.create_task(worker.run())
        stopped = asyncio.create_task(worker.lifecycle.stopped.wait())
        try:
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            worker.ended.set()
            stopped.cancel()
            await running
        if worker.failure is not None:
            raise EngineFailedError(f"engine {self._name} failed: {worker.failure}") from worker.failure

    async def _unless_ended(self, wait: Coroutine[Any, Any, object]) -> None:
        assert self.task is not None
        waiting = asyncio.create_task(wait)
        try:
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await asyncio.shield(self.task)
                raise EngineFailedError(f"engine {self._name} has stopped")
        finally:
            waiting.cancel()

    def _coordinator_settings(
        self, host: str | None, port: int | None, schedule_output_path: str | None
    ) -> CoordinatorSettings:
        config = self._engine.config
        by_prefix = config.enable_prefix_caching
        return CoordinatorSettings(
            listen=host or LOOPBACK,
            client_port=port or 0,
            single_port=True,
            routing_policy=config.prefix_caching_coordinator_policy if by_prefix else RoutingPolicy.LOAD_BALANCED,
            alpha=config.prefix_caching_routing_alpha,
            schedule_output_path=Path(schedule_output_path) if schedule_output_path is not None else None,
            # This program starts it, so there are no engines that outlived another one.
            timing=Timing(recovery=0.0),
        )
