"""The HTTP application: routes, authorization, error answers, probes, and the pages for chat and status."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import megatron_runtime
from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.process import tracing
from megatron_runtime.process.health import MetricsPage
from megatron_runtime.process.logs import REQUEST_ID
from megatron_runtime.process.tracing import Span, Tracer
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.limits import MAX_REQUEST_ID_CHARACTERS
from megatron_runtime.protocol.messages import AnswerFormats, Control, StatusReply
from megatron_runtime.server.auth import ApiKeys
from megatron_runtime.server.connections import MAX_HEADERS
from megatron_runtime.server.errors import ApiError, renamed, shown, try_again
from megatron_runtime.server.formats.chat_format import ChatFormat, NativeChatFormat
from megatron_runtime.server.guards import Origins, check_host
from megatron_runtime.server.json_text import JsonResponse
from megatron_runtime.server.metrics import ServerMetrics
from megatron_runtime.server.openai.chat import create_chat_completion
from megatron_runtime.server.openai.completions import create_completion, detokenize, tokenize
from megatron_runtime.server.openai.embeddings import EmbeddingRequest, create_embedding
from megatron_runtime.server.openai.messages import (
    CountTokensRequest,
    MessagesRequest,
    count_message_tokens,
    create_message,
    error_body,
)
from megatron_runtime.server.openai.pooling import RerankRequest, ScoreRequest, create_score, rerank
from megatron_runtime.server.openai.prompts import Prompts
from megatron_runtime.server.openai.responses import ResponsesRequest, create_response
from megatron_runtime.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    TokenizeRequest,
)
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.openai.texts import ClassifyRequest, PoolingRequest, classify, pool
from megatron_runtime.server.settings import ServerSettings
from megatron_runtime.server.streaming import ClientDisconnectedError
from megatron_runtime.tokenization import Tokenizer
from megatron_runtime.transport.control_calls import ControlRejectedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError

logger = logging.getLogger(__name__)

PAGE_FILES = (
    "chat.css",
    "chat.js",
    "conversations.js",
    "server.js",
    "status.css",
    "status.js",
    "text.js",
    "turns.js",
    "vendor/markdown-it.esm.min.js",
)
_CLIENT_CLOSED_REQUEST = 499
_REQUEST_ID = re.compile(rf"[A-Za-z0-9_.:/+=@-]{{1,{MAX_REQUEST_ID_CHARACTERS}}}")
MIN_STATUS_SECONDS = 1.0
"""Minimum number of seconds between two status requests to the coordinator, for any number of clients."""

Handler = Callable[[Service, Request], Awaitable[Response]]


def create_app(
    settings: ServerSettings,
    *,
    backend: CoordinatorClient,
    tokenizer: Tokenizer,
    chat_format: ChatFormat | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Return the application. The attribute `state.service` of the application is its Service.

    backend: the client of the coordinator.
    chat_format: converts conversations to prompts and parses answers; None: a NativeChatFormat with the parsers that
                 the settings name.
    tracer:  exports traces of requests; None: requests are not traced.

    Raises ValueError if a tool-call or reasoning parser is unknown or if the file of API keys is invalid. Raises
    OSError if the file of API keys cannot be read.
    """
    if chat_format is None:
        chat_format = NativeChatFormat(
            tokenizer, tool_call_parser=settings.tool_call_parser, reasoning_parser=settings.reasoning_parser
        )
    backend.formats = AnswerFormats(
        tool_calls=chat_format.tool_format or "", reasoning=chat_format.reasoning_format or ""
    )
    service = Service(
        settings=settings,
        client=backend,
        prompts=Prompts(
            tokenizer,
            chat_format,
            max_sequence_length=settings.max_sequence_length,
            media_hosts=settings.allowed_media_hosts,
        ),
        metrics=ServerMetrics(model=settings.served_name, vllm=settings.vllm_metrics),
        api_keys=ApiKeys(settings.api_keys_file),
        chat_format=chat_format,
        tracer=tracer,
    )
    app = FastAPI(
        title="megatron", version=megatron_runtime.__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.service = service
    app.add_middleware(RequestMiddleware, service=service)
    for path, handler, body in _POST_ROUTES:  # added first, because a request is compared with the routes in this order
        _add_post_route(app, service, path=path, handler=handler, body=body)
    _add_get_routes(app, service)
    _add_page(app)
    for kind in (ApiError, HTTPException, ClientDisconnectedError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    return app


class RequestMiddleware:
    """Checks the headers of each request. Counts open requests, and counts answers by route and status.

    Every request has an id. The id comes from the header x-request-id, or is random. The answer, all log lines and the
    trace contain the id. While the server drains, each answer closes its connection.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app = app
        self._service = service
        self._origins = Origins(service.settings.allowed_origins)
        self._hosts = frozenset(host.lower().strip("[]") for host in service.settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, headers = scope.setdefault("state", {}), Headers(scope=scope)
        scope["path"] = "/" + "/".join(filter(None, scope["path"].split("/")))
        given = headers.get("x-request-id", "")
        is_valid = _REQUEST_ID.fullmatch(given) is not None
        request_id = state["request_id"] = given if is_valid else f"req_{uuid.uuid4().hex}"
        REQUEST_ID.set(request_id)
        span: Span | None = None
        if self._service.tracer is not None and scope["method"] == "POST":
            span = state["span"] = self._service.tracer.begin("POST", headers=headers, is_server=True)
            span.set({"http.request.method": "POST", tracing.REQUEST_ID: request_id})
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # The label is the route template and never the path, because a client that tries many paths must not
                # create many metrics.
                route = getattr(scope.get("route"), "path", "unknown")
                self._service.metrics.responses.labels(route, str(status)).inc()
                if span is not None:
                    span.rename(f"POST {route}")
                    span.set({"http.route": route, "http.response.status_code": status})
                message = {**message, "headers": [*message["headers"], *self._headers(scope, headers)]}
            await send(message)

        app = self._app
        try:
            if given and not is_valid:
                message = (
                    f"Header x-request-id {shown(given)} is not an id: send 1 to {MAX_REQUEST_ID_CHARACTERS} letters, "
                    "digits and -_.:/+=@, or leave it out."
                )
                raise ApiError(400, message, param="x-request-id", code="invalid_request_id")
            if len(scope["headers"]) > MAX_HEADERS:
                message = f"The request has more than {MAX_HEADERS} headers: send fewer."
                raise ApiError(431, message, code="headers_too_large")
            if self._hosts:
                check_host(headers, self._hosts, self._origins)
            if scope["method"] == "OPTIONS" and (preflight := self._origins.preflight(headers)) is not None:
                app = Response(status_code=204, headers=preflight)
        except ApiError as error:
            app = error.response()
        try:
            with self._service.serving(state):
                await app(scope, receive, observed)
        except Exception:
            status = status or 500  # no answer was sent, so the outermost middleware answers with 500
            raise
        finally:
            if span is not None:
                # The answer has no status, because the client disconnected before the answer began.
                span.end(error=f"HTTP status {status}" if status >= 500 else "" if status else "client disconnected")
            logger.debug("%s %s: status %d", scope["method"], scope["path"], status)

    def _headers(self, scope: Scope, request: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers that the application adds to the answer of every route."""
        state = scope["state"]
        headers = [(b"x-request-id", state["request_id"].encode()), *self._service.rate_limit_headers(scope)]
        headers += self._origins.headers(request)
        if ignored := state.get("ignored_fields"):
            headers.append((b"x-ignored-fields", ignored.encode()))
        if ignored := state.get("ignored_keywords"):
            headers.append((b"x-ignored-keywords", ignored.encode()))
        if state.get("has_unread_calls"):
            headers.append((b"x-tool-call-format", b"unknown"))
        if self._service.draining:
            headers.append((b"connection", b"close"))
        return headers


def _add_page(app: FastAPI) -> None:
    """Add the chat page at / and the status page at /status.

    The pages load nothing from other servers, and a browser needs no API key to load the pages. If the server has API
    keys, the user enters a key in the page, and the page sends the key with its requests to routes under /v1.
    """
    folder = resources.files(__package__).joinpath("page")
    files = {f"/page/{name}": folder.joinpath(name).read_bytes() for name in PAGE_FILES}
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }

    def respond_with(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
        async def respond() -> Response:
            return Response(content, media_type=media_type, headers=headers)

        return respond

    page = respond_with(folder.joinpath("index.html").read_bytes(), "text/html")
    status = respond_with(folder.joinpath("status.html").read_bytes(), "text/html")
    app.add_api_route("/", page, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/status", status, methods=["GET", "HEAD"], include_in_schema=False)
    for path, content in files.items():
        kind = "text/css" if path.endswith(".css") else "text/javascript"
        app.add_api_route(path, respond_with(content, kind), methods=["GET"], include_in_schema=False)


def _add_get_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of GET requests.

    The probes and the version need no API key. Models, status, metrics and the OpenAPI description need an API key.
    """
    base, *aliases = service.settings.served_names
    view = ResourceView(service)
    page = MetricsPage(service.metrics.registry)
    shared = {
        "object": "model",
        "created": int(time.time()),
        "owned_by": "megatron",
        "max_model_len": service.prompts.sequence_limit,
        "tool_call_format": service.chat_format.tool_format,
        "reasoning_format": service.chat_format.reasoning_format,
    }

    def card(adapter: str) -> dict[str, Any]:
        """Return the description of `adapter` as a separate model, or of the base model if `adapter` is empty."""
        described = {**shared, "tasks": service.client.tasks or None}
        return {"id": adapter, **described, "parent": base} if adapter else {"id": base, **described}

    async def identify(request: Request) -> None:
        service.identify(request)
        await service.rate_limits.refresh(request.state.key)

    async def livez() -> Response:
        return JsonResponse({"alive": True})

    async def readyz() -> Response:
        missing = service.missing()
        return JsonResponse({"ready": not missing, "missing": missing}, status_code=503 if missing else 200)

    async def version() -> Response:
        return JsonResponse({"version": megatron_runtime.__version__})

    async def openapi(request: Request) -> Response:
        await identify(request)
        return JsonResponse(app.openapi())

    async def metrics(request: Request) -> Response:
        await identify(request)
        if not request.state.key.metrics:
            message = (
                "This API key may not read metrics, which describe the requests of all keys: "
                "set `metrics: true` for a key in the file of --api-keys-file."
            )
            raise ApiError(403, message, code="metrics_not_allowed")
        text = page.request()
        if text is None:
            raise try_again(503, "Too many requests wait for metrics.", code="metrics_busy")
        return Response(await text, media_type=CONTENT_TYPE_LATEST)

    async def list_models(request: Request) -> Response:
        await identify(request)
        models = [card(adapter) for adapter in service.models_of(request.state.key)]
        if models and not models[0].get("parent"):
            models[1:1] = [{**card(""), "id": alias} for alias in aliases]
        return JsonResponse({"object": "list", "data": models})

    async def status(request: Request) -> Response:
        await identify(request)
        return JsonResponse(await view.read())

    async def get_model(request: Request) -> Response:
        await identify(request)
        name = request.path_params["name"]
        return JsonResponse(card(service.check_model(request.state.key, name)) | {"id": name})

    # Load balancers and clients of other servers, such as vLLM, use other paths for the same probes.
    for path, methods in (("/healthz", ["GET", "HEAD"]), ("/ping", ["GET", "HEAD", "POST"])):
        app.add_api_route(path, livez if path == "/healthz" else readyz, methods=methods, include_in_schema=False)
    app.add_api_route("/v1", version, methods=["GET", "HEAD"], include_in_schema=False)
    for path, probe in (("/livez", livez), ("/readyz", readyz), ("/health", readyz), ("/v1/health", readyz)):
        app.add_api_route(path, probe, methods=["GET", "HEAD"], include_in_schema=False)
        # FastAPI would assign the same operation id to both methods, so only this second route is in the OpenAPI
        # description.
        app.add_api_route(path, probe, methods=["GET"], operation_id=path.strip("/").replace("/", "_"))
    app.add_api_route("/version", version, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/version", version, methods=["GET"])
    app.add_api_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)
    if service.settings.health_port is None:
        app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_api_route("/v1/status", status, methods=["GET"])
    for prefix in ("/v1", ""):
        for path, route in (("/models", list_models), ("/models/{name:path}", get_model)):
            app.add_api_route(prefix + path, route, methods=["HEAD"], include_in_schema=False)
            app.add_api_route(prefix + path, route, methods=["GET"], include_in_schema=bool(prefix))


def _add_post_route(
    app: FastAPI, service: Service, *, path: str, handler: Handler, body: type[ModelRequest] | None
) -> None:
    """Add a POST route at /v1/PATH, at /PATH and at its paths in _OTHER_PATHS. OpenAPI describes only /v1/PATH."""
    generates = path in _GENERATES

    async def endpoint(request: Request) -> Response:
        service.identify(request)
        if generates:
            service.check_generates()
        await service.take_request(request.state.key)
        try:
            return await handler(service, request)
        except ApiError as error:
            if error.status < 500 and error.code != "rate_limit_exceeded":
                service.charge_rejected_body(request.state.key, getattr(request.state, "body_bytes", 0))
            raise (error if body is None else renamed(error, body.own_names)) from error.__cause__

    app.add_api_route(
        f"/v1/{path}", endpoint, methods=["POST"], operation_id=handler.__name__, openapi_extra=_request_body(body)
    )
    for other in (f"/{path}", *_OTHER_PATHS.get(path, ())):
        app.add_api_route(other, endpoint, methods=["POST"], include_in_schema=False)


@cache
def _request_body(model: type[BaseModel] | None) -> dict[str, Any]:
    """Return the OpenAPI description of a request body. The result is cached, because computing it takes long."""
    if model is None:
        return {}
    return {"requestBody": {"content": {"application/json": {"schema": model.model_json_schema()}}, "required": True}}


async def start_profile(service: Service, request: Request) -> Response:
    """Start the range of time that CUDA profilers record. Answer when every rank has started the range.

    Raises ApiError.
    """
    return await _profiling(service, Header.START_CUDA_PROFILER, is_on=True)


async def stop_profile(service: Service, request: Request) -> Response:
    """End the range of time that CUDA profilers record. Answer when every rank has ended the range. Raises ApiError."""
    return await _profiling(service, Header.STOP_CUDA_PROFILER, is_on=False)


async def _profiling(service: Service, signal: Header, *, is_on: bool) -> Response:
    try:
        ack = await service.client.control(Control(kind=signal))
        return JsonResponse({"profiling": is_on, "ranks": ack.ranks})
    except ControlRejectedError as error:
        if error.code == ErrorCode.WRONG_ROLE:
            message = "This server may not profile the engines: its coordinator takes that on its admin port only."
            raise ApiError(403, message, code="not_an_administrator") from error
        raise ApiError(error.code if error.code >= 400 else 500, error.message, code="profiler_failed") from error
    except CoordinatorUnreachableError as error:
        raise try_again(503, f"{error}.", code="coordinator_unreachable", seconds=5) from error


_POST_ROUTES: tuple[tuple[str, Handler, type[ModelRequest] | None], ...] = (
    ("completions", create_completion, CompletionRequest),
    ("chat/completions", create_chat_completion, ChatRequest),
    ("responses", create_response, ResponsesRequest),
    ("messages", create_message, MessagesRequest),
    ("messages/count_tokens", count_message_tokens, CountTokensRequest),
    ("embeddings", create_embedding, EmbeddingRequest),
    ("classify", classify, ClassifyRequest),
    ("pooling", pool, PoolingRequest),
    ("score", create_score, ScoreRequest),
    ("rerank", rerank, RerankRequest),
    ("tokenize", tokenize, TokenizeRequest),
    ("detokenize", detokenize, DetokenizeRequest),
    ("start_profile", start_profile, None),
    ("stop_profile", stop_profile, None),
)
_GENERATES = frozenset({"completions", "chat/completions", "responses", "messages"})
"""POST routes that need a model that generates text. Pooling models have other routes."""
_OTHER_PATHS: Mapping[str, tuple[str, ...]] = {"rerank": ("/v2/rerank",)}
"""Additional paths of POST routes. Cohere's clients send rerank requests to /v2/rerank."""
BODIES: Mapping[str, type[ModelRequest]] = {path: body for path, _, body in _POST_ROUTES if body is not None}
"""Class of the request body of each POST route, by the path after /v1/."""


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case ApiError() if request.url.path.removeprefix("/v1").startswith("/messages"):
            return JsonResponse(error_body(error), status_code=error.status, headers=error.headers)
        case ApiError():
            return error.response()
        case ClientDisconnectedError() | ClientDisconnect():
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        case HTTPException(status_code=404):
            return ApiError(404, f"There is no {_shown_path(request)} here.", code="unknown_url").response()
        case HTTPException(status_code=405):
            message = f"{request.method} is not allowed for {_shown_path(request)}."
            response = ApiError(405, message, code="method_not_allowed").response()
            response.headers.update(error.headers or {})
            return response
        case HTTPException():
            return ApiError(error.status_code, str(error.detail)).response()
        case _:
            response = ApiError(500, "The server failed to answer this request.", code="internal_error").response()
            response.headers["x-request-id"] = request.state.request_id  # RequestMiddleware does not see this answer
            return response


def _shown_path(request: Request) -> str:
    return shown(request.url.path)[1:-1]


class ResourceView:
    """The part of the coordinator's status that every client may see. It contains no requests, keys or operations."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._asked = float("-inf")
        self._answer: asyncio.Future[StatusReply] | None = None

    async def read(self) -> dict[str, Any]:
        """Return the coordinator's status, at most MIN_STATUS_SECONDS old.

        Raises ApiError 503 if the coordinator is unreachable or rejects the request.
        """
        now = time.monotonic()
        if self._answer is None or (self._answer.done() and now - self._asked >= MIN_STATUS_SECONDS):
            self._asked = now
            self._answer = asyncio.ensure_future(self._service.client.status())
            # Retrieve the exception even if all clients have disconnected before the status request fails.
            self._answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            # A client that disconnects must not cancel the status request for the other clients.
            return self._described(await asyncio.shield(self._answer))
        except (CoordinatorUnreachableError, ControlRejectedError) as error:
            raise try_again(503, f"{error}.", code="coordinator_unreachable", seconds=5) from error

    def _described(self, status: StatusReply) -> dict[str, Any]:
        return {
            "model": self._service.settings.served_name,
            "state": status.state.value,
            "epoch": status.epoch,
            "queued": status.queued,
            "in_flight": status.in_flight,
            "engines": [
                {
                    "name": engine.name,
                    "state": engine.state.value,
                    "serving": engine.serving and not engine.suspect and not engine.draining,
                    "in_flight": engine.in_flight,
                    "epoch": engine.epoch,
                    "ranks": engine.ranks,
                    "seconds_since_heartbeat": round(engine.silent_seconds, 1),
                }
                for engine in status.engines
            ],
            "adapters": [{"name": each.name, "engines": each.engines} for each in status.adapters or ()],
        }
