"""The EngineBackend of the native engine. One thread runs the core, and the event loop sends commands to this thread.

This module does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_runtime.backends.native.engine import SUSPEND_TAGS, EngineCore
from megatron_runtime.backends.text import GrammarQueue, ModelText
from megatron_runtime.engine.backend import (
    BackendInfo,
    BackendListener,
    Capability,
    EngineBackend,
    RankResults,
)
from megatron_runtime.engine.engine_request import BackendStats, EngineRequest, RequestOutput
from megatron_runtime.engine.kv_transfer import KVTransfer, TransferEndedError
from megatron_runtime.process.fair_lanes import BudgetExceededError
from megatron_runtime.process.logs import of_request
from megatron_runtime.process.threads import off_loop
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.requests.capabilities import POOLING
from megatron_runtime.requests.errors import RequestOverflowError
from megatron_runtime.sampling.answer_guide import AnswerGuide
from megatron_runtime.sampling.answer_parts import AnswerParts
from megatron_runtime.sampling.batch import AnswerState

if TYPE_CHECKING:
    from megatron_runtime.tokenization import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

ALL_CAPABILITIES = frozenset(Capability) - {Capability.ADAPTERS, Capability.MEDIA, *POOLING.values()}
_OF_TEXT = frozenset({Capability.STRUCTURED_OUTPUT, Capability.CALL_STRUCTURE, Capability.BAD_WORDS, Capability.TEXT})
"""Capabilities that need a tokenizer."""


class EngineStopped(RuntimeError):
    """Raised if a command is sent after the engine's last step."""

    def __init__(self) -> None:
        super().__init__("the engine has stopped and runs no further commands")


class Ranks:
    """The ranks of an engine. In this base class, the process of the backend is the only rank."""

    count = 1

    async def confirm(self, signal: Header) -> RankResults:
        """Wait until each rank has completed all earlier commands or has failed. Return the results by rank."""
        return RankResults(self.count)

    def watch(self, *, on_failure: Callable[[BaseException], object], on_leave: Callable[[], object]) -> None:
        """Set the callbacks that report lost ranks and ranks that must stop.

        on_failure: called on any thread when a rank is lost.
        on_leave:   called when a rank has received SIGTERM.
        """

    def end(self, failure: BaseException | None) -> None:
        """Stop the other ranks. Idempotent.

        failure: cause to report to the other ranks if this engine failed; None for a normal stop.
        """


