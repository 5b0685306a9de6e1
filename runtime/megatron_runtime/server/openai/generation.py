"""Runs the choices of one request concurrently, and answers with one JSON body or with server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.client.coordinator_client import RequestOptions
from megatron_runtime.client.pending import TOKEN_BYTES
from megatron_runtime.client.rejection import ModelChangedError, RequestFailedError, RequestRejectedError
from megatron_runtime.process import tracing
from megatron_runtime.process.tracing import Attributes, Span
from megatron_runtime.server.auth import ApiKey, tenant_salt, tenant_session
from megatron_runtime.server.errors import ApiError, from_reply_error, try_again
from megatron_runtime.server.formats.chat_format import AnswerFormat, AnswerParserError
from megatron_runtime.server.json_text import to_json
from megatron_runtime.server.metrics import RequestObserver
from megatron_runtime.server.openai.answer import Choice, Piece
from megatron_runtime.server.openai.fields import reported
from megatron_runtime.server.openai.jobs import Job, Options, Prompt, jobs_of
from megatron_runtime.server.openai.schema import GenerationRequest
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.rate_limits import COUNTED_TOKENS, Reservation
from megatron_runtime.server.streaming import EventStream, cancel, until_disconnect

logger = logging.getLogger(__name__)

_MERGE_QUEUE_EVENTS = 64
_STARTED_AT_ONCE = 8

_T = TypeVar("_T")


async def respond(
    service: Service,
    request: Request,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    options: Options,
    *,
    choice: Callable[[Piece], dict[str, Any]],
    chunks: Callable[[Piece], Iterable[dict[str, Any]]],
    answer: AnswerFormat | None = None,
    more: Callable[[Sequence[Piece]], dict[str, Any]] = lambda _pieces: {},
) -> Response:
    """Run the jobs of a request, one per choice, and return the answer as one JSON body or as a stream of events.

    choice: returns the item of `choices` for a whole choice. Not called for a stream.
    chunks: returns the items of `choices` in the stream events for one part.
    answer: as for generation_of().
    more:   returns additional fields of the JSON body, from the parts of all choices. Not called for a stream.

    Raises the errors of generation_of().
    """
    settings, generation = service.settings, generation_of(service, request, body, prompts, options, answer=answer)
    base = {
        "id": f"{body.answer_id}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": generation.adapter or settings.served_name,
    }
    if body.stream:
        events = _events({"object": body.chunk_object, **base}, generation, chunks, include_usage=body.include_usage)
        return EventStream(events, keep_alive_seconds=settings.keep_alive_seconds, expired=service.expired)
    pieces = await until_disconnect(request.receive, generation.collect(), expired=service.expired)
    usage = generation.usage
    head = {"object": body.answer_object, **base}
    fields = {**head, "system_fingerprint": usage.fingerprint, "usage": usage.as_json(), **more(pieces)}
    encoded = []
    for piece in pieces:
        encoded.append(to_json(choice(piece)))
        await asyncio.sleep(0)  # other requests run between the choices
    content = b'%b,"choices":[%b]}' % (to_json(fields)[:-1], b",".join(encoded))
    return service.answer(request, content)


def generation_of(
    service: Service,
    request: Request,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    options: Options,
    *,
    answer: AnswerFormat | None = None,
) -> Generation:
    """Return the Generation of a request. Its jobs, one per choice, have not been started.

    answer: answer format whose parsers run in another process; None: no parser runs in another process.

    Raises ApiError 400 if a prompt is too long or a sampling parameter is invalid. Raises ApiError 429 if too many
    choices are open, or if the prompts exceed the token limit of the API key.
    """
    tenant, settings = request.state.tenant, service.settings
    service.check_choices(len(prompts) * (body.n or 1), tenant=tenant)
    service.check_priority(body.priority)
    jobs, field_names = jobs_of(
        body,
        prompts,
        options,
        tokenizer=service.prompts.tokenizer,
        sequence_limit=service.prompts.sequence_limit,
        defaults=service.defaults,
        cache_salt=tenant_salt("" if settings.share_prefix_cache else tenant, body.cache_salt),
    )
    if jobs[0].ignored_keywords:
        request.state.ignored_keywords = reported(jobs[0].ignored_keywords)
    key: ApiKey = request.state.key
    service.check_prompt(key, sum(len(prompt.tokens) for prompt in prompts))
    if key.tokens_per_minute is not None:
        for job in jobs:
            job.params.streaming_interval = min(job.params.streaming_interval, COUNTED_TOKENS) if body.stream else 1
    request.state.body_bytes = 0  # the prompt is charged from here on, so a later error must not charge the body too
    service.lease(request).add(
        sum(TOKEN_BYTES * len(job.prompt.tokens) for job in jobs)
    )  # every job is sent with its prompt
    adapter = service.adapter_of(body.model)
    span: Span | None = getattr(request.state, "span", None)
    if span is not None:
        span.set(_span_attributes(body, options, model=adapter or settings.served_name))
    session = tenant_session(tenant, body.prompt_cache_key or request.headers.get("x-session-id", ""))
    return Generation(service, key, adapter, jobs, field_names, request.state.request_id, session, span, answer)


def _span_attributes(body: GenerationRequest, options: Options, *, model: str) -> Attributes:
    return {
        tracing.REQUEST_N: body.n or 1,
        tracing.MAX_TOKENS: options.max_tokens,
        tracing.TEMPERATURE: body.temperature,
        tracing.TOP_P: body.top_p,
        tracing.RESPONSE_MODEL: model,
    }


async def _events(
    base: dict[str, Any],
    generation: Generation,
    chunks: Callable[[Piece], Iterable[dict[str, Any]]],
    *,
    include_usage: bool,
) -> AsyncGenerator[dict[str, Any]]:
    def event(choices: list[dict[str, Any]], **usage: Any) -> dict[str, Any]:
        return {**base, "system_fingerprint": generation.usage.fingerprint, "choices": choices, **usage}

    no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
    async with aclosing(generation.stream()) as pieces:
        async for piece in pieces:
            for chunk in chunks(piece):
                yield event([chunk], **no_usage)
    if include_usage:
        yield event([], usage=generation.usage.as_json())


@dataclass(slots=True)
class Usage:
    """Total token counts of all prompts and choices of a request, and the epochs of the weights that generated the
    tokens.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    epochs: set[int] = field(default_factory=set)

    def add(self, job: Job, reply: Mapping[str, Any]) -> None:
        if job.counts_prompt:
            self.prompt += len(job.prompt.tokens)
            self.cached += reply.get("num_cached_tokens") or 0
        if not job.is_prompt_only:
            tokens = reply["generated_tokens"]
            self.completion += len(tokens)
            if job.options.reasoning is not None:
                self.reasoning += job.options.reasoning.count(tokens)
        self.epochs.update(int(epoch) for _, epoch in reply.get("policy_epoch") or ())

    @property
    def fingerprint(self) -> str | None:
        """The `system_fingerprint`: `weights-7`, or `weights-6-7` for two epochs. None until a choice has finished."""
        return "-".join(["weights", *map(str, sorted(self.epochs))]) if self.epochs else None

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass(slots=True)
class Generation:
    """The jobs of one HTTP request.

    key:         the API key whose limits apply to the jobs.
    adapter:     the LoRA adapter that answers; empty: the base model.
    field_names: names of the request fields by sampling parameter, for errors.
    request_id:  id of the HTTP request.
    session:     session of the HTTP request for the coordinator; empty: no session.
    span:        trace span of the HTTP request; None: the request is not traced.
    answer:      see generation_of().
    """

    service: Service
    key: ApiKey
    adapter: str
    jobs: Sequence[Job]
    field_names: Mapping[str, str]
    request_id: str = ""
    session: str = ""
    span: Span | None = None
    answer: AnswerFormat | None = None
    usage: Usage = field(default_factory=Usage)
    _reservation: Reservation | None = None
    """The tokens reserved from the limit of the API key; None if the key has no token limit."""

    async def collect(self) -> list[Piece]:
        """Run the jobs, and return each choice as one part, in the order of the choices.

        If the call is cancelled or fails, the open choices are aborted.

        Raises ApiError 429 if the API key has too few tokens left in this minute.
        """
        tasks: list[asyncio.Task[Piece]] = []
        async with self._admitted():
            try:
                await start_all(tasks, (self._collect_one(job) for job in self.jobs))
                return list(await asyncio.gather(*tasks))
            finally:
                await cancel(*tasks)

    @asynccontextmanager
    async def _admitted(self) -> AsyncGenerator[None]:
        """Wait for the coordinator, then reserve the request's tokens from the rate limit of its API key.

        At the end of the `async with` block, charge the tokens beyond the reservation, or return the unused tokens.
        """
        await self.service.until_connected()
        if self.key.tokens_per_minute is None:
            yield
            return
        prompt = sum(len(job.prompt.tokens) for job in self.jobs if job.counts_prompt)
        choices = [job.params.num_tokens_to_generate for job in self.jobs]
        self._reservation = await self.service.reserve(self.key, prompt=prompt, choices=choices)
        try:
            yield
        finally:
            if self._reservation is not None:
                self._reservation.settle()

    async def _collect_one(self, job: Job) -> Piece:
        choice = Choice(job, self.service.prompts.tokenizer)
        with self._observed(job, streams=False) as observed:
            # An aborted answer counts against the limit with the tokens that it has generated so far.
            options = self._options(job, None if self._reservation is None else observed.count)
            with rejections_as_errors(self.field_names):
                reply = await self.service.client.add_request(job.prompt.tokens, job.params, **options)
            piece = self._finished(job, choice, reply, observed)
        with closing(_Parsing(self.answer)) as parsing:
            return await parsing.parsed(piece) if parsing.is_elsewhere else piece

    def _options(self, job: Job, on_tokens: Callable[[int], object] | None) -> RequestOptions:
        traceparent = "" if self.span is None else self.span.traceparent
        media: RequestOptions = {} if job.prompt.media is None else {"media": job.prompt.media}
        return {
            **media,
            "tenant": self.key.tenant,
            "adapter": self.adapter,
            "request_id": self.request_id,
            "session": self.session,
            "traceparent": traceparent,
            "on_tokens": on_tokens,
        }

    @contextmanager
    def _observed(self, job: Job, *, streams: bool) -> Generator[RequestObserver]:
        prompt_tokens, service = len(job.prompt.tokens), self.service
        observer = RequestObserver(
            service.metrics,
            prompt_tokens=prompt_tokens,
            tenant=self.key.tenant,
            streams=streams,
            on_generated=None if self._reservation is None else self._reservation.add,
        )
        try:
            with observer:
                yield observer
        finally:
            prompt = prompt_tokens if job.counts_prompt else 0
            service.count_answer(self.key, prompt=prompt, generated=observer.generated)
            if self.span is not None:
                self.span.set({tracing.TIME_TO_FIRST_TOKEN: observer.first_token_seconds})

    async def stream(self) -> AsyncGenerator[Piece]:
        """Run the jobs, and yield the parts of all choices in the order of their arrival.

        Closing the generator early aborts the open choices.

        Raises ApiError 429 if the API key has too few tokens left in this minute.
        """
        async with self._admitted():
            pieces = self._stream_one(self.jobs[0]) if len(self.jobs) == 1 else self._merged()
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    async def _merged(self) -> AsyncGenerator[Piece]:
        merged: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(_MERGE_QUEUE_EVENTS)
        tasks: list[asyncio.Task[None]] = []
        starting = asyncio.create_task(start_all(tasks, (self._forward(job, merged) for job in self.jobs)))
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
        choice, client = Choice(job, self.service.prompts.tokenizer), self.service.client
        parsing = _Parsing(self.answer)
        with closing(parsing), self._observed(job, streams=True) as observed, rejections_as_errors(self.field_names):
            options = self._options(job, observed.count)
            stream = client.add_request_streaming(job.prompt.tokens, job.params, **options)
            async with aclosing(stream):
                if (echo := choice.begin()) is not None:
                    yield echo
                async for event in stream:
                    if "final" in event:
                        last = self._finished(job, choice, event["final"], observed)
                        yield await parsing.parsed(last) if parsing.is_elsewhere else last
                        return
                    partial = event["partial"]
                    observed.tokens(len(partial["new_tokens"]), at=time.perf_counter())
                    if (piece := choice.feed(partial)) is not None:
                        yield await parsing.parsed(piece) if parsing.is_elsewhere else piece
        raise ApiError(500, "the engine's stream ended without a final answer")

    def _finished(self, job: Job, choice: Choice, reply: dict[str, Any], observed: RequestObserver) -> Piece:
        if reply.get("status") == "FAILED" or reply.get("error"):
            raise from_reply_error(reply.get("error"), field_names=self.field_names)
        reason: str = reply.get("finish_reason") or "stop"
        if reason not in ("stop", "length"):
            raise try_again(503, f"generation ended early ({reason}): try again", code=reason)
        piece = choice.finish(reply)
        self.usage.add(job, reply)
        if self.span is not None:
            tokens = {tracing.PROMPT_TOKENS: self.usage.prompt, tracing.COMPLETION_TOKENS: self.usage.completion}
            self.span.set(tokens)
        observed.finished(piece.finish_reason or "stop", reply)
        return piece


