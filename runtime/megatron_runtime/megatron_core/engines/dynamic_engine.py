"""Megatron-Core's `DynamicInferenceEngine`: an engine of this process, used directly or through a coordinator."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from megatron_runtime.backends.native.build import select_executor
from megatron_runtime.backends.native.engine import MASK_GRACE_SECONDS, SUSPEND_TAGS, EngineCore
from megatron_runtime.backends.native.executor import Executor
from megatron_runtime.backends.native.ranked.executor import Follower, RankedExecutor
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.client.pending import failed_reply
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.spawn import CoordinatorProcess
from megatron_runtime.distributed.rendezvous import LOOPBACK
from megatron_runtime.engine.lifecycle import StateEvents
from megatron_runtime.engine.output_stage import error_map
from megatron_runtime.in_process.answers import answered_request
from megatron_runtime.in_process.calls import (
    AnyStream,
    CallsClosedError,
    DirectCalls,
    EngineFailedError,
    FollowedCalls,
    MakeStream,
    require_process,
    token_ids,
)
from megatron_runtime.in_process.service import EngineService, FollowedService, unless_ended
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.async_stream import AsyncStream, BlockingStream
from megatron_runtime.requests.config import IGNORED_FIELDS, InferenceConfig, RoutingPolicy
from megatron_runtime.requests.request import DynamicInferenceRequest
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.tokenization import tokenizer_of

__all__ = ["MASK_GRACE_SECONDS", "SUSPEND_TAGS", "CallsClosedError", "DynamicInferenceEngine", "EngineFailedError"]

T = TypeVar("T")


class DynamicInferenceEngine(EngineCore):
    """Megatron-Core's engine: the core of the native backend, which also runs prompts and serves a coordinator.

    It runs the prompts of this process (generate(), generate_stream(), or add_request() and step() in one thread), or
    serves a coordinator on an event loop (start_listening_to_data_parallel_coordinator()). Calls of generate() and
    generate_stream() may be open at the same time, in any number of threads and event loops.

    controller: an Executor, or Megatron-Core's TextGenerationController: a model in `inference_wrapped_model.model` and
                a `tokenizer`.
    context:    the InferenceConfig, or Megatron-Core's DynamicInferenceContext, from which the limits are taken.
    follower: for another rank of an engine than its first, which runs the requests: `executor` is this rank's part.

    Without a coordinator, all ranks of an engine make the same calls of generate() and generate_stream(), and each
    returns the answers. The first rank runs the requests.
    """

    def __init__(
        self,
        controller: Any,
        context: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        follower: Follower | None = None,
    ) -> None:
        config = context if isinstance(context, InferenceConfig) else _config_of(context)
        wrapped = getattr(controller, "inference_wrapped_model", None)
        executor = controller if wrapped is None else _executor_of(wrapped.model, controller.tokenizer, config)
        super().__init__(executor, config, clock=clock)
        self._following = FollowedService(follower) if follower is not None else None
        self._calls = self._following.calls if self._following is not None else DirectCalls(self, self._text)
        self._service: EngineService | FollowedService | None = None
        self._pid = os.getpid()

    @property
    def controller(self) -> ModelText:
        """The model's text. Raises RuntimeError for an executor whose tokens have no text."""
        text = self._text
        if text is None:
            raise RuntimeError(f"{type(self.executor).__name__} has no controller: its tokens have no text")
        return text

    @property
    def _text(self) -> ModelText | None:
        return getattr(self.executor, "controller", None)

    def reset(self, *, preserve_prefix_cache: bool = False) -> None:
        """Drop every request without an answer, and the prefix cache unless `preserve_prefix_cache`.

        Raises RuntimeError while the engine serves a coordinator, which would wait for the answers.
        """
        if self._following is not None:
            return  # this rank has no requests
        self._calls_here()
        if isinstance(self._calls, DirectCalls) and self._calls.is_running:
            self._calls.reset(preserve_prefix_cache=preserve_prefix_cache)
        else:
            super().reset(preserve_prefix_cache=preserve_prefix_cache)

    # --- without a coordinator ----------------------------------------------------------------------------------

    def load_directly(self) -> None:
        """Load the weights for use without a coordinator. Every rank of the engine calls it.

        When the process of the first rank ends, the others are released. The loss of a rank ends all of them.
        """
        if self._following is not None:
            atexit.register(self._following.wait_at_exit)
            return
        self.executor.load()
        if isinstance(self.executor, RankedExecutor):
            self.executor.watch(on_failure=lambda _failure: None, on_leave=lambda: None)
            atexit.register(self._end_ranks, self.executor)

    def _end_ranks(self, executor: RankedExecutor) -> None:
        self._calls.close()
        executor.end(None)

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Answer all prompts, beside the calls of other threads. A prompt that cannot be answered has status FAILED.

        sampling_params: of all prompts, or one for each; also of Megatron-Core.

        Raises RuntimeError while the engine serves a coordinator, InvalidSamplingParamsError.
        """
        batch = _Batch(self, prompts, sampling_params)
        if batch.sent:
            with contextlib.closing(self._open(batch, partial(BlockingStream, None))) as stream:
                for item in stream:
                    batch.take(item)
        return batch.answers()

    async def generate_async(
        self,
        prompts: Sequence[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Do what generate() does, without blocking the caller's event loop. Cancelling it aborts the requests."""
        batch = await asyncio.to_thread(_Batch, self, prompts, sampling_params)
        if batch.sent:
            stream = self._open(batch, partial(AsyncStream, None, loop=asyncio.get_running_loop()))
            try:
                async for item in stream:
                    batch.take(item)
            finally:
                stream.close()
        return batch.answers()

    def generate_stream(self, prompt: str | list[int], sampling_params: SamplingParams) -> BlockingStream:
        """Return `{"partial": frame}` … `{"final": reply}` of one prompt. Closing the stream aborts the request.

        On other ranks than the first, all items come when the answer is complete.
        """
        return self.open_stream(self.tokenize(prompt, sampling_params), sampling_params, partial(BlockingStream, None))

    def open_stream(
        self, prompt: list[int], sampling_params: SamplingParams, make_stream: MakeStream[AnyStream]
    ) -> AnyStream:
        """Do what generate_stream() does, with a stream of the caller's."""
        sampling_params.streaming = True
        return self._calls_here().open([prompt], [sampling_params], make_stream, streaming=True)

    def _open(self, batch: _Batch, make_stream: MakeStream[AnyStream]) -> AnyStream:
        return self._calls_here().open(*batch.sent_arguments(), make_stream, streaming=False)

    def tokenize(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        """Return the token ids of a prompt, which may be token ids already.

        Raises TypeError, ValueError for anything else, also for a text that is not valid Unicode.
        """
        if isinstance(prompt, str):
            return self.controller.tokenize_prompt(prompt, params.add_BOS)
        return token_ids(prompt)

    def tokenize_or_fail(self, prompt: Any, params: SamplingParams) -> list[int] | dict[str, Any]:
        """Return the token ids of a prompt, or the reply of a request that fails because it has none."""
        try:
            return self.tokenize(prompt, params)
        except (ValueError, TypeError) as error:
            return failed_reply(error_map(ErrorCode.INVALID_REQUEST, error))

    def settle(self) -> None:
        """Wait until calls whose streams were closed have left the engine."""
        self._calls.settle()

    def close_calls(self) -> None:
        """End open calls, whose callers get CallsClosedError, and the thread and process that they started.

        Later calls start them again.
        """
        self._calls.close()

    def require_own_process(self) -> None:
        """Raise RuntimeError in a process that was forked after the engine was made: it lacks the engine's threads."""
        require_process(self._pid)

    def _calls_here(self) -> DirectCalls | FollowedCalls:
        if self._service is not None:
            raise RuntimeError("the engine serves a coordinator: send requests through an InferenceClient")
        return self._calls

    def _between_steps(self, action: Callable[[], T]) -> T:
        """Run a method of the core while no step of a direct call runs."""
        if isinstance(self._calls, DirectCalls) and self._calls.is_running:
            return self._calls.perform(lambda _: action())
        return action()

    def suspend(self, tags: Collection[str] = SUSPEND_TAGS) -> None:
        """Release memory: see EngineCore. Raises RuntimeError while direct calls are open: they need the memory."""
        if isinstance(self._calls, DirectCalls) and self._calls.has_open_calls:
            raise RuntimeError("suspend() while calls of generate() or generate_stream() are open: close them first")
        self._between_steps(partial(super().suspend, tags))

    def resume(self) -> None:
        self._between_steps(super().resume)

    def swap_weights(self, epoch: int) -> None:
        self._between_steps(partial(super().swap_weights, epoch))

    def set_epoch(self, epoch: int) -> None:
        self._between_steps(partial(super().set_epoch, epoch))

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
        """Serve a coordinator. Return its "tcp://host:port" when the engine is registered, with its weights loaded.

        launch_inference_coordinator: start the coordinator as a child process, which ends with this process. Only the
              first rank of an engine does.
        inference_coordinator_port, hostname: address of the coordinator; by default a free port on the loopback
              interface.
        loop: event loop of the engine's connection; None: the caller's loop.
        name: name of this engine, unique at its coordinator.

        Raises EngineFailedError or CoordinatorStartError, after everything that was started has been stopped, and
        RuntimeError while direct calls are open.
        """
        if self._service is not None:
            raise RuntimeError("the engine serves a coordinator already: stop_listening() first")
        if isinstance(self._calls, DirectCalls):
            if self._calls.has_open_calls:
                raise RuntimeError("calls of generate() or generate_stream() are open: close them first")
            await asyncio.to_thread(self._calls.close)
        launch = None
        if self._following is not None:
            launch_inference_coordinator = False
        if launch_inference_coordinator:
            by_prefix, path = self.config.enable_prefix_caching, coordinator_schedule_output_path
            launch = CoordinatorSettings(
                listen=hostname or LOOPBACK,
                client_port=inference_coordinator_port or 0,
                single_port=True,
                routing_policy=(
                    self.config.prefix_caching_coordinator_policy if by_prefix else RoutingPolicy.LOAD_BALANCED
                ),
                alpha=self.config.prefix_caching_routing_alpha,
                schedule_output_path=Path(path) if path is not None else None,
                timing=Timing(recovery=0.0),  # a new coordinator: there are no earlier engines to wait for
            )
        elif inference_coordinator_port is None:
            raise ValueError("inference_coordinator_port is required if no coordinator is launched")
        self._service = self._following or EngineService(self, self._text, name=name)
        starting = self._service.start(f"tcp://{hostname or LOOPBACK}:{inference_coordinator_port}", launch=launch)
        try:
            if loop is None or loop is asyncio.get_running_loop():
                return await starting
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(starting, loop))
        except BaseException:
            self._service = None
            raise

    @property
    def engine_loop_task(self) -> asyncio.Task[None]:
        """Task that ends when the engine has stopped, with EngineFailedError if it failed."""
        task = self._serving().task
        assert task is not None
        return task

    @property
    def coordinator(self) -> CoordinatorProcess | None:
        """The coordinator process that this engine launched."""
        return self._service.coordinator if isinstance(self._service, EngineService) else None

    @property
    def state_events(self) -> StateEvents:
        """The engine's states as events, for the event loop of the engine's connection."""
        return self._serving().events

    async def wait_until(self, state: EngineState, *, times: int | None = None) -> None:
        """Wait until the engine has reached RUNNING, PAUSED, SUSPENDED, RESUMED or STOPPED (for the n-th time).

        Call it on the event loop of the engine's connection. Raises EngineFailedError if the engine ends first.
        """
        if not self.state_events.has_reached(state, times=times):
            await unless_ended(self.state_events.wait(state, times=times), self.engine_loop_task)

    async def stop_listening(self) -> None:
        """Leave the coordinator, and stop it if this engine launched it. Idempotent.

        Call it on the event loop of the engine's connection.
        """
        if self._service is not None:
            await self._service.stop()
            self._service = None

    def _serving(self) -> EngineService | FollowedService:
        if self._service is None:
            raise RuntimeError(
                "the engine serves no coordinator: call start_listening_to_data_parallel_coordinator() first"
            )
        return self._service


