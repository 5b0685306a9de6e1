"""`DynamicInferenceEngine`, an engine in this process. The module path is the same as in Megatron-Core."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from megatron_runtime.backends.native.engine import SUSPEND_TAGS, EngineCore
from megatron_runtime.backends.native.ranked.executor import Follower
from megatron_runtime.backends.text import ModelText
from megatron_runtime.coordinator.spawn import CoordinatorProcess
from megatron_runtime.distributed.rendezvous import LOOPBACK
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.in_process.answers import PromptBatch
from megatron_runtime.in_process.builder import build_executor, coordinator_settings
from megatron_runtime.in_process.calls import (
    CallsClosedError,
    DirectCalls,
    EngineFailedError,
    MakeStream,
)
from megatron_runtime.in_process.service import EngineService, FollowedService
from megatron_runtime.megatron_core.contexts.dynamic_context import DynamicInferenceContext, config_of
from megatron_runtime.megatron_core.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.megatron_core.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.async_stream import AnyStream, AsyncStream, BlockingStream
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.request import DynamicInferenceRequest
from megatron_runtime.requests.sampling_params import SamplingParams

__all__ = ["SUSPEND_TAGS", "CallsClosedError", "DynamicInferenceEngine", "EngineFailedError"]


class DynamicInferenceEngine:
    """An engine with Megatron-Core's interface and the core of the native backend.

    The engine runs the prompts of this process (generate()), or serves a coordinator on an event loop
    (start_listening_to_data_parallel_coordinator()). Any number of threads and event loops can call generate() at the
    same time.

    Without a coordinator, all ranks of an engine must make the same calls of generate(). The first rank schedules the
    requests, and every rank returns the answers.

    controller: an Executor, or a TextGenerationController of this project or of Megatron-Core. The controller has the
                model in `inference_wrapped_model.model`, and a `tokenizer`. If the class of `inference_wrapped_model`
                is a subclass of this project's GPTInferenceWrapper, `inference_wrapped_model` runs the model.
    context:    an InferenceConfig, or a DynamicInferenceContext from which the limits are read.
    follower:   set on all ranks except the first. If it is set, `controller` is the part of the model on this rank.
    """

    def __init__(self, controller: Any, context: Any, *, follower: Follower | None = None) -> None:
        executor, config = controller, context
        if not isinstance(context, InferenceConfig):
            config = config_of(context.config)
        if (wrapped := getattr(controller, "inference_wrapped_model", None)) is not None:
            kind = type(wrapped)
            is_own = issubclass(kind, GPTInferenceWrapper) and kind is not GPTInferenceWrapper
            executor, config, _ = build_executor(
                wrapped.model,
                controller.tokenizer,
                config,
                ParallelSizes(),
                make_forward=kind.forward_of if is_own else None,
            )
            executor.load()
        self.core = EngineCore(executor, config)
        self.context = (
            context if isinstance(context, DynamicInferenceContext) else DynamicInferenceContext(None, self.core.config)
        )
        """The limits and the state of this engine."""
        self.context.bind(self.core)
        self.capture_stats: dict[str, Any] | None = None
        """Time and memory of capturing CUDA graphs. None, because this engine does not measure them."""
        self.text: ModelText | None = getattr(executor, "controller", None)
        """Converts between text and the engine's tokens; None if the tokens of this executor have no text."""
        self._following = FollowedService(follower) if follower is not None else None
        self.calls = self._following.calls if self._following is not None else DirectCalls(self.core, self.text)
        """Runs calls without a coordinator."""
        self._service: EngineService | FollowedService | None = None

    @property
    def controller(self) -> TextGenerationController:
        """The model with its tokenizer. `inference_wrapped_model` is None while the weights are released.

        Raises RuntimeError if the engine has no tokenizer.
        """
        executor = self.core.executor
        if self.text is None:
            raise RuntimeError(f"{type(executor).__name__} has no controller: its tokens have no text")
        model = getattr(executor, "model", None)
        wrapped = None if model is None else GPTInferenceWrapper(model, self.context)
        return TextGenerationController(wrapped, self.text)

    @property
    def unified_memory_level(self) -> int:
        """Always 0, because the KV cache does not use unified memory."""
        return self.core.config.unified_memory_level

    @property
    def state(self) -> EngineState:
        """The state of the engine, which the coordinator's signals change. Without a coordinator, always RUNNING."""
        return EngineState.RUNNING if self._service is None else EngineState(self._service.events.state)

    # --- without a coordinator ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Return the answers to all prompts, in order. Other threads can call generate() at the same time.

        If a prompt cannot be answered, its answer has the status FAILED.

        sampling_params: one object for all prompts, or one object per prompt, of this project or of Megatron-Core.

        Raises RuntimeError while the engine serves a coordinator, and InvalidSamplingParamsError.
        """
        call = PromptBatch(prompts, sampling_params, self.text)
        if call.sent:
            with contextlib.closing(self.open(call, BlockingStream, streaming=False)) as stream:
                for item in stream:
                    call.replies[item["final"]["request_id"]] = item["final"]
        return call.answers()

    async def generate_async(
        self,
        prompts: Sequence[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Do the same as generate() without blocking the caller's event loop.

        Cancelling the call aborts the requests.
        """
        call = await asyncio.to_thread(PromptBatch, prompts, sampling_params, self.text)
        if call.sent:
            stream = self.open(call, partial(AsyncStream, None, loop=asyncio.get_running_loop()), streaming=False)
            try:
                async for item in stream:
                    call.replies[item["final"]["request_id"]] = item["final"]
            finally:
                stream.close()
        return call.answers()

    def open(self, prompts: PromptBatch, make_stream: MakeStream[AnyStream], *, streaming: bool) -> AnyStream:
        """Submit prompts without a coordinator, and return the stream of their answers. See DirectCalls.

        Raises RuntimeError while the engine serves a coordinator.
        """
        self._require_no_coordinator()
        return self.calls.open(prompts, make_stream, streaming=streaming)

    def reset(self, *, preserve_prefix_cache: bool = False) -> None:
        """Abort all open requests, which get no answer.

        Also drop the prefix cache unless `preserve_prefix_cache` is true.

        The counters of `self.context` start again at 0.

        Raises RuntimeError while the engine serves a coordinator, because the coordinator would wait for the answers.
        """
        self._require_no_coordinator()
        self.calls.reset(preserve_prefix_cache=preserve_prefix_cache)
        self.context.restart_counters()

    def suspend(self, tags: Collection[str] = SUSPEND_TAGS) -> None:
        """Release memory of the engine.

        tags: the kinds of memory to release: "weights", "kv_cache" or both.

        Raises RuntimeError while direct calls are open, because these calls need the memory.
        """
        self.calls.require_none_open("suspend()")
        self.calls.between_steps(partial(self.core.suspend, tags))

    def resume(self) -> None:
        """Reallocate the memory that suspend() released.

        Raises an exception if there is not enough memory or if the weights are not usable.
        """
        self.calls.between_steps(self.core.resume)

    def _require_no_coordinator(self) -> None:
        if self._service is not None:
            raise RuntimeError("the engine serves a coordinator: send requests through an InferenceClient")

    # --- serving a coordinator ----------------------------------------------------------------------------------

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
        """Serve a coordinator. Return the coordinator's address when the engine has loaded the weights and registered.

        launch_inference_coordinator: whether to start the coordinator as a child process, which exits with this
                                      process. Only the first rank of an engine starts a coordinator.
        inference_coordinator_port, hostname: address of the coordinator. Default: a free port on the loopback
                                              interface.
        loop: event loop of the engine's connection; None: the caller's loop.
        name: name of this engine, unique at its coordinator.

        The address has the form "tcp://host:port".

        Raises RuntimeError while direct calls are open. If the start fails, this call stops everything that it has
        started, and raises EngineFailedError or CoordinatorStartError.
        """
        if self._service is not None:
            raise RuntimeError("the engine serves a coordinator already: stop_listening() first")
        self.calls.require_none_open("start_listening_to_data_parallel_coordinator()")
        await asyncio.to_thread(self.calls.close)
        host, port = hostname, inference_coordinator_port
        launch = None
        if launch_inference_coordinator and self._following is None:
            path = coordinator_schedule_output_path
            launch = coordinator_settings(self.core.config, host=host, port=port, schedule_output_path=path)
        elif port is None:
            raise ValueError("inference_coordinator_port is required if no coordinator is launched")
        self._service = self._following or EngineService(self.core, self.text, name=name)
        starting = self._service.start(f"tcp://{host or LOOPBACK}:{port}", launch=launch)
        try:
            if loop is None or loop is asyncio.get_running_loop():
                return await starting
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(starting, loop))
        except BaseException:
            self._service = None
            raise

    @property
    def service(self) -> EngineService | FollowedService:
        """The service that connects the engine to its coordinator. Raises RuntimeError if the engine serves no
        coordinator.
        """
        if self._service is None:
            raise RuntimeError(
                "the engine serves no coordinator: call start_listening_to_data_parallel_coordinator() first"
            )
        return self._service

    @property
    def engine_loop_task(self) -> asyncio.Task[Any]:
        """The task that finishes when the engine has stopped. The task raises EngineFailedError after a failure."""
        task = self.service.task
        assert task is not None
        return task

    @property
    def coordinator(self) -> CoordinatorProcess | None:
        """The coordinator process that this engine has launched, or None."""
        return self._service.coordinator if self._service is not None else None

    async def wait_until(self, state: EngineState) -> None:
        """Wait until the engine has reached RUNNING, PAUSED, SUSPENDED, RESUMED or STOPPED.

        state: a member of EngineState, or the member of Megatron-Core's enumeration with the same name.

        Call this method on the event loop of the engine's connection. Raises EngineFailedError if the engine stops
        before it reaches the state.
        """
        await self.service.wait_until(EngineState[state.name])

    async def stop_listening(self) -> None:
        """Disconnect from the coordinator. Stop the coordinator if this engine launched it. Idempotent.

        Call this method on the event loop of the engine's connection.
        """
        if self._service is not None:
            await self._service.stop()
            self._service = None
