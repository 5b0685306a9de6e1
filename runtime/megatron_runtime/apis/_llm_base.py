"""What MegatronLLM and MegatronAsyncLLM share: the engine, its background runtime, and what every call does.

The two classes differ only in how a caller waits. Public from here is `GenerationChunk` alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from megatron_runtime.apis._pipeline import ExecutorOptions, default_config, engine_of_model, engine_of_reference
from megatron_runtime.apis._runtime import _CoordinatorRuntime, _EventLoopManager, global_rank
from megatron_runtime.apis.serve import FrontEnd, ServeConfig
from megatron_runtime.backends.native.kv.dynamic_context import DynamicInferenceContext
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.client.inference_client import InferenceClient
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model_inference_wrappers.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.request import DynamicInferenceRequest, answered_request
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.server.settings import default_model_name
from megatron_runtime.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron_runtime.transport.control_link import ControlRefusedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError

__all__ = ["GenerationChunk", "_CoordinatorRuntime", "_EventLoopManager", "_MegatronLLMBase"]

T = TypeVar("T")
Prompt: TypeAlias = str | list[int]
Prompts: TypeAlias = str | list[int] | list[str] | list[list[int]]

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 30.0
"""For each verb of a shutdown; after it, the shutdown goes on without the engines that have not answered."""

WAITED_FOR = (EngineState.RUNNING, EngineState.PAUSED, EngineState.SUSPENDED, EngineState.RESUMED)


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of an answer. The texts of all pieces together are the answer's text, their tokens its tokens.

    log_probs: of the tokens, if they were asked for.
    request:   in the last piece, the whole request; a failed one has status FAILED.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    request: DynamicInferenceRequest | None = None


class _ChunkReader:
    """Makes the pieces of one answer from the items of its stream. A piece that was given out stays as it was."""

    def __init__(self, prompt: Prompt, prompt_tokens: list[int], params: SamplingParams, controller: ModelText) -> None:
        self._prompt = prompt
        self._prompt_tokens = prompt_tokens
        self._params = params
        self._controller = controller
        self._detokenizer = controller.detokenizer()
        self._characters = 0
        self._tokens = 0

    def read(self, item: dict[str, Any]) -> GenerationChunk:
        """item: `{"partial": frame}` or `{"final": reply}`."""
        if "partial" in item:
            frame = item["partial"]
            tokens: list[int] = frame["new_tokens"]
            piece = self._detokenizer.feed(tokens)
            self._characters += len(piece)
            self._tokens += len(tokens)
            return GenerationChunk(piece, tokens, frame.get("new_log_probs"))
        request = answered_request(
            item["final"],
            prompt=self._prompt,
            prompt_tokens=self._prompt_tokens,
            sampling_params=self._params,
            text=self._controller,
        )
        rest, log_probs = request.generated_tokens[self._tokens :], request.generated_log_probs
        return GenerationChunk(
            (request.generated_text or "")[self._characters :],
            rest,
            log_probs[-len(rest) :] if log_probs and rest else None,
            request,
        )


class _MegatronLLMBase:
    """One engine of this process, used directly or through a coordinator.

    Direct mode: every rank is primary, and generate() runs the engine in the calling thread. Lifecycle verbs need
    coordinator mode: there a background event loop has the engine's connection and, on global rank 0, the client.

    model:     a causal language model of transformers in eval mode, or a DecoderModel. Its weights are copied.
    tokenizer: a Tokenizer, a fast tokenizer of transformers, or a model reference that has one.
    inference_config: limits and options; None means Megatron-Core's defaults, with a KV cache that fits this machine.
    coordinator_host, coordinator_port: where the coordinator listens; by default a free port on the loopback interface.
    inference_wrapper_cls: the class that runs the model, derived from GPTInferenceWrapper.
    dtype:     "auto", "float32" or "bfloat16".
    threads:   torch threads; None leaves the choice.
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
    ) -> None:
        if not use_coordinator and (coordinator_host is not None or coordinator_port is not None):
            raise ValueError("coordinator_host/port require use_coordinator=True")
        expert_ranks = getattr(getattr(model, "config", None), "expert_model_parallel_size", 1)
        if not use_coordinator and expert_ranks > 1:
            raise ValueError(
                f"expert_model_parallel_size > 1 (it is {expert_ranks}) needs use_coordinator=True: expert ranks have "
                "to run in step"
            )
        config = inference_config or default_config()
        executor = ExecutorOptions(dtype=dtype, threads=threads, wrapper_class=inference_wrapper_cls)
        if isinstance(model, DynamicInferenceEngine):
            self._engine = model
        elif isinstance(model, str):
            self._engine = engine_of_reference(model, config, executor)
        else:
            self._engine = engine_of_model(model, tokenizer, config, executor)
        self._reference = next((str(item) for item in (tokenizer, model) if isinstance(item, str | Path)), None)
        self._use_coordinator = use_coordinator
        self._lock = threading.Lock()
        self._front_end: FrontEnd | None = None
        self._loop_manager: _EventLoopManager | None = None
        self._coord_runtime: _CoordinatorRuntime | None = None
        self._reached: dict[EngineState, int] = {}
        """On a worker rank: how often its own verbs have led to each state."""
        if use_coordinator:
            self._start_runtime(coordinator_host, coordinator_port)
        else:
            self._engine.executor.load()

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> Self:
        """The model of a reference, "builtin:NAME", a GGUF file or a directory of transformers, with its tokenizer."""
        return cls(model=str(model), tokenizer=None, **options)

    def _start_runtime(self, host: str | None, port: int | None) -> None:
        manager = _EventLoopManager()
        manager.start()
        runtime = _CoordinatorRuntime(
            self._engine, is_primary=self._is_global_primary(), coordinator_host=host, coordinator_port=port
        )
        try:
            manager.run_sync(runtime.setup(loop=manager.loop))
        except BaseException:
            manager.stop()
            raise
        self._loop_manager, self._coord_runtime = manager, runtime
        # An engine that joins may pass through states that no call of this program asked for.
        self._reached = {state: self._engine.state_events.times(state) for state in WAITED_FOR}

    # --- parts ------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_global_primary() -> bool:
        return global_rank() == 0

    @property
    def is_primary_rank(self) -> bool:
        """Whether generate() may be called here: on every rank in direct mode, else on global rank 0."""
        return not self._use_coordinator or self._is_global_primary()

    @property
    def engine(self) -> DynamicInferenceEngine:
        return self._engine

    @property
    def context(self) -> DynamicInferenceContext:
        return self._engine.context

    @property
    def controller(self) -> TextGenerationController:
        """The model and its text. Its `inference_wrapped_model` is None while the weights are released."""
        executor = self._engine.executor
        model, dtype = getattr(executor, "model", None), getattr(executor, "dtype", None)
        wrapped = GPTInferenceWrapper(model, dtype=dtype) if model is not None and dtype is not None else None
        return TextGenerationController(wrapped, self._engine.controller)

    def _assert_primary(self) -> None:
        if not self.is_primary_rank:
            raise RuntimeError(
                f"this is rank {global_rank()}: only the primary rank, 0, takes prompts and gives answers"
            )

    def _assert_coordinator(self) -> None:
        if not self._use_coordinator:
            raise RuntimeError("this call needs a coordinator: construct with use_coordinator=True")

    @staticmethod
    def _normalize_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
        """Return (prompts as a list, whether a batch was given). Only the first element is looked at; the engine checks
        the rest.

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
        if self._loop_manager is None:
            raise RuntimeError("this MegatronLLM has been shut down: make a new one")
        return self._loop_manager

    def _client(self) -> InferenceClient:
        client = self._coord_runtime.client if self._coord_runtime is not None else None
        if client is None:
            raise RuntimeError("this MegatronLLM has been shut down: make a new one")
        return client

    # --- generate -----------------------------------------------------------------------------------------------

    def _prepare(
        self, prompts: Any, sampling_params: SamplingParams | None, multi_modal_data: Any = None
    ) -> tuple[list[Prompt], bool, SamplingParams]:
        """Return (prompts as a list, whether a batch was given, sampling parameters)."""
        self._assert_primary()
        if multi_modal_data is not None:
            raise ValueError("multi_modal_data: this model takes text alone: leave it out")
        listed, is_batch = self._normalize_prompts(prompts)
        return listed, is_batch, sampling_params or SamplingParams()

    async def _generate_impl(self, prompts: list[Prompt], sp: SamplingParams) -> list[DynamicInferenceRequest]:
        """Return the answers in the order of `prompts`.

        In coordinator mode it must run on the background loop. In direct mode the engine runs in a thread.
        """
        if not self._use_coordinator:
            return await asyncio.to_thread(self._engine.generate, prompts, sp)
        tokens = await asyncio.to_thread(self._tokenize, prompts, sp)
        futures = [self._client().add_request(ids, sp) for ids in tokens]
        try:
            replies = await asyncio.gather(*futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [
            answered_request(reply, prompt=prompt, prompt_tokens=ids, sampling_params=sp, text=self._engine.controller)
            for reply, prompt, ids in zip(replies, prompts, tokens, strict=True)
        ]

    async def _stream_impl(self, prompt: Prompt, sp: SamplingParams) -> AsyncGenerator[GenerationChunk]:
        """Yield the pieces of one answer, in coordinator mode and on the background loop. Closed early, it aborts."""
        [tokens] = await asyncio.to_thread(self._tokenize, [prompt], sp)
        reader = _ChunkReader(prompt, tokens, sp, self._engine.controller)
        stream = self._client().add_request_streaming(tokens, sp)
        try:
            async for item in stream:
                yield reader.read(item)
        finally:
            await stream.aclose()

    def _prepare_stream(self, prompt: Any, sampling_params: SamplingParams | None) -> tuple[Prompt, SamplingParams]:
        listed, is_batch, params = self._prepare(prompt, sampling_params)
        if is_batch:
            raise TypeError("generate_stream() takes one prompt: str or list[int]")
        return listed[0], params

    def _stream_directly(self, prompt: Prompt, sp: SamplingParams) -> Generator[GenerationChunk]:
        """The pieces of one answer, in direct mode: the engine runs in the thread that asks for the next one."""
        [tokens] = self._tokenize([prompt], sp)
        reader = _ChunkReader(prompt, tokens, sp, self._engine.controller)
        for item in self._engine.generate_stream(tokens, sp):
            yield reader.read(item)

    @staticmethod
    async def _next(chunks: AsyncIterator[GenerationChunk]) -> GenerationChunk | None:
        return await anext(chunks, None)

    def _tokenize(self, prompts: list[Prompt], sp: SamplingParams) -> list[list[int]]:
        controller = self._engine.controller
        return [
            controller.tokenize_prompt(prompt, sp.add_BOS) if isinstance(prompt, str) else list(prompt)
            for prompt in prompts
        ]

    # --- lifecycle ----------------------------------------------------------------------------------------------

    async def _pause_impl(self) -> None:
        await self._verb("pause_engines", EngineState.PAUSED)

    async def _unpause_impl(self) -> None:
        await self._verb("unpause_engines", EngineState.RUNNING)

    async def _suspend_impl(self) -> None:
        await self._verb("suspend_engines", EngineState.SUSPENDED)

    async def _resume_impl(self) -> None:
        await self._verb("resume_engines", EngineState.RESUMED)

    async def _update_weights_impl(self, source: str, epoch: int) -> None:
        if self.is_primary_rank:
            await self._client().update_weights(source, epoch)

    async def _set_generation_epoch_impl(self, epoch: int) -> None:
        if self.is_primary_rank:
            await self._client().set_generation_epoch(epoch)

    async def _verb(self, name: str, reached: EngineState) -> None:
        """Every rank calls it: the primary has it confirmed by all engines, a worker waits for its own."""
        if self.is_primary_rank:
            await getattr(self._client(), name)()
        else:
            # Counted, because the engines may be in a later state before this rank asks.
            events = self._engine.state_events
            wanted = self._reached.get(reached, 0) + 1
            await self._engine.wait_until(reached, times=wanted)
            self._reached[reached] = min(wanted, events.times(reached))

    async def _shutdown_impl(self) -> None:
        """Stop every engine, then the coordinator; a worker rank waits until its engine is stopped. Engines that do not
        answer in time are left running.
        """
        assert self._coord_runtime is not None
        if self._front_end is not None:
            await self._front_end.stop()
        if self.is_primary_rank:
            client = self._client()
            try:
                await client.pause_engines(timeout_seconds=FAREWELL_SECONDS)
                await client.stop_engines(timeout_seconds=FAREWELL_SECONDS)
            except (ControlRefusedError, CoordinatorUnreachableError) as error:
                logger.warning("shutting down although the engines did not stop in order: %s", error)
        else:
            # The primary rank stops this engine, unless it is gone.
            await asyncio.wait({self._engine.engine_loop_task}, timeout=2 * FAREWELL_SECONDS)
        await self._coord_runtime.teardown()

    def _shut_down(self) -> None:
        """Once; a second caller waits for the first. Not on the background loop, which it ends."""
        with self._lock:
            manager = self._loop_manager
            if manager is None:
                return
            try:
                manager.run_sync(self._shutdown_impl())
            finally:
                self._loop_manager = None
                manager.stop()

    async def _wait_for_shutdown_impl(self) -> None:
        """Return when the engine was stopped. Raises EngineFailedError when it failed."""
        await asyncio.shield(self._engine.engine_loop_task)

    # --- HTTP ---------------------------------------------------------------------------------------------------

    async def _serve_impl(self, config: ServeConfig) -> None:
        """Start the HTTP front end, on the primary rank."""
        assert self._coord_runtime is not None
        assert self._coord_runtime.coord_addr is not None
        if not self.is_primary_rank:
            return
        if self._front_end is not None:
            raise RuntimeError(f"HTTP is served already, at {self._front_end.url}")
        self._front_end = FrontEnd(
            config,
            coordinator=self._coord_runtime.coord_addr,
            tokenizer=self._engine.controller.tokenizer,
            tokenizer_reference=self._reference,
            model_name=config.model_name or default_model_name(self._reference or "model"),
            max_sequence_length=self._engine.context.max_sequence_length,
        )
        try:
            await self._front_end.start()
        except BaseException:
            self._front_end = None
            raise

    def _check_can_serve(self) -> None:
        if not self._use_coordinator:
            raise ValueError("serve() needs a coordinator: construct with use_coordinator=True")

    @property
    def url(self) -> str | None:
        """Where HTTP is served, "http://host:port"; None where it is not."""
        return self._front_end.url if self._front_end is not None else None

    # --- bridges ------------------------------------------------------------------------------------------------

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the background loop and return its future."""
        return self._bridge(coro).submit(coro)

    def run_sync(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop and block for its result; this blocks the caller's own loop, too."""
        return self._bridge(coro).run_sync(coro)

    def _bridge(self, coro: Coroutine[Any, Any, Any]) -> _EventLoopManager:
        try:
            return self._manager()
        except RuntimeError:
            coro.close()
            raise
