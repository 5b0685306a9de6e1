"""Shared code of MegatronLLM and MegatronAsyncLLM: the engine, its background runtime, and every call as a coroutine.

The two classes differ only in how a caller waits. Only `GenerationChunk` is public.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar, cast

import torch

from megatron_runtime.backends.native.build import select_executor
from megatron_runtime.backends.native.kv.dynamic_context import DynamicInferenceContext
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.checkpoints.source import IN_MEMORY, ModelSource, resolve
from megatron_runtime.checkpoints.torch_dist.live_model import is_megatron_model, unwrapped
from megatron_runtime.coordinator.spawn import CoordinatorFailedError
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.in_process.answers import answered_request
from megatron_runtime.in_process.calls import AnyStream, MakeStream
from megatron_runtime.in_process.event_loop import EventLoopManager as _EventLoopManager
from megatron_runtime.in_process.front_end import FrontEnd, ServeConfig
from megatron_runtime.in_process.ranks import (
    executor_of_ranks,
    global_rank,
    local_rank,
    local_world,
    parallel_sizes,
    world_size,
)
from megatron_runtime.in_process.streams import GenerationChunk, ReadChunk
from megatron_runtime.megatron_core.apis._runtime import _CoordinatorRuntime
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine, EngineFailedError
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.megatron_core.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.megatron_core.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron_runtime.process.memory import available_bytes
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.request import DynamicInferenceRequest
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.server.settings import default_model_name
from megatron_runtime.tokenization import Tokenizer, load_tokenizer, tokenizer_of
from megatron_runtime.transport.control_calls import ControlRejectedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError

__all__ = ["GenerationChunk", "_CoordinatorRuntime", "_EventLoopManager", "_MegatronLLMBase"]

T = TypeVar("T")
Prompt: TypeAlias = str | list[int]
Prompts: TypeAlias = str | list[int] | list[str] | list[list[int]]

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 30.0
"""Timeout of each control signal of a shutdown, which then continues without the engines that have not answered."""

RELEASE_SECONDS = 15.0
"""How long `del`, or the end of the interpreter, waits for the end of an object that was not shut down."""

PLACES_PER_SLOT = 2
"""Prompts of lists that are submitted at once, per request that the engines run at once."""

DEFAULT_MEMORY_SHARE = 0.25
"""Share of the free memory for the KV cache of an engine without a configuration."""

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Types of a GPTModel's parameters that every device computes with."""

WAITABLE_STATES = (EngineState.RUNNING, EngineState.PAUSED, EngineState.SUSPENDED, EngineState.RESUMED)


