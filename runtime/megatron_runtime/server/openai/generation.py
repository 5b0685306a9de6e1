"""Run the choices of one request on the backend, all at once, and count the tokens that they use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from megatron_runtime.client.rejection import EngineFailedError, ModelChangedError, RequestRejectedError
from megatron_runtime.protocol.messages import ControlAck
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.server.errors import ApiError, from_reply_error, try_again
from megatron_runtime.server.metrics import RequestObserver, ServerMetrics
from megatron_runtime.server.openai.answer import Answer, Fragment, TokenLogProb, prompt_log_probs
from megatron_runtime.server.openai.jobs import Job
from megatron_runtime.server.streaming import cancel
from megatron_runtime.tokenization import Tokenizer

logger = logging.getLogger(__name__)

_MERGE_QUEUE_EVENTS = 64
_RECONNECT_CHECK_SECONDS = 0.05
_STARTED_AT_ONCE = 8

_T = TypeVar("_T")


class TokenStream(Protocol):
    """Partial answers, then one final: `{"partial": {"new_tokens": […]}}` … `{"final": reply}`."""

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]: ...

    async def aclose(self) -> None:
        """Abort the request if it is still open."""


class Backend(Protocol):
    """Generates tokens for tokenized prompts: an `InferenceClient`, or an in-process equivalent.

    A reply is a map with `status`, `finish_reason`, `generated_tokens`, `generated_text` (only if a stop text was
    matched), `prompt_length`, `generated_length`, `num_cached_tokens` and, when FAILED, `error`.
    Rejections are raised as RequestRejectedError.
    """

    @property
    def connected(self) -> bool:
        """Whether requests submitted now reach a coordinator."""

    def add_request(
        self, prompt: list[int], sampling_params: SamplingParams, *, tenant: str = ""
    ) -> asyncio.Future[Any]:
        """Submit; the future gives the reply map. Cancelling it aborts the request.

        tenant: the tenant that the request counts against; empty: the one of all requests without.
        """

    def add_request_streaming(
        self, prompt: list[int], sampling_params: SamplingParams, *, tenant: str = ""
    ) -> TokenStream:
        """Submit; the stream gives tokens as they are generated."""

    def start_cuda_profiler(self) -> asyncio.Future[ControlAck]:
        """Begin the profiled range of every engine. Fails with ControlRefusedError or CoordinatorUnreachableError."""

    def stop_cuda_profiler(self) -> asyncio.Future[ControlAck]:
        """End it, in the same way."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one choice; the last one has the finish reason.

    token_ids: the tokens that this part is made of.
    generated: all tokens that were generated, those that ended the answer included; on the last part only.
    generated_log_probs: of each of them, if they are known.
    """

    index: int
    text: str
    finish_reason: str | None = None
    log_probs: Sequence[TokenLogProb] = ()
    token_ids: Sequence[int] = ()
    generated: Sequence[int] = ()
    generated_log_probs: Sequence[float] | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request, summed over prompts and choices, and the epochs of the weights that made them."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    epochs: set[int] = field(default_factory=set)

    def add(self, job: Job, reply: Mapping[str, Any]) -> None:
        if job.counts_prompt:
            self.prompt += len(job.prompt)
            self.cached += reply.get("num_cached_tokens") or 0
        if not job.prompt_only:
            self.completion += len(reply["generated_tokens"])
        self.epochs.update(int(epoch) for _, epoch in reply.get("policy_epoch") or ())

    @property
    def fingerprint(self) -> str | None:
        """`system_fingerprint`: `weights-7`, `weights-6-7` for tokens of both, None while no choice is finished."""
        return "-".join(["weights", *map(str, sorted(self.epochs))]) if self.epochs else None

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class _Choice:
    """One choice while it is generated: turns the engine's replies into pieces."""

    def __init__(self, job: Job, tokenizer: Tokenizer, *, field_names: Mapping[str, str]) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._field_names = field_names
        self._answer = Answer(
            tokenizer,
            end_ids=job.end_ids,
            visible=job.visible,
            wants_log_probs=job.params.return_log_probs,
            offset=len(job.prefix or ""),
        )
        self._wants_prompt = job.params.return_log_probs and not job.params.skip_prompt_log_probs
        self._has_begun = job.prefix is None

    def begin(self) -> Piece | None:
        """Return the echo if it needs nothing from the engine."""
        return None if self._wants_prompt else self._echo({})

    def feed(self, partial: Mapping[str, Any]) -> Piece | None:
        """Take a partial answer."""
        echo = self._echo(partial) if partial.get("prompt_log_probs") is not None else None
        if not self._has_begun or self._job.prompt_only:
            # The prompt's log-probabilities come first, or with the final reply; the whole answer waits for them.
            return echo
        fragment = self._answer.feed(
            partial["new_tokens"], partial.get("new_log_probs"), partial.get("new_top_n_logprobs")
        )
        piece = self._joined(echo, fragment)
        return piece if piece.text or piece.token_ids else None

    def finish(self, reply: Mapping[str, Any]) -> Piece:
        """Take the final reply. Raises ApiError if it is a failure."""
        if reply.get("status") == "FAILED" or reply.get("error"):
            raise from_reply_error(reply.get("error"), field_names=self._field_names)
        reason: str = reply.get("finish_reason") or "stop"
        if reason not in ("stop", "length"):
            raise try_again(503, f"generation ended early ({reason}): try again", code=reason)
        echo = self._echo(reply)
        if self._job.prompt_only:
            return self._joined(echo, Fragment(), "length")
        piece = self._joined(echo, self._answer.finish(reply), reason)
        tokens, log_probs = reply["generated_tokens"], reply.get("generated_log_probs")
        # After a failover the reply may have only the log-probabilities since then.
        known = log_probs if log_probs is not None and len(log_probs) == len(tokens) else None
        return replace(piece, generated=tokens, generated_log_probs=known)

    def _echo(self, reply: Mapping[str, Any]) -> Piece | None:
        if self._has_begun:
            return None
        self._has_begun = True
        job = self._job
        entries = prompt_log_probs(self._tokenizer, job.prompt, reply) if self._wants_prompt else ()
        return Piece(job.index, job.prefix or "", log_probs=entries, token_ids=job.prompt)

    def _joined(self, echo: Piece | None, fragment: Fragment, reason: str | None = None) -> Piece:
        if echo is None:
            return Piece(self._job.index, fragment.text, reason, fragment.log_probs, fragment.token_ids)
        log_probs, token_ids = [*echo.log_probs, *fragment.log_probs], [*echo.token_ids, *fragment.token_ids]
        return Piece(self._job.index, echo.text + fragment.text, reason, log_probs, token_ids)


