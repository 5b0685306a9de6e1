"""`Service`, the state that all routes share: open requests, held bytes, API keys, tenants and readiness."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.process.tracing import Tracer
from megatron_runtime.requests.capabilities import GENERATE
from megatron_runtime.sampling.grammar_limits import MAX_ALTERNATIVES
from megatron_runtime.server.auth import ApiKey, ApiKeys
from megatron_runtime.server.errors import ApiError, context_length_error, invalid_value, shown, try_again
from megatron_runtime.server.formats.chat_format import ChatFormat
from megatron_runtime.server.guards import (
    MAX_ELEMENTS,
    Gunzip,
    JsonLimitError,
    JsonScan,
    NotJsonError,
    check_content_type,
)
from megatron_runtime.server.metrics import ServerMetrics
from megatron_runtime.server.openai.bodies import PARSED_IN_PLACE_BYTES, BodyBudget, Lease, parse, parse_in_child
from megatron_runtime.server.openai.fields import reported
from megatron_runtime.server.openai.jobs import MAX_JOBS, model_defaults
from megatron_runtime.server.openai.prompts import TEXT_TOKENIZED_IN_PLACE, Prompts
from megatron_runtime.server.openai.schema import ModelRequest
from megatron_runtime.server.rate_limits import LimitReachedError, RateLimits, Reservation
from megatron_runtime.server.settings import ServerSettings
from megatron_runtime.server.streaming import WholeAnswer, until_disconnect

_Model = TypeVar("_Model", bound=ModelRequest)
_T = TypeVar("_T")

UNNAMED_MODEL = "EMPTY"
"""Model name that Megatron-Core's clients send. It means the model of this server."""
BYTES_PER_TOKEN = 4
"""Number of bytes that count as one token in a rejected body, whose number of tokens is unknown."""
_CHECK_SECONDS = 0.05
"""Seconds between two checks of a condition for which a request waits."""
_NAMED_MODELS = 8
"""Maximum number of adapter names in the error for an unknown model."""