class NativeKVTransfer(KVTransfer):
    """The KVTransfer of a native engine, which reads and writes blocks of its prefix cache.

    All work runs on the engine's thread, between steps.
    """

    def __init__(self, backend: NativeBackend) -> None:
        self._call = backend.call
        core = backend.core
        self.layout = f"{core.executor.kv_layout} {core.config.block_size_tokens}"
        self.block_bytes = core.executor.page_bytes * core.context.prefix_cache.pages_per_block

    def read(self, transfer: int, blocks: range) -> Awaitable[bytes]:
        def command(core: EngineCore) -> bytes:
            with _transfer_of_core():
                table = core.context.transfers.exported(transfer)
            return core.executor.read_blocks(table, blocks)

        return self._call(command)

    def reserve(self, transfer: int, digests: Sequence[bytes], weights: str) -> Awaitable[int | None]:
        def command(core: EngineCore) -> int | None:
            if core.weights != weights:
                raise TransferEndedError(f"the blocks are of the weights {weights!r}, this engine has {core.weights!r}")
            return core.context.transfers.reserve(transfer, digests)

        return self._call(command)

    def write(self, transfer: int, first: int, data: bytes) -> Awaitable[None]:
        def command(core: EngineCore) -> None:
            with _transfer_of_core():
                table = core.context.transfers.reserved(transfer)
            core.executor.write_blocks(table, range(first, first + len(data) // self.block_bytes), data)

        return self._call(command)

    def complete(self, transfer: int) -> Awaitable[None]:
        def command(core: EngineCore) -> None:
            with _transfer_of_core():
                core.context.transfers.complete(transfer)

        return self._call(command)


@contextlib.contextmanager
def _transfer_of_core() -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise TransferEndedError("it was released, or the KV cache was cleared") from error


class NativeBackend(EngineBackend):
    """The EngineBackend of the native engine.

    A dedicated thread runs `core`. Code on other threads must use the core only through call().

    Commands run in order between steps. Each step wakes the event loop only once. The event loop receives the result of
    a command after the outputs of all earlier steps.

    controller: tokenizer and grammars of the model; None if the model's tokens have no text.
    ranks:      the engine's ranks, each of which confirms every verb; None if the engine is a single process.
    """

    def __init__(
        self,
        core: EngineCore,
        controller: ModelText | None = None,
        *,
        ranks: Ranks | None = None,
        name: str = "native",
    ) -> None:
        self.core = core
        self.controller = controller
        self.ranks = ranks or Ranks()
        config = core.config
        # Blocks of another engine come without the experts of their tokens.
        is_transferable = config.enable_prefix_caching and not core.executor.records_routing
        self.info = BackendInfo(
            name=name,
            vocab_size=core.executor.vocab_size,
            eos_ids=core.executor.eos_ids,
            max_sequence_length=core.context.max_sequence_length,
            max_requests=core.context.max_requests,
            max_tokens=config.step_tokens,
            kv_cache_bytes=core.executor.kv_cache_bytes,
            block_size_tokens=config.block_size_tokens if config.enable_prefix_caching else 0,
            ranks=self.ranks.count,
            capabilities=ALL_CAPABILITIES
            - (_OF_TEXT if controller is None else frozenset())
            - (frozenset() if is_transferable else {Capability.KV_TRANSFER}),
            remedies={Capability.KV_TRANSFER: "use prefix caching, without moe_enable_routing_replay"},
        )
        self.kv = NativeKVTransfer(self) if is_transferable else None
        self._grammars = GrammarQueue(controller)
        self._staged_epoch = 0
        self._commands: deque[tuple[Callable[[EngineCore], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._running = False
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: BackendListener | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- start and stop -----------------------------------------------------------------------------------------

    async def start(self, listener: BackendListener) -> None:
        self._loop, self._listener = asyncio.get_running_loop(), listener
        self.ranks.watch(
            on_failure=lambda error: self._deliver(listener.on_failure, error),
            on_leave=lambda: self._deliver(listener.on_leave),
        )
        self._thread.start()

    async def load(self) -> None:
        await self.call(lambda core: core.executor.load())
        if self.controller is not None:
            await asyncio.to_thread(self.controller.prepare_grammars)

    async def stop(self, cause: BaseException | None = None) -> None:
        self._grammars.close()
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread.is_alive():
            await off_loop(self._thread.join)
        await asyncio.sleep(0)  # run the callbacks that the thread has queued, even if the thread ended long ago
        if self.controller is not None:
            await off_loop(self.controller.close_grammars)  # not earlier, because the last step may need a mask
        self.ranks.end(cause)

    def tokenize(self, prompt: str, *, add_bos: bool) -> list[int]:
        assert self.controller is not None
        return self.controller.tokenize_prompt(prompt, add_bos)

    def bad_words(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        assert self.controller is not None
        return self.controller.bad_words(texts, vocab_size=self.info.vocab_size)

    def tokenizer(self) -> Tokenizer | None:
        return self.controller.tokenizer if self.controller is not None else None

    def stats(self) -> BackendStats:
        return self.core.stats()

    # --- the thread ---------------------------------------------------------------------------------------------

    def call(self, command: Callable[[EngineCore], T]) -> asyncio.Future[T]:
        """Run `command` on the engine's thread before the next step, and return a future of its result.

        Raises EngineStopped if the thread has ended.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel the command
        with self._wake:
            if self._ended:
                future.set_exception(EngineStopped())
            else:
                self._commands.append((command, future))
                self._wake.notify()
        return asyncio.wrap_future(future, loop=self._loop)

    def _run(self) -> None:
        core, listener = self.core, self._listener
        assert listener is not None
        try:
            while self._wait_for_work():
                self._run_commands()
                if self._running and core.has_work:
                    self._deliver(listener.on_outputs, core.step())
                if events := core.take_block_events():
                    # The coordinator already knows the stored blocks, because only prompt blocks are stored.
                    self._deliver(listener.on_cache_events, replace(events, stored=()))
        except BaseException as error:  # a panic of native code is no Exception
            logger.exception("the engine failed")
            self._deliver(listener.on_failure, error)
        with self._wake:
            self._ended = True
            while self._commands:
                self._commands.popleft()[1].set_exception(EngineStopped())

    def _wait_for_work(self) -> bool:
        """Block until there is a command or a step to run. Return False when the engine stops."""
        with self._wake:
            self._wake.wait_for(lambda: self._ended or self._commands or (self._running and self.core.has_work))
            return not self._ended

    def _run_commands(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            try:
                future.set_result(command(self.core))
            except Exception as error:
                future.set_exception(error)

    def _deliver(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback, *arguments)

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        params = request.sampling_params
        if self.controller is None or (params.structured_output is None and params.call_structure is None):
            self._add(request, _without_grammar(request))
            return
        received = time.monotonic()
        self._grammars.add(
            request, on_done=lambda begun: self._add_begun(request, begun, waited=time.monotonic() - received)
        )

    def abort(self, request_id: int) -> asyncio.Future[Any]:
        self._grammars.drop(request_id)
        return self.call(lambda core: core.abort_request(request_id))

    def _add_begun(self, request: EngineRequest, begun: asyncio.Task[AnswerState | None], *, waited: float) -> None:
        error = begun.exception()
        if error is not None:
            self._reject(request, error)
            return
        if request.deadline_seconds is not None:
            request = replace(request, deadline_seconds=max(0.0, request.deadline_seconds - waited))
        self._add(request, begun.result())

    def _add(self, request: EngineRequest, grammar: AnswerState | None) -> None:
        def added(future: asyncio.Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                self._reject(request, error)

        self.call(lambda core: core.add_request(request, grammar=grammar)).add_done_callback(added)

    def _reject(self, request: EngineRequest, error: BaseException) -> None:
        if isinstance(error, EngineStopped):
            # When an engine leaves, the coordinator dispatches its requests to another engine.
            extra = of_request(request.client_request_id)
            logger.info("request %d arrived after the engine stopped", request.request_id, extra=extra)
            return
        code, reason = ErrorCode.ENGINE_FAILED, error if isinstance(error, Exception) else str(error)
        if isinstance(error, RequestOverflowError | BudgetExceededError):
            code = ErrorCode.QUEUE_FULL
        elif isinstance(error, ValueError):
            code = ErrorCode.INVALID_REQUEST
        elif isinstance(error, TimeoutError):
            code = ErrorCode.DEADLINE
            reason = f"the deadline of {request.deadline_seconds:g} s passed while the request waited for its grammar"
        else:
            extra = of_request(request.client_request_id)
            logger.error("request %d could not be added: %r", request.request_id, error, extra=extra)
        assert self._listener is not None
        prompt_length = len(request.prompt_tokens)
        self._listener.on_outputs(
            [RequestOutput(request.request_id, [], prompt_length, "error", error=reason, error_code=code)]
        )

    # --- verbs --------------------------------------------------------------------------------------------------

    async def pause(self) -> RankResults:
        return await self._perform(self.call(lambda core: self._set_running(False)))

    async def unpause(self) -> RankResults:
        return await self._perform(self.call(lambda core: self._set_running(True)))

    async def confirm(self, signal: Header) -> RankResults:
        return await self.ranks.confirm(signal)

    async def release_memory(self, tags: Collection[str] | None = None) -> RankResults:
        return await self._perform(self.call(lambda core: core.suspend(SUSPEND_TAGS if tags is None else tags)))

    async def restore_memory(self) -> RankResults:
        return await self._perform(self.call(lambda core: core.resume()))

    async def stage_weights(self, source: str, epoch: int) -> RankResults:
        self._staged_epoch = epoch
        # On another thread, so that steps continue.
        results = await self._perform(asyncio.to_thread(self.core.executor.stage_weights, source))
        if results.failed:
            await self.discard_weights()  # other ranks may have staged the weights
        return results

    async def commit_weights(self) -> RankResults:
        return await self._perform(self.call(lambda core: core.swap_weights(self._staged_epoch)))

    async def discard_weights(self) -> None:
        await self.call(lambda core: core.executor.drop_staged())

    @property
    def copies(self) -> tuple[str, ...]:
        return self.core.executor.copies

    async def adopt_weights(self, source: str, epoch: int) -> None:
        executor = self.core.executor
        if executor.has_weights and not executor.holds(source):
            await asyncio.to_thread(executor.stage_weights, source)
            await self.call(lambda core: core.swap_weights(epoch))
        else:
            await self.call(lambda core: core.executor.use_source(source))

    async def set_epoch(self, epoch: int) -> None:
        await self.call(lambda core: core.set_epoch(epoch))

    async def profile(self, active: bool) -> RankResults:
        return await self._perform(self.call(lambda core: core.executor.profile(active)))

    def _set_running(self, running: bool) -> None:
        self._running = running

    async def _perform(self, work: Awaitable[object]) -> RankResults:
        """Await `work`, and return, for each rank, whether it succeeded.

        If `work` fails, it must undo its own changes.
        """
        try:
            await work
        except Exception as error:
            logger.exception("a verb failed")
            return RankResults.of_failure(error, ranks=self.ranks.count)
        return RankResults(self.ranks.count)


def _without_grammar(request: EngineRequest) -> AnswerState | None:
    """Return an AnswerGuide that enforces the reasoning budget of a request without a grammar.

    Return None if the whole answer is one AnswerPart.
    """
    parts = AnswerParts.of(request.sampling_params, token_bytes=lambda _id: b"")
    if parts is None:
        return None
    parts.feed_all(request.generated_tokens.tolist())
    return AnswerGuide(parts)
