"""The tokenizer of a model, the grammars of its answers, and the queue of grammars to compile.

This module does not import torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from megatron_runtime.checkpoints.source import ModelSource
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.process.fair_lanes import FairLanes
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.answer_guide import AnswerGuide, BeginGrammar
from megatron_runtime.sampling.answer_parts import AnswerParts
from megatron_runtime.sampling.bad_words import token_sequences
from megatron_runtime.sampling.batch import AnswerState
from megatron_runtime.sampling.grammar_limits import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:  # the imports of tokenizers and llguidance take half a second, so they happen at first use
    from megatron_runtime.sampling.structured_output import GrammarCompiler
    from megatron_runtime.tokenization import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LARGE_VOCABULARY = 100_000
"""Minimum number of tokens of a large vocabulary. Indexing 50,000 tokens takes 0.3 s, 260,000 several seconds."""

COMPILE_SECONDS_PER_MINUTE = 20.0
"""Seconds of compile time for new grammars per tenant, minute and engine. Grammars that are known already are free."""

LISTS_OF_BAD_WORDS = 32
"""Number of tokenized lists of bad words that are cached. The largest list takes 4 ms to tokenize."""


class ModelText:
    """A converter between text and tokens of one model, which also compiles grammars. Thread-safe.

    tokenizer: tokenizer of the model, or a function that returns the tokenizer, called at the first use.
    padded_vocab_size: number of logits per token, which can be greater than the tokenizer's vocabulary; None if not
                       known yet.
    """

    def __init__(self, tokenizer: Tokenizer | Callable[[], Tokenizer]) -> None:
        self.padded_vocab_size: int | None = None
        self._make_tokenizer = tokenizer
        self._grammars: GrammarCompiler | None = None
        self._grammar_lock = Lock()
        # All choices of a request, and often all requests of a client, have the same words.
        self._bad_words = lru_cache(LISTS_OF_BAD_WORDS)(self._token_sequences)

    @classmethod
    def of_model(cls, model: str | ModelSource) -> ModelText:
        """Return the ModelText of a model reference or source. Its tokenizer renders no chat templates."""

        def load() -> Tokenizer:
            from megatron_runtime.tokenization import load_tokenizer

            return load_tokenizer(model if isinstance(model, str) else str(model.location), renders_chat=False)

        return cls(load)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        made = self._make_tokenizer
        return made() if callable(made) else made

    def load(self) -> None:
        """Load the tokenizer, if the model has one. Call this before requests arrive."""
        try:
            self.tokenizer  # noqa: B018
        except (OSError, ValueError) as error:
            logger.info("the model has no tokenizer: %s", error)

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the token ids of `prompt`. add_BOS: start with the BOS token even if the tokenizer does not add it."""
        ids = self.tokenizer.encode(prompt)
        bos = self.tokenizer.bos_id
        return [bos, *ids] if add_BOS and bos is not None and ids[:1] != [bos] else ids

    def bad_words(self, texts: Iterable[str], *, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences to ban for the `texts` of SamplingParams.bad_words (see token_sequences())."""
        return self._bad_words(tuple(texts), vocab_size)

    def _token_sequences(self, texts: tuple[str, ...], vocab_size: int) -> tuple[tuple[int, ...], ...]:
        return token_sequences(texts, partial(self.tokenizer.encode, add_special=False), vocab_size=vocab_size)

    def detokenize(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode(tokens)

    def detokenizer(self, *, after: Sequence[int] = ()) -> Detokenizer:
        """Return a new incremental decoder. after: tokens that precede the text."""
        return self.tokenizer.detokenizer(after=after)

    def begin_grammar(
        self,
        params: SamplingParams,
        generated: Sequence[int] = (),
        *,
        tenant: str = "",
        begin_calls: BeginGrammar | None = None,
    ) -> AnswerState | None:
        """Return the grammar state of an answer after its tokens `generated`. Return None if any token is allowed.

        tenant:      tenant of the request. Token masks are computed round robin over tenants.
        begin_calls: starts to compile the grammar of tool calls. None compiles it in the calling thread.

        Raises:
            InvalidSamplingParamsError: the structure is not valid.
        """
        structure, grammar = params.structured_output, None
        parts = AnswerParts.of(params, token_bytes=lambda id_: self.tokenizer.token_bytes(id_))
        if parts is not None:
            parts.feed_all(generated)
            generated = generated[parts.free :]
        if structure is not None:
            of_structure = generated if parts is None or parts.structure is not None else ()
            grammar = self._grammar_compiler().begin(structure, of_structure, tenant=tenant)
        if parts is None:
            return grammar
        return AnswerGuide(parts, rest=generated, grammar=grammar, begin=begin_calls or self._begin_in_place)

    def _begin_in_place(self, structure: Mapping[str, Any], tokens: Sequence[int]) -> Future[AnswerState]:
        begun: Future[AnswerState] = Future()
        try:
            begun.set_result(self._grammar_compiler().begin(structure, tokens))
        except Exception as error:
            begun.set_exception(error)
        return begun

    def is_grammar_known(self, params: SamplingParams) -> bool:
        """Return whether begin_grammar() can start without compiling a grammar."""
        return params.structured_output is None or (
            self._grammars is not None and self._grammars.is_known(params.structured_output)
        )

    def prepare_grammars(self) -> None:
        """Index a large vocabulary. Call this before requests arrive.

        Indexing holds the interpreter lock for a second or more, which would stall the streams of requests.
        """
        if self.padded_vocab_size is None or self.padded_vocab_size < LARGE_VOCABULARY:
            return
        try:
            self._grammar_compiler()
        except ValueError as error:  # the model has no tokenizer, or one without an end-of-sequence token
            logger.info("structured output is not available: %s", error)

    def close_grammars(self) -> None:
        """Stop the process that compiles untrusted grammars. The next grammar restarts it."""
        with self._grammar_lock:
            grammars, self._grammars = self._grammars, None
        if grammars is not None:
            grammars.close()

    def _grammar_compiler(self) -> GrammarCompiler:
        with self._grammar_lock:
            if self._grammars is None:
                from megatron_runtime.sampling.structured_output import GrammarCompiler

                vocab_size = self.padded_vocab_size or self.tokenizer.vocab_size
                self._grammars = GrammarCompiler(self.tokenizer, vocab_size=vocab_size)
            return self._grammars


class GrammarQueue:
    """A queue that compiles the grammars of requests, one new grammar at a time, round robin over tenants.

    A request whose grammar was compiled before does not wait. Requests without a tenant count as requests of one
    tenant, which has no time budget. All methods run on the event loop.
    """

    def __init__(self, text: ModelText | None) -> None:
        self._text = text
        self._lanes = FairLanes(
            {"known": 1, "new": 1}, what="Compiling grammars", seconds_per_minute=COMPILE_SECONDS_PER_MINUTE
        )
        self._tasks: dict[int, asyncio.Task[Any]] = {}

    async def begin(self, request: EngineRequest) -> AnswerState | None:
        """Compile the request's grammar, and return its state after the tokens that the request has generated so far.

        A grammar that was compiled before is reused. Return None if any token is allowed.

        Raises:
            InvalidSamplingParamsError: the structure is not valid.
            BudgetExceededError: the request's tenant has used up its time budget for new grammars.
            TimeoutError: the deadline of the request has passed.
        """
        assert self._text is not None
        params = request.sampling_params
        # Looking up a grammar above the size limit takes long, and begin_grammar() rejects such a grammar at once.
        is_known = request.params_bytes > 2 * MAX_GRAMMAR_BYTES or self._text.is_grammar_known(params)
        generated = request.generated_tokens.tolist()
        begin_calls = partial(self._begin_calls, request, asyncio.get_running_loop())
        call = partial(self._text.begin_grammar, params, generated, tenant=request.tenant, begin_calls=begin_calls)
        async with asyncio.timeout(request.deadline_seconds):
            lane = "known" if is_known else "new"
            return await self._lanes.run(lane, request.tenant, call, is_metered=request.has_tenant and not is_known)

    async def begin_calls(
        self, request: EngineRequest, structure: Mapping[str, Any], tokens: Sequence[int] = ()
    ) -> AnswerState:
        """Compile the grammar of a request's tool calls, and return its state after `tokens`.

        Raises the errors of begin().
        """
        params = SamplingParams(structured_output=dict(structure))
        begun = await self.begin(
            replace(
                request,
                sampling_params=params,
                generated_tokens=np.array(tokens, np.int32),
                deadline_seconds=None,  # the request's own deadline applies
            )
        )
        assert begun is not None
        return begun

    def _begin_calls(
        self,
        request: EngineRequest,
        loop: asyncio.AbstractEventLoop,
        structure: Mapping[str, Any],
        tokens: Sequence[int],
    ) -> Future[AnswerState]:
        """Start begin_calls(), and return a future of its result. Can be called on any thread."""
        begun: Future[AnswerState] = Future()

        def done(task: asyncio.Task[AnswerState]) -> None:
            if (error := task.exception()) is None:
                begun.set_result(task.result())
            else:
                begun.set_exception(error)

        def add() -> None:
            self._add(request.request_id, self.begin_calls(request, structure, tokens), done)

        try:
            loop.call_soon_threadsafe(add)
        except RuntimeError as error:  # the loop has ended
            begun.set_exception(error)
        return begun

    def add(self, request: EngineRequest, *, on_done: Callable[[asyncio.Task[AnswerState | None]], None]) -> None:
        """Start begin() as a task.

        Call `on_done` with this task when the task ends, unless drop() has removed the request.
        """
        self._add(request.request_id, self.begin(request), on_done)

    def _add(self, request_id: int, work: Coroutine[Any, Any, _T], on_done: Callable[[asyncio.Task[_T]], None]) -> None:
        def done(task: asyncio.Task[_T]) -> None:
            if self._tasks.get(request_id) is task:
                del self._tasks[request_id]
            if not task.cancelled():
                on_done(task)

        task = self._tasks[request_id] = asyncio.create_task(work)
        task.add_done_callback(done)

    def drop(self, request_id: int) -> None:
        """Remove an aborted request from the queue. No effect if it is not in the queue."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        self._lanes.close()