@dataclass(slots=True)
class Service:
    """The state of one server process.

    chat_format: model-specific code for prompts and answers.
    tracer:      records the spans of requests; None: requests are not traced.
    """

    settings: ServerSettings
    client: CoordinatorClient
    prompts: Prompts
    metrics: ServerMetrics
    api_keys: ApiKeys
    chat_format: ChatFormat
    tracer: Tracer | None = None
    draining: bool = False
    in_flight: int = 0
    """Number of open HTTP requests, including probes."""
    in_flight_by_tenant: collections.Counter[str] = field(default_factory=collections.Counter)
    """Number of open HTTP requests by tenant, on routes that check the API key."""
    last_request: float = -math.inf
    """Time on the monotonic clock at which the last request with a valid API key began."""
    bodies: BodyBudget = field(init=False)
    """The bytes that requests hold until they are answered."""
    expired: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the end of the drain time. Requests that are still open then get an error."""
    defaults: Mapping[str, Any] = field(init=False)
    """The model's default sampling parameters. Parameters in a request take precedence."""
    rate_limits: RateLimits = field(init=False)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.rate_limits = RateLimits(
            self.client,
            reserved_tokens=self.settings.reserve_tokens,
            wait_seconds=self.settings.coordinator_wait_seconds,
        )
        config = self.prompts.tokenizer.generation_config if self.settings.generation_config == "auto" else {}
        self.defaults = model_defaults(config)
        self.bodies = BodyBudget(self.settings.max_bodies_bytes)

    def missing(self) -> list[str]:
        """Return the reasons why this server is not ready, as short phrases; empty if the server is ready."""
        missing = []
        if not self.client.connected:
            where = f" at {self.settings.coordinator}" if self.settings.coordinator else ""
            missing.append(f"connection to the coordinator{where}")
        if self.draining:
            missing.append("the server is shutting down")
        return missing

    @property
    def adapter_names(self) -> list[str]:
        """The names of the adapters that requests can use as their model.

        An adapter with the same name as the base model is left out, because the base model takes precedence.
        """
        base = self.settings.served_names
        return sorted(adapter.name for adapter in self.client.adapters.adapters if adapter.name not in base)

    def adapter_of(self, model: str | None) -> str:
        """Return the name of the adapter that serves a model. Raises ApiError 404 if the model is not served.

        The result is "" if `model` is the base model, None or UNNAMED_MODEL. With the setting `any_model_name`, the
        result is also "" for every unknown name.
        """
        if model in (None, UNNAMED_MODEL, *self.settings.served_names):
            return ""
        names = self.adapter_names
        if model in names:
            return model
        if self.settings.any_model_name:
            return ""
        offered = ", ".join(repr(name) for name in [*self.settings.served_names, *names[:_NAMED_MODELS]])
        more = f" and {len(names) - _NAMED_MODELS} more" if len(names) > _NAMED_MODELS else ""
        message = f"The model {shown(model)} does not exist: this server offers {offered}{more}."
        raise ApiError(404, message, param="model", code="model_not_found")

    def models_of(self, key: ApiKey) -> list[str]:
        """Return the names of the adapters that `key` can use, with "" for the base model."""
        served = self.settings.served_name
        return [name for name in ("", *self.adapter_names) if key.allows(name or served)]

    async def read(self, request: Request, model: type[_Model]) -> _Model:
        """Read the body of a request, and return it as a validated `model`.

        The bytes of the body count towards the server's memory limit until the request is answered.

        Raises ApiError 400 for an invalid body, 403 for a model that the key cannot use, 404 for an unknown model, 413
        for a large body, 415 for another content type, and 429 if the server would hold too many bytes or the tenant
        has used up its time for large bodies.
        """
        is_compressed = check_content_type(request.headers)
        # A longer list is invalid. Only the tokens of a prompt and the alternatives of a format can have this many
        # elements.
        longest = max(self.prompts.sequence_limit or MAX_ELEMENTS, MAX_ALTERNATIVES)
        scan, lease = JsonScan(long_list=longest), self.lease(request)
        chunks = _decompressed(request) if is_compressed else request.stream()
        parts = await self._body(request, chunks, scan, lease, token_field=model.token_field)
        size: int = request.state.body_bytes
        lease.add(scan.parsed_bytes)
        if size <= PARSED_IN_PLACE_BYTES:
            validated = parse(model, b"".join(parts), scan)
        else:
            work = self.prompts.lanes.run("parse", lease, partial(parse_in_child, model, parts, scan))
            validated = await until_disconnect(request.receive, work, expired=self.expired)
        lease.add(-size)
        if ignored := validated.ignored:
            self.metrics.ignored_fields.inc(len(ignored))
            request.state.ignored_fields = reported(ignored)
        self.check_model(request.state.key, validated.model)
        return validated

    def lease(self, request: Request) -> Lease:
        """Return the lease that counts the bytes of a request.

        The lease is released when the request has been answered.
        """
        state = request.scope["state"]
        if "lease" not in state:
            state["lease"] = Lease(self.bodies, request.state.tenant)
        lease: Lease = state["lease"]
        return lease

    def check_model(self, key: ApiKey, model: str | None) -> str:
        """Return the name of the adapter that serves a model, or "" if the base model serves it.

        Raises ApiError 403 if the key cannot use the model, and 404 if the model is not served.
        """
        adapter = self.adapter_of(model)
        name = adapter or self.settings.served_name
        if not key.allows(name):
            self.metrics.rejected_by_key.labels(key.name, "model").inc()
            allowed = ", ".join(sorted(key.models or ()))
            message = f"The API key {key.name} may not use the model {shown(name)}: it may use {allowed}."
            raise ApiError(403, message, param="model", code="model_not_allowed")
        return adapter

    def answer(self, request: Request, content: bytes, *, media_type: str = "application/json") -> Response:
        """Return the response with a complete answer.

        The bytes of `content` count towards the server's memory limit until the client has read them.
        """
        self.lease(request).force(len(content))
        return WholeAnswer(content, media_type=media_type)

    async def _body(
        self,
        request: Request,
        stream: AsyncIterator[bytes],
        scan: JsonScan,
        lease: Lease,
        *,
        token_field: str | None,
    ) -> list[bytes]:
        """Return the chunks of the body. Store the size of the body in the request's state, for charge_rejected_body().

        stream:      the decompressed body.
        lease:       lease of the request, to which the bytes of the body are added.
        token_field: the request field for token ids. An error for a list that is too long names this field.
        """
        limit = self.settings.max_body_bytes
        too_large = ApiError(413, f"The request body is larger than {limit} bytes: shorten it.", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        chunks: list[bytes] = []
        size, rejection = 0, None
        async for chunk in stream:
            size += len(chunk)
            request.state.body_bytes = size
            if size > limit:
                raise too_large
            if rejection is not None:
                continue  # keep reading, because many clients read an answer only after they have sent the whole body
            try:
                lease.add(len(chunk))
                scan.feed(chunk)
                if scan.longest_list:
                    tokens, maximum = scan.longest_list, scan.long_list
                    raise context_length_error(prompt_length=tokens, limit=maximum, param=token_field, is_bound=True)
                chunks.append(chunk)
            except JsonLimitError as error:
                message = f"The request body is too complex: {error}."
                rejection = ApiError(400, message, code="body_too_complex")
            except NotJsonError as error:
                rejection = ApiError(400, f"The request body is not valid JSON: {error}.", code="invalid_json")
            except ApiError as error:
                rejection = error
            if rejection is not None:
                chunks.clear()
                lease.release()
        if rejection is not None:
            raise rejection
        return chunks

    async def while_connected(self, request: Request, work: Coroutine[Any, Any, _T], *, characters: int = 0) -> _T:
        """Return the result of `work`, the tokenization for a request.

        If the text is long, cancel `work` when the client disconnects.

        characters: length of the text.
        """
        if characters <= TEXT_TOKENIZED_IN_PLACE:
            return await work
        return await until_disconnect(request.receive, work, expired=self.expired)

    @contextmanager
    def serving(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Return a context manager that counts one HTTP request as open until the `with` block ends.

        state: state of the request, in which identify() stores the tenant.
        """
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()
            if (lease := state.get("lease")) is not None:
                lease.release()
            if (tenant := state.get("tenant")) is not None:
                self.in_flight_by_tenant[tenant] -= 1
                if not self.in_flight_by_tenant[tenant]:
                    del self.in_flight_by_tenant[tenant]

    def identify(self, request: Request) -> None:
        """Store the API key and the tenant of a request in its state.

        Raises ApiError 401 if the request has no valid API key.
        """
        key = self.api_keys.find(request.headers)
        if key is None:
            message = "Incorrect or missing API key: send the header 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key")
        request.state.key = key
        request.state.tenant = key.tenant
        self.last_request = time.monotonic()
        self.in_flight_by_tenant[key.tenant] += 1

    async def take_request(self, key: ApiKey) -> None:
        """Count a request against the limits of its API key.

        Raises ApiError 429 if no request or no token is left in this minute. Raises ApiError 503 if the coordinator,
        which stores the counts, does not answer.
        """
        if key.tenant:
            self.metrics.requests_by_key.labels(key.name).inc()
        if key.is_limited:
            with self._rejections(key):
                await self.rate_limits.take_request(key)

    def check_prompt(self, key: ApiKey, tokens: int) -> None:
        """Raise ApiError 429 if the prompts of a request have more tokens than the API key's limit for one minute."""
        with self._rejections(key):
            self.rate_limits.check_prompt(key, tokens)

    async def reserve(self, key: ApiKey, *, prompt: int, choices: list[int | None]) -> Reservation | None:
        """Return a reservation from RateLimits.reserve() for a request, or None if the API key has no token limit."""
        if key.tokens_per_minute is None:
            return None
        with self._rejections(key):
            return await self.rate_limits.reserve(key, prompt=prompt, choices=choices)

    def charge_rejected_body(self, key: ApiKey, num_bytes: int) -> None:
        """Charge a rejected body to the token limit of its API key: one token per BYTES_PER_TOKEN bytes."""
        self.add_tokens(key, num_bytes // BYTES_PER_TOKEN)

    @contextmanager
    def _rejections(self, key: ApiKey) -> Iterator[None]:
        try:
            yield
        except LimitReachedError as error:
            self.metrics.rejected_by_key.labels(key.name, error.reason).inc()
            raise

    def count_answer(self, key: ApiKey, *, prompt: int, generated: int) -> None:
        """Count the tokens of a finished choice in the metrics of its API key.

        prompt:    number of prompt tokens; 0 for further choices of the same prompt.
        generated: number of generated tokens that the engine last reported for the choice.
        """
        if key.tenant:
            self.metrics.prompt_tokens_by_key.labels(key.name).inc(prompt)
            self.metrics.generation_tokens_by_key.labels(key.name).inc(generated)

    def add_tokens(self, key: ApiKey, tokens: int) -> None:
        """Charge tokens that were not generated, such as the tokens of a rejected body, to the limit of an API key.

        One call charges at most the limit of one minute, so that a single mistake of a client does not use up several
        minutes.
        """
        if key.tokens_per_minute is not None:
            tokens = min(tokens, key.tokens_per_minute)
            self.metrics.charged_tokens_by_key.labels(key.name).inc(tokens)
            self.rate_limits.charge(key, tokens)

    def rate_limit_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit headers of the answer to a request. The list is empty if the API key has no limits."""
        key = scope["state"].get("key")
        return [] if key is None or not key.is_limited else self.rate_limits.headers(key)

    async def wait_idle(self) -> None:
        while self.in_flight:
            await self._idle.wait()

    def check_in_flight(self, *, tenant: str) -> None:
        """Raise ApiError 429 for a new request if too many requests are open.

        Requests that wait for a coordinator count as open.
        """
        self._check_capacity(self.in_flight_by_tenant, tenant=tenant, more=0)

    def check_choices(self, choices: int, *, tenant: str) -> None:
        """Raise ApiError 400 if a request cannot have this number of choices, and 429 if too many choices are open."""
        if choices > MAX_JOBS:
            raise ApiError(400, f"Prompts times n may not exceed {MAX_JOBS}: ask for fewer.", param="n")
        self.check_open(choices, tenant=tenant)

    def check_open(self, choices: int, *, tenant: str) -> None:
        """Raise ApiError 429 if `choices` more choices or pooling texts would exceed the limit of open requests."""
        self._check_capacity(self.metrics.open_requests, tenant=tenant, more=choices)

    def check_priority(self, priority: int | None) -> None:
        """Raise ApiError 400 for a priority that the server does not allow."""
        if priority and not self.settings.allow_priority:
            problem = (
                f"{priority} is not 0, and this server lets no request choose its priority. Leave the field out, or "
                "start the server with --allow-priority (spec.server.allowPriority)"
            )
            raise invalid_value("priority", problem)

    async def until_connected(self) -> None:
        """Wait until the coordinator is connected, so that its restart only delays requests.

        Raises ApiError 503 after `coordinator_wait_seconds`.
        """
        if not self.client.connected:
            await self._until(lambda: self.client.connected, "The coordinator has not answered")

    async def tasks(self) -> tuple[str, ...]:
        """Return the tasks that the engines offer: GENERATE and names in POOLING_TASKS.

        Waits until an engine has reported its tasks. Raises ApiError 503 after `coordinator_wait_seconds`.
        """
        if not self.client.tasks:
            await self._until(lambda: bool(self.client.tasks), "No engine has served")
        return self.client.tasks

    def check_generates(self) -> None:
        """Raise ApiError 404 if all known engines have pooling models."""
        if self.client.tasks and GENERATE not in self.client.tasks:
            message = (
                f"The model {shown(self.settings.served_name)} generates no text: it is a pooling model with the task "
                f"{', '.join(self.client.tasks)}. Use POST /v1/pooling, /v1/embeddings, /v1/classify, /v1/score or "
                "/v1/rerank."
            )
            raise ApiError(404, message, code="not_offered")

    async def _until(self, is_true: Callable[[], bool], problem: str) -> None:
        seconds = self.settings.coordinator_wait_seconds
        try:
            async with asyncio.timeout(seconds):
                while not is_true():  # noqa: ASYNC110 - only while there is no coordinator, or no engine
                    await asyncio.sleep(_CHECK_SECONDS)
        except TimeoutError as error:
            message = f"{problem} for {seconds:g} s: try again."
            raise try_again(503, message, code="coordinator_unreachable", seconds=5) from error

    def _check_capacity(self, open_by_tenant: collections.Counter[str], *, tenant: str, more: int) -> None:
        """Raise ApiError 429 if `more` additional requests would exceed the limit of open requests.

        If the limit is reached, the server still accepts requests of a tenant that has less than its fair share.
        Therefore no tenant can block other tenants, and at most twice the limit is open.
        """
        limit = self.settings.max_open_requests
        share = limit // len({*open_by_tenant, tenant})
        if open_by_tenant.total() + more > limit and open_by_tenant[tenant] + more > share:
            message = f"This server has {limit} requests open, or would have: try again."
            raise try_again(429, message, code="too_many_requests")


async def _decompressed(request: Request) -> AsyncIterator[bytes]:
    """Yield the decompressed chunks of a gzip body.

    Other requests run between the chunks. Raises ApiError 400 for invalid gzip data.
    """
    gunzip = Gunzip()
    async for chunk in request.stream():
        for piece in gunzip.feed(chunk):
            yield piece
            await asyncio.sleep(0)
    gunzip.finish()
