"""`MegatronAsyncLLM`: inference for asynchronous programs, with an HTTP server."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Self

from megatron_runtime.in_process.answers import PromptBatch
from megatron_runtime.in_process.front_end import ServeConfig
from megatron_runtime.in_process.streams import AsyncChunkIterator, ReadChunk
from megatron_runtime.megatron_core.apis._llm_base import Prompts, _MegatronLLMBase
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.async_stream import AsyncStream
from megatron_runtime.requests.request import DynamicInferenceRequest
from megatron_runtime.requests.sampling_params import SamplingParams


class MegatronAsyncLLM(_MegatronLLMBase):
    """An LLM with asynchronous methods, which can be awaited on any event loop. The engine runs in a background thread.

        async with MegatronAsyncLLM.from_pretrained("builtin:smollm2-135m") as llm:
            answers = await asyncio.gather(*(llm.generate(prompt) for prompt in prompts))

    The constructor has the arguments of `_MegatronLLMBase`, but use_coordinator is True by default.

    allow_direct_mode: whether use_coordinator=False is accepted.
    """

    def __init__(self, *, use_coordinator: bool = True, allow_direct_mode: bool = False, **options: Any) -> None:
        if not use_coordinator and not allow_direct_mode:
            raise ValueError("MegatronAsyncLLM requires use_coordinator=True (or allow_direct_mode=True)")
        super().__init__(use_coordinator=use_coordinator, **options)

    async def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | None = None, multi_modal_data: Any = None
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Return the answer to one prompt, or the list of answers to prompts. A failed request has the status FAILED.

        prompts: str or list[int] for one prompt, list[str] or list[list[int]] for several prompts. The answers are in
                 the order of the prompts.

        Raises RuntimeError on a worker rank, and TypeError for prompts of another type. Raises RequestRejectedError if
        the coordinator rejects a request for a reason other than its prompt.
        """
        listed, is_batch = self._prepare(prompts, multi_modal_data)
        if not listed:
            return []
        generating = self._generate_impl(listed, sampling_params)
        answers = await (self._manager().run_async(generating) if self._use_coordinator else generating)
        return answers if is_batch else answers[0]

    def generate_stream(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None
    ) -> AsyncChunkIterator:
        """Return an asynchronous iterator over the chunks of an answer. Reading the first chunk submits the request.

        The request is aborted by aclose(), by leaving a loop over the iterator, or by cancelling the task of the loop.
        """
        single = self._prepare_stream(prompt)

        async def begin() -> tuple[AsyncStream, ReadChunk]:
            prompts = await asyncio.to_thread(PromptBatch, [single], sampling_params, self._engine.text)
            return self._open_stream(prompts, partial(AsyncStream, None, loop=asyncio.get_running_loop()))

        return AsyncChunkIterator(begin, partial(asyncio.to_thread, self._settle))

    # --- lifecycle: coordinator mode only -----------------------------------------------------------------------

    async def pause(self) -> None:
        """Pause generation. Requests keep their KV and tokens. Returns when every engine has paused."""
        await self._manager().run_async(self._pause_impl())

    async def unpause(self) -> None:
        await self._manager().run_async(self._unpause_impl())

    async def suspend(self) -> None:
        """Release the memory of weights and KV cache. Allowed if the engines are paused."""
        await self._manager().run_async(self._suspend_impl())

    async def resume(self) -> None:
        """Reallocate the memory that suspend() has released. The engines stay paused. Call unpause() to continue."""
        await self._manager().run_async(self._resume_impl())

    async def update_weights(self, source: Any, epoch: int | None = None) -> None:
        """Load the weights of `source`, and label them with `epoch`. Allowed if the engines are running or paused.

        Every rank must make this call. Every rank can continue training when the call returns.

        source: a model reference, a model in memory as in the constructor's argument `model`, or a Trainer. The engines
                copy the weights of a model in memory. From a Trainer, they load the last published weights.
        epoch:  must be None for a Trainer, which assigns the epochs of its weights. Otherwise, None means the current
                epoch plus one.
        """
        await self._manager().run_async(self._lifecycle().update_weights(source, epoch))

    async def set_generation_epoch(self, epoch: int) -> None:
        """Label all tokens that are sampled from now on with `epoch`."""
        await self._manager().run_async(self._lifecycle().verb(Header.SET_GENERATION_EPOCH, epoch=epoch))

    async def shutdown(self) -> None:
        """Stop the engines and the coordinator. Idempotent.

        In direct mode, end all open calls and stop the engine's thread. The next call of generate() starts the thread
        again.
        """
        await asyncio.to_thread(self._shut_down if self._use_coordinator else self._engine.calls.close)

    async def wait_for_shutdown(self) -> None:
        """Wait until the engine of this rank has stopped. Returns immediately in direct mode."""
        if self._loop_manager is not None:
            await self._loop_manager.run_async(self._wait_for_shutdown_impl())

    # --- HTTP ---------------------------------------------------------------------------------------------------

    async def serve(self, serve_config: ServeConfig | None = None, blocking: bool = True) -> None:
        """Serve the OpenAI API over HTTP on the primary rank. Worker ranks use only the argument `blocking`.

        blocking: if true, return when the engines have stopped. Otherwise return immediately, with `url` set.

        Raises ValueError in direct mode, and OSError if the address is in use.
        """
        self._check_can_serve()
        await self._manager().run_async(self._serve_impl(serve_config or ServeConfig()))
        if blocking:
            await self.wait_for_shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()