class _Parsing:
    """Parses one choice with a parser that runs in another process, if the answer has such a parser.

    is_elsewhere: whether the choice has a parser in another process.
    """

    def __init__(self, answer: AnswerFormat | None) -> None:
        self._parser = None if answer is None else answer.async_parser()
        self.is_elsewhere = self._parser is not None
        self._fed = 0

    async def parsed(self, piece: Piece) -> Piece:
        """Return `piece` with the events of the parser. Raises ApiError 500 if the parser fails."""
        assert self._parser is not None
        is_last = piece.finish_reason is not None
        tokens = piece.generated[self._fed :] if is_last else piece.token_ids
        self._fed += len(tokens)
        try:
            piece.events = await self._parser.feed(piece.text, tokens, is_last=is_last)
        except AnswerParserError as error:
            logger.error("an answer cannot be parsed: %s", error)
            message = f"The answer cannot be parsed: {error}."
            raise ApiError(500, message, code="answer_not_parsed", is_final=True) from error
        return piece

    def close(self) -> None:
        if self._parser is not None:
            self._parser.close()


@contextmanager
def rejections_as_errors(field_names: Mapping[str, str]) -> Generator[None]:
    """Return a context manager that converts CoordinatorClient's errors for a rejected request to ApiError.

    field_names: names of the request fields by sampling parameter.
    """
    try:
        yield
    except RequestRejectedError as error:
        details: dict[str, Any] = {
            "code": error.code,
            "message": str(error),
            "retry_after_seconds": error.retry_after_seconds,
            "field": error.field,
        }
        if isinstance(error, ModelChangedError):
            details["type"] = "model_changed"
        elif isinstance(error, RequestFailedError):
            logger.error("engine_failed: %s", error)
            details |= {"type": "engine_failed", "is_transient": False}
        elif error.field is not None:
            details["type"] = "unsupported_value"
        raise from_reply_error(details, field_names=field_names) from error


async def start_all(tasks: list[asyncio.Task[_T]], works: Iterable[Coroutine[Any, Any, _T]]) -> None:
    """Start a task for each coroutine, and append it to `tasks`.

    Between the starts, the event loop runs other requests, so that many starts do not block them.
    """
    for work in works:
        tasks.append(asyncio.create_task(work))
        if len(tasks) % _STARTED_AT_ONCE == 0:
            await asyncio.sleep(0)
