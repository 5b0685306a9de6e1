"""`MegatronLLM`: inference for synchronous programs."""

from __future__ import annotations

from typing import Any, Self

from megatron_runtime.in_process.answers import PromptBatch
from megatron_runtime.in_process.front_end import ServeConfig
from megatron_runtime.in_process.streams import ChunkIterator, ReadChunk
from megatron_runtime.megatron_core.apis._llm_base import Prompts, _MegatronLLMBase
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.async_stream import BlockingStream
from megatron_runtime.requests.request import DynamicInferenceRequest
from megatron_runtime.requests.sampling_params import SamplingParams


class MegatronLLM(_MegatronLLMBase):
    """An LLM with blocking methods. The constructor has the arguments of `_MegatronLLMBase`.

        with MegatronLLM.from_pretrained("builtin:smollm2-135m") as llm:
            print(llm.generate("The capital of France is").generated_text)

    Thread-safe.
    """

    def generate(
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
        if self._use_coordinator:
            answers = self._manager().run_sync(self._generate_impl(listed, sampling_params))
        else:
            answers = self._engine.generate(listed, sampling_params)
        return answers if is_batch else answers[0]

    def generate_stream(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> ChunkIterator:
        """Return an iterator over the chunks of an answer. Reading the first chunk submits the request.

        Other threads can call the LLM while the iterator is open. The request is aborted by close() or by leaving a
        loop over the iterator.
        """
        single = self._prepare_stream(prompt)

        def begin() -> tuple[BlockingStream, ReadChunk]:
            if self._use_coordinator:
                self._manager().require_other_thread("generate_stream()")
            return self._open_stream(PromptBatch([single], sampling_params, self._engine.text), BlockingStream)

        return ChunkIterator(begin, self._settle)

    # --- lifecycle: coordinator mode only -----------------------------------------------------------------------

    def pause(self) -> None:
        """Pause generation. Requests keep their KV and tokens. Returns when every engine has paused."""
        self._manager().run_sync(self._pause_impl())

    def unpause(self) -> None:
        self._manager().run_sync(self._unpause_impl())

    def suspend(self) -> None:
        """Release the memory of weights and KV cache. Allowed if the engines are paused."""
        self._manager().run_sync(self._suspend_impl())

    def resume(self) -> None:
        """Reallocate the memory that suspend() has released. The engines stay paused. Call unpause() to continue."""
        self._manager().run_sync(self._resume_impl())

    def update_weights(self, source: Any, epoch: int | None = None) -> None:
        """Load the weights of `source`, and label them with `epoch`. Allowed if the engines are running or paused.

        Every rank must make this call. Every rank can continue training when the call returns.

        source: a model reference, a model in memory as in the constructor's argument `model`, or a Trainer. The engines
                copy the weights of a model in memory. From a Trainer, they load the last published weights.
        epoch:  must be None for a Trainer, which assigns the epochs of its weights. Otherwise, None means the current
                epoch plus one.
        """
        self._manager().run_sync(self._lifecycle().update_weights(source, epoch))

    def set_generation_epoch(self, epoch: int) -> None:
        """Label all tokens that are sampled from now on with `epoch`."""
        self._manager().run_sync(self._lifecycle().verb(Header.SET_GENERATION_EPOCH, epoch=epoch))

    def shutdown(self) -> None:
        """Stop the engines and the coordinator. Idempotent.

        In direct mode, end all open calls and stop the engine's thread. The next call of generate() starts the thread
        again.
        """
        if self._use_coordinator:
            self._shut_down()
        else:
            self._engine.calls.close()

    def wait_for_shutdown(self) -> None:
        """Wait until the engine of this rank has stopped. Returns immediately in direct mode."""
        if self._loop_manager is not None:
            self._loop_manager.run_sync(self._wait_for_shutdown_impl())

    # --- HTTP ---------------------------------------------------------------------------------------------------

    def serve(self, serve_config: ServeConfig | None = None, blocking: bool = True) -> None:
        """Serve the OpenAI API over HTTP on the primary rank. Worker ranks use only the argument `blocking`.

        blocking: if true, return when the engines have stopped. Otherwise return immediately, with `url` set.

        Raises ValueError in direct mode, and OSError if the address is in use.
        """
        self._check_can_serve()
        self._manager().run_sync(self._serve_impl(serve_config or ServeConfig()))
        if blocking:
            self.wait_for_shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
