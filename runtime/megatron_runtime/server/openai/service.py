"""`Service`, the state that all routes share: open requests, bodies, tenants, readiness."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from megatron_runtime.client.inference_client import InferenceClient
from megatron_runtime.server.auth import ApiKeys
from megatron_runtime.server.errors import ApiError, from_validation, shown, try_again
from megatron_runtime.server.guards import JsonLimitError, JsonScan, check_content_type
from megatron_runtime.server.metrics import ServerMetrics
from megatron_runtime.server.openai.jobs import MAX_JOBS
from megatron_runtime.server.openai.prompts import TEXT_TOKENIZED_IN_PLACE, Prompts
from megatron_runtime.server.openai.schema import ModelRequest
from megatron_runtime.server.reasoning import ReasoningFormat
from megatron_runtime.server.settings import ServerSettings
from megatron_runtime.server.streaming import until_disconnect
from megatron_runtime.server.tools import ToolParser

_Model = TypeVar("_Model", bound=ModelRequest)
_T = TypeVar("_T")

UNNAMED_MODEL = "EMPTY"
"""Megatron-Core's clients send this name: it means the model of the server."""
_NAMED_MODELS = 8
"""Adapters that the error for an unknown model names."""


@dataclass(slots=True)
class Service:
    """One per server process.

    tool_parser: parses the calls in answers; None if tools are not offered.
    reasoning_format: how the model marks its reasoning; None if it is part of the text.
    """

    settings: ServerSettings
    client: InferenceClient
    prompts: Prompts
    metrics: ServerMetrics
    api_keys: ApiKeys
    tool_parser: type[ToolParser] | None
    reasoning_format: ReasoningFormat | None = None
    draining: bool = False
    in_flight: int = 0
    """Open HTTP requests, probes included."""
    in_flight_by_tenant: collections.Counter[str] = field(default_factory=collections.Counter)
    """Open HTTP requests of routes that check the API key."""
    last_request: float = -math.inf
    """Time on the monotonic clock when the last request with a valid API key began."""
    body_bytes: int = 0
    """Of incomplete request bodies."""
    expired: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the drain time is over: requests that are still open are answered with an error."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def missing(self) -> list[str]:
        """Return the reasons why this server is not ready, one phrase each."""
        missing = []
        if not self.client.connected:
            where = f" at {self.settings.coordinator}" if self.settings.coordinator else ""
            missing.append(f"connection to the coordinator{where}")
        if self.draining:
            missing.append("the server is shutting down")
        return missing

    @property
    def adapter_names(self) -> list[str]:
        """Names of the adapters that requests may give as their model. The base model hides one of its own name."""
        base = self.settings.served_name
        return sorted(adapter.name for adapter in self.client.adapters.adapters if adapter.name != base)

    def adapter_of(self, model: str | None) -> str:
        """Return the adapter of a model; empty for the base model, for None and for UNNAMED_MODEL. Raises ApiError 404
        if the model is not served.
        """
        if model in (None, UNNAMED_MODEL, self.settings.served_name):
            return ""
        names = self.adapter_names
        if model in names:
            return model
        offered = ", ".join(repr(name) for name in [self.settings.served_name, *names[:_NAMED_MODELS]])
        more = f" and {len(names) - _NAMED_MODELS} more" if len(names) > _NAMED_MODELS else ""
        message = f"The model {shown(model)} does not exist: this server offers {offered}{more}."
        raise ApiError(404, message, param="model", code="model_not_found")

    async def read(self, request: Request, model: type[_Model]) -> _Model:
        """Return the validated body. Raises ApiError 400, 404 for another model, 413 or 415."""
        check_content_type(request.headers)
        scan = JsonScan()
        body = await self._body(request, scan)
        try:
            validated = model.model_validate_json(body, context=scan)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False, include_context=False)) from error
        self.adapter_of(validated.model)
        return validated

    async def _body(self, request: Request, scan: JsonScan) -> bytes:
        """Return the body. While bodies arrive, the total size of all of them is limited."""
        limit = self.settings.max_body_bytes
        too_large = ApiError(413, f"The request body is larger than {limit} bytes: shorten it.", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        chunks, size = [], 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self.body_bytes += len(chunk)
                if size > limit:
                    raise too_large
                if self.body_bytes > self.settings.max_bodies_bytes:
                    message = "This server receives too many large request bodies at once: try again."
                    raise try_again(429, message, code="too_many_requests")
                scan.feed(chunk)
                chunks.append(chunk)
        except JsonLimitError as error:
            raise ApiError(400, f"The request body is too complex: {error}.", code="body_too_complex") from error
        finally:
            self.body_bytes -= size
        return b"".join(chunks)

    async def while_connected(self, request: Request, work: Coroutine[Any, Any, _T], *, characters: int = 0) -> _T:
        """Await tokenization for a request. Tokenization of a long text is cancelled when the client disconnects.

        characters: length of the text.
        """
        if characters <= TEXT_TOKENIZED_IN_PLACE:
            return await work
        return await until_disconnect(request.receive, work, expired=self.expired)

    @contextmanager
    def serving(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Count one HTTP request as open. state: of the request, with the tenant that identify() finds."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()
            if (tenant := state.get("tenant")) is not None:
                self.in_flight_by_tenant[tenant] -= 1
                if not self.in_flight_by_tenant[tenant]:
                    del self.in_flight_by_tenant[tenant]

    def identify(self, request: Request) -> None:
        """Write the tenant of a request into its state. Raises ApiError 401 if it carries none of the API keys."""
        tenant = self.api_keys.tenant(request.headers.get("authorization", ""))
        if tenant is None:
            message = "Incorrect or missing API key: send the header 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key")
        request.state.tenant = tenant
        self.last_request = time.monotonic()
        self.in_flight_by_tenant[tenant] += 1

    async def wait_idle(self) -> None:
        while self.in_flight:
            await self._idle.wait()

    def check_in_flight(self, *, tenant: str) -> None:
        """Raise ApiError 429 for a new request if too many are open, including those that wait for a coordinator."""
        self._check_capacity(self.in_flight_by_tenant, tenant=tenant, more=0)

    def check_choices(self, choices: int, *, tenant: str) -> None:
        """Raise ApiError 400 for more choices than one request may have, 429 if too many choices are open."""
        if choices > MAX_JOBS:
            raise ApiError(400, f"Prompts times n may not exceed {MAX_JOBS}: ask for fewer.", param="n")
        self._check_capacity(self.metrics.open_requests, tenant=tenant, more=choices)

    def _check_capacity(self, open_by_tenant: collections.Counter[str], *, tenant: str, more: int) -> None:
        """Raise ApiError 429 if `more` and the open ones together would be too many.

        A full server still accepts requests of a tenant that has less than its fair share of the limit. So no tenant
        blocks others, and at most twice the limit is open.
        """
        limit = self.settings.max_open_requests
        share = limit // len({*open_by_tenant, tenant})
        if open_by_tenant.total() + more > limit and open_by_tenant[tenant] + more > share:
            message = f"This server has {limit} requests open, or would have: try again."
            raise try_again(429, message, code="too_many_requests")