@dataclass(slots=True)
class Generation:
    """The jobs of one HTTP request.

    field_names: request fields by the sampling parameter that they became, for errors.
    coordinator_wait_seconds: how long they wait for a coordinator that is not reachable.
    """

    backend: Backend
    tokenizer: Tokenizer
    metrics: ServerMetrics
    jobs: Sequence[Job]
    field_names: Mapping[str, str]
    coordinator_wait_seconds: float
    usage: Usage = field(default_factory=Usage)

    async def collect(self) -> list[Piece]:
        """Return every choice whole, in order. Cancelled or failed, it aborts what is still open."""
        await self._until_connected()
        tasks: list[asyncio.Task[Piece]] = []
        try:
            await _start(tasks, (self._collect_one(job) for job in self.jobs))
            return list(await asyncio.gather(*tasks))
        finally:
            await cancel(*tasks)

    async def _until_connected(self) -> None:
        """Wait for the coordinator: its restart delays requests and fails none."""
        try:
            async with asyncio.timeout(self.coordinator_wait_seconds):
                while not self.backend.connected:  # noqa: ASYNC110 - only while the coordinator is away
                    await asyncio.sleep(_RECONNECT_CHECK_SECONDS)
        except TimeoutError as error:
            message = f"The coordinator has not answered for {self.coordinator_wait_seconds:g} s: try again."
            raise try_again(503, message, code="coordinator_unreachable", seconds=5) from error

    async def _collect_one(self, job: Job) -> Piece:
        choice = _Choice(job, self.tokenizer, field_names=self.field_names)
        with self.metrics.request(len(job.prompt), streams=False, tenant=job.tenant) as observed:
            with _rejections(self.field_names):
                reply = await self.backend.add_request(job.prompt, job.params, tenant=job.tenant)
            return self._finished(job, choice, reply, observed)

    async def stream(self) -> AsyncGenerator[Piece]:
        """Yield pieces as they come, choices interleaved. Closed early, it aborts what is still open."""
        await self._until_connected()
        if len(self.jobs) == 1:
            async with aclosing(self._stream_one(self.jobs[0])) as pieces:
                async for piece in pieces:
                    yield piece
            return
        merged: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(_MERGE_QUEUE_EVENTS)
        tasks: list[asyncio.Task[None]] = []
        starting = asyncio.create_task(_start(tasks, (self._forward(job, merged) for job in self.jobs)))
        try:
            remaining = len(self.jobs)
            while remaining:
                event = await merged.get()
                if event is None:
                    remaining -= 1
                elif isinstance(event, BaseException):
                    raise event
                else:
                    yield event
        finally:
            await cancel(starting)
            await cancel(*tasks)

    async def _forward(self, job: Job, merged: asyncio.Queue[Piece | BaseException | None]) -> None:
        try:
            async with aclosing(self._stream_one(job)) as pieces:
                async for piece in pieces:
                    await merged.put(piece)
            await merged.put(None)
        except Exception as error:
            await merged.put(error)

    async def _stream_one(self, job: Job) -> AsyncGenerator[Piece]:
        choice = _Choice(job, self.tokenizer, field_names=self.field_names)
        observing = self.metrics.request(len(job.prompt), streams=True, tenant=job.tenant)
        with observing as observed, _rejections(self.field_names):
            stream = self.backend.add_request_streaming(job.prompt, job.params, tenant=job.tenant)
            async with aclosing(stream):
                if (echo := choice.begin()) is not None:
                    yield echo
                async for event in stream:
                    if "final" in event:
                        yield self._finished(job, choice, event["final"], observed)
                        return
                    partial = event["partial"]
                    observed.tokens(len(partial["new_tokens"]), at=time.perf_counter())
                    if (piece := choice.feed(partial)) is not None:
                        yield piece
        raise ApiError(500, "the engine's stream ended without a final answer")

    def _finished(self, job: Job, choice: _Choice, reply: dict[str, Any], observed: RequestObserver) -> Piece:
        piece = choice.finish(reply)
        self.usage.add(job, reply)
        observed.finished(piece.finish_reason or "stop", reply)
        return piece


@contextmanager
def _rejections(field_names: Mapping[str, str]) -> Generator[None]:
    """Raise the client's rejections as ApiError."""
    try:
        yield
    except RequestRejectedError as error:
        details = {"code": error.code, "message": str(error), "retry_after_seconds": error.retry_after_seconds}
        if isinstance(error, ModelChangedError):
            details["type"] = "model_changed"
        elif isinstance(error, EngineFailedError):
            logger.error("engine_failed: %s", error)
            details |= {"type": "engine_failed", "is_transient": False}
        raise from_reply_error(details, field_names=field_names) from error


async def _start(tasks: list[asyncio.Task[_T]], works: Iterable[Coroutine[Any, Any, _T]]) -> None:
    """Append a running task for each; other requests run between them, however many there are."""
    for work in works:
        tasks.append(asyncio.create_task(work))
        if len(tasks) % _STARTED_AT_ONCE == 0:
            await asyncio.sleep(0)
