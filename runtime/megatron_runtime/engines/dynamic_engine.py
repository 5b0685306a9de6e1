"""Megatron-Core's `DynamicInferenceEngine`: an engine of this process, used directly or through a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any

from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.engine import MASK_GRACE_SECONDS, SUSPEND_TAGS, EngineCore
from megatron_runtime.backends.native.executor import Executor
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.spawn import CoordinatorProcess, spawn_coordinator
from megatron_runtime.engine.engine_request import BackendStats, EngineRequest, RequestOutput
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.state_events import StateEvents
from megatron_runtime.engine.worker import EngineWorker
from megatron_runtime.engines.offline import OfflineRun
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.config import InferenceConfig, RoutingPolicy
from megatron_runtime.requests.request import DynamicInferenceRequest, answered_request
from megatron_runtime.requests.sampling_params import SamplingParams

__all__ = ["MASK_GRACE_SECONDS", "SUSPEND_TAGS", "DynamicInferenceEngine", "EngineFailedError"]

LOOPBACK = "127.0.0.1"


class EngineFailedError(RuntimeError):
    """The engine ended before, or while, it served. The cause is its __cause__."""


class DynamicInferenceEngine:
    """Megatron-Core's engine on the core of the native backend.

    It generates in the calling thread (generate, generate_stream, or add_request and step), or serves a coordinator on
    an event loop (start_listening_to_data_parallel_coordinator).

    executor: runs steps. clock: seconds, monotonic; deadlines and times are on it.
    """

    def __init__(
        self, executor: Executor, config: InferenceConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.core = EngineCore(executor, config, clock=clock)
        self.executor = executor
        self.config = config
        self.context = self.core.context
        self._in_use = threading.Lock()
        self._service: _Service | None = None

    # --- the core -----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.core.epoch

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def controller(self) -> ModelText:
        """What samples and makes text. Raises RuntimeError for an executor whose tokens have no text."""
        controller = self._controller
        if controller is None:
            raise RuntimeError(f"{type(self.executor).__name__} has no controller: its tokens have no text")
        return controller

    @property
    def _controller(self) -> ModelText | None:
        return getattr(self.executor, "controller", None)

    def add_request(self, request: EngineRequest, *, grammar: Any = None) -> None:
        """Queue a request. Raises as EngineCore.add_request()."""
        self.core.add_request(request, grammar=grammar)

    def abort_request(self, request_id: int) -> bool:
        """Forget a request and free its memory. False if it is not open."""
        return self.core.abort_request(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step. Return what it brought, and the requests that ended without running."""
        return self.core.step()

    def set_epoch(self, epoch: int) -> None:
        self.core.set_epoch(epoch)

    def suspend(self, tags: Collection[str] = SUSPEND_TAGS) -> None:
        """Release memory. Raises ValueError for a tag that is not in SUSPEND_TAGS."""
        self.core.suspend(tags)

    def resume(self) -> None:
        """Reallocate what suspend() released. Raises if memory is short or the weights are not sound."""
        self.core.resume()

    def swap_weights(self, epoch: int) -> None:
        """Use the weights that the executor has staged, as `epoch`."""
        self.core.swap_weights(epoch)

    def reset(self, *, preserve_prefix_cache: bool = False) -> None:
        """Forget every request without an answer, and the prefix cache unless it is to be kept.

        Raises RuntimeError while the engine serves a coordinator, which would wait for the answers.
        """
        with self._alone():
            self.core.reset(preserve_prefix_cache=preserve_prefix_cache)

    def stats(self) -> BackendStats:
        return self.core.stats()

    def check_integrity(self) -> None:
        """Raise AssertionError if pages, prefix cache, slots and queues do not agree."""
        self.core.check_integrity()

    # --- in the calling thread ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Answer all prompts in this thread; one call at a time. A prompt that cannot be answered has status FAILED.

        sampling_params: of all prompts, or of each.

        Raises RuntimeError while the engine serves a coordinator.
        """
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: want one, or one for each"
            )
        with self._alone():
            tokens = [self._tokens(prompt, params) for prompt, params in zip(prompts, sampling_params, strict=True)]
            run = self._offline(tokens, sampling_params, streaming=False)
            replies = {item["final"]["request_id"]: item["final"] for item in run}
        return [
            answered_request(
                replies[number],
                prompt=prompt,
                prompt_tokens=tokens[number],
                sampling_params=sampling_params[number],
                text=self._controller,
            )
            for number, prompt in enumerate(prompts)
        ]

    def generate_stream(self, prompt: str | list[int], sampling_params: SamplingParams) -> Generator[dict[str, Any]]:
        """Yield `{"partial": frame}` … `{"final": reply}` of one prompt, as the engine makes them, in this thread."""
        with self._alone():
            sampling_params.streaming = True
            yield from self._offline([self._tokens(prompt, sampling_params)], [sampling_params], streaming=True)

    def _alone(self) -> threading.Lock:
        if self._service is not None:
            raise RuntimeError("the engine serves a coordinator: send requests through an InferenceClient")
        return self._in_use

    def _tokens(self, prompt: str | list[int], params: SamplingParams) -> list[int]:
        return self.controller.tokenize_prompt(prompt, params.add_BOS) if isinstance(prompt, str) else list(prompt)

    def _offline(
        self, tokens: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, streaming: bool
    ) -> OfflineRun:
        self.executor.load()
        return OfflineRun(self.core, tokens, params, controller=self._controller, streaming=streaming)

    # --- in the service of a coordinator ------------------------------------------------------------------------

    async def start_listening_to_data_parallel_coordinator(
        self,
        inference_coordinator_port: int | None = None,
        launch_inference_coordinator: bool = True,
        *,
        hostname: str | None = None,
        coordinator_schedule_output_path: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        name: str = "engine-0",
    ) -> str:
        """Serve a coordinator, and return its "tcp://host:port" once registered with the weights loaded.

        launch_inference_coordinator: start the coordinator as a process of its own, which ends with this one.
        inference_coordinator_port, hostname: where it listens, or is; by default a free port on the loopback interface.
        loop: where the engine's connection lives; None means the caller's loop.
        name: of this engine; unique at its coordinator.

        Raises EngineFailedError, CoordinatorStartError; nothing is left running then.
        """
        if self._service is not None:
            raise RuntimeError("the engine serves a coordinator already: stop_listening() first")
        if inference_coordinator_port is None and not launch_inference_coordinator:
            raise ValueError("inference_coordinator_port is wanted where no coordinator is launched")
        service = _Service(self.core, self._controller, name=name)
        coordinator = None
        if launch_inference_coordinator:
            coordinator = self._coordinator_settings(
                hostname, inference_coordinator_port, coordinator_schedule_output_path
            )
        starting = service.start(f"tcp://{hostname or LOOPBACK}:{inference_coordinator_port}", launch=coordinator)
        self._service = service
        try:
            if loop is None or loop is asyncio.get_running_loop():
                return await starting
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(starting, loop))
        except BaseException:
            self._service = None
            raise

    def _coordinator_settings(
        self, host: str | None, port: int | None, schedule_output_path: str | None
    ) -> CoordinatorSettings:
        config = self.config
        by_prefix = config.enable_prefix_caching
        return CoordinatorSettings(
            listen=host or LOOPBACK,
            client_port=port or 0,
            single_port=True,
            routing_policy=config.prefix_caching_coordinator_policy if by_prefix else RoutingPolicy.LOAD_BALANCED,
            alpha=config.prefix_caching_routing_alpha,
            schedule_output_path=Path(schedule_output_path) if schedule_output_path is not None else None,
            # This program starts it, so no engine has outlived an earlier one.
            timing=Timing(recovery=0.0),
        )

    @property
    def engine_loop_task(self) -> asyncio.Task[None]:
        """Ends when the engine was stopped, and raises EngineFailedError when it failed."""
        task = self._serving().task
        assert task is not None
        return task

    @property
    def coordinator(self) -> CoordinatorProcess | None:
        """The coordinator that was launched here."""
        return self._service.coordinator if self._service is not None else None

    @property
    def state_events(self) -> StateEvents:
        """The engine's states as events. They belong to the loop of the engine's connection."""
        worker = self._serving().worker
        assert worker is not None
        return worker.lifecycle.events

    async def wait_until(self, state: EngineState, *, times: int | None = None) -> None:
        """Return when the engine has reached RUNNING, PAUSED, SUSPENDED, RESUMED or STOPPED (for the n-th time), on the
        loop of the engine's connection. Raises EngineFailedError if the engine ends first.
        """
        if not self.state_events.has_reached(state, times=times):
            await self._serving().unless_ended(self.state_events.wait(state, times=times))

    async def stop_listening(self) -> None:
        """Leave the coordinator, and end it if it was launched here. Call it on the loop of the engine's connection.
        Idempotent.
        """
        if self._service is not None:
            await self._service.stop()
            self._service = None

    def _serving(self) -> _Service:
        if self._service is None:
            raise RuntimeError(
                "the engine serves no coordinator: start_listening_to_data_parallel_coordinator() comes first"
            )
        return self._service


class _Service:
    """Runs a core's worker on the event loop of start(), until stop() or the end of the engine.

    name: of the engine, unique at the coordinator.
    """

    def __init__(self, core: EngineCore, controller: ModelText | None, *, name: str) -> None:
        self.coordinator: CoordinatorProcess | None = None
        self.task: asyncio.Task[None] | None = None
        self.worker: EngineWorker | None = None
        self._core = core
        self._controller = controller
        self._name = name

    async def start(self, address: str, *, launch: CoordinatorSettings | None) -> str:
        """Serve the coordinator at `address`, or the one that is started here if `launch` has its settings.

        Returns its address when registered. Raises CoordinatorStartError, or EngineFailedError when the engine cannot
        load. Nothing is left running then.
        """
        try:
            if launch is not None:
                self.coordinator = await asyncio.to_thread(spawn_coordinator, launch)
                address = self.coordinator.address
            settings = EngineSettings(
                coordinator=address, name=self._name, max_requests=self._core.config.request_slots
            )
            worker = self.worker = EngineWorker(settings, NativeBackend(self._core, self._controller))
            self.task = asyncio.create_task(self._serve(worker))
            await self.unless_ended(worker.joined.wait())
        except BaseException:
            await self.stop()
            raise
        return address

    async def stop(self) -> None:
        """End the worker, then the coordinator if it was started here. Idempotent; raises nothing of theirs."""
        if self.worker is not None:
            self.worker.ended.set()
        if self.task is not None:
            with contextlib.suppress(EngineFailedError):  # raised to the callers that wait for the task
                await self.task
        if self.coordinator is not None:
            await asyncio.to_thread(self.coordinator.stop)

    async def _serve(self, worker: EngineWorker) -> None:
        """Run until a verb stops the engine, stop() ends it, or it fails."""
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

    async def unless_ended(self, wait: Coroutine[Any, Any, object]) -> None:
        """Await `wait`. Raises EngineFailedError if the engine ends first."""
        assert self.task is not None
        waiting = asyncio.create_task(wait)
        try:
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await asyncio.shield(self.task)
                raise EngineFailedError(f"engine {self._name} has stopped")
        finally:
            waiting.cancel()
