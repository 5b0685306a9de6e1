"""The base class of MegatronLLM and MegatronAsyncLLM.

The base class has the engine and the background loop, and implements each call as a coroutine.
The two classes differ only in how a caller waits for results. The only public name in this module is `GenerationChunk`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from megatron_runtime.in_process.answers import Prompt, PromptBatch
from megatron_runtime.in_process.builder import build_executor, default_config
from megatron_runtime.in_process.calls import MakeStream, require_process
from megatron_runtime.in_process.event_loop import EventLoopManager as _EventLoopManager
from megatron_runtime.in_process.front_end import FrontEnd, ServeConfig
from megatron_runtime.in_process.lifecycle import ProgramLifecycle
from megatron_runtime.in_process.ranks import ProgramRanks, global_rank, parallel_sizes, world_size
from megatron_runtime.in_process.streams import GenerationChunk, ReadChunk
from megatron_runtime.megatron_core.contexts.dynamic_context import DynamicInferenceContext
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.megatron_core.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.megatron_core.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.async_stream import AnyStream
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.request import DynamicInferenceRequest
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.server.settings import default_model_name

__all__ = ["GenerationChunk", "_CoordinatorRuntime", "_EventLoopManager", "_MegatronLLMBase"]

T = TypeVar("T")
Prompts: TypeAlias = Prompt | list[str] | list[list[int]]

RELEASE_SECONDS = 15.0
"""Maximum number of seconds that `del` or the exit of the interpreter waits for the shutdown of an object."""

PLACES_PER_SLOT = 2
"""Maximum number of prompts of a batch that are submitted at the same time, per request slot of the engines."""


class _CoordinatorRuntime:
    """The coordinator and the client of one MegatronLLM. setup() and teardown() run on the background event loop.

    The primary rank starts a coordinator and a client. A worker rank connects to the coordinator at host and port, or
    receives the address through torch.distributed.

    engine_ranks: number of consecutive ranks of the program that form one engine.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        is_primary: bool,
        coordinator_host: str | None,
        coordinator_port: int | None,
        engine_ranks: int = 1,
    ) -> None:
        self.client: InferenceClient | None = None
        """The client on the primary rank; None on worker ranks."""
        self.coord_addr: str | None = None
        """Address of the coordinator as "tcp://host:port"; None before setup()."""
        self.ranks = ProgramRanks(None)
        self.lifecycle: ProgramLifecycle | None = None
        """The lifecycle of this rank; None before setup()."""
        self._engine = engine
        self._engine_ranks = engine_ranks
        self._is_primary = is_primary
        self._host = coordinator_host
        self._port = coordinator_port

    async def setup(self, *, loop: asyncio.AbstractEventLoop) -> None:
        """Start the coordinator and the client. If one of them fails to start, stop both."""
        try:
            if self._is_primary:
                self.coord_addr = await self._listen(loop, launch=True)
                await self._share()
                self.client = InferenceClient(self.coord_addr, deserialize=False, records=True)
                await self.client.start()
            else:
                await self._share()
                self.coord_addr = await self._listen(loop, launch=False)
            engines = max(1, world_size() // self._engine_ranks)
            self.lifecycle = ProgramLifecycle(
                self._engine.core,
                self._engine.service,
                client=self.client.native if self.client is not None else None,
                ranks=self.ranks,
                places=PLACES_PER_SLOT * self._engine.core.config.request_slots * engines,
            )
        except BaseException:
            await self.teardown()
            raise

    async def _listen(self, loop: asyncio.AbstractEventLoop, *, launch: bool) -> str:
        """Connect the engine to a coordinator, and return the coordinator's address.

        launch: whether to start the coordinator. If no port is configured, the coordinator uses a free port.
        """
        where: dict[str, str] = {} if self._host is None else {"hostname": self._host}
        name = f"engine-{global_rank() // self._engine_ranks}"
        return await self._engine.start_listening_to_data_parallel_coordinator(
            self._port, launch, loop=loop, name=name, **where
        )

    async def _share(self) -> None:
        """Send the coordinator's address from the primary rank to every other rank, unless a port is configured."""
        self.ranks = await ProgramRanks.join()
        if self._port is None and self.ranks.group is not None:
            address = await self.ranks.text_of_first(self.coord_addr or "")
            if not self._is_primary:
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                self._host, self._port = host, int(port)

    async def teardown(self) -> None:
        """Stop the client, the connection of the engine, and the coordinator, if they have been started. Idempotent."""
        client, self.client = self.client, None
        try:
            if self.lifecycle is not None:
                await self.lifecycle.close()
        finally:
            if client is not None:
                client.stop()
            await self._engine.stop_listening()


class _MegatronLLMBase:
    """One engine in this process, used directly or through a coordinator.

    In direct mode every rank is primary, and one thread runs the engine for all callers. All ranks of an engine must
    make the same calls, and every rank returns the answers. Lifecycle methods require coordinator mode. In this mode a
    background event loop runs the connection of the engine and, on global rank 0, the client.

    The garbage collector, or the exit of the interpreter, shuts down an object that is no longer used.

    model:     a GPTModel of Megatron-Core, or a causal language model of transformers in eval mode. The engine copies
               the weights.
    tokenizer: a Tokenizer, a fast tokenizer of transformers, a tokenizer of Megatron-Core (or another object with
               `tokenize` and `detokenize`), or a reference of a model that has a tokenizer. None: the tokenizer of the
               model reference.
    inference_config: limits and options of the engine. None: Megatron-Core's defaults, with a KV cache that fits into
        the host's memory.
    coordinator_host, coordinator_port: address of the coordinator. Default: a free port on the loopback interface.
    inference_wrapper_cls: the class that runs the model, a subclass of GPTInferenceWrapper.
    dtype:     type with which the engine computes: "auto", "float32" or "bfloat16". For a GPTModel, "auto" means its
               `params_dtype`. For other models, "auto" means bfloat16 if the device supports it.
    threads:   number of torch threads; None: torch's default.
    tensor_model_parallel_size, pipeline_model_parallel_size, expert_model_parallel_size: number of ranks of one engine
        in each dimension. None: the size from a Megatron-Core model or its parallel state, otherwise 1. With torchrun,
        start as many ranks as the product of the sizes, or a multiple of this number. Consecutive ranks form an engine.
        Every rank constructs the object.
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
            model,
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
            executor, config, follower = build_executor(
                model,
                tokenizer,
                inference_config or default_config(),
                sizes,
                dtype=dtype,
                threads=threads,
                make_forward=None if inference_wrapper_cls is None else inference_wrapper_cls.forward_of,
            )
            self._engine = DynamicInferenceEngine(executor, config, follower=follower)
        self._sizes = sizes
        self._reference = next((str(item) for item in (tokenizer, model) if isinstance(item, str | Path)), None)
        self._use_coordinator = use_coordinator
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._loop_manager: _EventLoopManager | None = None
        self._coord_runtime: _CoordinatorRuntime | None = None
        if use_coordinator:
            self._start_runtime(coordinator_host, coordinator_port)
        else:
            self._engine.calls.begin()

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> Self:
        """Return an instance with the model `model`: "builtin:NAME", a GGUF file or a transformers directory."""
        return cls(model=str(model), tokenizer=None, **options)

    def _start_runtime(self, host: str | None, port: int | None) -> None:
        manager = _EventLoopManager()
        manager.start()
        runtime = _CoordinatorRuntime(
            self._engine,
            is_primary=global_rank() == 0,
            coordinator_host=host,
            coordinator_port=port,
            engine_ranks=self._sizes.world,
        )
        try:
            manager.run_sync(runtime.setup(loop=manager.loop))
        except BaseException:
            manager.stop()
            raise
        self._loop_manager, self._coord_runtime = manager, runtime
        self._finalizer = weakref.finalize(self, _release, manager, runtime, self._pid)
        manager.run_sync(runtime.ranks.wait())  # register before the start, so that no rank misses a signal

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def is_primary_rank(self) -> bool:
        """Whether generate() can be called on this rank: in direct mode on every rank, otherwise only on rank 0."""
        return not self._use_coordinator or global_rank() == 0

    @property
    def engine(self) -> DynamicInferenceEngine:
        return self._engine

    @property
    def context(self) -> DynamicInferenceContext:
        return self._engine.context

    @property
    def controller(self) -> TextGenerationController:
        """The model with its tokenizer. `inference_wrapped_model` is None while the weights are released."""
        return self._engine.controller

    def _assert_primary(self) -> None:
        if not self.is_primary_rank:
            raise RuntimeError(f"this is rank {global_rank()}: only the primary rank, 0, accepts prompts")

    def _assert_coordinator(self) -> None:
        if not self._use_coordinator:
            raise RuntimeError("this call needs a coordinator: construct with use_coordinator=True")

    @staticmethod
    def _normalize_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
        """Return (prompts as a list, whether the argument is a batch).

        The types of prompts after the first are not checked.

        Raises TypeError unless the argument is a str, list[int], list[str] or list[list[int]].
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
        require_process(self._pid)
        if self._loop_manager is None:
            raise RuntimeError("this MegatronLLM has been shut down: create a new one")
        return self._loop_manager

    def _lifecycle(self) -> ProgramLifecycle:
        """Return the lifecycle, whose methods run on the background loop."""
        runtime = self._coord_runtime
        assert runtime is not None
        assert runtime.lifecycle is not None
        return runtime.lifecycle

    # --- generate -----------------------------------------------------------------------------------------------

    def _prepare(self, prompts: Any, multi_modal_data: Any = None) -> tuple[list[Prompt], bool]:
        """Return (prompts as a list, whether the argument is a batch).

        Raises an error if this object cannot answer prompts.
        """
        self._assert_primary()
        require_process(self._pid)
        if multi_modal_data is not None:
            raise ValueError("multi_modal_data: this model accepts text only: leave it out")
        return self._normalize_prompts(prompts)

    def _prepare_stream(self, prompt: Any) -> Prompt:
        listed, is_batch = self._prepare(prompt)
        if is_batch:
            raise TypeError("generate_stream() takes one prompt: str or list[int]")
        return listed[0]

    async def _generate_impl(self, prompts: list[Prompt], sp: SamplingParams | None) -> list[DynamicInferenceRequest]:
        """Generate the answers to `prompts`, and return them in the same order.

        sp: sampling parameters of this project or of Megatron-Core.

        In coordinator mode the coroutine runs on the background loop, in direct mode on the caller's loop.
        """
        if not self._use_coordinator:
            return await self._engine.generate_async(prompts, sp)
        call = await asyncio.to_thread(PromptBatch, prompts, sp, self._engine.text)
        return await self._lifecycle().calls.answer(call)

    def _open_stream(self, prompts: PromptBatch, make_stream: MakeStream[AnyStream]) -> tuple[AnyStream, ReadChunk]:
        """Submit a streaming request. Return the stream, and a function that converts its items to chunks."""
        if not prompts.sent:
            stream = make_stream(lambda: None)
            stream.put({"final": prompts.replies[0]})
            stream.finish()
        elif self._use_coordinator:
            self._manager()  # raises an error if the engine was shut down
            stream = self._lifecycle().calls.open(prompts, make_stream)
        else:
            stream = self._engine.open(prompts, make_stream, streaming=True)
        return stream, prompts.chunk_reader()

    def _settle(self) -> None:
        """Wait until the engine has dropped all requests that were aborted so far."""
        if not self._use_coordinator:
            self._engine.calls.settle()
        elif self._loop_manager is not None:
            with contextlib.suppress(RuntimeError):  # the object has been shut down, or this is the engine's own thread
                self._loop_manager.run_sync(asyncio.sleep(0))

    # --- lifecycle ----------------------------------------------------------------------------------------------

    async def _pause_impl(self) -> None:
        await self._lifecycle().verb(Header.PAUSE)

    async def _unpause_impl(self) -> None:
        await self._lifecycle().verb(Header.UNPAUSE)

    async def _suspend_impl(self) -> None:
        await self._lifecycle().verb(Header.SUSPEND)

    async def _resume_impl(self) -> None:
        await self._lifecycle().verb(Header.RESUME)

    async def _shutdown_impl(self) -> None:
        """Stop every engine, and then the coordinator. A worker rank waits until its engine has stopped."""
        assert self._coord_runtime is not None
        await self._lifecycle().stop()
        await self._coord_runtime.teardown()

    async def _wait_for_shutdown_impl(self) -> None:
        """Wait until the engine has stopped. Raises EngineFailedError or CoordinatorFailedError after a failure."""
        await self._lifecycle().wait_for_end()

    def _shut_down(self) -> None:
        """Shut down once. A second caller waits for the first.

        Do not call this method on the background loop, because the method stops this loop.
        """
        with self._lock:
            manager, runtime = self._loop_manager, self._coord_runtime
            if manager is None or runtime is None:
                return
            require_process(self._pid)
            manager.require_other_thread("shutdown()")
            try:
                manager.run_sync(self._shutdown_impl())
            finally:  # even if the caller is interrupted
                self._loop_manager = None
                self._finalizer.detach()
                manager.end(runtime.teardown())
                manager.join(RELEASE_SECONDS)
                manager.stop()

    # --- HTTP ---------------------------------------------------------------------------------------------------

    async def _serve_impl(self, config: ServeConfig) -> None:
        """Start the HTTP front end on the primary rank."""
        assert self._coord_runtime is not None
        assert self._coord_runtime.coord_addr is not None
        if self.is_primary_rank:
            assert self._engine.text is not None
            await self._lifecycle().serve(
                partial(
                    FrontEnd,
                    config,
                    coordinator=self._coord_runtime.coord_addr,
                    tokenizer=self._engine.text.tokenizer,
                    tokenizer_reference=self._reference,
                    model_name=config.model_name or default_model_name(self._reference or "model"),
                    max_sequence_length=self._engine.core.context.max_sequence_length,
                )
            )

    async def _stop_frontend_if_started(self) -> None:
        """Stop the HTTP front end of this rank, if it has been started."""
        if self._coord_runtime is not None:
            await self._lifecycle().stop_serving()

    def _check_can_serve(self) -> None:
        if not self._use_coordinator:
            raise ValueError("serve() needs a coordinator: construct with use_coordinator=True")

    @property
    def _front_end(self) -> FrontEnd | None:
        return self._lifecycle().front_end if self._coord_runtime is not None else None

    @property
    def url(self) -> str | None:
        """URL of the HTTP server as "http://host:port"; None if no server runs."""
        return self._front_end.url if self._front_end is not None else None

    # --- bridges ------------------------------------------------------------------------------------------------

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the background loop, and return its future."""
        return self._bridge(coro).submit(coro)

    def run_sync(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop, block until it has completed, and return its result.

        If the caller runs on an event loop, this call blocks the loop too.
        """
        return self._bridge(coro).run_sync(coro)

    def _bridge(self, coro: Coroutine[Any, Any, Any]) -> _EventLoopManager:
        try:
            return self._manager()
        except RuntimeError:
            coro.close()
            raise


def _release(manager: _EventLoopManager, runtime: _CoordinatorRuntime, pid: int) -> None:
    """Shut down the coordinator, the client and the background loop of an object that was not shut down before.

    The garbage collector can call this function in any thread.
    """
    if os.getpid() == pid:
        manager.end(runtime.teardown())
        if threading.current_thread() is threading.main_thread():  # in other threads, waiting could cause a deadlock
            manager.join(RELEASE_SECONDS)