def _config_of(context: Any) -> InferenceConfig:
    """Return the configuration with which a context of Megatron-Core was built."""
    source = context.config
    names = (field.name for field in fields(InferenceConfig) if field.name not in IGNORED_FIELDS)
    return InferenceConfig(**{name: getattr(source, name) for name in names if hasattr(source, name)})


def _executor_of(model: Any, tokenizer: Any, config: InferenceConfig) -> Executor:
    """Return the executor of a model in memory, with its weights loaded, in the type of its parameters."""
    text = tokenizer_of(tokenizer)
    executor = select_executor(
        model_in_memory(model, ends=text.eos_ids), ModelText(text), config, kv_cache_memory=config.buffer_bytes
    )
    executor.load()
    return executor


class _Batch:
    """The prompts of a generate() call, and their answers in the same order.

    sent: numbers of the prompts that the engine gets. The others cannot be token ids, and fail alone.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        prompts: Sequence[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> None:
        if not isinstance(sampling_params, Sequence):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        self._params = [SamplingParams.of(params) for params in sampling_params]
        if len(self._params) != len(prompts):
            raise ValueError(
                f"{len(self._params)} sampling_params for {len(prompts)} prompts: want one, or one for each"
            )
        self._prompts = prompts
        self._text = engine._text
        self._tokens = [engine.tokenize_or_fail(*pair) for pair in zip(prompts, self._params, strict=True)]
        self._replies = [tokens if isinstance(tokens, dict) else None for tokens in self._tokens]
        self.sent = [number for number, reply in enumerate(self._replies) if reply is None]

    def sent_arguments(self) -> tuple[list[list[int]], list[SamplingParams]]:
        """Return the token ids and the parameters of the prompts that the engine gets."""
        return [cast("list[int]", self._tokens[n]) for n in self.sent], [self._params[n] for n in self.sent]

    def take(self, item: dict[str, Any]) -> None:
        """Take an item of the call's stream."""
        reply = item["final"]
        self._replies[self.sent[reply["request_id"]]] = reply

    def answers(self) -> list[DynamicInferenceRequest]:
        """Return the answers. `request_id` is the prompt's number."""
        columns = zip(self._replies, self._prompts, self._tokens, self._params, strict=True)
        return [
            answered_request(
                {**cast("dict[str, Any]", reply), "request_id": number},
                prompt=prompt,
                prompt_tokens=tokens if isinstance(tokens, list) else [],
                sampling_params=params,
                text=self._text,
            )
            for number, (reply, prompt, tokens, params) in enumerate(columns)
        ]