class _MegatronLLMBase:
    """One engine of this process, used directly or through a coordinator.

    In direct mode every rank is primary, and one thread runs the engine for all callers. The ranks of an engine then
    make the same calls, and each returns the answers. Lifecycle methods need coordinator mode, where a background event
    loop runs the engine's connection and, on global rank 0, the client.

    An object that is no longer used is shut down by the garbage collector, and at the end of the interpreter.

    model:     a GPTModel of Megatron-Core, a causal language model of transformers in eval mode, or a DecoderModel. Its
               weights are copied.
    tokenizer: a Tokenizer, a fast tokenizer of transformers, a tokenizer of Megatron-Core (or another object with
               `tokenize` and `detokenize`), or a model reference that has one. None: that of the model reference.
    inference_config: limits and options; None means Megatron-Core's defaults, with a KV cache that fits this host.
    coordinator_host, coordinator_port: address of the coordinator; by default a free port on the loopback interface.
    inference_wrapper_cls: the class that runs the model, derived from GPTInferenceWrapper.
    dtype:     "auto", "float32" or "bfloat16". "auto" is `params_dtype` of a GPTModel; of other models, bfloat16 if
               the device computes with it.
    threads:   torch threads; None: torch's default.
    tensor_model_parallel_size, pipeline_model_parallel_size, expert_model_parallel_size: ranks of one engine by
               dimension; None: those of a Megatron-Core model or of its parallel state, else 1. Start their product, or
               a multiple of it, with torchrun. Consecutive ranks are an engine. Every rank constructs the object.
    """

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        inference_config: InferenceConfig | None = None,
        use_coordinator: bool = False,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        inference_wrapper_cls: type[GPTInferenceWrapper] | None = None,
        dtype: str = "auto",
        threads: int | None = None,
        tensor_model_parallel_size: int | None = None,
        pipeline_model_parallel_size: int | None = None,
        expert_model_parallel_size: int | None = None,
    ) -> None:
        if not use_coordinator and (coordinator_host is not None or coordinator_port is not None):
            raise ValueError("coordinator_host/port require use_coordinator=True")
        sizes = parallel_sizes(
            unwrapped(model) if is_megatron_model(model) else model,
            tensor=tensor_model_parallel_size,
            pipeline=pipeline_model_parallel_size,
            expert=expert_model_parallel_size,
        )
        if not use_coordinator and sizes.expert > 1:
            raise ValueError(
                f"expert_model_parallel_size > 1 (it is {sizes.expert}) needs use_coordinator=True, which synchronises "
                "the steps of the ranks"
            )
        if isinstance(model, DynamicInferenceEngine):
            self._engine = model
        else:
            config = inference_config or default_config()
            self._engine = _make_engine(
                model, tokenizer, config, sizes, dtype=dtype, threads=threads, wrapper_class=inference_wrapper_cls
            )
        self._sizes = sizes
        self._reference = next((str(item) for item in (tokenizer, model) if isinstance(item, str | Path)), None)
        self._use_coordinator = use_coordinator
        self._lock = threading.Lock()
        self._loop_manager: _EventLoopManager | None = None
        self._coord_runtime: _CoordinatorRuntime | None = None
        self._reached: dict[EngineState, int] = {}
        """On a worker rank: how often its own calls have waited for each state."""
        if use_coordinator:
            self._start_runtime(coordinator_host, coordinator_port)
        else:
            self._engine.load_directly()

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> Self:
        """Load a model and its tokenizer by reference: "builtin:NAME", a GGUF file or a directory of transformers."""
        return cls(model=str(model), tokenizer=None, **options)

    def _start_runtime(self, host: str | None, port: int | None) -> None:
        manager = _EventLoopManager()
        manager.start()
        runtime = _CoordinatorRuntime(
            self._engine,
            name=f"engine-{global_rank() // self._sizes.world}",
            is_primary=global_rank() == 0,
            coordinator_host=host,
            coordinator_port=port,
            places=PLACES_PER_SLOT * self._engine.config.request_slots * max(1, world_size() // self._sizes.world),
        )
        try:
            manager.run_sync(runtime.setup(loop=manager.loop))
        except BaseException:
            manager.stop()
            raise
        self._loop_manager, self._coord_runtime = manager, runtime
        # A joining engine may pass through states without a call of this program.
        self._reached = {state: self._engine.state_events.times(state) for state in WAITABLE_STATES}
        self._finalizer = weakref.finalize(self, _release, manager, runtime, os.getpid())
        manager.run_sync(runtime.wait_for_all())

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def is_primary_rank(self) -> bool:
        """Whether generate() may be called on this rank: any rank in direct mode, else global rank 0."""
        return not self._use_coordinator or global_rank() == 0

    @property
    def engine(self) -> DynamicInferenceEngine:
        return self._engine

    @property
    def context(self) -> DynamicInferenceContext:
        return self._engine.context

    @property
    def controller(self) -> TextGenerationController:
        """The model and its tokenizer. `inference_wrapped_model` is None while the weights are released."""
        executor = self._engine.executor
        model, dtype = getattr(executor, "model", None), getattr(executor, "dtype", None)
        wrapped = GPTInferenceWrapper(model, dtype=dtype) if model is not None and dtype is not None else None
        return TextGenerationController(wrapped, lambda: self._engine.controller.tokenizer)

    def _assert_primary(self) -> None:
        if not self.is_primary_rank:
            raise RuntimeError(f"this is rank {global_rank()}: only the primary rank, 0, accepts prompts")

    def _assert_coordinator(self) -> None:
        if not self._use_coordinator:
            raise RuntimeError("this call needs a coordinator: construct with use_coordinator=True")

    @staticmethod
    def _normalize_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
        """Return (prompts as a list, whether it is a batch). Only the first element is checked here.

        Raises TypeError for anything but str, list[int], list[str], list[list[int]].
        """
        if isinstance(prompts, str):
            return [prompts], False
        if isinstance(prompts, list):
            if not prompts:
                return [], True
            first = prompts[0]
            if isinstance(first, int) and not isinstance(first, bool):
                return [prompts], False
            if isinstance(first, str | list):
                return prompts, True
        shown = f"a list of {type(prompts[0]).__name__}" if isinstance(prompts, list) else type(prompts).__name__
        raise TypeError(f"prompts is {shown}: want str, list[int], list[str] or list[list[int]]")

    def _manager(self) -> _EventLoopManager:
        self._assert_coordinator()
        self._engine.require_own_process()
        if self._loop_manager is None:
            raise RuntimeError("this MegatronLLM has been shut down: create a new one")
        return self._loop_manager

    def _client(self) -> InferenceClient:
        runtime = self._coord_runtime
        if runtime is not None:
            runtime.raise_failure()
        if runtime is None or runtime.client is None:
            raise RuntimeError("this MegatronLLM has been shut down: create a new one")
        return runtime.client

    # --- generate -----------------------------------------------------------------------------------------------

    def _prepare(
        self, prompts: Any, sampling_params: SamplingParams | None, multi_modal_data: Any = None
    ) -> tuple[list[Prompt], bool, SamplingParams]:
        """Return (prompts as a list, whether it is a batch, sampling parameters).

        sampling_params: of this project or of Megatron-Core.
        """
        self._assert_primary()
        self._engine.require_own_process()
        if multi_modal_data is not None:
            raise ValueError("multi_modal_data: this model accepts text only: leave it out")
        listed, is_batch = self._normalize_prompts(prompts)
        return listed, is_batch, SamplingParams.of(sampling_params or SamplingParams())

    async def _generate_impl(self, prompts: list[Prompt], sp: SamplingParams) -> list[DynamicInferenceRequest]:
        """Return the answers in the order of `prompts`.

        Runs on the background loop in coordinator mode. In direct mode it runs on the caller's loop.
        """
        if not self._use_coordinator:
            return await self._engine.generate_async(prompts, sp)
        self._client()  # raises if it was shut down
        assert self._coord_runtime is not None
        tokens = await asyncio.to_thread(lambda: [self._engine.tokenize_or_fail(prompt, sp) for prompt in prompts])
        replies = await self._coord_runtime.answer(tokens, sp)
        return [
            answered_request(
                reply,
                prompt=prompt,
                prompt_tokens=ids if isinstance(ids, list) else [],
                sampling_params=sp,
                text=self._engine.controller,
            )
            for reply, prompt, ids in zip(replies, prompts, tokens, strict=True)
        ]

    def _prepare_stream(self, prompt: Any, sampling_params: SamplingParams | None) -> tuple[Prompt, SamplingParams]:
        listed, is_batch, params = self._prepare(prompt, sampling_params)
        if is_batch:
            raise TypeError("generate_stream() takes one prompt: str or list[int]")
        return listed[0], params

    def _open_stream(
        self,
        prompt: Prompt,
        tokens: list[int] | dict[str, Any],
        sp: SamplingParams,
        make_stream: MakeStream[AnyStream],
    ) -> tuple[AnyStream, ReadChunk]:
        """Submit the request of a stream. Return the stream, and a function that converts its items to chunks.

        tokens: of the prompt, or the reply of a request that fails; see tokenize_or_fail().
        """
        if isinstance(tokens, dict):
            stream = make_stream(lambda: None)
            stream.put({"final": tokens})
            stream.finish()
            tokens = []
        elif self._use_coordinator:
            loop, client = self._manager().loop, self._client()

            def abort(request_id: int) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the request
                    loop.call_soon_threadsafe(client.abort_request, request_id)

            stream = client.native.add_request_to_stream(tokens, sp, lambda number: make_stream(partial(abort, number)))
        else:
            stream = self._engine.open_stream(tokens, sp, make_stream)
        return stream, self._chunk_reader(prompt, tokens, sp)

    def _chunk_reader(self, prompt: Prompt, prompt_tokens: list[int], sp: SamplingParams) -> ReadChunk:
        text = self._engine.controller
        detokenizer = text.detokenizer(after=prompt_tokens)
        length = count = 0  # characters and tokens in the chunks so far

        def read(item: dict[str, Any]) -> GenerationChunk:
            nonlocal length, count
            if "partial" in item:
                frame = item["partial"]
                tokens: list[int] = frame["new_tokens"]
                new_text = detokenizer.feed(tokens)
                length += len(new_text)
                count += len(tokens)
                return GenerationChunk(new_text, tokens, frame.get("new_log_probs"))
            request = answered_request(
                item["final"], prompt=prompt, prompt_tokens=prompt_tokens, sampling_params=sp, text=text
            )
            rest, log_probs = request.generated_tokens[count:], request.generated_log_probs
            rest_log_probs = log_probs[-len(rest) :] if log_probs and rest else None
            return GenerationChunk((request.generated_text or "")[length:], rest, rest_log_probs, request)

        return read

    # --- lifecycle ----------------------------------------------------------------------------------------------

    async def _pause_impl(self) -> None:
        await self._verb("pause_engines", reached=EngineState.PAUSED)

    async def _unpause_impl(self) -> None:
        await self._verb("unpause_engines", reached=EngineState.RUNNING)

    async def _suspend_impl(self) -> None:
        await self._verb("suspend_engines", reached=EngineState.SUSPENDED)

    async def _resume_impl(self) -> None:
        await self._verb("resume_engines", reached=EngineState.RESUMED)

    async def _update_weights_impl(self, source: Any, epoch: int | None) -> None:
        """Switch every engine to the weights of `source`, a model reference or a model in memory, as `epoch`.

        With a model in memory, every rank of the program makes this call, and each of its engines reads its own rank's
        model. The call returns when all engines have copied the weights.
        """
        if isinstance(source, str | Path):
            await self._verb("update_weights", str(source), self._next_epoch(epoch))
            return
        runtime, executor = self._coord_runtime, cast("Any", self._engine.executor)
        assert runtime is not None
        executor.use_memory(model_in_memory(source, ends=executor.eos_ids))
        await runtime.share_failure(None)  # every rank has its model
        failure: Exception | None = None
        try:
            await self._verb("update_weights", IN_MEMORY, self._next_epoch(epoch))
        except Exception as error:
            failure = error
        cause = await runtime.share_failure(failure)  # every engine has copied the weights
        if failure is not None:
            raise failure
        if cause is not None:
            raise RuntimeError(f"the weights were not updated: {cause}")

    def _next_epoch(self, epoch: int | None) -> int:
        return self._engine.epoch + 1 if epoch is None else epoch

    async def _verb(self, name: str, *arguments: Any, reached: EngineState | None = None) -> None:
        """Send a control signal from the primary rank. A worker rank waits until its engine has reached a state."""
        if self.is_primary_rank:
            assert self._coord_runtime is not None
            await self._coord_runtime.confirmed(getattr(self._client(), name)(*arguments))
        elif reached is not None:
            # Counted, because the engine may have left the state again before this rank waits for it.
            events = self._engine.state_events
            wanted = self._reached.get(reached, 0) + 1
            await self._engine.wait_until(reached, times=wanted)
            self._reached[reached] = min(wanted, events.times(reached))

    async def _shutdown_impl(self) -> None:
        """Stop every engine, then the coordinator. A worker rank waits until its engine has stopped.

        Engines that do not answer in time are left running.
        """
        runtime = self._coord_runtime
        assert runtime is not None
        if runtime.front_end is not None:
            await runtime.front_end.stop()
        if runtime.failure is not None:
            pass  # nothing answers a signal
        elif self.is_primary_rank:
            client = self._client()
            try:
                await runtime.confirmed(client.pause_engines(timeout_seconds=SHUTDOWN_SECONDS))
                await runtime.confirmed(client.stop_engines(timeout_seconds=SHUTDOWN_SECONDS))
            except (
                ControlRejectedError,
                CoordinatorFailedError,
                CoordinatorUnreachableError,
                EngineFailedError,
            ) as error:
                logger.warning("shutting down without a clean stop of the engines: %s", error)
        else:
            # The primary rank stops this engine, unless the primary has ended.
            await asyncio.wait({self._engine.engine_loop_task}, timeout=2 * SHUTDOWN_SECONDS)
        await runtime.teardown()

    def _shut_down(self) -> None:
        """Shut down once; a second caller waits for the first. Not on the background loop, which it stops."""
        with self._lock:
            manager, runtime = self._loop_manager, self._coord_runtime
            if manager is None or runtime is None:
                return
            self._engine.require_own_process()
            manager.require_other_thread("shutdown()")
            try:
                manager.run_sync(self._shutdown_impl())
            finally:  # also if the caller was interrupted
                self._loop_manager = None
                self._finalizer.detach()
                manager.end(runtime.teardown())
                manager.join(RELEASE_SECONDS)
                manager.stop()

    async def _wait_for_shutdown_impl(self) -> None:
        """Wait until the engine has stopped. Raises EngineFailedError, CoordinatorFailedError if one has failed."""
        assert self._coord_runtime is not None
        await self._coord_runtime.wait_for_end()

    # --- HTTP ---------------------------------------------------------------------------------------------------

    async def _serve_impl(self, config: ServeConfig) -> None:
        """Start the HTTP front end on the primary rank."""
        assert self._coord_runtime is not None
        assert self._coord_runtime.coord_addr is not None
        if not self.is_primary_rank:
            return
        if self._front_end is not None:
            raise RuntimeError(f"HTTP is served already at {self._front_end.url}")
        self._coord_runtime.front_end = FrontEnd(
            config,
            coordinator=self._coord_runtime.coord_addr,
            tokenizer=self._engine.controller.tokenizer,
            tokenizer_reference=self._reference,
            model_name=config.model_name or default_model_name(self._reference or "model"),
            max_sequence_length=self._engine.context.max_sequence_length,
        )
        try:
            await self._coord_runtime.front_end.start()
        except BaseException:
            self._coord_runtime.front_end = None
            raise

    def _check_can_serve(self) -> None:
        if not self._use_coordinator:
            raise ValueError("serve() needs a coordinator: construct with use_coordinator=True")

    @property
    def _front_end(self) -> FrontEnd | None:
        return self._coord_runtime.front_end if self._coord_runtime is not None else None

    @property
    def url(self) -> str | None:
        """URL of the HTTP server, "http://host:port"; None if none runs."""
        return self._front_end.url if self._front_end is not None else None

    # --- bridges ------------------------------------------------------------------------------------------------

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the background loop and return its future."""
        return self._bridge(coro).submit(coro)

    def run_sync(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop and block until its result. Blocks the caller's own loop, too."""
        return self._bridge(coro).run_sync(coro)

    def _bridge(self, coro: Coroutine[Any, Any, Any]) -> _EventLoopManager:
        try:
            return self._manager()
        except RuntimeError:
            coro.close()
            raise


def _release(manager: _EventLoopManager, runtime: _CoordinatorRuntime, pid: int) -> None:
    """Close what an object that was not shut down has left. The garbage collector may call it in any thread."""
    if os.getpid() == pid:
        manager.end(runtime.teardown())
        if threading.current_thread() is threading.main_thread():  # other threads may be those to wait for
            manager.join(RELEASE_SECONDS)


def default_config() -> InferenceConfig:
    """Return Megatron-Core's defaults, with a KV cache that fits this host beside its other ranks."""
    gigabytes = InferenceConfig().buffer_size_gb
    if (available := available_bytes()) is not None:
        gigabytes = min(gigabytes, available * DEFAULT_MEMORY_SHARE / local_world() / (1 << 30))
    return InferenceConfig(buffer_size_gb=gigabytes, enable_chunked_prefill=True)


def _make_engine(
    model: Any,
    tokenizer: Any,
    config: InferenceConfig,
    sizes: ParallelSizes,
    *,
    dtype: str = "auto",
    threads: int | None = None,
    wrapper_class: type[GPTInferenceWrapper] | None = None,
) -> DynamicInferenceEngine:
    """Return the engine of a model; its weights are not loaded yet.

    model: a model reference, which may have a tokenizer of its own, or a model in memory, which needs `tokenizer`.
    sizes: ranks of the engine.
    dtype, threads, wrapper_class: options of the executor; see MegatronLLM.

    Raises ModelSourceError, UnsupportedModelError for a model, TypeError for a tokenizer, that cannot be used.
    """
    source: ModelSource
    text: Tokenizer | Callable[[], Tokenizer]
    if isinstance(model, str):
        source = resolve(model)
        text = (lambda: load_tokenizer(model)) if tokenizer is None else tokenizer_of(tokenizer)
    else:
        text = tokenizer_of(tokenizer)
        source = model_in_memory(model, ends=text.eos_ids)
    if dtype == "auto" and is_megatron_model(model):
        dtype = _DTYPES.get(unwrapped(model).config.params_dtype, dtype)
    options: dict[str, Any] = {
        "dtype": dtype,
        "threads": threads,
        "make_forward": None if wrapper_class is None else wrapper_class.forward_of,
    }
    if sizes.world > 1:
        executor, config, follower = executor_of_ranks(source, ModelText(text), config, sizes, **options)
        return DynamicInferenceEngine(executor, config, follower=follower)
    executor = select_executor(
        source, ModelText(text), config, local_rank=local_rank(), kv_cache_memory=config.buffer_bytes, **options
    )
    return DynamicInferenceEngine(executor, config)
